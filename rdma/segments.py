"""The client's mappings of a node's shared segments."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from rdma.errors import BadPlace, SegmentError
from rdma.region import address_of
from rdma.transport import OFFSET_MASK, SEGMENT_SHIFT

__all__ = ["SegmentMap", "Watcher", "watch"]

_POPULATE_WRITE: Final = 23
_PIECE: Final = 8 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


class Watcher(Protocol):
    """Is told of all mappings of the process, as one that registers them with a device must be."""

    def mapped(self, address: int, size: int) -> None:
        """A segment has been mapped."""

    def unmapping(self, address: int) -> None:
        """A segment is about to be unmapped; it is when this returns."""


_watchers: list[Watcher] = []
_mapped: dict[int, int] = {}
_watching = threading.Lock()


def watch(watcher: Watcher) -> None:
    """Tell somebody of every mapping of a segment in this process, those there are included."""
    with _watching:
        _watchers.append(watcher)
        for address, size in _mapped.items():
            watcher.mapped(address, size)


class _Mapping:
    """One segment, mapped shared.

    Attributes:
        readonly: all of it, for readers.
        writable: all of it.
        size: its size in bytes.
    """

    __slots__ = ("_address", "_map", "readonly", "size", "writable")

    def __init__(self, fd: int, size: int) -> None:
        try:
            if os.fstat(fd).st_size < size:
                raise SegmentError(f"a segment of {size} bytes is shorter than the node said")
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise SegmentError(f"a segment cannot be mapped: {error}") from error
        self.size = size
        self.writable = memoryview(self._map)
        self.readonly = self.writable.toreadonly()
        self._address = address_of(self.writable)
        with _watching:
            _mapped[self._address] = size
            for watcher in _watchers:
                watcher.mapped(self._address, size)

    def populate(self, start: int, length: int) -> bool:
        """Make the page tables of a range, off the hot path; ``False`` if the kernel can't."""
        return bool(_libc.madvise(self._address + start, length, _POPULATE_WRITE) == 0)

    def close(self) -> bool:
        """Unmap; ``False`` if views of it are in use, with the last of which it then goes."""
        with _watching:
            _mapped.pop(self._address, None)
            watchers = list(_watchers)
        for watcher in watchers:
            watcher.unmapping(self._address)
        self.readonly.release()
        self.writable.release()
        try:
            self._map.close()
        except BufferError:
            return False
        return True


class SegmentMap:
    """The segments of one node that this client has mapped, by number.

    The page tables of a new mapping are made by a thread in the background, in bounded pieces,
    so that the first use of a block does not pay for page faults. The thread ends when it has
    nothing left to do, and at :meth:`close` in any case. Only pages that the segment has already
    are touched.

    ``add`` and ``close`` may be called from any thread; the rest takes no lock.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, _Mapping] = {}
        self._readonly: dict[int, memoryview] = {}
        self._lock = threading.Lock()
        self._work: deque[tuple[_Mapping, int]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._mappings)

    def numbers(self) -> Sequence[int]:
        """Return the numbers of the segments mapped."""
        return list(self._mappings)

    def add(self, number: int, fd: int, size: int, *, populate: bool = True) -> None:
        """Map a segment.

        Args:
            number: the node's number of it.
            fd: its file descriptor; taken over and closed, also on failure.
            size: its size in bytes, as the node said.
            populate: whether to make its page tables in the background.

        Raises:
            SegmentError: it cannot be mapped, is shorter than ``size``, or the map is closed.
        """
        try:
            with self._lock:
                if self._closed:
                    raise SegmentError("the connection is closed")
                if number in self._mappings:
                    return
                mapping = self._mappings[number] = _Mapping(fd, size)
                self._readonly[number] = mapping.readonly
                if populate:
                    self._work.append((mapping, os.dup(fd)))
                    self._start()
        finally:
            os.close(fd)

    def views(self, places: Sequence[int], length: int) -> list[memoryview]:
        """Return read-only views of ``length`` bytes at each of ``places``.

        Raises:
            BadPlace: a place lies outside the segments mapped.
        """
        if not places:
            return []
        number = min(places) >> SEGMENT_SHIFT
        first, memory = number << SEGMENT_SHIFT, self._readonly.get(number)
        if memory is not None and max(places) + length <= first + len(memory):
            # All in one segment, as nearly always: one look at its bounds is enough.
            return [memory[(start := place - first) : start + length] for place in places]
        return [self._view(place, length) for place in places]

    def _view(self, place: int, length: int) -> memoryview:
        memory = self._readonly.get(place >> SEGMENT_SHIFT)
        start = place & OFFSET_MASK
        if memory is None or start + length > len(memory):
            raise BadPlace("a block lies outside the segments mapped")
        return memory[start : start + length]

    def writable(self, place: int, length: int) -> memoryview:
        """Return ``length`` writable bytes at ``place``.

        Raises:
            BadPlace: they lie outside the segments mapped.
        """
        mapping = self._mappings.get(place >> SEGMENT_SHIFT)
        start = place & OFFSET_MASK
        if mapping is None or start + length > mapping.size:
            raise BadPlace("a block lies outside the segments mapped")
        return mapping.writable[start : start + length]

    def close(self) -> int:
        """End the background thread and unmap everything; may be called again.

        Returns:
            How many mappings live on because views of them are in use.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            mappings = list(self._mappings.values())
            self._mappings.clear()
            self._readonly.clear()
            while self._work:
                os.close(self._work.popleft()[1])
        return sum(not mapping.close() for mapping in mappings)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._populate_all, name="kvstore-populate", daemon=True
            )
            self._thread.start()

    def _populate_all(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._work:
                    self._thread = None
                    return
                mapping, fd = self._work.popleft()
            try:
                self._populate(mapping, fd)
            finally:
                os.close(fd)

    def _populate(self, mapping: _Mapping, fd: int) -> None:
        at = 0
        while at < mapping.size and not self._closed:
            piece = _next_data(fd, at)
            if piece is None:
                return
            start, end = piece
            end = min(end, start + _PIECE, mapping.size)
            if start >= end or not mapping.populate(start, end - start):
                return
            at = end


def _next_data(fd: int, at: int) -> tuple[int, int] | None:
    """Return the first range from ``at`` on that has pages, or ``None``."""
    try:
        start = os.lseek(fd, at, os.SEEK_DATA)
        return start, os.lseek(fd, start, os.SEEK_HOLE)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EINVAL):
            return None
        raise
