"""The runs of bytes that a block of KV tensors consists of: pure arithmetic, for kernels that copy.

A run is contiguous in the tensors and in the buffer of the block; where it begins differs from one
block to the next by a fixed stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Final

from client.paged_layers import Group, Span

WORDS: Final = (16, 8, 4, 2, 1)
"""Sizes, in bytes, that a kernel can copy at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """One contiguous piece of every block.

    Attributes:
        address: where it begins in block 0.
        stride: bytes from one block's to the next block's.
        offset: where it begins in the buffer of a block.
        length: bytes.
    """

    address: int
    stride: int
    offset: int
    length: int

    @property
    def alignment(self) -> int:
        """What divides its place in every block, and its length."""
        return math.gcd(self.address, self.stride, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class Batch:
    """Runs of one length, for one launch of a kernel.

    Attributes:
        runs: in the order of their offsets.
        word: bytes that can be copied at once, one of ``WORDS``.
    """

    runs: tuple[Run, ...]
    word: int

    @property
    def length(self) -> int:
        """Bytes of each run."""
        return self.runs[0].length


def runs_of(groups: Sequence[Group], covered: Iterable[Span]) -> list[Run]:
    """The runs of a range of layers, in the order of the bytes."""
    return [run for span in covered for run in _span(groups[span.group], span)]


def _span(group: Group, span: Span) -> Iterable[Run]:
    lead = group.lead
    *outer, length = lead.shape
    offset = span.offset
    for layer in range(span.start, span.stop):
        first = lead.address + layer * group.step
        for index in product(*map(range, outer)):
            away = sum(at * stride for at, stride in zip(index, lead.strides, strict=False))
            yield Run(first + away, lead.block_stride, offset, length)
            offset += length


def batches(runs: Iterable[Run], alignment: int) -> list[Batch]:
    """Cut runs into launches.

    Args:
        runs: as ``runs_of`` gives them.
        alignment: what divides the addresses of all buffers.
    """
    cut = []
    for _, alike in groupby(runs, key=lambda run: run.length):
        members = tuple(alike)
        common = math.gcd(alignment, *(run.alignment for run in members))
        cut.append(Batch(members, next(word for word in WORDS if common % word == 0)))
    return cut
