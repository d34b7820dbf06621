"""Copying between buffers without holding the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Final, TypeAlias

import numpy

__all__ = ["Copier", "copy", "copy_all"]

Pair: TypeAlias = tuple[memoryview, memoryview]
"""Destination and source, of as many bytes."""

_LEAST_SHARED: Final = 4 << 20
"""Bytes from which a copy is shared out: waking a thread costs as much as copying about 1 MiB."""
_PIECE: Final = 1 << 20


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


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy each ``(destination, source)`` of ``pairs`` as :func:`copy` does."""
    for destination, source in pairs:
        copy(destination, source)


class _Share:
    """One large copy: pieces that whoever is free takes, and what came of them."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pieces = deque(_cut(pairs))
        self.error: BaseException | None = None
        self.left = threading.Semaphore(0)
        """Released by the helper once it touches no memory any more."""

    def work(self) -> None:
        """Copy pieces until there is none left, or one failed."""
        while self.error is None:
            try:
                destination, source = self._pieces.popleft()
            except IndexError:
                return
            try:
                copy(destination, source)
            except ValueError as error:
                self.error = error

    def drop_rest(self) -> None:
        """Let nobody take another piece; where all went well there is none."""
        self._pieces.clear()


class Copier:
    """Copies with two threads where that pays: one core does not use all of memory's bandwidth.

    The second thread is started by the first copy that is large enough, and ended by ``close``.
    One copy is shared at a time; another that comes meanwhile is done by its caller alone.
    """

    def __init__(self) -> None:
        self._shares: SimpleQueue[_Share | None] = SimpleQueue()
        self._busy = threading.Lock()
        self._helper: threading.Thread | None = None
        self._closed = False

    def copy_all(self, pairs: Sequence[Pair]) -> None:
        """Copy each ``(destination, source)``; when this returns, no memory is touched any more.

        Raises:
            ValueError: as :func:`copy`.
        """
        size = sum(source.nbytes for _, source in pairs)
        if size < _LEAST_SHARED or not self._busy.acquire(blocking=False):
            copy_all(pairs)
            return
        try:
            if not self._has_helper():
                copy_all(pairs)
                return
            share = _Share(pairs)
            self._shares.put(share)
            try:
                share.work()
            finally:
                share.drop_rest()
                share.left.acquire()
            if share.error is not None:
                raise share.error
        finally:
            self._busy.release()

    def close(self) -> None:
        """End the second thread; later copies are done without it."""
        with self._busy:
            self._closed = True
            if self._helper is not None:
                self._shares.put(None)
                self._helper.join()
                self._helper = None

    def _has_helper(self) -> bool:
        if self._helper is None and not self._closed and len(os.sched_getaffinity(0)) > 1:
            self._helper = threading.Thread(target=self._help, name="kvstore-copy", daemon=True)
            self._helper.start()
        return self._helper is not None

    def _help(self) -> None:
        while (share := self._shares.get()) is not None:
            share.work()
            share.left.release()


def _cut(pairs: Iterable[Pair]) -> Iterable[Pair]:
    for destination, source in pairs:
        if destination.nbytes != source.nbytes or source.nbytes <= _PIECE:
            yield destination, source
            continue
        to, of = destination.cast("B"), source.cast("B")
        for start in range(0, len(of), _PIECE):
            yield to[start : start + _PIECE], of[start : start + _PIECE]
