"""Which blocks have a copy on a GPU, and in what order each GPU gives its copies up. Pure.

A block on a GPU has an extent in DRAM or on SSD as well, so that no copy is ever the only one:
which goes first is a matter of speed alone, and a parent may go before its children. What keeps a
copy is a pin of its block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from kvstore.entry import GONE, IN_DRAM, IN_HBM, IN_SSD, Entry
from kvstore.index import Index
from tiers.links import PARKED, Link
from tiers.policy import Policy
from tiers.tier import Extent


class Copy(Link):
    """A block's copy on a GPU, or the room for one.

    Attributes:
        entry: the block.
        gpu: number of the GPU among those of the node.
        extent: where it lies in that GPU's tier.
    """

    __slots__ = ("entry", "extent", "gpu")

    def __init__(self, entry: Entry, gpu: int, extent: Extent = -1) -> None:
        super().__init__()
        self.entry = entry
        self.gpu = gpu
        self.extent = extent

    def __repr__(self) -> str:
        return f"<Copy of {self.entry!r} on GPU {self.gpu} at {self.extent:#x}>"

    def key(self) -> Hashable:
        """What names the block across namespaces and shards."""
        return self.entry.key()


class HbmCopies:
    """The copies of a node's GPUs; of each block there is one at most.

    Never frees an extent: who removes a copy frees its extent, at once if the block has no pins.

    Args:
        index: holds the blocks, and notes of each whether it has a copy.
        orders: for each GPU the order in which its copies go.
    """

    def __init__(self, index: Index, orders: Sequence[Policy]) -> None:
        self._index = index
        self._orders = tuple(orders)
        self._by_entry: dict[Entry, Copy] = {}
        self._parked: tuple[dict[Copy, None], ...] = tuple({} for _ in orders)

    def __len__(self) -> int:
        return len(self._by_entry)

    def of(self, entry: Entry) -> Copy | None:
        """The copy of a block; also of one that is gone and still pinned."""
        return self._by_entry.get(entry)

    def on(self, gpu: int) -> list[Copy]:
        """The copies on a GPU, in no order."""
        return [copy for copy in self._by_entry.values() if copy.gpu == gpu]

    def add(self, copy: Copy) -> None:
        """Take in a copy whose bytes are all there.

        Raises:
            ValueError: the block has one already, or isn't held in DRAM or on SSD.
        """
        if not copy.entry.state & (IN_DRAM | IN_SSD):
            raise ValueError(f"{copy.entry!r} has no extent below hbm")
        self._index.add_copy(copy.entry)
        self._by_entry[copy.entry] = copy
        self._orders[copy.gpu].insert(copy)

    def remove(self, copy: Copy, *, evicted: bool) -> None:
        """Forget a copy.

        Args:
            copy: which.
            evicted: it made room for others (as opposed to being withdrawn or lost).

        Raises:
            KeyError: it is none of these.
        """
        del self._by_entry[copy.entry]
        self._index.remove_copy(copy.entry)
        self._parked[copy.gpu].pop(copy, None)
        self._orders[copy.gpu].remove(copy, evicted=evicted)

    def touch(self, entries: Iterable[Entry]) -> None:
        """Note a use of those blocks that have a copy, given from leaf to root."""
        by_gpu: dict[int, list[Copy]] = {}
        for entry in entries:
            if entry.state & IN_HBM:
                copy = self._by_entry[entry]
                by_gpu.setdefault(copy.gpu, []).append(copy)
        for gpu, copies in by_gpu.items():
            self._orders[gpu].touch(copies)

    def fit(self, gpu: int) -> None:
        """Tell a GPU's order that the GPU is full with as many blocks as it holds now."""
        order = self._orders[gpu]
        held = max(len(order), 1)
        # A little off does no harm, while every change costs an adaptive policy what it remembers.
        if abs(held - order.capacity) * 16 > order.capacity:
            order.resize(held)

    def victims(self, gpu: int) -> Iterator[Copy]:
        """The copies on a GPU whose blocks have no pins, next to go first.

        The caller may do anything between two steps. What is pinned is set aside until a later call
        finds it without pins.
        """
        self._offer_again(gpu)
        order = self._orders[gpu]
        for copy in order.victims():
            assert isinstance(copy, Copy)
            if copy.entry.pins or copy.entry.state & GONE:
                order.park(copy)
                self._parked[gpu][copy] = None
            else:
                yield copy

    def _offer_again(self, gpu: int) -> None:
        parked = self._parked[gpu]
        for copy in list(parked):
            if not copy.queue & PARKED:
                del parked[copy]
            elif not copy.entry.pins:
                del parked[copy]
                self._orders[gpu].release(copy)
