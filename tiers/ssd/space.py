"""Which regions hold what, which is written to, which are free.

Pure state, no I/O and no lock: the log calls it under its own. A region goes round::

    FREE -> BUSY (its head is being written) -> OPEN -> CLOSING (full; its summary is due once
    the last writer is done) -> SEALED -> BUSY (being reclaimed) -> FREE

At most one region is OPEN.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tiers.errors import BadExtent
from tiers.ssd.format import (
    PAGE,
    RecordHeader,
    encode_entry,
    encode_record,
    record_pages,
    region_page,
    summary_pages,
)
from tiers.ssd.region import (
    DEAD,
    WRITING,
    FoundRegion,
    Held,
    Region,
    Slot,
    State,
    extent_page,
    make_extent,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiers.tier import Extent, Record


class Space:
    """The regions of one file.

    Args:
        regions: how many there are.
        region_pages: pages in each.
    """

    def __init__(self, regions: int, region_pages: int) -> None:
        self.regions = [Region(number) for number in range(regions)]
        self.region_pages = region_pages
        self.sequence = 1
        self.blocks = 0
        self.live_bytes = 0
        self._free = deque(self.regions)
        self._open: Region | None = None
        self._due: list[Region] = []

    # --- places ---------------------------------------------------------------------------

    def next_sequence(self) -> int:
        """Draw the next number in the order of writes."""
        self.sequence += 1
        return self.sequence - 1

    def _find(self, extent: Extent) -> tuple[Region, int]:
        page = extent_page(extent)
        number, place = divmod(page - 1, self.region_pages)
        if 0 <= number < len(self.regions):
            region = self.regions[number]
            index = region.index_of(place)
            current = extent == make_extent(page, region.generation)
            if current and index is not None and region.held(index):
                return region, index
        raise BadExtent(f"no block at extent {extent} of the ssd tier")

    # --- storing --------------------------------------------------------------------------

    def fits(self, size: int) -> bool:
        """Whether a block of ``size`` bytes fits in a region at all."""
        return 1 + record_pages(size) + summary_pages(1) <= self.region_pages

    @property
    def largest_block(self) -> int:
        """Bytes of the largest block that fits in a region."""
        return (self.region_pages - 1 - record_pages(0) - summary_pages(1)) * PAGE

    def has_room(self, size: int) -> bool:
        """Whether the open region takes another block of ``size`` bytes."""
        region = self._open
        if region is None:
            return False
        reserve = summary_pages(len(region.tags) + 1)
        return region.cursor + record_pages(size) + reserve <= self.region_pages

    def allocate(self, record: Record, checksum: int) -> Slot | None:
        """Take space in the open region; None, and the region closes, where it has none."""
        region = self._open
        if region is None:
            return None
        if not self.has_room(record.size):
            self.close_region()
            return None
        page = region_page(region.number, self.region_pages) + region.cursor
        header = RecordHeader(record, region.generation, self.next_sequence(), page, checksum)
        encoded, crc = encode_record(header)
        region.entries += encode_entry(header, crc, region.cursor)
        region.pages.append(region.cursor)
        region.sizes.append(record.size)
        region.checksums.append(checksum)
        region.header_crcs.append(crc)
        region.tags.append(WRITING)
        region.cursor += record_pages(record.size)
        region.writers += 1
        extent = make_extent(page, region.generation)
        return Slot(region.number, len(region.tags) - 1, page, extent, encoded)

    def commit(self, slot: Slot, tag: object) -> None:
        """The record is on the medium: the block is held from now on."""
        region = self.regions[slot.region]
        region.tags[slot.index] = tag
        self._count(region, 1, region.sizes[slot.index])
        self._written(region)

    def abandon(self, slot: Slot) -> None:
        """The write failed: the space is lost until the region is reclaimed."""
        region = self.regions[slot.region]
        region.tags[slot.index] = DEAD
        self._written(region)

    def _count(self, region: Region, blocks: int, size: int) -> None:
        region.live += blocks
        region.live_bytes += size
        self.blocks += blocks
        self.live_bytes += size

    def _written(self, region: Region) -> None:
        region.writers -= 1
        if region.state is State.CLOSING and not region.writers:
            self._due.append(region)

    def close_region(self) -> None:
        """Write no more into the open region; its summary is due once its writers are done."""
        region, self._open = self._open, None
        if region is None:
            return
        region.state = State.CLOSING
        if not region.writers:
            self._due.append(region)

    def due(self) -> list[Region]:
        """Take the regions whose summary is to be written now."""
        due, self._due = self._due, []
        return due

    def sealed(self, region: Region, *, summarised: bool) -> None:
        """The summary was written, or could not be; either way the region can be reclaimed."""
        region.state = State.SEALED
        region.summarised = summarised
        if summarised:
            region.entries = bytearray()

    def outdated(self) -> list[Region]:
        """Take the sealed regions with no summary, or one that lists blocks freed since."""
        found = [
            region
            for region in self.regions
            if region.state is State.SEALED and (region.outdated or not region.summarised)
        ]
        for region in found:
            region.state = State.CLOSING
        return found

    # --- going round ----------------------------------------------------------------------

    def take_free(self) -> Region | None:
        """Take the region that has been free longest, to write its head."""
        if not self._free:
            return None
        region = self._free.popleft()
        region.state = State.BUSY
        return region

    def install(self, region: Region, generation: int, sequence: int) -> None:
        """The head is written: the region takes records from now on."""
        region.generation = generation
        region.opened = sequence
        region.state = State.OPEN
        self._open = region

    def release(self, region: Region) -> None:
        """Put a region among the free ones, last."""
        region.clear()
        self._free.append(region)

    def take_empty(self, number: int) -> Region:
        """Take a sealed region without blocks, to reclaim it; ValueError where it isn't one."""
        region = self.regions[number]
        if region.state is not State.SEALED or region.live:
            raise ValueError(
                f"region {number} is {region.state.value} with {region.live} blocks held"
            )
        region.state = State.BUSY
        return region

    def put_back(self, region: Region) -> None:
        """The medium refused to reclaim the region: it is sealed as before."""
        region.state = State.SEALED
        region.failures += 1

    def victim(self) -> Region | None:
        """The sealed region to reclaim next: fewest live bytes, then the oldest."""
        sealed = [region for region in self.regions if region.state is State.SEALED]
        return min(sealed, key=lambda r: (r.failures, r.live_bytes, r.opened), default=None)

    # --- blocks ---------------------------------------------------------------------------

    def held(self, extent: Extent) -> Held:
        """What ``load`` needs; raises BadExtent."""
        region, index = self._find(extent)
        return Held(
            extent_page(extent),
            region.generation,
            region.sizes[index],
            region.checksums[index],
            region.header_crcs[index],
        )

    def set_tag(self, extent: Extent, tag: object) -> None:
        """Replace a block's tag; raises BadExtent."""
        region, index = self._find(extent)
        region.tags[index] = tag

    def free(self, extent: Extent) -> None:
        """Forget a block; raises BadExtent."""
        region, index = self._find(extent)
        region.tags[index] = DEAD
        region.outdated = True
        self._count(region, -1, -region.sizes[index])

    def residents(self, number: int) -> list[object]:
        """Tags of the blocks held in a region."""
        return self.regions[number].residents()

    # --- after a restart ------------------------------------------------------------------

    def restore(self, found: Iterable[FoundRegion]) -> None:
        """Take over the regions that were found, as sealed ones; those without blocks are free."""
        for seen in found:
            self.sequence = max(self.sequence, seen.sequence + 1)
            if not seen.entries:
                continue
            region = self.regions[seen.number]
            region.generation = seen.generation
            region.opened = seen.opened
            region.cursor = seen.cursor
            region.state = State.SEALED
            region.summarised = seen.summarised
            region.entries = bytearray(b"" if seen.summarised else seen.entries)
            region.fill(seen.entries)
            self.blocks += region.live
            self.live_bytes += region.live_bytes
        self._free = deque(r for r in self.regions if r.state is State.FREE)

    def resumable(self) -> Region | None:
        """The sealed region that was put to use last, where an eighth of it is still empty."""
        sealed = [region for region in self.regions if region.state is State.SEALED]
        newest = max(sealed, key=lambda region: region.opened, default=None)
        if newest is None or newest.cursor > self.region_pages * 7 // 8:
            return None
        return newest

    def resume(self, region: Region, entries: bytes) -> None:
        """Write on in a restored region; ``entries`` are those of its records."""
        region.entries = bytearray(entries)
        region.summarised = False
        region.state = State.OPEN
        self._open = region

    # --- figures --------------------------------------------------------------------------

    @property
    def free_regions(self) -> int:
        """Regions that hold nothing and can be put to use."""
        return len(self._free)

    @property
    def writable_bytes(self) -> int:
        """Bytes of whole pages that records can still be written to."""
        pages = len(self._free) * (self.region_pages - 1 - summary_pages(1))
        if self._open is not None:
            reserve = summary_pages(len(self._open.tags) + 1)
            pages += max(0, self.region_pages - self._open.cursor - reserve)
        return pages * PAGE
