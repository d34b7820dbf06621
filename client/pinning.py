"""A node's memory, registered with CUDA, so that a GPU reads and writes it without the CPU.

Registering takes about 0.1 s for each GiB, so it is done once for each segment that a client maps,
by a thread in the background. Until a segment is registered, what copies it has to go another way.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeAlias

import numpy as np

from client.addresses import Addresses
from rdma import segments

logger = logging.getLogger("kvstore.client.pinning")

Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"


class Registrar(Protocol):
    """What makes memory known to a device."""

    def register(self, address: int, size: int) -> None:
        """Pin memory.

        Raises:
            OSError: it can't be pinned; the message says why.
        """

    def unregister(self, address: int) -> None:
        """Give it back."""


class CudaRegistrar:
    """Registers memory for all devices of the process (``cudaHostRegister``).

    Raises:
        ImportError: there is no torch, or it is built without CUDA.
    """

    def __init__(self) -> None:
        self._runtime = import_module("torch").cuda.cudart()
        if self._runtime is None:
            raise ImportError("torch is built without CUDA")

    def register(self, address: int, size: int) -> None:
        """See ``Registrar.register``."""
        portable_and_mapped = 3
        self._check(self._runtime.cudaHostRegister(address, size, portable_and_mapped))

    def unregister(self, address: int) -> None:
        """See ``Registrar.unregister``."""
        self._check(self._runtime.cudaHostUnregister(address))

    @staticmethod
    def _check(status: Any) -> None:
        if int(status):
            raise OSError(f"CUDA error {int(status)}")


class PinnedSegments:
    """Which memory of nodes a device can reach. Any thread may use it.

    A segment that is about to be unmapped is given back first, and not before the last copy that
    uses it has ended.

    Args:
        registrar: pins memory.
    """

    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._work: deque[tuple[int, int]] = deque()
        self._thread: threading.Thread | None = None
        self._busy: int | None = None

    def __repr__(self) -> str:
        size = sum(end - start for start, end in self._ends.items())
        return f"<PinnedSegments {len(self._ends)} registered, {size} bytes>"

    def mapped(self, address: int, size: int) -> None:
        """Take note of a new mapping; it is registered in the background."""
        with self._lock:
            self._work.append((address, size))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._register_all, name="kvstore-pinning", daemon=True
                )
                self._thread.start()

    def unmapping(self, address: int) -> None:
        """Give a mapping back; returns when nothing uses it any more."""
        with self._idle:
            self._work = deque(item for item in self._work if item[0] != address)
            self._idle.wait_for(lambda: self._busy != address)
            if self._ends.pop(address, None) is None:
                return
            self._starts.remove(address)
            self._idle.wait_for(lambda: not self._uses.get(address))
            try:
                self._registrar.unregister(address)
            except OSError as error:
                logger.warning("a segment stays registered: %s", error)

    @contextmanager
    def using(self, addresses: Addresses, length: int) -> Iterator[bool]:
        """Keep memory registered for the time of the block.

        Args:
            addresses: of buffers.
            length: bytes of each.

        Yields:
            Whether all of it is registered. Where it is not, nothing is kept.
        """
        with self._lock:
            held = self._find(addresses, length)
            for start in held or ():
                self._uses[start] = self._uses.get(start, 0) + 1
        try:
            yield held is not None
        finally:
            with self._idle:
                for start in held or ():
                    self._uses[start] -= 1
                self._idle.notify_all()

    def begin_at(self, addresses: Addresses) -> Flags:
        """At which addresses a registered segment begins."""
        return np.isin(addresses, np.array(list(self._ends), np.int64))

    def wait(self, timeout: float) -> bool:
        """Wait until all that is mapped is registered; False where ``timeout`` seconds pass."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._work and self._busy is None, timeout)

    def _find(self, addresses: Addresses, length: int) -> list[int] | None:
        """The segments that buffers lie in; None where one lies in none."""
        if not len(addresses):
            return []
        if not self._starts:
            return None
        starts = np.array(self._starts, np.int64)
        ends = np.array([self._ends[start] for start in self._starts], np.int64)
        at = np.searchsorted(starts, addresses, side="right") - 1
        if at.min() < 0 or bool((addresses + length > ends[at]).any()):
            return None
        return [self._starts[number] for number in np.unique(at).tolist()]

    def _register_all(self) -> None:
        while True:
            with self._idle:
                self._busy = None
                self._idle.notify_all()
                if not self._work:
                    self._thread = None
                    return
                address, size = self._work.popleft()
                self._busy = address
            try:
                self._registrar.register(address, size)
            except OSError as error:
                logger.warning("a segment of %d bytes can't be pinned: %s", size, error)
                continue
            with self._lock:
                bisect.insort(self._starts, address)
                self._ends[address] = address + size


@cache
def pinned_segments() -> PinnedSegments:
    """The process's, which follows all mappings of nodes' segments from the first call on.

    Raises:
        ImportError: there is no CUDA here.
    """
    pinned = PinnedSegments(CudaRegistrar())
    segments.watch(pinned)
    return pinned
