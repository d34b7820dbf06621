"""The memory behind the HBM tier: its segments on the device, and who else has them mapped."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from tiers.errors import BadExtent, MediumFailed, TierConfigError, TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiers.device import Device

_log = logging.getLogger(__name__)


class HbmSegment:
    """One allocation on the device.

    Attributes:
        number: never used for another segment of the same tier.
        size: bytes.
        address: where it lies in the device's address space of this process.
        owner: the tenant that it belongs to, None before the first.
        sharers: how many have been given its handle and not said that they are done with it.
        exported: whether anybody ever has been given the handle.
    """

    __slots__ = ("address", "exported", "number", "owner", "sharers", "size")

    def __init__(self, number: int, size: int, address: int, owner: str | None = None) -> None:
        self.number = number
        self.size = size
        self.address = address
        self.owner = owner
        self.sharers = 0
        self.exported = False


class HbmArena:
    """The segments in use. Implements :class:`tiers.slab.SegmentSource`; the caller has the lock.

    Args:
        device: the GPU.
        zero: clears memory of the device, and returns when that is done.
    """

    def __init__(self, device: Device, zero: Callable[[int, int], None]) -> None:
        self._device = device
        self._zero = zero
        self._segments: dict[int, HbmSegment] = {}
        self._withdrawn: dict[int, HbmSegment] = {}
        self.size = 0
        self.on_release: Callable[[int], None] | None = None

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[HbmSegment]:
        return iter(self._segments.values())

    def __getitem__(self, number: int) -> HbmSegment:
        """A segment by number.

        Raises:
            BadExtent: no such segment.
        """
        segment = self._segments.get(number)
        if segment is None:
            raise BadExtent(f"no segment {number}")
        return segment

    @property
    def withdrawn(self) -> int:
        """Bytes that hold no blocks and can't be given back yet, since others have them mapped."""
        return sum(segment.size for segment in self._withdrawn.values())

    # What the allocator asks.

    def create(self, number: int, size: int) -> None:
        """See :meth:`tiers.slab.SegmentSource.create`."""
        self._install(number, size, self._allocate(size), None)

    def claim(self, number: int, owner: str) -> None:
        """See :meth:`tiers.slab.SegmentSource.claim`."""
        self._segments[number].owner = owner

    def may_replace(self, number: int) -> bool:
        """See :meth:`tiers.slab.SegmentSource.may_replace`: not while anybody has it mapped."""
        return not self._segments[number].sharers

    def replace(self, old: int, new: int, owner: str) -> bool:
        """See :meth:`tiers.slab.SegmentSource.replace`.

        An allocation whose handle has been given to another tenant's process goes back to the
        device, as the process may map it again later; any other one is cleared and stays.
        """
        segment = self._take(old)
        self.size -= segment.size
        try:
            address = self._renewed(segment)
        except TierError as error:
            _log.error("capacity falls by %d bytes: %s", segment.size, error)
            return False
        self._install(new, segment.size, address, owner)
        return True

    def drop(self, number: int) -> None:
        """See :meth:`tiers.slab.SegmentSource.drop`."""
        segment = self._take(number)
        if segment.sharers:
            self._withdrawn[number] = segment
        else:
            self._give_back(segment)

    # Sharing.

    def share(self, number: int, owner: str) -> bytes:
        """See :meth:`tiers.hbm.HbmTier.share`."""
        segment = self[number]
        if segment.owner != owner:
            raise BadExtent(f"segment {number} belongs to another tenant")
        try:
            handle = self._device.handle(segment.address)
        except OSError as error:
            raise MediumFailed(f"segment {number} can't be shared: {error.strerror}") from error
        segment.sharers += 1
        segment.exported = True
        return handle

    def unshare(self, number: int) -> bool:
        """End a share.

        Returns:
            Whether nobody shares the segment now.

        Raises:
            BadExtent: nobody shares such a segment.
        """
        withdrawn = self._withdrawn.get(number)
        segment = self[number] if withdrawn is None else withdrawn
        if not segment.sharers:
            raise BadExtent(f"nobody shares segment {number}")
        segment.sharers -= 1
        if segment.sharers:
            return False
        if withdrawn is not None:
            del self._withdrawn[number]
            self._give_back(segment)
        return True

    def close(self) -> None:
        """Give everything back, also what others still have mapped."""
        for number in list(self._segments):
            self._give_back(self._take(number))
        for segment in self._withdrawn.values():
            self._give_back(segment)
        self._withdrawn.clear()

    def _take(self, number: int) -> HbmSegment:
        if self.on_release is not None:
            self.on_release(number)
        return self._segments.pop(number)

    def _install(self, number: int, size: int, address: int, owner: str | None) -> None:
        self._segments[number] = HbmSegment(number, size, address, owner)
        self.size += size

    def _renewed(self, segment: HbmSegment) -> int:
        """Memory in which nothing is left of a segment's, and that its handle does not map."""
        if not segment.exported:
            return self._cleared(segment.address, segment.size)
        self._release(segment.address)
        return self._allocate(segment.size)

    def _allocate(self, size: int) -> int:
        """New memory, cleared: what was in it may be another tenant's."""
        try:
            address = self._device.allocate(size)
        except OSError as error:
            raise _refused(error, size) from error
        return self._cleared(address, size)

    def _cleared(self, address: int, size: int) -> int:
        try:
            self._zero(address, size)
        except OSError as error:
            self._release(address)
            raise MediumFailed(f"the GPU's memory can't be written: {error.strerror}") from error
        return address

    def _give_back(self, segment: HbmSegment) -> None:
        if segment.sharers:
            _log.warning("segment %d goes while %d share it", segment.number, segment.sharers)
        self.size -= segment.size
        self._release(segment.address)

    def _release(self, address: int) -> None:
        try:
            self._device.release(address)
        except OSError as error:
            _log.error("memory of the GPU is not given back: %s", error.strerror)


def _refused(error: OSError, size: int) -> TierError:
    if error.errno == errno.ENOMEM:
        return TierConfigError(f"no {size} bytes of memory left on the GPU: {error.strerror}")
    return MediumFailed(f"no segment of {size} bytes on the GPU: {error.strerror}")
