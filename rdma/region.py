"""Memory regions: buffers that a transport may read from or write to.

A transport that goes through a network card has to register memory before the card may touch
it; ``shm`` and ``tcp`` need no registration and use regions for their bounds and lifetime only.
A region keeps its buffer alive, so that nothing is freed under a transfer.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy

from rdma.errors import RegionError

__all__ = ["NoRegistration", "Region", "RegionCache", "Registrar", "address_of"]


def address_of(buffer: memoryview) -> int:
    """Return the address of the first byte of ``buffer``."""
    array = numpy.frombuffer(buffer, numpy.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


class Registrar(Protocol):
    """Makes memory known to the device of a transport."""

    def register(self, address: int, length: int, writable: bool) -> object:
        """Register ``length`` bytes at ``address``; return what :meth:`deregister` wants."""

    def deregister(self, registration: object) -> None:
        """Undo one :meth:`register`."""


class NoRegistration:
    """The registrar of transports whose bytes a CPU moves."""

    def register(self, address: int, length: int, writable: bool) -> object:
        """Do nothing."""
        return None

    def deregister(self, registration: object) -> None:
        """Do nothing."""


class Region:
    """One registered range of memory.

    Attributes:
        buffer: the memory, as single bytes; kept alive while the region is.
        address: address of its first byte.
        length: its size in bytes.
        registration: what the transport's registrar returned for it.
    """

    __slots__ = ("address", "buffer", "length", "registration")

    def __init__(self, buffer: memoryview, address: int, registration: object) -> None:
        self.buffer = buffer
        self.address = address
        self.length = buffer.nbytes
        self.registration = registration

    @property
    def writable(self) -> bool:
        """Whether a transport may write to it."""
        return not self.buffer.readonly

    def slice(self, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes from ``offset``.

        Raises:
            RegionError: they do not lie within the region.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise RegionError(
                f"bytes {offset} to {offset + length} lie outside a region of {self.length}"
            )
        return self.buffer[offset : offset + length]


class RegionCache:
    """Registers each range of memory once, however often it is asked for; thread-safe.

    A region lives from its first :meth:`acquire` to its last :meth:`release`. It is not kept
    beyond that: the same addresses may be other memory by then.

    Args:
        registrar: makes memory known to the transport.
    """

    def __init__(self, registrar: Registrar | None = None) -> None:
        self._registrar: Registrar = registrar if registrar is not None else NoRegistration()
        self._lock = threading.Lock()
        self._regions: dict[tuple[int, int, bool], list[Region]] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def acquire(self, buffer: memoryview) -> Region:
        """Return the region of ``buffer``, registering it if it is not.

        Raises:
            RegionError: the buffer is empty or not contiguous.
        """
        if not buffer.nbytes or not buffer.c_contiguous:
            raise RegionError("only contiguous memory that is not empty can be registered")
        flat = buffer.cast("B")
        address = address_of(flat)
        key = (address, flat.nbytes, not flat.readonly)
        with self._lock:
            users = self._regions.get(key)
            if users is None:
                registration = self._registrar.register(*key)
                users = self._regions[key] = [Region(flat, address, registration)]
            else:
                users.append(users[0])
            return users[0]

    def release(self, region: Region) -> None:
        """Give back one :meth:`acquire`; the last one deregisters.

        Raises:
            RegionError: the region is not registered here.
        """
        key = (region.address, region.length, region.writable)
        with self._lock:
            users = self._regions.get(key)
            if users is None or users[0] is not region:
                raise RegionError("the region is not registered here")
            users.pop()
            if not users:
                del self._regions[key]
                self._registrar.deregister(region.registration)

    def close(self) -> None:
        """Deregister all that is left."""
        with self._lock:
            left = [users[0] for users in self._regions.values()]
            self._regions.clear()
            for region in left:
                self._registrar.deregister(region.registration)
