"""Checksums of blocks that come in pieces, taken while the bytes are still in the cache. Pure."""

from __future__ import annotations

from crc32c import crc32c


class Sums:
    """The crc32c of blocks of one size, one after the other.

    Args:
        size: bytes of a block.

    Attributes:
        done: the crc32c of each block that is complete, in order.
    """

    __slots__ = ("_left", "_size", "_sum", "done")

    def __init__(self, size: int) -> None:
        self.done: list[int] = []
        self._size = size
        self._left = size
        self._sum = 0

    def __repr__(self) -> str:
        return f"<Sums done={len(self.done)} left={self._left}>"

    def __call__(self, piece: memoryview) -> None:
        """Take note of the bytes that come next; they all belong to one block."""
        self._sum = crc32c(piece, self._sum)
        self._left -= len(piece)
        if not self._left:
            self.done.append(self._sum)
            self._left, self._sum = self._size, 0
