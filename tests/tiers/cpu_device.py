"""A stand-in for a GPU, in ordinary memory: what is queued is not done before somebody lets it be.

So what a GPU does late by chance is late here by decision. Memory that is given out holds bytes
that nobody wrote; what is done with memory that has been given back is an error.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from tiers.device import HANDLE_BYTES

DIRT = 0xDB


class CpuEvent:
    """A point in a stream of a `CpuDevice`."""

    def __init__(self, device: CpuDevice, stream: int, position: int) -> None:
        self._device = device
        self._stream = stream
        self._position = position

    def done(self) -> bool:
        self._device.ask("done")
        return self._device.ended(self._stream) >= self._position

    def wait(self) -> None:
        self._device.ask("wait")
        self._device.run(self._stream, self._position)


class CpuDevice:
    """See above. It is as much a GPU as its test needs.

    Attributes:
        refused: names of what it refuses to do.
        copies: all copies that it has done: to, from, length.
        live: the sizes of the allocations, by address; `host` and `registered` likewise.
    """

    def __init__(self, total: int, granularity: int = 4096) -> None:
        self.granularity = granularity
        self.refused: set[str] = set()
        self.copies: list[tuple[int, int, int]] = []
        self.live: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self._total = total
        self._memory: list[np.ndarray] = []  # type: ignore[type-arg]
        self._lock = threading.RLock()
        self._queues: dict[int, deque[Callable[[], None]]] = {}
        self._ended: dict[int, int] = {}
        self._streams = 0

    @property
    def streams(self) -> list[int]:
        return list(self._queues)

    def ask(self, what: str) -> None:
        if what in self.refused:
            raise OSError(errno.EIO, f"{what} refused")

    def open(self) -> None:
        self.ask("open")

    def uuid(self) -> bytes:
        return b"in place of a GP"

    def free_bytes(self) -> int:
        return self._total - sum(self.live.values())

    def allocate(self, size: int) -> int:
        with self._lock:
            self.ask("allocate")
            assert size % self.granularity == 0
            if size > self.free_bytes():
                raise OSError(errno.ENOMEM, "out of memory")
            return self._new(size, self.live)

    def release(self, address: int) -> None:
        with self._lock:
            self.ask("release")
            del self.live[address]

    def handle(self, address: int) -> bytes:
        assert address in self.live
        return address.to_bytes(HANDLE_BYTES, "little")

    def allocate_host(self, size: int) -> int:
        with self._lock:
            self.ask("allocate_host")
            return self._new(size, self.host)

    def release_host(self, address: int) -> None:
        with self._lock:
            del self.host[address]

    def register(self, address: int, size: int) -> None:
        self.ask("register")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]

    # Streams.

    def stream(self) -> int:
        with self._lock:
            self.ask("stream")
            self._streams += 1
            self._queues[self._streams] = deque()
            self._ended[self._streams] = 0
            return self._streams

    def end_stream(self, stream: int) -> None:
        with self._lock:
            under_way = self._queues.pop(stream)
            assert not under_way or "wait" in self.refused, "given back with work under way"

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self.ask("copy")

        def do() -> None:
            self._check(to, size)
            self._check(source, size)
            ctypes.memmove(to, source, size)
            self.copies.append((to, source, size))

        self._queue(stream, do)

    def copy_all(self, moves: Iterable[tuple[int, int, int]], stream: int) -> None:
        for to, source, size in moves:
            self.copy(to, source, size, stream)

    def zero(self, address: int, size: int, stream: int) -> None:
        self.ask("zero")

        def do() -> None:
            self._check(address, size)
            ctypes.memset(address, 0, size)

        self._queue(stream, do)

    def record(self, stream: int) -> CpuEvent:
        with self._lock:
            return CpuEvent(self, stream, self._ended[stream] + len(self._queues[stream]))

    def ended(self, stream: int) -> int:
        return self._ended[stream]

    def run(self, stream: int, position: int | None = None) -> None:
        """Let a stream go on to a position, or to its end."""
        with self._lock:
            queue = self._queues.get(stream, deque())
            while queue and (position is None or self._ended[stream] < position):
                queue.popleft()()
                self._ended[stream] += 1

    def step(self, stream: int) -> None:
        """Let a stream do one thing."""
        self.run(stream, self._ended[stream] + 1)

    def read(self, address: int, size: int) -> bytes:
        """What is in memory now."""
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Write now, as a process that has it mapped does."""
        self._check(address, len(data))
        ctypes.memmove(address, data, len(data))

    def _queue(self, stream: int, do: Callable[[], None]) -> None:
        with self._lock:
            self._queues[stream].append(do)

    def _new(self, size: int, where: dict[int, int]) -> int:
        # Kept for ever, so that no address is given out twice.
        self._memory.append(np.full(size + 4096, DIRT, np.uint8))
        address: int = -(-self._memory[-1].ctypes.data // 4096) * 4096
        where[address] = size
        return address

    def _check(self, address: int, size: int) -> None:
        known = (self.live, self.host, self.registered)
        assert any(
            start <= address and address + size <= start + length
            for ranges in known
            for start, length in ranges.items()
        ), f"{size} bytes at {address:#x} are nobody's"
