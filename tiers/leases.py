"""When an extent may be reused that a device may still be reading or writing. Pure.

A copy that has been queued ends at some time after the call that queued it has returned. Until then
its extents are leased: freeing one forgets the block at once, but its room waits for the end.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tiers.tier import Extent

E = TypeVar("E")
"""Whatever tells that a copy has ended: an event, or a process whose copies end with it."""


class Leases(Generic[E]):
    """Counts the ends that each extent waits for. Not thread-safe: the caller has the lock.

    Args:
        query: whether the end has come; must not raise.
    """

    def __init__(self, query: Callable[[E], bool]) -> None:
        self._query = query
        self._waits: list[tuple[E, frozenset[Extent]]] = []
        self._counts: Counter[Extent] = Counter()
        self._departing: set[Extent] = set()

    def __len__(self) -> int:
        """Number of extents that are leased."""
        return len(self._counts)

    @property
    def departures(self) -> int:
        """Number of extents that have been freed and wait."""
        return len(self._departing)

    def hold(self, extents: Iterable[Extent], end: E) -> None:
        """Lease extents until ``end``, beside what they are leased for already."""
        held = frozenset(extents)
        self._counts.update(held)
        self._waits.append((end, held))

    def depart(self, extent: Extent) -> bool:
        """Whether an extent that is freed now has to wait; ``settle`` names it later then."""
        if extent not in self._counts:
            return False
        self._departing.add(extent)
        return True

    def departing(self, extent: Extent) -> bool:
        """Whether an extent has been freed and waits for its leases to end."""
        return extent in self._departing

    def settle(self) -> list[Extent]:
        """End the leases whose end has come.

        Returns:
            The extents that waited for them to be reused, each once. O(leases).
        """
        waiting: list[tuple[E, frozenset[Extent]]] = []
        over: list[frozenset[Extent]] = []
        for end, held in self._waits:
            if self._query(end):
                over.append(held)
            else:
                waiting.append((end, held))
        self._waits = waiting
        return [extent for held in over for extent in held if self._ended(extent)]

    def ends(self) -> list[E]:
        """All that is waited for."""
        return [end for end, _ in self._waits]

    def _ended(self, extent: Extent) -> bool:
        self._counts[extent] -= 1
        if self._counts[extent]:
            return False
        del self._counts[extent]
        waited = extent in self._departing
        self._departing.discard(extent)
        return waited
