"""No store at all: blocks in the client's own memory, by memcpy alone. A limit of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import adapter

Pairs: TypeAlias = list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
"""Where to, and from where."""
POOL = 512 << 20
"""Bytes that puts go through before they begin anew."""


class Adapter(adapter.Adapter):
    """Copies to new memory with every put, until a pool is used up and it begins anew.

    Settings: ``threads``, how many copy at once. Each takes an equal part of a call's bytes.
    """

    def open(self, settings: Mapping[str, str]) -> None:
        """Touch all memory."""
        size = int(settings["block_bytes"])
        count = min(int(settings["capacity"]), POOL) // size
        self._pool = np.ones((count, size), np.uint8)
        self._slots = cycle(range(count))
        self._held: dict[bytes, int] = {}
        self._threads = int(settings["threads"])
        self._others = ThreadPoolExecutor(max(1, self._threads - 1))

    def close(self) -> None:
        """Free the memory."""
        self._others.shutdown()
        del self._pool

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Copy there."""
        slots = [next(self._slots) for _ in keys]
        self._held.update(zip(keys, slots, strict=True))
        self._copy(
            [(self._pool[slot], _bytes(block)) for slot, block in zip(slots, blocks, strict=True)]
        )
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Copy back."""
        slots = [self._held[key] for key in keys]
        self._copy(
            [(_bytes(block), self._pool[slot]) for slot, block in zip(slots, into, strict=True)]
        )
        return len(keys)

    def exists(self, keys: Sequence[bytes]) -> int:
        """Look into a dict."""
        return sum(key in self._held for key in keys)

    def remove_all(self) -> None:
        """Forget the keys."""
        self._held.clear()

    def _copy(self, pairs: Pairs) -> None:
        if self._threads == 1:
            _copy_all(pairs)
            return
        shares = _split(pairs, self._threads)
        waiting = [self._others.submit(_copy_all, share) for share in shares[1:]]
        _copy_all(shares[0])
        for each in waiting:
            each.result()


def _split(pairs: Pairs, parts: int) -> list[Pairs]:
    """Equal parts of the bytes; whole blocks where there are many."""
    if len(pairs) >= parts:
        return [pairs[part::parts] for part in range(parts)]
    (into, block), step = pairs[0], -(-pairs[0][0].nbytes // parts)
    return [
        [(into[start : start + step], block[start : start + step])]
        for start in range(0, into.nbytes, step)
    ]


def _copy_all(pairs: Pairs) -> None:
    for into, block in pairs:
        np.copyto(into, block)


def _bytes(block: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(block, np.uint8)
