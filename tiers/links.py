"""Intrusive lists: the order that a policy keeps, without an allocation for each touch.

An item that a policy orders is a `Link`: its neighbours are two of its own slots. So an item is in
the order of at most one policy at a time. That is enough here: only memory tiers order their
residents one by one, while the SSD tier gives back whole regions.

A `Queue` is one such order, coldest first, with two side tracks for items that can't go now:

* *held*: a parent that may not go before its children. It waits, in order, on a second line.
* *parked*: an item somebody has pinned. It is on no line at all until it is released.

A scan for victims moves what it can't use to a side track, once, and whatever frees the item puts
it back at the cold end. Thus the same prefix of the line is never walked twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

OUTSIDE: Final = 0
"""`Link.queue` of an item that no policy knows."""

_CURSOR: Final = 1
HELD: Final = 64
PARKED: Final = 128
ASIDE: Final = HELD | PARKED


class Link:
    """An item that a policy can order.

    `queue` says where it is: `OUTSIDE`, or the code of its `Queue`, with `HELD` or `PARKED` added
    while it is on a side track. The slots belong to the policy; owners only read `queue`.
    """

    __slots__ = ("next", "previous", "queue")

    previous: Link
    next: Link
    queue: int

    def __init__(self) -> None:
        self.previous = self.next = NOWHERE
        self.queue = OUTSIDE

    def key(self) -> Hashable:
        """What a policy may remember of the item after it has left (ARC's ghosts)."""
        raise NotImplementedError


def _sentinel() -> Link:
    link = Link.__new__(Link)
    link.previous = link.next = link
    link.queue = _CURSOR
    return link


NOWHERE: Final = _sentinel()
"""The neighbour of an item on no line. Unlinking from it changes nothing, so nobody has to ask."""


def unlink(item: Link) -> None:
    """Take `item` off the line it is on, if any."""
    before, after = item.previous, item.next
    before.next = after
    after.previous = before
    item.previous = item.next = NOWHERE


def link_after(place: Link, item: Link) -> None:
    """Put `item`, which is on no line, on the hotter side of `place`."""
    after = place.next
    item.previous = place
    item.next = after
    place.next = item
    after.previous = item


class Queue:
    """One order of items, coldest first. `code` is what its items carry in `Link.queue`.

    `len()` counts held and parked items too: they still take room in their tier.
    """

    __slots__ = ("_held", "_length", "code", "line")

    def __init__(self, code: int) -> None:
        self.code = code
        self.line = _sentinel()
        self._held = _sentinel()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, item: Link) -> None:
        """Add an item that is in no queue, at the hot end."""
        link_after(self.line.previous, item)
        item.queue = self.code
        self._length += 1

    def remove(self, item: Link) -> None:
        """Take an item of this queue out, wherever in it it is."""
        unlink(item)
        item.queue = OUTSIDE
        self._length -= 1

    def hold(self, item: Link) -> None:
        """Set a parent aside; `walk(held=True)` still meets it, before all others."""
        unlink(item)
        link_after(self._held.previous, item)
        item.queue = self.code | HELD

    def park(self, item: Link) -> None:
        """Set a pinned item aside; no walk meets it."""
        unlink(item)
        item.queue = self.code | PARKED

    def release(self, item: Link) -> None:
        """Put an item that was set aside back at the cold end, where it was found.

        A walk that has left nothing behind itself meets it next.
        """
        unlink(item)
        place = self.line
        while place.next.queue == _CURSOR and place.next is not self.line:
            place = place.next
        link_after(place, item)
        item.queue = self.code

    def walk(self, held: bool) -> Walk:
        """A walk along the line, from the coldest on.

        With `held`, along those set aside by `hold` before.
        """
        return Walk(self._held, self.line) if held else Walk(self.line)


class Walk:
    """One look at the items of a few lines, coldest first, in no hurry.

    Anything may happen to the lines between two steps: where the walk is, is an item of its own. An
    item that stays where it was is not met again, and one released at the cold end is, if the walk
    has left nothing behind itself there.
    """

    __slots__ = ("_cursor", "_line", "_lines")

    def __init__(self, *lines: Link) -> None:
        self._lines = list(lines)
        self._cursor = Link()
        self._cursor.queue = _CURSOR
        self._enter()

    def _enter(self) -> None:
        self._line = self._lines.pop(0)
        link_after(self._line, self._cursor)

    def peek(self) -> Link | None:
        """The item that is next, which stays next; None where there is none now."""
        while True:
            item = self._cursor.next
            while item.queue == _CURSOR and item is not self._line:
                item = item.next
            if item is not self._line:
                return item
            if not self._lines:
                return None
            unlink(self._cursor)
            self._enter()

    def take(self) -> Link | None:
        """The item that is next, which has been met then; None where there is none now."""
        item = self.peek()
        if item is not None:
            unlink(self._cursor)
            link_after(item, self._cursor)
        return item

    def close(self) -> None:
        """End the walk."""
        unlink(self._cursor)
