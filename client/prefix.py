"""The prefix level: token ids and KV tensors instead of hashes and bytes.

Both classes are thin: hashes come from ``kvstore.identity``, bytes from a layout, and everything
else is one or a few calls of the block level.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, overload

import numpy as np

from client.buffers import PutBlocks
from client.layout import BlockShape, KVTensors, Layout
from client.results import FAILED, Match, PutResult, tier_counts
from kvstore.errors import NamespaceMismatch, ParentAbsent
from kvstore.identity import ROOT_PARENT, ExtraKeys, Namespace, prefix_hashes

TokenIds: TypeAlias = "Sequence[int] | np.ndarray[Any, Any]"

BATCH_BYTES: Final = 64 << 20
"""Payload that one call of the block level moves at most, so that pins stay few and short."""


class Views(Protocol):
    """Blocks as the block level shows them."""

    codes: bytes
    failure: str | None

    @property
    def prefix(self) -> int:
        """Number of blocks found before the first miss."""

    @property
    def valid(self) -> bool:
        """Whether what was read through the views so far is what the node stored."""

    @overload
    def __getitem__(self, index: int) -> memoryview | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview | None]: ...


class BlockClient(Protocol):
    """The calls of the blocking client that the prefix level makes."""

    namespace: Namespace
    deadline: float

    def match(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> Match:
        """Say how far a prefix reaches."""

    def view(
        self, hashes: Sequence[bytes], *, deadline: float | None = None
    ) -> AbstractContextManager[Views]:
        """Show blocks without copying them."""

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        deadline: float | None = None,
    ) -> PutResult:
        """Store blocks."""


class AsyncBlockClient(Protocol):
    """The calls of the asyncio client that the prefix level makes."""

    namespace: Namespace
    deadline: float

    async def match(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> Match:
        """Say how far a prefix reaches."""

    def view(
        self, hashes: Sequence[bytes], *, deadline: float | None = None
    ) -> AbstractAsyncContextManager[Views]:
        """Show blocks without copying them."""

    async def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        deadline: float | None = None,
    ) -> PutResult:
        """Store blocks."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many leading tokens of a sequence are held, or were loaded.

    Attributes:
        tokens: number of tokens; a multiple of the tokens in a block.
        tiers: how many of them lie in, or came from, each tier, by its name.
        failure: why there are no more, as the code of an error; ``None`` where the node answered.
    """

    tokens: int
    tiers: dict[str, int]
    failure: str | None = None


class Prefixes:
    """Loads and saves the KV tensors of token prefixes through a blocking client.

    Args:
        client: a client whose namespace has this layout.
        layout: how tensors become block bytes.

    Raises:
        NamespaceMismatch: the client's namespace is not of this layout.
    """

    def __init__(self, client: BlockClient, layout: Layout) -> None:
        check_layout(client.namespace, layout)
        self._client = client
        self._layout = layout

    def match(
        self, token_ids: TokenIds, *, extra_keys: ExtraKeys = (), deadline: float | None = None
    ) -> PrefixMatch:
        """Say how many leading tokens are held, on every shard.

        Args:
            token_ids: the whole prompt.
            extra_keys: as for ``prefix_hashes``.
            deadline: seconds; the client's own where left out.
        """
        hashes = prefix_hashes(token_ids, self._layout.block_tokens, extra_keys)
        match = self._client.match(hashes, deadline=deadline)
        return _prefix_match(match.codes, match.failure, self._layout)

    def load(
        self,
        token_ids: TokenIds,
        tensors: KVTensors,
        *,
        extra_keys: ExtraKeys = (),
        deadline: float | None = None,
    ) -> PrefixMatch:
        """Fill tensors with the KV of as many leading tokens as are held.

        Args:
            token_ids: the tokens to load; those after the last full block are left out.
            tensors: key and value of each layer, with room for all of these tokens. What lies
                behind the tokens loaded is undefined afterwards.
            extra_keys: as for ``prefix_hashes``.
            deadline: seconds; the client's own where left out.

        Returns:
            The tokens loaded and where they came from.

        Raises:
            NamespaceMismatch: the tensors are not of this layout or too small.
        """
        end = time.monotonic() + (self._client.deadline if deadline is None else deadline)
        hashes = prefix_hashes(token_ids, self._layout.block_tokens, extra_keys)
        self._layout.check(tensors, len(hashes) * self._layout.block_tokens)
        match = self._client.match(hashes, deadline=_left(end))
        codes, failure = b"", match.failure
        for start, batch in _batches(hashes[: match.blocks], self._layout.block_bytes):
            with self._client.view(batch, deadline=_left(end)) as views:
                got = unpack_views(views, self._layout, tensors, start)
                failure = views.failure
            codes += got
            if len(got) < len(batch):
                break
        return _prefix_match(codes, failure, self._layout)

    def save(
        self,
        token_ids: TokenIds,
        tensors: KVTensors,
        *,
        extra_keys: ExtraKeys = (),
        deadline: float | None = None,
    ) -> PutResult:
        """Store the KV of all full blocks of a token sequence; what is held already costs nothing.

        Args:
            token_ids: the tokens whose KV the tensors hold, from the first on.
            tensors: key and value of each layer.
            extra_keys: as for ``prefix_hashes``.
            deadline: seconds; the client's own where left out.

        Returns:
            What became of each block.

        Raises:
            NamespaceMismatch: the tensors are not of this layout or too small.
        """
        end = time.monotonic() + (self._client.deadline if deadline is None else deadline)
        hashes = prefix_hashes(token_ids, self._layout.block_tokens, extra_keys)
        self._layout.check(tensors, len(hashes) * self._layout.block_tokens)
        codes, parent = b"", ROOT_PARENT
        for start, batch in _batches(hashes, self._layout.block_bytes):
            blocks = PackedBlocks(self._layout, tensors, start, len(batch))
            try:
                result = self._client.put(batch, blocks, parent=parent, deadline=_left(end))
            except ParentAbsent as error:
                return _saved(codes, len(hashes), error.code)
            codes, parent = codes + result.codes, batch[-1]
            if result.failure is not None or result.refused or result.failed:
                return _saved(codes, len(hashes), result.failure)
        return _saved(codes, len(hashes), None)


class AsyncPrefixes:
    """The asyncio twin of ``Prefixes``: the same calls, awaited.

    Args:
        client: an asyncio client whose namespace has this layout.
        layout: how tensors become block bytes.

    Raises:
        NamespaceMismatch: the client's namespace is not of this layout.
    """

    def __init__(self, client: AsyncBlockClient, layout: Layout) -> None:
        check_layout(client.namespace, layout)
        self._client = client
        self._layout = layout

    async def match(
        self, token_ids: TokenIds, *, extra_keys: ExtraKeys = (), deadline: float | None = None
    ) -> PrefixMatch:
        """As ``Prefixes.match``."""
        hashes = prefix_hashes(token_ids, self._layout.block_tokens, extra_keys)
        match = await self._client.match(hashes, deadline=deadline)
        return _prefix_match(match.codes, match.failure, self._layout)

    async def load(
        self,
        token_ids: TokenIds,
        tensors: KVTensors,
        *,
        extra_keys: ExtraKeys = (),
        deadline: float | None = None,
    ) -> PrefixMatch:
        """As ``Prefixes.load``; a cancelled call no longer touches the tensors."""
        end = time.monotonic() + (self._client.deadline if deadline is None else deadline)
        hashes = prefix_hashes(token_ids, self._layout.block_tokens, extra_keys)
        self._layout.check(tensors, len(hashes) * self._layout.block_tokens)
        match = await self._client.match(hashes, deadline=_left(end))
        codes, failure = b"", match.failure
        for start, batch in _batches(hashes[: match.blocks], self._layout.block_bytes):
            async with self._client.view(batch, deadline=_left(end)) as views:
                got = unpack_views(views, self._layout, tensors, start)
                failure = views.failure
            codes += got
            if len(got) < len(batch):
                break
        return _prefix_match(codes, failure, self._layout)

    async def save(
        self,
        token_ids: TokenIds,
        tensors: KVTensors,
        *,
        extra_keys: ExtraKeys = (),
        deadline: float | None = None,
    ) -> PutResult:
        """As ``Prefixes.save``."""
        end = time.monotonic() + (self._client.deadline if deadline is None else deadline)
        hashes = prefix_hashes(token_ids, self._layout.block_tokens, extra_keys)
        self._layout.check(tensors, len(hashes) * self._layout.block_tokens)
        codes, parent = b"", ROOT_PARENT
        for start, batch in _batches(hashes, self._layout.block_bytes):
            blocks = PackedBlocks(self._layout, tensors, start, len(batch))
            try:
                result = await self._client.put(batch, blocks, parent=parent, deadline=_left(end))
            except ParentAbsent as error:
                return _saved(codes, len(hashes), error.code)
            codes, parent = codes + result.codes, batch[-1]
            if result.failure is not None or result.refused or result.failed:
                return _saved(codes, len(hashes), result.failure)
        return _saved(codes, len(hashes), None)


class PackedBlocks:
    """The blocks of tensors as a ``BlockSource``: only those that the node wants are packed."""

    def __init__(self, layout: Layout, tensors: KVTensors, first_block: int, count: int) -> None:
        self._layout = layout
        self._tensors = tensors
        self._first_block = first_block
        self._count = count

    def __len__(self) -> int:
        return self._count

    def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
        """Pack blocks into memory; see ``BlockSource.write``."""
        start = 0
        for end in range(1, len(positions) + 1):
            if end == len(positions) or positions[end] != positions[end - 1] + 1:
                first = self._first_block + positions[start]
                self._layout.pack(self._tensors, first, into[start:end])
                start = end


def check_layout(namespace: Namespace, layout: BlockShape) -> None:
    """Accept a layout that makes the blocks of a namespace.

    Raises:
        NamespaceMismatch: name, element type or a size differs.
    """
    for field, mine in (
        ("layout", layout.name),
        ("dtype", layout.dtype),
        ("block_tokens", layout.block_tokens),
        ("block_bytes", layout.block_bytes),
    ):
        if (theirs := getattr(namespace, field)) != mine:
            raise NamespaceMismatch(f"{field} is {mine} in the layout, {theirs} in the namespace")


def unpack_views(views: Views, layout: Layout, tensors: KVTensors, start: int) -> bytes:
    """Copy the leading blocks found into tensors.

    Returns:
        Their tier codes; none where the views lost their pins meanwhile, because the bytes may
        then be those of other blocks.
    """
    blocks = [view for view in views[: views.prefix] if view is not None]
    layout.unpack(blocks, tensors, start)
    return views.codes[: len(blocks)] if views.valid else b""


def _prefix_match(codes: bytes, failure: str | None, layout: Layout) -> PrefixMatch:
    tokens = layout.block_tokens
    tiers = {name: count * tokens for name, count in tier_counts(codes).items()}
    return PrefixMatch(len(codes) * tokens, tiers, failure)


def _saved(codes: bytes, total: int, failure: str | None) -> PutResult:
    return PutResult(codes + bytes([FAILED]) * (total - len(codes)), failure)


def _batches(hashes: Sequence[bytes], block_bytes: int) -> Iterator[tuple[int, Sequence[bytes]]]:
    step = max(1, BATCH_BYTES // block_bytes)
    for start in range(0, len(hashes), step):
        yield start, hashes[start : start + step]


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())
