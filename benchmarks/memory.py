"""Copying in memory: buffers whose pages are there, and what memcpy makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Sample, median_time, median_time_of

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


def memcpy_onward(sources: Blocks, pool_bytes: int, calls: int) -> Sample:
    """Like ``memcpy``, but to other memory in every call, until ``pool_bytes`` are used up.

    A copy to the same few megabytes again and again stays within the processor's cache; a store
    that takes in new blocks has no such luck.
    """
    total = sum(block.nbytes for block in sources)
    batches = [[np.ones_like(block) for block in sources] for _ in range(pool_bytes // total)]
    onward = itertools.cycle(batches)

    def once(destinations: Blocks) -> None:
        for destination, source in zip(destinations, sources, strict=True):
            np.copyto(destination, source)

    return lambda: total / median_time_of(lambda: next(onward), once, calls)
