"""A node's memory for tests: segments as memfds, named by places."""

from __future__ import annotations

import mmap
import os
from types import TracebackType

from rdma.transport import place_of, split_place


class NodeMemory:
    """A few shared segments."""

    def __init__(self, segments: int = 2, size: int = 1 << 20) -> None:
        self.size = size
        self.fds: dict[int, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._views: dict[int, memoryview] = {}
        for number in range(1, segments + 1):
            fd = os.memfd_create(f"segment-{number}", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            self.fds[number] = fd
            self._maps[number] = mmap.mmap(fd, size)
            self._views[number] = memoryview(self._maps[number])

    def view(self, place: int, size: int, /) -> memoryview:
        segment, offset = split_place(place)
        assert offset + size <= self.size
        return self._views[segment][offset : offset + size]

    def places(self, number: int, size: int) -> list[int]:
        """Return places for ``number`` blocks of ``size`` bytes, spread over the segments."""
        step = -(-size // 64) * 64
        slots = self.size // step
        where = [(segment, slot * step) for slot in range(slots) for segment in self.fds]
        assert number <= len(where)
        return [place_of(*pair) for pair in where[:number]]

    def close(self) -> None:
        for number, view in self._views.items():
            view.release()
            self._maps[number].close()
            os.close(self.fds[number])
        self._views.clear()

    def __enter__(self) -> NodeMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
