"""The blocks that are copied into KV tensors, by where they lie."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from client.buffers import flat_bytes
from client.paged_copies import Arrays
from kvstore.errors import NamespaceMismatch
from rdma.gpu_segments import GpuView

Source: TypeAlias = "memoryview | GpuView"
"""A block in memory of the host, or where it lies on a GPU."""


class SourceViews(Protocol):
    """Blocks as a client shows them, some of them perhaps on a GPU."""

    codes: bytes
    failure: str | None

    @property
    def prefix(self) -> int:
        """Number of blocks found before the first miss."""

    @property
    def valid(self) -> bool:
        """Whether what was read through the views so far is what the node stored."""

    def __getitem__(self, index: slice, /) -> Sequence[Source | None]: ...


@dataclass(frozen=True, slots=True)
class Sources:
    """Blocks, each with the id that the engine gives it.

    Attributes:
        arrays: those in memory of the host.
        ids: theirs.
        near: those on a GPU.
        near_ids: theirs.
    """

    arrays: Arrays
    ids: Sequence[int]
    near: Sequence[GpuView]
    near_ids: Sequence[int]


def parted(blocks: Sequence[Source], block_ids: Sequence[int], length: int) -> Sources:
    """Tell blocks on the host from those on a GPU.

    Args:
        blocks: all of them.
        block_ids: as many ids.
        length: bytes that each is to have.

    Raises:
        NamespaceMismatch: a block has another size.
    """
    near = [block for block in blocks if isinstance(block, GpuView)]
    _check_lengths({view.length for view in near}, length)
    if len(near) == len(blocks):
        return Sources(Arrays([]), [], near, block_ids)
    host = [flat_bytes(block) for block in blocks if not isinstance(block, GpuView)]
    if not near:
        return Sources(arrays_of(host, length), block_ids, [], [])
    ids: list[int] = []
    near_ids: list[int] = []
    for block, number in zip(blocks, block_ids, strict=True):
        (near_ids if isinstance(block, GpuView) else ids).append(number)
    return Sources(arrays_of(host, length), ids, near, near_ids)


def arrays_of(buffers: Sequence[memoryview], length: int) -> Arrays:
    """Buffers of the host as arrays.

    Args:
        buffers: flat bytes.
        length: bytes that each is to have.

    Raises:
        NamespaceMismatch: a buffer has another size.
    """
    _check_lengths(set(map(len, buffers)), length)
    return Arrays(buffers)


def _check_lengths(found: Set[int], length: int) -> None:
    for other in found - {length}:
        raise NamespaceMismatch(f"a buffer has {other} bytes, {length} are needed")
