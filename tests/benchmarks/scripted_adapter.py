"""A store in the worker's own memory that goes wrong as its settings say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from benchmarks.peers import adapter


class Adapter(adapter.Adapter):
    """Setting ``fault``: ``refuses``, ``spoils``, ``loses``, ``dies``, ``shuts`` or nothing."""

    zero_copy = True

    def open(self, settings: Mapping[str, str]) -> None:
        self._fault = settings.get("fault", "")
        if self._fault == "shuts":
            raise ConnectionError("nobody is at home")
        self._held: dict[bytes, bytes] = {}

    def close(self) -> None:
        self._held.clear()

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        if self._fault == "refuses":
            raise MemoryError("no room")
        if self._fault == "dies":
            os._exit(3)
        self._held.update((key, bytes(block)) for key, block in zip(keys, blocks, strict=True))
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        if self._fault == "loses":
            return 0
        for key, block in zip(keys, into, strict=True):
            block[:] = self._held[key]
            if self._fault == "spoils":
                block[len(block) // 2] ^= 1
        return len(keys)

    def exists(self, keys: Sequence[bytes]) -> int:
        return sum(key in self._held for key in keys)

    def view(
        self, keys: Sequence[bytes], size: int
    ) -> AbstractContextManager[Sequence[memoryview | None]]:
        return self._views(keys)

    @contextmanager
    def _views(self, keys: Sequence[bytes]) -> Iterator[Sequence[memoryview | None]]:
        yield [memoryview(self._held[key]) for key in keys]

    def remove_all(self) -> None:
        self._held.clear()
