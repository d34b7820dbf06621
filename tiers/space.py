"""The inside of one segment: which units are free and which belong to a slab.

A segment is counted in units (a power of two of bytes, at least a page). A slab is a run of units.
Units that come free join their free neighbours by themselves, as the map has no other structure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FREE: object = object()
"""Stands in a slab's tags where no block is."""

_FREE_UNIT = b"\x01"
_TAKEN_UNIT = b"\x00"


class SlabClass:
    """The slabs of one tenant and one block size.

    Attributes:
        owner: the tenant.
        size: payload bytes of every block.
        current: the slab that the next block goes to, None where all are full.
        partial: further slabs with room. The last to get room is the first to be filled, which
            leaves the emptiest at the other end, where they can become empty.
        slabs: number of slabs, full ones included.
    """

    __slots__ = ("current", "owner", "partial", "size", "slabs")

    def __init__(self, owner: str, size: int) -> None:
        self.owner = owner
        self.size = size
        self.current: Slab | None = None
        self.partial: dict[Slab, None] = {}
        self.slabs = 0


class Slab:
    """A run of units cut into equal slots.

    Attributes:
        group: the slab class that it belongs to.
        space: the segment that it lies in.
        first: its first unit.
        units: its length in units.
        base: extent of its first slot.
        stride: bytes from one slot to the next.
        slots: number of slots.
        free: extents of the free slots.
        tags: by slot, the caller's tag or ``FREE``.
    """

    __slots__ = ("base", "first", "free", "group", "slots", "space", "stride", "tags", "units")

    def __init__(
        self,
        group: SlabClass,
        space: Space,
        first: int,
        units: int,
        base: int,
        stride: int,
        slots: int,
    ) -> None:
        self.group = group
        self.space = space
        self.first = first
        self.units = units
        self.base = base
        self.stride = stride
        self.slots = slots
        self.free = list(range(base + (slots - 1) * stride, base - 1, -stride))
        self.tags: list[object] = [FREE] * slots

    @property
    def blocks(self) -> int:
        """Number of blocks held."""
        return self.slots - len(self.free)

    @property
    def live(self) -> int:
        """Payload bytes of the blocks held."""
        return (self.slots - len(self.free)) * self.group.size

    def held(self) -> list[object]:
        """The tags of the blocks held, by address."""
        return [tag for tag in self.tags if tag is not FREE]


class Space:
    """One segment's units.

    Attributes:
        number: the segment's number.
        units: its length in units.
        owner: the tenant that it belongs to, None where no tenant has had it yet.
        retiring: True once it takes no more blocks and waits to become empty.
        slabs: by unit, the slab there or None.
        taken: number of slabs in it.
        free_units: number of units that belong to no slab.
    """

    __slots__ = ("_free", "free_units", "number", "owner", "retiring", "slabs", "taken", "units")

    def __init__(self, number: int, units: int) -> None:
        self.number = number
        self.units = units
        self.owner: str | None = None
        self.retiring = False
        self.slabs: list[Slab | None] = [None] * units
        self.taken = 0
        self.free_units = units
        self._free = bytearray(_FREE_UNIT * units)

    def find(self, units: int) -> int | None:
        """The lowest run of ``units`` free units: its first unit, or None."""
        if self.free_units < units:
            return None
        first = self._free.find(_FREE_UNIT * units)
        return None if first < 0 else first

    def free_from(self, first: int) -> int:
        """Number of free units in a row from unit ``first``, which is free."""
        end = self._free.find(_TAKEN_UNIT, first)
        return (self.units if end < 0 else end) - first

    def longest(self) -> int:
        """Length in units of the longest free run."""
        if self.free_units in (0, self.units):
            return self.free_units
        return max(map(len, self._free.split(_TAKEN_UNIT)))

    def take(self, slab: Slab) -> None:
        """Give a slab its units, which are free."""
        end = slab.first + slab.units
        self._free[slab.first : end] = _TAKEN_UNIT * slab.units
        self.slabs[slab.first : end] = [slab] * slab.units
        self.free_units -= slab.units
        self.taken += 1

    def give_back(self, slab: Slab) -> None:
        """Free the units of a slab."""
        end = slab.first + slab.units
        self._free[slab.first : end] = _FREE_UNIT * slab.units
        self.slabs[slab.first : end] = [None] * slab.units
        self.free_units += slab.units
        self.taken -= 1

    def runs(self) -> Iterator[tuple[int, Slab | None]]:
        """The segment from end to end: length in units and slab (None for a free run)."""
        unit = 0
        while unit < self.units:
            slab = self.slabs[unit]
            if slab is not None:
                length = slab.units
            else:
                length = self.free_from(unit)
            yield length, slab
            unit += length
