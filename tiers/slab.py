"""Where blocks go inside segments: a slab allocator that keeps tenants apart. Pure: no memory.

A segment belongs to one tenant while it holds blocks. Inside, runs of units are cut into slabs,
each of equal slots for one block size, so that reserving and freeing a block are a ``pop`` and an
``append``. An empty slab stays with its size until another size needs a slab.

An extent is the segment's number and the byte offset in it, so that locating a block is arithmetic.
Segment numbers start at 1 and are never used twice: an old extent can't name a new block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tiers.crowding import crowding
from tiers.errors import BadExtent
from tiers.space import FREE, Slab, SlabClass, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiers.tier import Extent

OFFSET_BITS = 44
"""Low bits of an extent that hold the offset: segments are below 16 TiB."""

OFFSET_MASK = (1 << OFFSET_BITS) - 1

PAGE = 4096
SLOT_ALIGNMENT = 64

_UNITS_PER_SEGMENT = 1 << 14
_SLABS_PER_SEGMENT = 32
_TAIL_SHARE = 256
_REFUSALS_KEPT = 1024


class SegmentSource(Protocol):
    """Whoever has the memory behind the segments. Told before the allocator acts on it."""

    def create(self, number: int, size: int) -> None:
        """A new segment of ``size`` bytes, of no tenant yet."""

    def claim(self, number: int, owner: str) -> None:
        """An untouched segment now belongs to ``owner``."""

    def may_replace(self, number: int) -> bool:
        """Whether an empty segment may make way for one of another tenant's now."""

    def replace(self, old: int, new: int, owner: str) -> bool:
        """The empty segment ``old`` makes way for ``new``, of the same size, for ``owner``.

        False where ``old`` is gone but no memory could be had for ``new``.
        """

    def drop(self, number: int) -> None:
        """A retired segment has become empty and is no longer used."""


def unit_bytes(segment_bytes: int) -> int:
    """The unit for segments of this size: a power of two, at least a page."""
    share = segment_bytes // _UNITS_PER_SEGMENT
    return max(PAGE, 1 << (share.bit_length() - 1) if share else 0)


class SlabAllocator:
    """Reserves and frees extents. Not thread-safe: the caller has the lock.

    Args:
        segment_bytes: usual size of a segment; sets how it is divided.
        source: the memory behind it.
        first_number: number of the first segment.
    """

    def __init__(self, segment_bytes: int, source: SegmentSource, *, first_number: int = 1) -> None:
        self.unit = unit_bytes(segment_bytes)
        self._shift = self.unit.bit_length() - 1
        self._segment_bytes = segment_bytes
        self._source = source
        self._spaces: dict[int, Space] = {}
        self._unowned: dict[Space, None] = {}
        self._vacant: dict[Space, None] = {}
        self._owned: dict[str, dict[Space, None]] = {}
        self._classes: dict[tuple[str, int], SlabClass] = {}
        self._idle: dict[Slab, None] = {}
        self._refused: set[tuple[str, int]] = set()
        self.next_number = first_number
        self.used = 0

    # Hot path: one dict look-up, no allocation beyond the key.

    def reserve(self, owner: str, size: int, tag: object) -> Extent | None:
        """Find room for a block of ``size`` bytes; None where there is none now. O(1)."""
        group = self._classes.get((owner, size))
        slab = None if group is None else group.current
        if slab is None:
            slab = self._refill(owner, size)
            if slab is None:
                return None
        free = slab.free
        if len(free) == slab.slots:
            del self._idle[slab]
        extent = free.pop()
        slab.tags[(extent - slab.base) // slab.stride] = tag
        if not free:
            group = slab.group
            group.current = group.partial.popitem()[0] if group.partial else None
        self.used += size
        return extent

    def free(self, extent: Extent) -> None:
        """Make the extent's room usable again. O(1).

        Raises:
            BadExtent: no block there.
        """
        try:
            slab = self._spaces[extent >> OFFSET_BITS].slabs[(extent & OFFSET_MASK) >> self._shift]
            slot = (extent - slab.base) // slab.stride  # type: ignore[union-attr]
            if slab.tags[slot] is FREE:  # type: ignore[union-attr]
                raise _absent(extent)
        except (KeyError, IndexError, AttributeError):
            raise _absent(extent) from None
        assert slab is not None
        free = slab.free
        group = slab.group
        if not free:
            if group.current is None:
                group.current = slab
            else:
                group.partial[slab] = None
        slab.tags[slot] = FREE
        free.append(extent)
        self.used -= group.size
        if len(free) == slab.slots:
            self._emptied(slab)

    # Looking.

    def tag(self, extent: Extent) -> object:
        """The tag of the block at ``extent``.

        Raises:
            BadExtent: no block there.
        """
        slab, slot = self._slot(extent)
        return slab.tags[slot]

    def retag(self, extent: Extent, tag: object) -> None:
        """Give the block at ``extent`` another tag.

        Raises:
            BadExtent: no block there.
        """
        slab, slot = self._slot(extent)
        slab.tags[slot] = tag

    def size(self, extent: Extent) -> int:
        """Payload bytes of the block at ``extent``.

        Raises:
            BadExtent: no block there.
        """
        return self._slot(extent)[0].group.size

    def spaces(self) -> Iterator[Space]:
        """All segments, in the order of their numbers."""
        return iter(self._spaces.values())

    @property
    def largest_block(self) -> int:
        """Bytes of the largest block that could ever find room."""
        sizes = (space.units for space in self._spaces.values() if not space.retiring)
        return max(sizes, default=0) * self.unit

    def crowding(
        self, owner: str, size: int, movable: Callable[[object], bool] | None = None
    ) -> list[object]:
        """Tags of the blocks whose freeing makes room for a block, at the least cost.

        See :func:`tiers.crowding.crowding`.
        """
        own = [space for space in self._owned.get(owner, ()) if not space.retiring]
        others = [
            space
            for space in self._spaces.values()
            if space.owner not in (None, owner)
            and not space.retiring
            and self._source.may_replace(space.number)
        ]
        return crowding(own, others, size, slot_stride(size), self.unit, movable)

    # Segments.

    def add(self, size: int) -> int:
        """Take a new segment into use; its number. ``size`` is whole units, in bytes."""
        space = Space(self._new_number(), size >> self._shift)
        self._source.create(space.number, size)
        self._spaces[space.number] = space
        self._unowned[space] = None
        self._refused.clear()
        return space.number

    def reconsider(self) -> None:
        """Take note that the source may let segments be replaced which it did not before."""
        self._refused.clear()

    def retire(self, number: int) -> list[object]:
        """Let a segment take no more blocks; the tags of those it still holds.

        It is dropped when the last of them is freed, at once where it holds none.

        Raises:
            BadExtent: no such segment.
        """
        space = self._spaces.get(number)
        if space is None:
            raise BadExtent(f"no segment {number}")
        space.retiring = True
        self._unowned.pop(space, None)
        self._vacant.pop(space, None)
        tags: list[object] = []
        for slab in [slab for _, slab in space.runs() if slab is not None]:
            tags.extend(slab.held())
            if slab.blocks:
                self._detach(slab)
            else:
                self._release(slab)
        if number in self._spaces and not space.taken:
            self._drop(space)
        return tags

    # Cold path.

    def _refill(self, owner: str, size: int) -> Slab | None:
        key = (owner, size)
        if key in self._refused:
            return None
        if size <= 0:
            raise ValueError(f"a block has at least one byte, not {size}")
        slab = self._carve(owner, size)
        if slab is None:
            if len(self._refused) >= _REFUSALS_KEPT:
                self._refused.clear()
            self._refused.add(key)
        return slab

    def _carve(self, owner: str, size: int) -> Slab | None:
        """Cut a new slab and make it its class's current one.

        It takes the whole run where what it would leave is shorter than itself: the longer the
        slab, the less of it is tail, and the fewer gaps there are between slabs.
        """
        stride = slot_stride(size)
        slots = self._slots(stride)
        space = self._room(owner, self._units(stride), self._units(slots * stride))
        if space is None:
            return None
        wanted = self._units(slots * stride)
        first = space.find(wanted)
        if first is None:
            first = space.find(space.longest())
            assert first is not None
        run = space.free_from(first)
        if run < 2 * wanted:
            slots = (run << self._shift) // stride
        group = self._classes.setdefault((owner, size), SlabClass(owner, size))
        units = self._units(slots * stride)
        base = space.number << OFFSET_BITS | first << self._shift
        slab = Slab(group, space, first, units, base, stride, slots)
        space.take(slab)
        self._vacant.pop(space, None)
        group.slabs += 1
        group.current = slab
        self._idle[slab] = None
        return slab

    def _room(self, owner: str, least: int, wanted: int) -> Space | None:
        """The segment to cut a slab from: ``wanted`` units in a row, or else ``least``."""
        self._sweep()
        return (
            self._own_room(owner, wanted)
            or self._claim(owner, least)
            or self._longest_room(owner, least)
            or self._conquer(owner, least)
        )

    def _sweep(self) -> None:
        """Give up all empty slabs: cutting between them would break up the room they leave."""
        for slab in list(self._idle):
            self._release(slab)

    def _own_room(self, owner: str, units: int) -> Space | None:
        for space in self._owned.get(owner, ()):
            if space.find(units) is not None and not space.retiring:
                return space
        return None

    def _longest_room(self, owner: str, least: int) -> Space | None:
        candidates = [space for space in self._owned.get(owner, ()) if not space.retiring]
        best = max(candidates, key=Space.longest, default=None)
        return best if best is not None and best.longest() >= least else None

    def _claim(self, owner: str, least: int) -> Space | None:
        for space in self._unowned:
            if space.units >= least:
                self._source.claim(space.number, owner)
                del self._unowned[space]
                self._give(space, owner)
                return space
        return None

    def _conquer(self, owner: str, least: int) -> Space | None:
        """Take an empty segment from another tenant, as a new one that nobody else has mapped."""
        for old in list(self._vacant):
            if old.units < least or old.owner == owner:
                continue
            if self._source.may_replace(old.number):
                new = Space(self._new_number(), old.units)
                made = self._source.replace(old.number, new.number, owner)
                self._forget(old)
                if not made:
                    continue
                self._spaces[new.number] = new
                self._give(new, owner)
                return new
        return None

    def _give(self, space: Space, owner: str) -> None:
        space.owner = owner
        self._owned.setdefault(owner, {})[space] = None
        self._vacant[space] = None

    def _forget(self, space: Space) -> None:
        del self._spaces[space.number]
        self._vacant.pop(space, None)
        if space.owner is not None:
            owned = self._owned[space.owner]
            del owned[space]
            if not owned:
                del self._owned[space.owner]

    def _emptied(self, slab: Slab) -> None:
        self._refused.clear()
        self._idle[slab] = None
        if slab.space.retiring:
            self._release(slab)
            if not slab.space.taken:
                self._drop(slab.space)

    def _release(self, slab: Slab) -> None:
        """Give an empty slab's units back to its segment."""
        del self._idle[slab]
        self._unlist(slab)
        slab.space.give_back(slab)
        if not slab.space.taken and not slab.space.retiring:
            self._vacant[slab.space] = None
        self._refused.clear()

    def _detach(self, slab: Slab) -> None:
        """Keep a slab's blocks, but let its class put no more into it."""
        self._unlist(slab)
        slab.group = SlabClass(slab.group.owner, slab.group.size)
        slab.group.slabs = 1

    def _unlist(self, slab: Slab) -> None:
        group = slab.group
        group.partial.pop(slab, None)
        if group.current is slab:
            group.current = group.partial.popitem()[0] if group.partial else None
        group.slabs -= 1
        key = (group.owner, group.size)
        if not group.slabs and self._classes.get(key) is group:
            del self._classes[key]

    def _drop(self, space: Space) -> None:
        self._source.drop(space.number)
        self._forget(space)

    def _slot(self, extent: Extent) -> tuple[Slab, int]:
        space = self._spaces.get(extent >> OFFSET_BITS)
        unit = (extent & OFFSET_MASK) >> self._shift
        slab = space.slabs[unit] if space is not None and unit < space.units else None
        if slab is None:
            raise _absent(extent)
        slot, rest = divmod(extent - slab.base, slab.stride)
        if rest or slot >= slab.slots or slab.tags[slot] is FREE:
            raise _absent(extent)
        return slab, slot

    def _units(self, size: int) -> int:
        return (size + self.unit - 1) >> self._shift

    def _slots(self, stride: int) -> int:
        """Slots in a full slab: the fewest, near the usual slab size, that leave a short tail."""
        fewest = max(1, self._segment_bytes // _SLABS_PER_SEGMENT // stride)
        most = max(fewest, self._segment_bytes // 4 // stride)
        best, least = fewest, 1.0
        for slots in range(fewest, min(most, fewest + 64) + 1):
            taken = self._units(slots * stride) << self._shift
            tail = 1 - slots * stride / taken
            if tail < least:
                best, least = slots, tail
            if tail * _TAIL_SHARE <= 1:
                break
        return best

    def _new_number(self) -> int:
        number = self.next_number
        self.next_number += 1
        return number


def slot_stride(size: int) -> int:
    """Bytes from one slot to the next for blocks of ``size`` bytes: whole cache lines."""
    return -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _absent(extent: Extent) -> BadExtent:
    return BadExtent(f"no block at extent {extent:#x}")
