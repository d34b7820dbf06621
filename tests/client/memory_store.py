"""A stand-in for a client: the block level over a dictionary, without a node or a socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from client.buffers import BlockSource, PutBlocks, flat_bytes
from client.results import FAILED, HELD, STORED, Match, PutResult, leading_hits
from kvstore.errors import ParentAbsent
from kvstore.identity import ROOT_PARENT, Namespace

DRAM = 2


class MemoryViews:
    """Views of what the dictionary holds."""

    def __init__(self, views: list[memoryview | None], valid: bool, failure: str | None) -> None:
        self._views = views
        self.codes = bytes(DRAM if view is not None else 0 for view in views)
        self.valid = valid
        self.failure = failure

    @property
    def prefix(self) -> int:
        return leading_hits(self.codes)

    @overload
    def __getitem__(self, index: int) -> memoryview | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview | None]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._views[index]


class MemoryStore:
    """Blocks in a dictionary; ``failure`` makes every call answer as if the node were gone."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.deadline = 1.0
        self.blocks: dict[bytes, bytes] = {}
        self.failure: str | None = None
        self.valid = True
        self.forget_parents = False
        self.packed = 0
        self.devices: list[bool] = []

    def match(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> Match:
        if self.failure:
            return Match(b"", self.failure)
        held = [value in self.blocks for value in hashes]
        return Match(bytes([DRAM]) * (held.index(False) if False in held else len(held)))

    @contextmanager
    def view(
        self, hashes: Sequence[bytes], *, device: bool = False, deadline: float | None = None
    ) -> Iterator[MemoryViews]:
        self.devices.append(device)
        found = [self.blocks.get(value) if not self.failure else None for value in hashes]
        views = [memoryview(data) if data is not None else None for data in found]
        yield MemoryViews(views, self.valid, self.failure)

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        deadline: float | None = None,
    ) -> PutResult:
        if self.failure:
            return PutResult(bytes([FAILED]) * len(hashes), self.failure)
        if parent != ROOT_PARENT and (self.forget_parents or parent not in self.blocks):
            raise ParentAbsent("the parent is not held")
        codes = bytearray()
        for index, value in enumerate(hashes):
            codes.append(HELD if value in self.blocks else STORED)
            if value not in self.blocks:
                self.blocks[value] = self._bytes_of(blocks, index)
                self.packed += 1
        return PutResult(bytes(codes))

    def _bytes_of(self, blocks: PutBlocks, index: int) -> bytes:
        if not isinstance(blocks, BlockSource):
            return bytes(flat_bytes(blocks[index]))
        block = memoryview(bytearray(self.namespace.block_bytes))
        blocks.write([index], [block])
        return bytes(block)


class AsyncMemoryStore:
    """The asyncio twin."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.namespace = inner.namespace
        self.deadline = inner.deadline

    async def match(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> Match:
        return self.inner.match(hashes)

    def view(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> AsyncContext:
        return AsyncContext(self.inner.view(hashes))

    async def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        deadline: float | None = None,
    ) -> PutResult:
        return self.inner.put(hashes, blocks, parent=parent)


class AsyncContext:
    """A context manager, awaited."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __aenter__(self) -> Any:
        return self.inner.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.inner.__exit__(*error)
