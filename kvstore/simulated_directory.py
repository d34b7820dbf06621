"""The directory of a simulated pool: which node holds what, always right and in no time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.directory.scripts import MOST_RECORDS
from kvstore.feed import Feed


class Locations:
    """Which nodes hold a block: a directory that is always right.

    Args:
        on_last: called with a block and the only node that still holds it, when others gave it up.

    Attributes:
        published, withdrawn: locations that came and went.
        batches: calls that told of them, each of one node's changes under one tag.
    """

    def __init__(self, on_last: Callable[[bytes, int], None] | None = None) -> None:
        self._on_last = on_last
        self.published = 0
        self.withdrawn = 0
        self.batches = 0
        self._holders: dict[bytes, int] = {}
        self._tags: dict[bytes, int] = {}
        self._untold: Counter[tuple[int, int]] = Counter()

    def __len__(self) -> int:
        """Blocks that some node holds."""
        return len(self._holders)

    def publish(self, block: bytes, node: int) -> None:
        """Note that a node holds a block."""
        self._holders[block] = self._holders.get(block, 0) | 1 << node
        self.published += 1
        self._note(block, node)

    def withdraw(self, block: bytes, node: int) -> None:
        """Note that a node has given a block up."""
        left = self._holders[block] & ~(1 << node)
        self.withdrawn += 1
        self._note(block, node)
        if not left:
            del self._holders[block]
            return
        self._holders[block] = left
        if self._on_last is not None and not left & (left - 1):
            self._on_last(block, left.bit_length() - 1)

    def meet(self, chain: Sequence[bytes]) -> None:
        """Learn which chain blocks belong to: those with one tag are told of together."""
        for block in chain:
            self._tags.setdefault(block, chain[0][0])

    def tell(self) -> None:
        """Count the calls for all that has changed since it was told last."""
        self.batches += sum(-(-count // MOST_RECORDS) for count in self._untold.values())
        self._untold.clear()

    def _note(self, block: bytes, node: int) -> None:
        self._untold[node, self._tags.get(block, -1)] += 1

    def reach(self, chain: Sequence[bytes], among: int, start: int = 0) -> tuple[int, int]:
        """How far some nodes hold a chain, by bisection: a node that has a block has all before it.

        Args:
            chain: the whole chain.
            among: the nodes that matter, a bit for each.
            start: leading blocks that need not be asked for.

        Returns:
            How many leading blocks one of the nodes holds, at least ``start``; and which hold them,
            a bit for each, none where there are no more than ``start``.
        """
        holders, low, high = 0, start, len(chain)
        while low < high:
            middle = (low + high) // 2
            found = self._holders.get(chain[middle], 0) & among
            if found:
                holders, low = found, middle + 1
            else:
                high = middle
        return low, holders


class Publication(Feed):
    """Tells the directory what a node's shard gained and lost, in place of a log of it."""

    __slots__ = ("_locations", "_node")

    def __init__(self, locations: Locations, node: int) -> None:
        super().__init__(1)
        self._locations = locations
        self._node = node

    def stored(self, block: bytes) -> None:
        """Publish it."""
        self._locations.publish(block, self._node)

    def removed(self, block: bytes) -> None:
        """Withdraw it."""
        self._locations.withdraw(block, self._node)


def bits(mask: int) -> Iterator[int]:
    """The places of the bits that are set, the lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
