"""Registration: memory that a device may touch, behind the interface of ``rdma.region``."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import resource
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from rdma.errors import RegionError
from rdma.region import Region, RegionCache, Registrar
from rdma.transport import split_place
from rdma.verbs.adapter import Adapter
from rdma.verbs.errors import TransferTimeout
from rdma.verbs.plan import Piece

__all__ = [
    "Arena",
    "Registration",
    "Segment",
    "SegmentSource",
    "VerbsRegistrar",
    "register_dmabuf",
]

_log = logging.getLogger(__name__)

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
        try:
            registration.handle.close()
        except self._adapter.binding.Error as error:
            # Only a device that is gone refuses; the kernel has unpinned the memory.
            _log.warning("memory cannot be deregistered: %s", error)

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

    Registering holds the interpreter's lock, and takes many times longer where the pages have to
    be found first: :meth:`prepare` has that done by a thread that does not hold it.

    Args:
        registrar: registers with the device; a :class:`VerbsRegistrar` that is not shared.
        segments: the node's memory.
        populate: touches all pages of a segment; called in a thread.

    Attributes:
        landing: a byte that belongs to no block.

    Raises:
        RegionError: nothing can be registered.
    """

    def __init__(
        self,
        registrar: Registrar,
        segments: SegmentSource,
        populate: Callable[[int], object] | None = None,
    ) -> None:
        self._segments = segments
        self._populate = populate
        self._cache = RegionCache(registrar)
        self._known: dict[int, tuple[int, int, Region]] = {}
        page = self._cache.acquire(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))
        assert isinstance(page.registration, Registration)
        self.landing = Piece(page.address, 1, page.registration.local)
        self._closed = False

    def register(self, number: int) -> None:
        """Register a segment now.

        Raises:
            RegionError: it was refused.
        """
        if number in self._known:
            return
        if self._closed:
            raise RegionError("the device has been given back")
        region = self._cache.acquire(self._segments.segment(number).view)
        registration = region.registration
        assert isinstance(registration, Registration)
        self._known[number] = (region.address, registration.local, region)

    @property
    def registered(self) -> int:
        """Bytes of the node's memory that are registered."""
        return sum(region.length for _, _, region in list(self._known.values()))

    def forget(self, number: int) -> None:
        """Deregister a segment, before its memory is given back; no work on it may be under way."""
        known = self._known.pop(number, None)
        if known is not None:
            self._cache.release(known[2])

    def locate(self, places: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the address and the key of each place; None where a segment is not registered."""
        known, found = self._known, []
        for place in places:
            number, offset = split_place(place)
            if number not in known:
                return None
            address, key, _ = known[number]
            found.append((address + offset, key))
        return found

    async def prepare(
        self, places: Sequence[int], deadline: float | None = None
    ) -> list[tuple[int, int]]:
        """Register the segments of all places, then return what :meth:`locate` does.

        Args:
            places: whose blocks the caller holds in place until this returns.
            deadline: when to give up, on the clock of the event loop.

        Raises:
            RegionError: a segment can't be registered.
            TransferTimeout: it took longer.
        """
        try:
            async with asyncio.timeout_at(deadline):
                for number in dict.fromkeys(split_place(place)[0] for place in places):
                    await self._prepare(number)
        except TimeoutError:
            raise TransferTimeout("the node's memory was not registered by the deadline") from None
        located = self.locate(places)
        assert located is not None, "what is held in place is not deregistered"
        return located

    async def _prepare(self, number: int) -> None:
        if number in self._known:
            return
        if self._populate is not None:
            await asyncio.to_thread(self._populate, number)
        self.register(number)

    def close(self) -> None:
        """Deregister everything."""
        self._closed = True
        self._known.clear()
        self._cache.close()
