"""Copying between buffers without holding the interpreter lock."""

from __future__ import annotations

from collections.abc import Iterable

import numpy

__all__ = ["copy", "copy_all"]


def copy(destination: memoryview, source: memoryview) -> None:
    """Copy ``source`` to ``destination``; other threads run meanwhile.

    Args:
        destination: writable contiguous memory, as many bytes as ``source``.
        source: contiguous memory.

    Raises:
        ValueError: the sizes differ or ``destination`` is read-only.
    """
    if destination.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit {destination.nbytes}")
    numpy.copyto(numpy.frombuffer(destination, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


def copy_all(pairs: Iterable[tuple[memoryview, memoryview]]) -> None:
    """Copy each ``(destination, source)`` of ``pairs`` as :func:`copy` does."""
    for destination, source in pairs:
        copy(destination, source)
