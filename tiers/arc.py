"""ARC: recency and frequency, balanced by what was evicted too early.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03. Items seen once
since they came are on one queue, items seen again on another. Two ghost lists remember the keys of
what each gave up; a ghost that comes back says which queue deserved more room.

In the paper a miss evicts, then inserts. Here the owner does both when it likes, so the paper's
REPLACE is the choice that a scan makes, and the ghosts are trimmed as items leave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import ClassVar

from tiers.links import ASIDE, Link, Queue, Walk
from tiers.policy import Policy, Scan

_ONCE = 2
_AGAIN = 3


class Arc(Policy):
    """Adaptive replacement. `target` is the room, in items, for what was seen once."""

    name: ClassVar[str] = "arc"

    def __init__(self, capacity: int) -> None:
        self._once = Queue(_ONCE)
        self._again = Queue(_AGAIN)
        self._once_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self.target = 0.0
        super().__init__(capacity)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def ghosts(self) -> int:
        """Keys remembered of items that have left; at most the capacity."""
        return len(self._once_ghosts) + len(self._again_ghosts)

    def resize(self, capacity: int) -> None:
        """Set the capacity, and bring the target and the ghosts within it."""
        super().resize(capacity)
        self.target = min(self.target, float(capacity))
        self._trim()

    def insert(self, item: Link) -> None:
        """Take in an item; one whose ghost is still here counts as seen again, and adapts."""
        key = item.key()
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self.target = min(self.target + max(1.0, again / once), float(self.capacity))
            del self._once_ghosts[key]
            self._again.append(item)
        elif key in self._again_ghosts:
            self.target = max(self.target - max(1.0, once / again), 0.0)
            del self._again_ghosts[key]
            self._again.append(item)
        else:
            self._once.append(item)

    def touch(self, items: Iterable[Link]) -> None:
        """Move each item to the hot end of the seen-again queue."""
        for item in items:
            if item.queue:
                self.queue_of(item).remove(item)
                self._again.append(item)

    def remove(self, item: Link, *, evicted: bool) -> None:
        """Forget an item; of an evicted one the key stays, as a ghost."""
        queue = self.queue_of(item)
        queue.remove(item)
        if evicted:
            ghosts = self._once_ghosts if queue is self._once else self._again_ghosts
            ghosts[item.key()] = None
            self._trim()

    def scan(self, *, held: bool = False) -> Scan:
        """At each step the coldest of the queue that has more than its share of the room."""
        return _ArcScan(self, self._once.walk(held), self._again.walk(held))

    @property
    def prefers_once(self) -> bool:
        """Whether what was seen once has more than its share of the room."""
        return len(self._once) > self.target

    def queue_of(self, item: Link) -> Queue:
        """The queue that an item of this policy is in."""
        return self._once if item.queue & ~ASIDE == _ONCE else self._again

    def _trim(self) -> None:
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self.capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and len(self) + self.ghosts > 2 * self.capacity:
            self._again_ghosts.popitem(last=False)


class _ArcScan:
    def __init__(self, policy: Arc, once: Walk, again: Walk) -> None:
        self._policy = policy
        self._once = once
        self._again = again

    def _side(self) -> Walk:
        sides = (self._once, self._again)
        first, second = sides if self._policy.prefers_once else sides[::-1]
        return second if first.peek() is None else first

    def peek(self) -> Link | None:
        return self._side().peek()

    def take(self) -> Link | None:
        return self._side().take()

    def close(self) -> None:
        self._once.close()
        self._again.close()
