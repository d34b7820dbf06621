"""What a disk gives by itself: large reads past the page cache, several at once."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

PIECE: Final = 2 << 20


class Disk:
    """One file of written data, read past the page cache.

    Args:
        file: to be written; on the disk to be measured.
        size: its bytes, a multiple of ``PIECE``.
        depth: reads in flight.

    Raises:
        OSError: the file system has no direct reads, or no room.
    """

    def __init__(self, file: Path, size: int, depth: int) -> None:
        self._pieces = range(0, size, PIECE)
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._buffers = [mmap.mmap(-1, PIECE) for _ in range(depth)]
        for number, buffer in enumerate(self._buffers):
            buffer.write(os.urandom(4096) * (PIECE // 4096))
            for at in self._pieces[number::depth]:
                os.pwritev(self._fd, [buffer], at)
        os.fsync(self._fd)

    def rate(self) -> float:
        """Bytes a second at which the whole file is read once."""
        began = time.perf_counter()
        with ThreadPoolExecutor(len(self._buffers)) as pool:
            list(pool.map(self._read, range(len(self._buffers))))
        return len(self._pieces) * PIECE / (time.perf_counter() - began)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _read(self, number: int) -> None:
        for at in self._pieces[number :: len(self._buffers)]:
            if os.preadv(self._fd, [self._buffers[number]], at) != PIECE:
                raise OSError(f"the disk gave less than asked for at {at}")
