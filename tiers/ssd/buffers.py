"""Aligned memory for I/O past the page cache, and who may use it at once."""

from __future__ import annotations

import mmap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from tiers.ssd.format import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

_SMALL: Final = 2 * PAGE


def aligned_memory(size: int) -> memoryview:
    """Give ``size`` bytes, all zero, that start on a page boundary."""
    return memoryview(mmap.mmap(-1, size))


def aligned(view: memoryview) -> bool:
    """Whether a buffer of bytes starts on a page boundary."""
    return bool(np.frombuffer(view, dtype=np.uint8).ctypes.data % PAGE == 0)


def flat(data: Buffer) -> memoryview:
    """See a contiguous buffer as plain bytes.

    Raises:
        ValueError: the buffer is not contiguous.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    return view.cast("B")


class Bounce:
    """One thread's aligned memory: two pages at hand, and a larger buffer made on demand."""

    def __init__(self) -> None:
        small = aligned_memory(_SMALL)
        self.head = small[:PAGE]
        self.tail = small[PAGE:]
        self._large = small[:0]

    def large(self, size: int) -> memoryview:
        """Give ``size`` bytes of aligned memory; the content is undefined."""
        if len(self._large) < size:
            self._large = aligned_memory(size)
        return self._large[:size]


class BouncePool:
    """At most ``depth`` bounces, so at most that many I/Os in flight.

    Args:
        depth: how many may be out at once; a further caller waits.
    """

    def __init__(self, depth: int) -> None:
        self._slots = threading.Semaphore(depth)
        self._idle: list[Bounce] = []

    @contextmanager
    def take(self) -> Iterator[Bounce]:
        """Lend a bounce for the length of a ``with``."""
        with self._slots:
            bounce = self._idle.pop() if self._idle else Bounce()
            try:
                yield bounce
            finally:
                self._idle.append(bounce)

    def clear(self) -> None:
        """Let go of the memory that nobody has out."""
        self._idle.clear()
