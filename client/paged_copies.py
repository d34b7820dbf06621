"""Copies between KV tensors in host memory and the bytes of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from client.paged_layers import Group, Span

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Copies(Protocol):
    """Moves the bytes of blocks between KV tensors and host memory."""

    def mark(self) -> object | None:
        """What has been asked of the device so far."""

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Sequence[ByteArray],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy out of the tensors."""

    def scatter(
        self,
        sources: Sequence[ByteArray],
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy into the tensors."""


class HostCopies:
    """Copies where the KV tensors lie in host memory: one call of numpy for each fused group.

    Args:
        tensors: whose memory it is, to be kept alive.
        groups: where the layers lie.
        blocks: how many blocks there are.
    """

    def __init__(self, tensors: Sequence[Any], groups: Sequence[Group], blocks: int) -> None:
        self._views = [np.asarray(_Window(tensors, group, blocks)) for group in groups]

    def mark(self) -> None:
        """Nothing: the host does what it is asked at once."""

    def gather(
        self,
        block_ids: Sequence[int],
        targets: Sequence[ByteArray],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy out of the tensors; see ``PagedMemory.gather``."""
        shown = self._shown(covered)
        for block, target in zip(block_ids, targets, strict=True):
            for view, span in shown:
                part = target[span.offset : span.offset + span.length]
                np.copyto(part.reshape(view.shape[1:]), view[block])

    def scatter(
        self,
        sources: Sequence[ByteArray],
        block_ids: Sequence[int],
        covered: Sequence[Span],
        after: object | None,
    ) -> None:
        """Copy into the tensors; see ``PagedMemory.scatter``."""
        shown = self._shown(covered)
        for block, source in zip(block_ids, sources, strict=True):
            for view, span in shown:
                part = source[span.offset : span.offset + span.length]
                np.copyto(view[block], part.reshape(view.shape[1:]))

    def _shown(self, covered: Sequence[Span]) -> list[tuple[ByteArray, Span]]:
        return [(self._views[span.group][:, span.start : span.stop], span) for span in covered]


class _Window:
    """Shows numpy the memory of a group, and keeps the tensors alive as long as it looks."""

    def __init__(self, tensors: Sequence[Any], group: Group, blocks: int) -> None:
        self._tensors = tensors
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (group.lead.address, False),
            "shape": group.shape(blocks),
            "strides": group.strides,
        }
