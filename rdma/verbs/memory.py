"""Registration: memory that a device may touch, behind the interface of ``rdma.region``."""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from rdma.errors import RegionError
from rdma.region import Region, RegionCache, Registrar
from rdma.transport import split_place
from rdma.verbs.adapter import Adapter

__all__ = [
    "Arena",
    "Registration",
    "Segment",
    "SegmentSource",
    "VerbsRegistrar",
    "register_dmabuf",
]

LOCAL_WRITE: Final = 1
REMOTE_WRITE: Final = 2
REMOTE_READ: Final = 4
RELAXED_ORDERING: Final = 1 << 20
"""Of ``enum ibv_access_flags`` of <infiniband/verbs.h>, which is ABI."""


class Registration(NamedTuple):
    """A registered range.

    Attributes:
        local: key for the device's own use.
        remote: key for peers; grants what was registered for and nothing else.
        base: address that stands for the first byte, here and for peers.
        handle: pyverbs' memory region.
    """

    local: int
    remote: int
    base: int
    handle: Any


class VerbsRegistrar:
    """Registers memory of this process with a device.

    An address of GPU memory is registered the same way where the peer-memory kernel module
    (``nvidia-peermem``) is loaded; that has not been run on hardware.

    Args:
        adapter: the device.
        shared: whether peers may read and, where it is writable, write the memory.
        readable: whether peers that may write it may read it, too.
    """

    def __init__(self, adapter: Adapter, *, shared: bool, readable: bool = True) -> None:
        self._adapter = adapter
        self._shared = shared
        self._readable = readable

    def register(self, address: int, length: int, writable: bool) -> Registration:
        """Register memory; its pages are pinned from here on.

        Raises:
            RegionError: the device or the kernel refused; the message says why.
        """
        adapter = self._adapter
        if length > adapter.limits.region:
            raise RegionError(
                f"{length} bytes are more than {adapter.choice.device} registers at once "
                f"(max_mr_size {adapter.limits.region})"
            )
        try:
            region = adapter.binding.mr.MR(
                adapter.domain, length, self._access(writable), address=address
            )
        except adapter.binding.Error as error:
            raise refusal(error, length) from error
        return Registration(region.lkey, region.rkey, address, region)

    def deregister(self, registration: object) -> None:
        """Unpin memory: from here on peers that name it are refused."""
        assert isinstance(registration, Registration)
        registration.handle.close()

    def _access(self, writable: bool) -> int:
        if self._shared:
            # No relaxed ordering: the node's answer comes by another way than its bytes.
            granted = REMOTE_READ if self._readable else 0
            return granted | LOCAL_WRITE | REMOTE_WRITE if writable else granted
        # Relaxed ordering lets the device's writes overtake each other, not the completion.
        return RELAXED_ORDERING | (LOCAL_WRITE if writable else 0)


def register_dmabuf(adapter: Adapter, fd: int, offset: int, length: int) -> Registration:
    """Register GPU memory by its dma-buf, for peers to read and write. Not yet run on hardware.

    Args:
        adapter: the device.
        fd: of the dma-buf, as ``cuMemGetHandleForAddressRange`` returns it; may be closed after.
        offset: of the first byte in the dma-buf.
        length: number of bytes.

    Raises:
        RegionError: the device, its driver or the kernel can't do it.
    """
    access = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
    try:
        region = adapter.binding.mr.DmaBufMR(
            adapter.domain, length, access, dmabuf=fd, offset=offset
        )
    except adapter.binding.Error as error:
        raise refusal(error, length) from error
    # pyverbs passes the offset as the address that stands for the first byte.
    return Registration(region.lkey, region.rkey, offset, region)


def refusal(error: Exception, length: int) -> RegionError:
    """Return the error for a registration that was refused, with what mends it.

    Args:
        error: pyverbs', with an ``error_code``.
        length: bytes that were to be registered.
    """
    code = getattr(error, "error_code", 0)
    reason = {
        errno.ENOMEM: _memlock_advice(),
        errno.EFAULT: "the memory is mapped read-only, or not at all",
        errno.EOPNOTSUPP: "the device or its driver can't register this kind of memory",
        errno.ENOSPC: "the device has no more room for registrations",
    }.get(code, str(error))
    return RegionError(f"{length} bytes cannot be registered: {reason}")


def _memlock_advice() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "the kernel or the device is out of memory for it"
    return (
        f"this process may lock {soft} bytes (ulimit -l); raise it, as with LimitMEMLOCK=infinity "
        "in its systemd unit or --ulimit memlock=-1 for its container"
    )


class Segment(Protocol):
    """A segment of the node's memory."""

    @property
    def view(self) -> memoryview:
        """All of it, writable."""


class SegmentSource(Protocol):
    """What knows the node's segments: its DRAM tier."""

    def segment(self, number: int, /) -> Segment:
        """Return a segment."""


class Arena:
    """The node's segments, each registered once with the device, for its own use only.

    A segment that was not registered ahead is at its first use, which holds the event loop up
    while its pages are pinned.

    Args:
        registrar: registers with the device; a :class:`VerbsRegistrar` that is not shared.
        segments: the node's memory.
    """

    def __init__(self, registrar: Registrar, segments: SegmentSource) -> None:
        self._segments = segments
        self._cache = RegionCache(registrar)
        self._known: dict[int, tuple[int, int, Region]] = {}

    def register(self, number: int) -> None:
        """Register a segment ahead of its first use.

        Raises:
            RegionError: it was refused.
        """
        if number in self._known:
            return
        region = self._cache.acquire(self._segments.segment(number).view)
        registration = region.registration
        assert isinstance(registration, Registration)
        self._known[number] = (region.address, registration.local, region)

    def forget(self, number: int) -> None:
        """Deregister a segment, before its memory is given back; no work on it may be under way."""
        known = self._known.pop(number, None)
        if known is not None:
            self._cache.release(known[2])

    def locate(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the address and the key of each place.

        Raises:
            RegionError: a segment can't be registered.
        """
        known, found = self._known, []
        for place in places:
            number, offset = split_place(place)
            if number not in known:
                self.register(number)
            address, key, _ = known[number]
            found.append((address + offset, key))
        return found

    def close(self) -> None:
        """Deregister everything."""
        self._known.clear()
        self._cache.close()
