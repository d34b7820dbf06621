"""The DRAM tier: blocks in memory segments that the tenant's own processes can map."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tiers.arena import Arena
from tiers.errors import BadExtent
from tiers.occupancy import DramStatistics, count
from tiers.segment import HUGE_PAGE, Segment
from tiers.slab import OFFSET_BITS, OFFSET_MASK, PAGE
from tiers.slab_tier import SlabTier
from tiers.tier import Extent, Record

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tiers.segment import HugePages


class DramTier(SlabTier[Segment]):
    """Blocks in memory. A block's extent stays where it is until it is freed.

    Args:
        capacity: bytes of memory, at least a page. The last segment takes what is left.
        segment_bytes: bytes of a segment: the largest block, and the step in which tenants get
            memory. Less than 1 % is lost to the division where blocks are below a hundredth of
            it; while one size takes over from smaller ones, gaps can hold a few per cent more.
        huge_pages: ``auto`` asks the kernel for transparent huge pages, ``never`` declines them,
            ``require`` takes reserved 2 MiB pages or fails.
        prefault: touch all memory in the background from ``open`` on.

    Raises:
        TierConfigError: impossible sizes.
    """

    name: ClassVar[str] = "dram"

    def __init__(
        self,
        capacity: int,
        *,
        segment_bytes: int = 1 << 30,
        huge_pages: HugePages = "auto",
        prefault: bool = True,
    ) -> None:
        self._huge_pages: HugePages = huge_pages
        self._prefault = prefault
        super().__init__(capacity, segment_bytes, HUGE_PAGE if huge_pages == "require" else PAGE)

    def _new_segments(self, *, in_use: bool) -> Arena:
        self._arena = Arena(self._huge_pages, prefault=in_use and self._prefault)
        self._views = self._arena.views
        return self._arena

    def view(self, extent: Extent, size: int) -> memoryview:
        """The block's memory, writable, not copied. ``extent`` must hold a block."""
        offset = extent & OFFSET_MASK
        return self._views[extent >> OFFSET_BITS][offset : offset + size]

    def store(self, record: Record, data: Buffer, tag: object, *, owner: str = "") -> Extent | None:
        """Reserve and copy. See :meth:`Tier.store`."""
        source = np.frombuffer(memoryview(data), np.uint8)
        if source.nbytes != record.size:
            raise ValueError(f"{source.nbytes} bytes given for a block of {record.size}")
        extent = self.reserve(owner, record.size, tag)
        if extent is not None:
            np.copyto(np.frombuffer(self.view(extent, record.size), np.uint8), source)
        return extent

    def load(self, extent: Extent, into: memoryview, offset: int = 0) -> None:
        """Copy out. See :meth:`Tier.load`."""
        with self._lock:
            size = self._allocator.size(extent)
        end = offset + into.nbytes
        if not 0 <= offset <= end <= size:
            raise BadExtent(f"bytes {offset} to {end} of a block of {size}")
        if end > offset:
            source = np.frombuffer(self.view(extent, size)[offset:end], np.uint8)
            np.copyto(np.frombuffer(into, np.uint8), source)

    def statistics(self) -> DramStatistics:
        """Count what is held, free and lost, and how far the pre-fault is."""
        with self._lock:
            total = count(self._allocator.spaces(), self._allocator.unit)
            return DramStatistics(
                capacity=self._left + self._arena.size,
                used=total.used,
                blocks=total.blocks,
                lost=total.lost + self._left,
                free_slots=total.free_slots,
                segments=len(self._arena),
                populated=self._arena.populated,
                populating=self._arena.populating,
            )

    def populate(self, number: int) -> None:
        """Touch all memory of a segment now, without holding the interpreter's lock for long.

        Ends early if the segment is given back meanwhile.

        Raises:
            BadExtent: no such segment.
        """
        self._arena.populate(number)

    def wait_prefault(self, timeout: float | None = None) -> bool:
        """Wait until all memory is touched; False where ``timeout`` seconds pass first."""
        return self._arena.wait(timeout)
