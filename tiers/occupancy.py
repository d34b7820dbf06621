"""Counting what the bytes of tiers in memory are: held, free for use, or lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiers.slab import slot_stride
from tiers.tier import TierStatistics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiers.space import Space


@dataclass(frozen=True, slots=True)
class DramStatistics(TierStatistics):
    """The DRAM tier's occupancy. Bytes where not said otherwise.

    Attributes:
        free_slots: the part of ``free`` that only blocks of sizes in use can have at once; other
            sizes get it as slabs become empty.
        segments: number of segments.
        populated: memory touched ahead of use.
        populating: memory still to be touched ahead of use.
    """

    free_slots: int
    segments: int
    populated: int
    populating: int


@dataclass(frozen=True, slots=True)
class HbmStatistics(TierStatistics):
    """The HBM tier's occupancy. Bytes where not said otherwise.

    Attributes:
        free_slots: the part of ``free`` that only blocks of sizes in use can have at once; other
            sizes get it as slabs become empty.
        segments: number of segments.
        departing: the part of ``lost`` that was blocks which are freed, until copies of them end.
        withdrawn: the part of ``lost`` that was retired segments which others still have mapped.
    """

    free_slots: int
    segments: int
    departing: int
    withdrawn: int


@dataclass(slots=True)
class Occupancy:
    """Sums over segments, in bytes; ``used + free_slots + free_runs + lost`` is their size."""

    used: int = 0
    blocks: int = 0
    free_slots: int = 0
    free_runs: int = 0
    lost: int = 0


def count(spaces: Iterable[Space], unit: int) -> Occupancy:
    """Count the bytes of some segments.

    A free run counts as free only as far as whole blocks of a size that its tenant uses fit into
    it. Nothing in a retiring segment is free.

    Args:
        spaces: the segments.
        unit: bytes of a unit.
    """
    spaces = list(spaces)
    sizes: dict[str | None, set[int]] = {}
    for space in spaces:
        if space.taken:
            sizes.setdefault(space.owner, set()).update(
                slab.group.size for _, slab in space.runs() if slab is not None
            )
    total = Occupancy()
    for space in spaces:
        if space.taken or space.retiring:
            _add(total, space, unit, sizes.get(space.owner, set()))
        else:
            total.free_runs += space.units * unit
    return total


def _add(total: Occupancy, space: Space, unit: int, sizes: set[int]) -> None:
    for units, slab in space.runs():
        length = units * unit
        usable = slots = used = 0
        if slab is not None:
            used = slab.live
            slots = 0 if space.retiring else len(slab.free) * slab.group.size
            total.blocks += slab.blocks
        elif not space.retiring:
            usable = max((length // slot_stride(size) * size for size in sizes), default=length)
        total.used += used
        total.free_slots += slots
        total.free_runs += usable
        total.lost += length - used - slots - usable
