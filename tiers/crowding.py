"""Which blocks to give up so that a block of another size, or another tenant's, finds room.

Slabs stay with their block size while they hold blocks. When one size has all of them, freeing
blocks in eviction order may free a slot here and there for ever without a slab becoming empty. This
module names sets of blocks that make room for certain.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tiers.space import Slab, Space

    Candidate = tuple[float, int, list[Slab]]


def crowding(
    own: Iterable[Space],
    others: Iterable[Space],
    size: int,
    stride: int,
    unit: int,
    movable: Callable[[object], bool] | None,
) -> list[object]:
    """Choose the blocks to free.

    Slabs of the tenant's other block sizes come first, a whole segment of another tenant only where
    those give nothing. Of either kind, the choice is the one that throws away the fewest bytes for
    each block that fits afterwards, and of equals the smallest. Free runs beside a slab count as
    room gained, so that a size which takes over goes from neighbour to neighbour and leaves no
    gaps. Blocks of the same tenant and size are never chosen: which of those to free is a question
    of eviction order, as any of them makes room.

    Args:
        own: the tenant's segments.
        others: segments of other tenants.
        size: block size that needs room, in bytes; slabs that hold it already are left alone.
        stride: bytes from one block of that size to the next.
        unit: bytes of a unit.
        movable: tells by tag whether a block may be freed; None where all may.

    Returns:
        The tags, or nothing where no choice of other blocks helps.
    """
    slabs = [window for space in own for window in _windows(space, size, stride, unit)]
    segments = (_whole(space, stride, unit) for space in others if space.units * unit >= stride)
    for candidates in (slabs, segments):
        for _, _, chosen in sorted(candidates, key=itemgetter(0, 1)):
            tags = [tag for slab in chosen for tag in slab.held()]
            if movable is None or all(map(movable, tags)):
                return tags
    return []


def _windows(space: Space, size: int, stride: int, unit: int) -> Iterator[Candidate]:
    """The shortest rows of neighbouring slabs that make room, one per right end."""
    runs = list(space.runs())
    least = -(-stride // unit)
    left = length = live = 0
    for right, (units, slab) in enumerate(runs):
        if slab is not None and slab.group.size == size:
            left, length, live = right + 1, 0, 0
            continue
        length += units
        live += 0 if slab is None else slab.live
        while length - runs[left][0] >= least:
            gone_units, gone = runs[left]
            length -= gone_units
            live -= 0 if gone is None else gone.live
            left += 1
        if length >= least:
            room = length + _free(runs, left - 1) + _free(runs, right + 1)
            chosen = [slab for _, slab in runs[left : right + 1] if slab is not None]
            yield live / (room * unit // stride), live, chosen


def _free(runs: list[tuple[int, Slab | None]], index: int) -> int:
    """Length of a run if it exists and is free."""
    if 0 <= index < len(runs) and runs[index][1] is None:
        return runs[index][0]
    return 0


def _whole(space: Space, stride: int, unit: int) -> Candidate:
    slabs = [slab for _, slab in space.runs() if slab is not None]
    live = sum(slab.live for slab in slabs)
    return live / (space.units * unit // stride), live, slabs
