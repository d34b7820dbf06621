"""The DRAM tier: blocks in memory segments that the tenant's own processes can map."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tiers.arena import Arena
from tiers.errors import BadExtent, TierConfigError
from tiers.occupancy import DramStatistics, count
from tiers.segment import HUGE_PAGE
from tiers.slab import OFFSET_BITS, OFFSET_MASK, PAGE, SlabAllocator, unit_bytes
from tiers.tier import Extent, Record, Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from tiers.segment import HugePages, Segment


class DramTier(Tier):
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
        step = HUGE_PAGE if huge_pages == "require" else PAGE
        if segment_bytes < step or segment_bytes % step or segment_bytes > OFFSET_MASK:
            raise TierConfigError(
                f"segment_bytes must be a multiple of {step}, not {segment_bytes}"
            )
        self._step = max(step, unit_bytes(segment_bytes))
        if capacity < self._step:
            raise TierConfigError(f"capacity must be at least {self._step} bytes, not {capacity}")
        self._segment_bytes = segment_bytes
        self._huge_pages: HugePages = huge_pages
        self._prefault = prefault
        self._lock = threading.Lock()
        self._left = capacity
        self._arena = Arena(huge_pages, prefault=False)
        self._allocator = SlabAllocator(segment_bytes, self._arena)
        self._views = self._arena.views

    def open(self) -> None:
        """Make the segments, untouched. See :meth:`Tier.open`."""
        with self._lock:
            if len(self._arena):
                return
            self._renew(prefault=self._prefault)
            try:
                while self._left >= self._step:
                    size = min(self._segment_bytes, self._left) // self._step * self._step
                    self._allocator.add(size)
                    self._left -= size
            except BaseException:
                self._close()
                raise

    def close(self) -> None:
        """See :meth:`Tier.close`. Views that the caller still holds must not be used."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._left += self._arena.size
        self._arena.close()
        self._renew(prefault=False)

    def _renew(self, *, prefault: bool) -> None:
        self._arena = Arena(self._huge_pages, prefault=prefault)
        self._allocator = SlabAllocator(
            self._segment_bytes, self._arena, first_number=self._allocator.next_number
        )
        self._views = self._arena.views

    # Hot path.

    def reserve(self, owner: str, size: int, tag: object) -> Extent | None:
        """Find room for a block; its bytes are whatever the tenant last had there.

        The extent is 64-byte aligned in its segment, and page-aligned where ``size`` is a multiple
        of a page. O(1); only the first block of a slab costs more, and a tenant's taking over
        another's empty segment costs giving its pages back.

        Args:
            owner: the tenant.
            size: payload bytes, at least 1.
            tag: what ``tag`` and ``crowding`` answer.

        Returns:
            The extent, or None where there is no room now, or ever (see ``largest_block``).
        """
        with self._lock:
            return self._allocator.reserve(owner, size, tag)

    def free(self, extent: Extent) -> None:
        """See :meth:`Tier.free`. O(1)."""
        with self._lock:
            self._allocator.free(extent)

    def view(self, extent: Extent, size: int) -> memoryview:
        """The block's memory, writable, not copied. ``extent`` must hold a block."""
        offset = extent & OFFSET_MASK
        return self._views[extent >> OFFSET_BITS][offset : offset + size]

    def locate(self, extent: Extent) -> tuple[int, int]:
        """The number of the segment, and the byte offset in it."""
        return extent >> OFFSET_BITS, extent & OFFSET_MASK

    # Blocks.

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

    def tag(self, extent: Extent) -> object:
        """The tag of the block at ``extent``.

        Raises:
            BadExtent: no block there.
        """
        with self._lock:
            return self._allocator.tag(extent)

    def retag(self, extent: Extent, tag: object) -> None:
        """Give the block at ``extent`` another tag.

        Raises:
            BadExtent: no block there.
        """
        with self._lock:
            self._allocator.retag(extent, tag)

    def crowding(
        self, owner: str, size: int, movable: Callable[[object], bool] | None = None
    ) -> list[object]:
        """Tags of the blocks whose freeing makes room for a block, at the least cost.

        For when ``reserve`` answers None. Freeing any one block of the same owner and size helps
        too; those are never named here, as which of them to free is for the eviction order to say.
        The emptiest slabs of the owner's other sizes come first, then the emptiest segment of
        another owner. Freeing them all lets ``reserve`` succeed.

        Args:
            owner: the tenant that needs room.
            size: payload bytes of the block.
            movable: tells by tag whether a block may be freed (it is not pinned); None: all may.

        Returns:
            The tags; empty where no other blocks can make room.
        """
        with self._lock:
            return self._allocator.crowding(owner, size, movable)

    # Segments.

    def segment(self, number: int) -> Segment:
        """A segment by number. Its ``fd`` is for processes of its ``owner`` alone.

        Raises:
            BadExtent: no such segment.
        """
        return self._arena[number]

    def segments(self) -> list[Segment]:
        """All segments, by number."""
        with self._lock:
            return list(self._arena)

    def add_segment(self) -> int:
        """Grow by one segment while running; its number.

        Raises:
            TierConfigError, MediumFailed: the memory can't be had; nothing has changed.
        """
        with self._lock:
            return self._allocator.add(self._segment_bytes // self._step * self._step)

    def retire_segment(self, number: int) -> list[object]:
        """Shrink by one segment while running.

        The segment takes no more blocks from now on; its memory is given back and ``capacity``
        falls when the last block in it has been freed, at once where there is none.

        Returns:
            The tags of the blocks in it, which the caller is to free.

        Raises:
            BadExtent: no such segment.
        """
        with self._lock:
            return self._allocator.retire(number)

    @property
    def on_release(self) -> Callable[[int], None] | None:
        """Called with a segment's number before its memory is given back, while the tier is open.

        For who has registered the memory elsewhere. May be called under the tier's lock.
        """
        return self._arena.on_release

    @on_release.setter
    def on_release(self, on_release: Callable[[int], None] | None) -> None:
        self._arena.on_release = on_release

    # Counting.

    @property
    def capacity(self) -> int:
        """See :attr:`Tier.capacity`. Changes with ``add_segment`` and ``retire_segment``."""
        return self._left + self._arena.size

    @property
    def used(self) -> int:
        """See :attr:`Tier.used`."""
        return self._allocator.used

    @property
    def largest_block(self) -> int:
        """Bytes of the largest block that could ever find room."""
        with self._lock:
            return self._allocator.largest_block

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
