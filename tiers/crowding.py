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
    units: int,
    movable: Callable[[object], bool] | None,
) -> list[object]:
    """Choose the blocks to free.

    Slabs of the tenant's other block sizes come first, the emptiest before all; a whole segment of
    another tenant only where those give nothing. What is compared is the share of the room gained
    that live blocks fill, then their bytes: the least is thrown away for the room that there is
    afterwards.

    Args:
        own: the tenant's segments.
        others: segments of other tenants.
        size: block size that needs room, in bytes; slabs that hold it already are left alone.
        units: length of the room needed.
        movable: tells by tag whether a block may be freed; None where all may.

    Returns:
        The tags, or nothing where no choice of blocks helps.
    """
    slabs = [candidate for space in own for candidate in _windows(space, size, units)]
    segments = (_whole(space) for space in others if space.units >= units)
    for candidates in (slabs, segments):
        for _, _, chosen in sorted(candidates, key=itemgetter(0, 1)):
            tags = [tag for slab in chosen for tag in slab.held()]
            if movable is None or all(map(movable, tags)):
                return tags
    return []


def _windows(space: Space, size: int, units: int) -> Iterator[Candidate]:
    """The shortest rows of neighbouring runs that are long enough, one per right end."""
    row: list[tuple[int, Slab | None]] = []
    left = length = live = 0
    for run in space.runs():
        run_units, slab = run
        if slab is not None and slab.group.size == size:
            row, left, length, live = [], 0, 0, 0
            continue
        row.append(run)
        length += run_units
        live += 0 if slab is None else slab.live
        while length - row[left][0] >= units:
            gone_units, gone = row[left]
            length -= gone_units
            live -= 0 if gone is None else gone.live
            left += 1
        if length >= units:
            yield live / length, live, [slab for _, slab in row[left:] if slab is not None]


def _whole(space: Space) -> Candidate:
    slabs = [slab for _, slab in space.runs() if slab is not None]
    live = sum(slab.live for slab in slabs)
    return live / space.units, live, slabs
