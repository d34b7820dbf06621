"""Which blocks of an SSD region are worth writing again when the region is reclaimed. Pure.

A block is worth it where others hang below it, or where it was used since it was written. Writing
again is bounded to a share of the region, so that reclaiming always gains room; beyond the bound
the least recently used go, with all below them. Pinned blocks are kept in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.entry import Entry

KEPT_SHARE: Final = 0.5
"""Share of a region's bytes that may be written again."""


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """What becomes of a region's residents.

    Attributes:
        keep: to be written to another region, parents first.
        give_up: to lose their copy here, children first.
    """

    keep: list[Entry]
    give_up: list[Entry]


def depths_of(entries: Iterable[Entry]) -> dict[Entry, int]:
    """How many blocks the prefix has that each entry ends; of their ancestors, too.

    Each block is visited once, however many of the entries follow it.
    """
    depths: dict[Entry, int] = {}
    for entry in entries:
        path = []
        step: Entry | None = entry
        while step is not None and step not in depths:
            path.append(step)
            step = step.parent
        depth = 0 if step is None else depths[step]
        for one in reversed(path):
            depth += 1
            depths[one] = depth
    return depths


def plan_reclaim(residents: Iterable[Entry], region_bytes: int) -> ReclaimPlan:
    """Divide the residents of one region of ``region_bytes``."""
    entries = list(residents)
    depths = depths_of(entries)
    by_worth = sorted(entries, key=lambda entry: (entry.last_use, -depths[entry]), reverse=True)
    room = int(region_bytes * KEPT_SHARE)
    keep: list[Entry] = []
    give_up: list[Entry] = []
    for entry in by_worth:
        size = entry.shard.block_bytes
        if entry.pins or (entry.worth_keeping_on_ssd and size <= room):
            room -= size
            keep.append(entry)
        else:
            give_up.append(entry)
    keep.sort(key=depths.__getitem__)
    give_up.sort(key=depths.__getitem__, reverse=True)
    return ReclaimPlan(keep, give_up)
