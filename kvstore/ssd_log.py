"""The SSD tier of a simulation: its log of regions, with no bytes.

Blocks are written to the end of the log and space comes back a region at a time, the one with the
fewest live blocks first, then the oldest. What of a region is written anew and what is given up is
decided by `kvstore.reclaim`, as in a node. The headers of records take no room here.
"""

from __future__ import annotations

from typing import Final

from kvstore.entry import IN_DRAM, Entry
from kvstore.index import Index
from kvstore.reclaim import depths_of, plan_reclaim

SPARE_REGIONS: Final = 2
"""Regions kept free: one for new blocks, one for those that reclaim writes again."""

_LEAST_REGIONS: Final = 8


class SsdLog:
    """Regions of blocks.

    Args:
        index: told where blocks are.
        capacity: blocks that fit; ``None`` is infinite.
        region_blocks: blocks in a region, fewer where the capacity is small.

    Attributes:
        written: blocks written, those that a reclaim wrote anew included.
        dropped: blocks that a reclaim took out of the node.
    """

    def __init__(self, index: Index, capacity: int | None, region_blocks: int) -> None:
        self.written = 0
        self.dropped = 0
        self._index = index
        self._region_blocks = region_blocks
        self._free: int | None = None
        if capacity is not None:
            self._region_blocks = max(min(region_blocks, capacity // _LEAST_REGIONS), 1)
            self._free = capacity // self._region_blocks
        self._next = 0
        self._regions: dict[int, dict[Entry, None]] = {}

    def make_room(self, blocks: int) -> None:
        """Reclaim until as many regions are spare as a node keeps, or nothing is to be had."""
        while self._free is not None and self._free < SPARE_REGIONS + blocks // self._region_blocks:
            if not self._reclaim():
                return

    def write(self, entry: Entry) -> bool:
        """Append a block that has no copy here; False where there is no room."""
        extent = self._append(entry)
        if extent is None:
            return False
        self._index.place(entry, "ssd", extent)
        return True

    def forget(self, entry: Entry) -> None:
        """Note that a block that has left the index takes no room here any more."""
        if entry.ssd is not None:
            del self._regions[entry.ssd // self._region_blocks][entry]

    def _append(self, entry: Entry) -> int | None:
        region, place = divmod(self._next, self._region_blocks)
        if place == 0:
            if self._free is not None:
                if self._free == 0:
                    return None
                self._free -= 1
            self._regions[region] = {}
        self._regions[region][entry] = None
        self._next += 1
        self.written += 1
        return self._next - 1

    def _reclaim(self) -> bool:
        sealed = [region for region in self._regions if region != self._next // self._region_blocks]
        if not sealed or self._free is None:
            return False
        region = min(sealed, key=lambda number: (len(self._regions[number]), number))
        plan = plan_reclaim(self._regions[region], self._region_blocks)
        for entry in plan.keep:
            self._rewrite(entry)
        remaining = list(self._regions[region])
        for entry in sorted(remaining, key=depths_of(remaining).__getitem__, reverse=True):
            self._give_up(entry)
        del self._regions[region]
        self._free += 1
        return True

    def _rewrite(self, entry: Entry) -> None:
        extent = self._append(entry)
        if extent is not None:
            old = self._index.relocate(entry, "ssd", extent)
            del self._regions[old // self._region_blocks][entry]

    def _give_up(self, entry: Entry) -> None:
        if entry.gone:
            return
        if entry.state & IN_DRAM:
            self.forget(entry)
            self._index.displace(entry, "ssd")
            return
        gone = self._index.drop(entry)
        self.dropped += len(gone)
        for one in gone:
            self.forget(one)
