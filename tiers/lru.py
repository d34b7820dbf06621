"""LRU: the item longest unused goes first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from tiers.links import Link
from tiers.policy import SingleQueue


class Lru(SingleQueue):
    """Least recently used first. Touched leaf to root, a parent is never older than its child."""

    name: ClassVar[str] = "lru"

    def touch(self, items: Iterable[Link]) -> None:
        """Move each item to the hot end, in the order given.

        The line's end is closed once, after the last item: an item's own `next` is only read when
        it is touched again, and by then its successor has set it.
        """
        line = self._queue.line
        code = self._queue.code
        hottest = line.previous
        for item in items:
            if item is hottest or not item.queue:
                continue
            before, after = item.previous, item.next
            before.next = after
            after.previous = before
            hottest.next = item
            item.previous = hottest
            item.queue = code
            hottest = item
        hottest.next = line
        line.previous = hottest
