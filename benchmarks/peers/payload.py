"""Keys, and the bytes that belong to each: whoever knows a key can check the block."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from benchmarks.peers.adapter import KEY_BYTES

POSITIONS = 32
"""Different blocks that one client holds ready to put: those of one batch."""
_STEP = 64
_SEED = 20_260


class Payload:
    """Blocks of one size.

    A block is a stretch of one random pattern, at an offset that the key's last byte names, with
    the key itself in its first and last bytes. So one key's block is never another's, and a buffer
    becomes the block of another key of the same position by writing 64 bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        count = size + POSITIONS * _STEP
        self._pattern = np.random.default_rng(_SEED).integers(0, 256, count, dtype=np.uint8)

    def fill(self, block: memoryview, position: int) -> None:
        """Make a buffer ready for `stamp` with keys of this position."""
        _array(block)[:] = self._expected(position)

    def stamp(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Make buffers that are filled for the keys' positions the blocks of these keys."""
        for key, block in zip(keys, blocks, strict=True):
            block[:KEY_BYTES] = key
            block[-KEY_BYTES:] = key

    def wipe(self, blocks: Sequence[memoryview]) -> None:
        """Spoil the stamps, so that what an earlier get left is not taken for a later one's."""
        for block in blocks:
            block[:KEY_BYTES] = bytes(KEY_BYTES)
            block[-KEY_BYTES:] = bytes(KEY_BYTES)

    def stamped(self, key: bytes, block: memoryview) -> bool:
        """Whether the first and last bytes are those of this key's block."""
        return bytes(block[:KEY_BYTES]) == key == bytes(block[-KEY_BYTES:])

    def equal(self, key: bytes, block: memoryview) -> bool:
        """Whether every byte is as it was put."""
        inner = slice(KEY_BYTES, self.size - KEY_BYTES)
        same = np.array_equal(_array(block)[inner], self._expected(key[-1])[inner])
        return len(block) == self.size and self.stamped(key, block) and same

    def _expected(self, position: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        start = position * _STEP
        return self._pattern[start : start + self.size]


def new_chain(length: int) -> list[bytes]:
    """Keys that nobody has put, at the positions 0, 1, 2, ... one after the other."""
    return [os.urandom(KEY_BYTES - 1) + bytes([n % POSITIONS]) for n in range(length)]


def named_chain(name: str, length: int) -> list[bytes]:
    """The same keys in every process that asks for this name."""
    heads = (hashlib.sha256(f"{name}/{n}".encode()).digest() for n in range(length))
    return [head[:-1] + bytes([n % POSITIONS]) for n, head in enumerate(heads)]


def _array(block: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(block, np.uint8)
