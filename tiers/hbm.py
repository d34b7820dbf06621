"""The HBM tier: blocks in the memory of one GPU, which the tenant's own processes can map.

Memory is taken when the tier is opened, checked against what the card has free. Each segment is an
allocation of its own, since CUDA shares whole allocations: so tenants are as much apart here as in
the DRAM tier. A node with several GPUs has one tier for each.

A process that maps a segment by its handle copies from it in its own streams, and writes to blocks
that have been reserved for it. The tier itself copies on streams of its own and waits for events,
never for the device; only giving back memory that has been shared may wait for all that this
process has queued. An extent is not reused before the copies that use it have ended: those that the
tier queues by itself, those of other processes by :meth:`HbmTier.lease`.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from tiers.cuda import CudaDevice
from tiers.device import Event
from tiers.errors import BadExtent, MediumFailed, TierConfigError
from tiers.hbm_arena import HbmArena, HbmSegment
from tiers.host_copies import HostCopies, let_go
from tiers.leases import Leases
from tiers.occupancy import HbmStatistics, count
from tiers.slab import OFFSET_BITS, OFFSET_MASK
from tiers.slab_tier import SlabTier
from tiers.tier import Extent, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from tiers.device import Device, End
    from tiers.host_copies import ByteArray

_log = logging.getLogger(__name__)

_OUT: Final = 0
_IN: Final = 1

_DEPARTING: Final = object()
"""The tag of a block that has been freed and whose room waits for copies to end."""


class HbmTier(SlabTier[HbmSegment]):
    """Blocks on a GPU. A block's extent stays where it is until it is freed.

    Args:
        capacity: bytes of the GPU's memory, at least a segment's granularity (2 MiB). The last
            segment takes what is left.
        device: the GPU, by the number that this process sees it under, or a stand-in for one.
        segment_bytes: bytes of a segment: the largest block, and the step in which tenants get
            memory.
        lanes: how many ``store`` and ``load`` may be under way at once; more wait.
        buffer_bytes: length of each of two pinned buffers that each lane has for host memory that
            has not been pinned.

    Raises:
        TierConfigError: impossible sizes.
    """

    name: ClassVar[str] = "hbm"

    def __init__(
        self,
        capacity: int,
        *,
        device: int | Device = 0,
        segment_bytes: int = 1 << 30,
        lanes: int = 4,
        buffer_bytes: int = 4 << 20,
    ) -> None:
        self._device: Device = CudaDevice(device) if isinstance(device, int) else device
        if lanes < 1 or buffer_bytes < 1:
            raise TierConfigError(f"{lanes} lanes with {buffer_bytes} bytes can't copy anything")
        self._lanes = lanes
        self._buffer_bytes = buffer_bytes
        self._copies: HostCopies | None = None
        super().__init__(capacity, segment_bytes, self._device.granularity)

    def _new_segments(self, *, in_use: bool) -> HbmArena:
        self._arena = HbmArena(self._device, self._zero)
        self._leases: Leases[End] = Leases(_over)
        self._departing = 0
        return self._arena

    def open(self) -> None:
        """Take all memory. See :meth:`Tier.open`.

        Raises:
            TierConfigError: there is no such GPU, or it has too little free memory.
            MediumFailed: the GPU answered with an error.
        """
        if self._copies is not None:
            return
        self._device.open()
        try:
            free = self._device.free_bytes()
            if free < self.capacity:
                raise TierConfigError(
                    f"the GPU has {free} bytes free, which is less than the HBM tier's "
                    f"{self.capacity}: make it smaller, or start it before what has the rest"
                )
            self._copies = HostCopies(self._device, self._lanes, self._buffer_bytes)
        except OSError as error:
            raise MediumFailed(f"the GPU can't be used: {error.strerror}") from error
        try:
            super().open()
        except BaseException:
            self.close()
            raise

    def _close(self) -> None:
        for end in self._leases.ends():
            if isinstance(end, Event):
                let_go(end.wait)
        super()._close()
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    # Host memory.

    def pin(self, address: int, size: int) -> None:
        """Pin memory of this process, as a DRAM tier's segment, so that copies need no buffer.

        Takes up to 0.1 s for each GiB.

        Raises:
            MediumFailed: it can't be pinned, or the tier is not open.
        """
        with self._failing() as copies:
            copies.pin(address, size)

    def unpin(self, address: int) -> None:
        """Undo ``pin``, before the memory goes; no copy of it is under way. Twice does nothing."""
        if self._copies is not None:
            self._copies.unpin(address)

    # Blocks.

    def reserve(self, owner: str, size: int, tag: object) -> Extent | None:
        """See :meth:`SlabTier.reserve`."""
        with self._lock:
            extent = self._allocator.reserve(owner, size, tag)
            if extent is None and self._settle():
                extent = self._allocator.reserve(owner, size, tag)
            return extent

    def free(self, extent: Extent) -> None:
        """See :meth:`Tier.free`. The block's room waits for its leases to end."""
        with self._lock:
            self._free(extent)

    def _free(self, extent: Extent) -> None:
        size = self._size(extent)
        if self._leases.depart(extent):
            self._allocator.retag(extent, _DEPARTING)
            self._departing += size
            self._settle()
        else:
            self._allocator.free(extent)

    def store(self, record: Record, data: Buffer, tag: object, *, owner: str = "") -> Extent | None:
        """Reserve and copy. See :meth:`Tier.store`."""
        source = np.frombuffer(memoryview(data), np.uint8)
        if source.nbytes != record.size:
            raise ValueError(f"{source.nbytes} bytes given for a block of {record.size}")
        extent = self.reserve(owner, record.size, tag)
        if extent is not None:
            try:
                self.fill(extent, source)
            except BaseException:
                self.free(extent)
                raise
        return extent

    def fill(self, extent: Extent, source: ByteArray) -> None:
        """Copy host memory to a block that has been reserved; over on return.

        Raises:
            MediumFailed: the GPU failed.
            BadExtent: no block there, or a smaller one.
        """
        address = self._address(extent, 0, source.nbytes)
        with self._failing() as copies:
            copies.store(address, source)

    def load(self, extent: Extent, into: memoryview, offset: int = 0) -> None:
        """Copy to host memory; over on return. See :meth:`Tier.load`."""
        address = self._address(extent, offset, into.nbytes)
        if into.nbytes:
            with self._failing() as copies:
                copies.load(address, np.frombuffer(into, np.uint8))

    def copy_out(
        self,
        moves: Sequence[tuple[Extent, int]],
        size: int,
        stream: int | None = None,
        offset: int = 0,
    ) -> Event:
        """Queue copies from blocks to other memory that the GPU reaches.

        Nothing is waited for. The blocks are leased until the copies have ended. What lies side by
        side at both ends, in memory that has been pinned here, goes as one copy.

        Args:
            moves: extents, and the addresses to copy to: of this GPU, of one that it reaches, or
                of pinned host memory, which must stay until the end.
            size: bytes of each copy.
            stream: CUDA's handle of the caller's stream on this GPU; None: one of the tier's own.
            offset: where in the blocks to begin.

        Returns:
            The end of the copies.

        Raises:
            MediumFailed: the GPU failed, and some of the copies may have been queued; or the tier
                is not open.
            BadExtent: no block there, or the range goes beyond it; nothing is queued.
        """
        pairs = [(to, self._address(extent, offset, size)) for extent, to in moves]
        return self._queue(moves, pairs, size, stream, _OUT)

    def copy_in(
        self,
        moves: Sequence[tuple[Extent, int]],
        size: int,
        stream: int | None = None,
        offset: int = 0,
    ) -> Event:
        """Queue copies to reserved blocks from other memory. See :meth:`copy_out`.

        Only from the end of the copies on are the blocks to be shown to others.
        """
        pairs = [(self._address(extent, offset, size), source) for extent, source in moves]
        return self._queue(moves, pairs, size, stream, _IN)

    def _queue(
        self,
        moves: Sequence[tuple[Extent, int]],
        pairs: list[tuple[int, int]],
        size: int,
        stream: int | None,
        way: int,
    ) -> Event:
        with self._failing() as copies:
            queue = copies.streams[way] if stream is None else stream
            # A copy must not go on from one allocation to the next, even where they touch.
            pins = [copies.pin_at(other) for _, other in moves]
            places = [
                None if pin is None else (extent >> OFFSET_BITS, pin)
                for (extent, _), pin in zip(moves, pins, strict=True)
            ]
            try:
                self._device.copy_all(_joined(pairs, size, places), queue)
            finally:
                end = self._device.record(queue)
                self.lease([extent for extent, _ in moves], end)
        return end

    def lease(self, extents: Iterable[Extent], end: End) -> None:
        """Let extents not be reused before ``end``, even where they are freed earlier.

        For who queues copies by itself; and with the end of a process for what that may still read
        or write when its connection is gone, since its GPU can outlive it.

        Raises:
            BadExtent: one holds no block; none is leased.
        """
        with self._lock:
            held = frozenset(extents)
            for extent in held:
                self._size(extent)
            self._settle()
            self._leases.hold(held, end)

    def settle(self) -> None:
        """Make the room of freed blocks usable whose leases have ended; others do it by the way."""
        with self._lock:
            self._settle()

    def _settle(self) -> bool:
        """Whether there is more room now."""
        ended = self._leases.settle()
        for extent in ended:
            self._departing -= self._allocator.size(extent)
            self._allocator.free(extent)
        return bool(ended)

    def tag(self, extent: Extent) -> object:
        """See :meth:`SlabTier.tag`."""
        with self._lock:
            self._size(extent)
            return self._allocator.tag(extent)

    def retag(self, extent: Extent, tag: object) -> None:
        """See :meth:`SlabTier.retag`."""
        with self._lock:
            self._size(extent)
            self._allocator.retag(extent, tag)

    def crowding(
        self, owner: str, size: int, movable: Callable[[object], bool] | None = None
    ) -> list[object]:
        """See :meth:`SlabTier.crowding`. No room is expected of blocks that are freed already."""

        def may_go(tag: object) -> bool:
            return tag is not _DEPARTING and (movable is None or movable(tag))

        with self._lock:
            self._settle()
            return self._allocator.crowding(owner, size, may_go)

    # Sharing.

    def uuid(self) -> bytes:
        """16 bytes that name the GPU in every process of the host.

        Raises:
            MediumFailed: the tier is not open.
        """
        with self._failing():
            return self._device.uuid()

    def share(self, number: int, owner: str) -> bytes:
        """The handle by which a process of a tenant maps a segment.

        It maps all of the segment, to read and to write, so it is for processes of its owner alone.
        While anybody shares a segment, its memory is not given back or given to another tenant,
        however empty it is; of one that is retired, the room is lost until the last has called
        ``unshare``.

        Args:
            number: the segment's.
            owner: the tenant.

        Returns:
            64 bytes, of which anybody can map the segment.

        Raises:
            BadExtent: no such segment, or it is another tenant's.
            MediumFailed: the GPU refuses.
        """
        with self._lock:
            return self._arena.share(number, owner)

    def unshare(self, number: int) -> None:
        """Say that a process has closed its mapping, or has ended: once for each ``share``.

        Raises:
            BadExtent: nobody shares such a segment.
        """
        with self._lock:
            if self._arena.unshare(number):
                self._allocator.reconsider()

    def retire_segment(self, number: int) -> list[object]:
        """See :meth:`SlabTier.retire_segment`."""
        with self._lock:
            tags = self._allocator.retire(number)
            return [tag for tag in tags if tag is not _DEPARTING]

    # Counting.

    @property
    def used(self) -> int:
        """See :attr:`Tier.used`."""
        return self._allocator.used - self._departing

    def statistics(self) -> HbmStatistics:
        """Count what is held, free and lost."""
        with self._lock:
            self._settle()
            total = count(self._allocator.spaces(), self._allocator.unit)
            leaving = self._leases.departures
            return HbmStatistics(
                capacity=self.capacity,
                used=total.used - self._departing,
                blocks=total.blocks - leaving,
                lost=total.lost + self._left + self._departing + self._arena.withdrawn,
                free_slots=total.free_slots,
                segments=len(self._arena),
                departing=self._departing,
                withdrawn=self._arena.withdrawn,
            )

    # Inside.

    def _size(self, extent: Extent) -> int:
        size = self._allocator.size(extent)
        if self._leases.departing(extent):
            raise BadExtent(f"no block at extent {extent:#x}")
        return size

    def _address(self, extent: Extent, offset: int, length: int) -> int:
        with self._lock:
            size = self._size(extent)
            start = self._arena[extent >> OFFSET_BITS].address + (extent & OFFSET_MASK)
        if not 0 <= offset <= offset + length <= size:
            raise BadExtent(f"bytes {offset} to {offset + length} of a block of {size}")
        return start + offset

    @contextmanager
    def _failing(self) -> Iterator[HostCopies]:
        copies = self._copies
        if copies is None:
            raise MediumFailed("the HBM tier is not open")
        try:
            yield copies
        except OSError as error:
            raise MediumFailed(f"the GPU failed: {error.strerror}") from error

    def _zero(self, address: int, size: int) -> None:
        assert self._copies is not None
        self._copies.zero(address, size)


def _joined(
    pairs: list[tuple[int, int]], size: int, places: Sequence[object]
) -> Iterator[tuple[int, int, int]]:
    """The same copies, with those as one that go on where the one before them ends.

    Only where ``places`` are the same, and not None.
    """
    first = 0
    for number in range(1, len(pairs) + 1):
        length = (number - first) * size
        to, source = pairs[first]
        if (
            number == len(pairs)
            or places[first] is None
            or places[number] != places[first]
            or pairs[number] != (to + length, source + length)
        ):
            yield to, source, length
            first = number


def _over(end: End) -> bool:
    """Whether an end has come: also where the device has failed, and copies nothing any more."""
    try:
        return end.done()
    except OSError as error:
        _log.warning("a copy has ended with its GPU: %s", error.strerror)
        return True
