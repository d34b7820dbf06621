"""A client's buffers: registered for good, or for the time of a call."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from rdma.region import Region, RegionCache, Registrar, address_of
from rdma.verbs.memory import Registration

__all__ = ["ClientMemory"]

_ADDRESS: Final = attrgetter("address")


class ClientMemory:
    """A client's registered memory.

    What is registered with :meth:`register` stays so, and calls on any part of it cost nothing
    more. Other buffers are registered for the time of their call.

    Args:
        registrar: registers with the device; a ``VerbsRegistrar`` that is shared.
    """

    def __init__(self, registrar: Registrar) -> None:
        self._cache = RegionCache(registrar)
        self._lock = threading.Lock()
        self._lasting: list[Region] = []

    def register(self, buffer: memoryview) -> Region:
        """Register a buffer until :meth:`release`; it is kept alive as long.

        Raises:
            RegionError: it was refused.
        """
        region = self._cache.acquire(buffer)
        with self._lock:
            insort(self._lasting, region, key=_ADDRESS)
        return region

    def release(self, region: Region) -> None:
        """Undo one :meth:`register`; a peer that names the memory afterwards is refused.

        Raises:
            RegionError: the region is not registered.
        """
        self._cache.release(region)
        with self._lock:
            self._lasting.remove(region)

    def name(self, buffers: Sequence[memoryview]) -> tuple[list[int], list[Region]]:
        """Return what to tell a peer of ``buffers``.

        Returns:
            A triple (address, key, length) for each buffer, and the regions to be handed to
            :meth:`give_back` when the peer is done.

        Raises:
            RegionError: a buffer can't be registered.
        """
        named: list[int] = []
        taken: list[Region] = []
        try:
            for run in _runs(buffers):
                region = self._covering(run)
                if region is None:
                    region = self._cache.acquire(run.view())
                    taken.append(region)
                named += _triples(run, region)
        except BaseException:
            self.give_back(taken)
            raise
        return named, taken

    def give_back(self, regions: Sequence[Region]) -> None:
        """End what :meth:`name` began."""
        for region in regions:
            self._cache.release(region)

    def close(self) -> None:
        """Deregister everything."""
        self._lasting.clear()
        self._cache.close()

    def _covering(self, run: _Run) -> Region | None:
        """Return a lasting region that all of ``run`` lies in."""
        if not self._lasting:
            return None
        with self._lock:
            at = bisect_right(self._lasting, run.start, key=_ADDRESS)
            before = self._lasting[:at]
        for region in reversed(before):
            if run.end <= region.address + region.length and region.writable >= run.writable:
                return region
        return None


class _Run:
    """Buffers of one object that follow each other in memory."""

    __slots__ = ("buffers", "end", "start", "writable")

    def __init__(self, buffer: memoryview, start: int) -> None:
        self.buffers = [buffer]
        self.start = start
        self.end = start + buffer.nbytes
        self.writable = not buffer.readonly

    def takes(self, buffer: memoryview, start: int) -> bool:
        """Add a buffer if it follows; return whether it does."""
        first = self.buffers[0]
        follows = (
            start == self.end
            and buffer.obj is first.obj
            and buffer.readonly == first.readonly
            and _bytes_of(buffer.obj) is not None
        )
        if follows:
            self.buffers.append(buffer)
            self.end += buffer.nbytes
        return follows

    def view(self) -> memoryview:
        """Return all of it as one view."""
        first = self.buffers[0]
        whole = _bytes_of(first.obj) if len(self.buffers) > 1 else None
        if whole is None:
            return first
        offset = self.start - address_of(whole)
        view = whole[offset : offset + self.end - self.start]
        return view if self.writable else view.toreadonly()


def _bytes_of(owner: object) -> memoryview | None:
    """Return all of an object's memory, if that is contiguous."""
    try:
        whole = memoryview(owner)  # type: ignore[arg-type]
        return whole.cast("B") if whole.nbytes and whole.c_contiguous else None
    except (TypeError, ValueError):
        return None


def _runs(buffers: Sequence[memoryview]) -> list[_Run]:
    runs: list[_Run] = []
    for buffer in buffers:
        start = address_of(buffer)
        if not runs or not runs[-1].takes(buffer, start):
            runs.append(_Run(buffer, start))
    return runs


def _triples(run: _Run, region: Region) -> list[int]:
    registration = region.registration
    assert isinstance(registration, Registration)
    named: list[int] = []
    address = registration.base + run.start - region.address
    for buffer in run.buffers:
        named += (address, registration.remote, buffer.nbytes)
        address += buffer.nbytes
    return named
