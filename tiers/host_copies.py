"""Copies between a device and memory of this process, on streams of their own.

Memory that has been pinned is copied from and to as it is. Other memory goes through two pinned
buffers by turns, so that a CPU copy and a copy over the bus run at once.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import queue
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiers.device import Device, Event

    ByteArray: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_log = logging.getLogger(__name__)

_BUFFERS: Final = 2
_WAYS: Final = 2


def address_of(array: ByteArray) -> int:
    """Where the bytes of an array lie."""
    address: int = array.__array_interface__["data"][0]
    return address


class _Lane:
    """A stream, with pinned buffers beside it. One copy at a time; each is over on return.

    Args:
        device: the GPU, open.
        buffer_bytes: length of each of the pinned buffers.
    """

    def __init__(self, device: Device, buffer_bytes: int) -> None:
        self._device = device
        self._bytes = buffer_bytes
        self._stream = device.stream()
        try:
            self._memory = device.allocate_host(_BUFFERS * buffer_bytes)
        except BaseException:
            device.end_stream(self._stream)
            raise
        pointer = (ctypes.c_uint8 * (_BUFFERS * buffer_bytes)).from_address(self._memory)
        whole = np.ctypeslib.as_array(pointer)
        self._buffers = [whole[n * buffer_bytes :][:buffer_bytes] for n in range(_BUFFERS)]

    def close(self) -> None:
        """Give the stream and the buffers back."""
        self._buffers = []
        let_go(lambda: self._device.end_stream(self._stream))
        let_go(lambda: self._device.release_host(self._memory))

    def zero(self, address: int, size: int) -> None:
        """Clear memory of the device.

        Raises:
            OSError: the device has failed; so below.
        """
        self._device.zero(address, size, self._stream)
        self._device.record(self._stream).wait()

    def store_pinned(self, to: int, source: ByteArray) -> None:
        """Copy pinned memory to the device."""
        self._move(to, address_of(source), source.nbytes).wait()

    def load_pinned(self, source: int, into: ByteArray) -> None:
        """Copy from the device to pinned memory."""
        self._move(address_of(into), source, into.nbytes).wait()

    def store(self, to: int, source: ByteArray) -> None:
        """Copy any memory to the device."""
        under_way: list[Event | None] = [None] * _BUFFERS
        try:
            for number, first in enumerate(range(0, source.nbytes, self._bytes)):
                turn = number % _BUFFERS
                _wait(under_way[turn])
                piece = source[first : first + self._bytes]
                buffer = self._buffers[turn][: piece.nbytes]
                np.copyto(buffer, piece)
                under_way[turn] = self._move(to + first, address_of(buffer), piece.nbytes)
        finally:
            # After an error too: whoever has the lane next writes to these buffers.
            for event in under_way:
                _wait(event)

    def load(self, source: int, into: ByteArray) -> None:
        """Copy from the device to any memory."""
        last: Event | None = None
        before: tuple[ByteArray, ByteArray] | None = None
        try:
            for number, first in enumerate(range(0, into.nbytes, self._bytes)):
                piece = into[first : first + self._bytes]
                buffer = self._buffers[number % _BUFFERS][: piece.nbytes]
                event = self._move(address_of(buffer), source + first, piece.nbytes)
                _wait(last)
                if before is not None:
                    np.copyto(*before)
                last, before = event, (piece, buffer)
        finally:
            _wait(last)
        if before is not None:
            np.copyto(*before)

    def _move(self, to: int, source: int, size: int) -> Event:
        self._device.copy(to, source, size, self._stream)
        return self._device.record(self._stream)


def _wait(event: Event | None) -> None:
    if event is not None:
        event.wait()


class HostCopies:
    """Copies by any number of threads, each of which is over on return.

    Args:
        device: the GPU, open.
        lanes: how many may be under way at once; more wait.
        buffer_bytes: length of each of two pinned buffers that each lane has.

    Attributes:
        streams: two more, for whoever has copies of its own in two directions.

    Raises:
        OSError: there is not enough memory for them.
    """

    def __init__(self, device: Device, lanes: int, buffer_bytes: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._pinned: tuple[tuple[int, int], ...] = ()
        self._free: queue.LifoQueue[_Lane] = queue.LifoQueue()
        self._count = 0
        self.streams: list[int] = []
        try:
            for _ in range(_WAYS):
                self.streams.append(device.stream())
            for _ in range(lanes):
                self._free.put(_Lane(device, buffer_bytes))
                self._count += 1
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give everything back; nothing is under way on ``streams``. Waits for all other copies."""
        while self._count:
            self._count -= 1
            self._free.get().close()
        while self.streams:
            stream = self.streams.pop()
            let_go(partial(self._device.end_stream, stream))
        for start, _ in self._pinned:
            self.unpin(start)

    def pin(self, address: int, size: int) -> None:
        """See :meth:`tiers.hbm.HbmTier.pin`.

        Raises:
            OSError: it can't be pinned.
        """
        self._device.register(address, size)
        with self._lock:
            self._pinned = tuple(sorted((*self._pinned, (address, address + size))))

    def unpin(self, address: int) -> None:
        """Undo ``pin``; what is not pinned stays so."""
        with self._lock:
            kept = tuple(pin for pin in self._pinned if pin[0] != address)
            known = len(kept) < len(self._pinned)
            self._pinned = kept
        if known:
            let_go(lambda: self._device.unregister(address))

    def store(self, to: int, source: ByteArray) -> None:
        """Copy to the device.

        Raises:
            OSError: the device has failed; so below.
        """
        with self._lane() as lane:
            if self._is_pinned(source):
                lane.store_pinned(to, source)
            else:
                lane.store(to, source)

    def load(self, source: int, into: ByteArray) -> None:
        """Copy from the device."""
        with self._lane() as lane:
            if self._is_pinned(into):
                lane.load_pinned(source, into)
            else:
                lane.load(source, into)

    def zero(self, address: int, size: int) -> None:
        """Clear memory of the device."""
        with self._lane() as lane:
            lane.zero(address, size)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._free.get()
        try:
            yield lane
        finally:
            self._free.put(lane)

    def pin_at(self, address: int) -> tuple[int, int] | None:
        """Where the pinned memory that an address lies in begins and ends; None if in none."""
        pinned = self._pinned
        at = bisect.bisect_right(pinned, address, key=_start) - 1
        return pinned[at] if at >= 0 and address < pinned[at][1] else None

    def _is_pinned(self, array: ByteArray) -> bool:
        start = address_of(array)
        pin = self.pin_at(start)
        return pin is not None and start + array.nbytes <= pin[1]


def _start(pin: tuple[int, int]) -> int:
    return pin[0]


def let_go(call: Callable[[], None]) -> None:
    """Give something back to a device, and go on whatever it says."""
    try:
        call()
    except OSError as error:
        _log.warning("the GPU does not take back what it gave: %s", error.strerror)
