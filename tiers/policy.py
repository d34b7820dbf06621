"""What decides the order in which a full tier gives up its blocks: the interface.

A policy orders items (`tiers.links.Link`), knows nothing of blocks or bytes, and evicts nothing
itself: the owner of the items asks for `victims`, takes those it can, and says so with `remove`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, Protocol

from tiers.links import Link, Queue


class Scan(Protocol):
    """A look along an order, which lasts while items come and go; `tiers.links.Walk` is one."""

    def peek(self) -> Link | None:
        """The item that is next, which stays next; None where there is none now."""

    def take(self) -> Link | None:
        """The item that is next, which is not offered again; None where there is none now."""

    def close(self) -> None:
        """End the scan."""


class Policy(ABC):
    """An eviction order over the items of one tier.

    `capacity` is in items. Nothing here enforces it: adaptive policies size their memory by it.

    Items are handed in from leaf to root, so that a parent is never older than its child.
    """

    name: ClassVar[str]

    def __init__(self, capacity: int) -> None:
        self.capacity = 0
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Set the capacity, in items (at least 1), at any time.

        Raises:
            ValueError: `capacity` is less than 1.
        """
        if capacity < 1:
            raise ValueError(f"a policy needs a capacity of at least 1 item, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def __len__(self) -> int:
        """Items in the order, those set aside included."""

    @abstractmethod
    def insert(self, item: Link) -> None:
        """Take in an item that is in no policy."""

    @abstractmethod
    def touch(self, items: Iterable[Link]) -> None:
        """Note a use of each item, in the order given. Items in no policy are passed over."""

    @abstractmethod
    def remove(self, item: Link, *, evicted: bool) -> None:
        """Forget an item. `evicted`: it made room for others (as opposed to being withdrawn)."""

    @abstractmethod
    def scan(self, *, held: bool = False) -> Scan:
        """A look at the items in the order in which to give them up; the first is the next to go.

        The caller may remove, hold, park or touch any item between two steps, and should hold or
        park what it may not take, so that later scans need not pass it again. With `held`, items
        set aside by `hold` are offered too, before others.
        """

    def victims(self, *, held: bool = False) -> Iterator[Link]:
        """All that a `scan` offers."""
        scan = self.scan(held=held)
        try:
            while (item := scan.take()) is not None:
                yield item
        finally:
            scan.close()

    @abstractmethod
    def queue_of(self, item: Link) -> Queue:
        """The queue that an item of this policy is in."""

    def hold(self, item: Link) -> None:
        """Set aside an item that may not go before others (a parent), until `release`."""
        self.queue_of(item).hold(item)

    def park(self, item: Link) -> None:
        """Set aside an item that is pinned, until `release` or its next touch."""
        self.queue_of(item).park(item)

    def release(self, item: Link) -> None:
        """Offer an item that was set aside again, as the next victim of its queue."""
        self.queue_of(item).release(item)


class SingleQueue(Policy):
    """The parts that policies with one queue share."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue = Queue(2)

    def __len__(self) -> int:
        return len(self._queue)

    def insert(self, item: Link) -> None:
        """Take in an item that is in no policy, at the hot end."""
        self._queue.append(item)

    def remove(self, item: Link, *, evicted: bool) -> None:
        """Forget an item; there is no difference why it goes."""
        self._queue.remove(item)

    def scan(self, *, held: bool = False) -> Scan:
        """Items from the cold end on."""
        return self._queue.walk(held)

    def queue_of(self, item: Link) -> Queue:
        """The one queue."""
        return self._queue
