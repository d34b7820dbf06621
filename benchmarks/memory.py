"""Copying in memory: buffers whose pages are there, and what memcpy makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Sample, median_time

Blocks: TypeAlias = Sequence[NDArray[np.uint8]]


def blocks(count: int, size: int) -> list[NDArray[np.uint8]]:
    """``count`` private buffers of ``size`` bytes with random content, all pages touched."""
    source = np.random.default_rng(count * size)
    return [source.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]


def memcpy(destinations: Blocks, sources: Blocks, calls: int) -> Sample:
    """A sample of bytes a second that one thread copies from ``sources`` to ``destinations``."""
    total = sum(block.nbytes for block in sources)

    def once() -> None:
        for destination, source in zip(destinations, sources, strict=True):
            np.copyto(destination, source)

    return lambda: total / median_time(once, calls)
