"""What a node gained and lost, tier by tier, for those who follow it: routers above all.

Every event says which tiers hold a block from then on, and has a number, one above that of the
event before. A follower keeps the number of the last event that it was told, its position. Who has
none, or one that the log doesn't reach back to any more, is given a snapshot in pages, and between
them the events that happen meanwhile. A page is made only when all earlier events have been told,
so what a follower has been told is at each moment what the node held a moment ago.

Numbers go on for as long as the node runs, but nothing is recorded while nobody follows: the number
by which a recording begins is one that no follower of an earlier one can have as its position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from kvstore.entry import IN_DRAM, IN_HBM, IN_SSD, Entry
from kvstore.index import Index

MOST_EVENTS: Final = 65_536
"""Events that the log remembers: at most about 20 MiB, with the entries of blocks long gone."""
STEP: Final = 256
"""Events, and blocks of a snapshot, told at once: about a millisecond of the event loop's time."""

_HOST: Final = IN_DRAM | IN_SSD
_TIERS: Final = IN_HBM | _HOST
_SHIFT: Final = 4
"""By which a change and a block's tiers go into one byte: the bit of HBM follows the others."""
assert IN_HBM >> _SHIFT == _HOST + 1


class Change(IntEnum):
    """What happened to a block; the numbers are those of ``events.proto``."""

    STORED = 1
    MOVED = 2
    REMOVED = 3


class Word(IntEnum):
    """What a batch is to its follower; the numbers are those of ``events.proto``."""

    RESET = 1
    RESUMED = 2
    SNAPSHOT = 3
    EVENTS = 4
    HEARTBEAT = 5


class Event(NamedTuple):
    """What happened to one block.

    Attributes:
        change: what.
        tiers: the bits of ``kvstore.entry`` of the tiers that hold it from now on.
        entry: the block; only what names it is of the time of the event.
    """

    change: Change
    tiers: int
    entry: Entry


class Batch(NamedTuple):
    """What a follower is told at once; ``events.proto`` says what it means to it.

    Attributes:
        word: what kind of batch it is.
        after: the follower's position before.
        sequence: its position from now on.
        complete: whether it knows from now on all that the node held at ``sequence``.
        events: in the order in which they happened.
    """

    word: Word
    after: int
    sequence: int
    complete: bool
    events: list[Event]


class Events:
    """The events of an index, recorded while anybody follows and for as long after as is wanted.

    Args:
        index: what is told of.
        capacity: events remembered.

    Attributes:
        sequence: number of the last event.
        gaps: how often a follower was so slow that events were lost to it.
        followers: how many follow.
    """

    def __init__(self, index: Index, capacity: int = MOST_EVENTS) -> None:
        self.index = index
        self.sequence = 0
        self.gaps = 0
        self.followers = 0
        self._capacity = capacity
        self._recording = False
        self._start = 0
        self._codes = bytearray()  # rings, once they are full
        self._entries: list[Entry] = []
        self._waiting: dict[Follower, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"<Events at {self.sequence}, {len(self._codes)} known, {self.followers} followers>"

    # --- the log -------------------------------------------------------------------------------

    def stored(self, entry: Entry) -> None:
        """See ``kvstore.index.Observer``."""
        self._record(Change.STORED, entry)

    def moved(self, entry: Entry) -> None:
        """See ``kvstore.index.Observer``. A block in no tier is about to be placed or removed."""
        if entry.state & _HOST:
            self._record(Change.MOVED, entry)

    def removed(self, entry: Entry) -> None:
        """See ``kvstore.index.Observer``."""
        self._record(Change.REMOVED, entry)

    def _record(self, change: int, entry: Entry) -> None:
        code = change << 3 | (entry.state & IN_HBM) >> _SHIFT | entry.state & _HOST
        if len(self._codes) < self._capacity:
            self._codes.append(code)
            self._entries.append(entry)
        else:
            place = (self.sequence - self._start) % self._capacity
            self._codes[place] = code
            self._entries[place] = entry
        self.sequence += 1
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting.values():
                wake()

    def reaches(self, position: int) -> bool:
        """Whether all events after a position are remembered."""
        return 0 <= self.sequence - position <= len(self._codes) and self._recording

    def since(self, position: int, limit: int) -> list[Event]:
        """The oldest events after a position that the log reaches back to."""
        first = position - self._start
        last = min(first + limit, self.sequence - self._start)
        return [self._event(number % self._capacity) for number in range(first, last)]

    def _event(self, place: int) -> Event:
        code = self._codes[place]
        change = Change(code >> 3)
        tiers = code << _SHIFT & IN_HBM | code & _HOST
        return Event(change, 0 if change is Change.REMOVED else tiers, self._entries[place])

    # --- following -----------------------------------------------------------------------------

    def follow(
        self,
        position: int | None = None,
        namespaces: Collection[bytes] = (),
        *,
        snapshot: bool = True,
    ) -> Follower:
        """Begin to follow.

        Args:
            position: number of the last event that the follower was told; None where it knows
                nothing.
            namespaces: fingerprints of those to be told of; of all, where it is empty.
            snapshot: whether one who lacks events is told what the node holds, or only what
                happens from now on.
        """
        if not self._recording:
            self._recording = True
            # Above every position that a follower of the recording before can have.
            self._start = self.sequence = self.sequence + 1
            self.index.observe(self)
        self.followers += 1
        return Follower(self, position, frozenset(namespaces), snapshot)

    def rest(self) -> None:
        """Record nothing more and forget all, unless somebody follows."""
        if not self.followers and self._recording:
            self._recording = False
            self.index.leave(self)
            self._codes = bytearray()
            self._entries = []

    def wait(self, follower: Follower, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, when the next event has happened."""
        self._waiting[follower] = wake

    def leave(self, follower: Follower) -> None:
        """Take note that somebody follows no more."""
        self._waiting.pop(follower, None)
        self.followers -= 1


class Follower:
    """What one follower has been told, and what it is to be told next; made by ``Events.follow``.

    Attributes:
        told: its position.
        complete: whether it knows all that the node held there.
    """

    def __init__(
        self, events: Events, position: int | None, namespaces: frozenset[bytes], snapshot: bool
    ) -> None:
        self._events = events
        self._namespaces = namespaces
        self._snapshot = snapshot
        self._pages: Iterator[list[Entry]] | None = None
        self._begun = False
        self._seen = -1 if position is None else position
        self.told = max(self._seen, 0)
        self.complete = False

    def take(self) -> list[Batch]:
        """What is to be told now: nothing, where the follower knows all.

        A follower whose events are lost is reset, as one that has no position is at the beginning.
        """
        if not self._begun or not self._events.reaches(self._seen):
            return [self._begin()]
        batches = []
        if found := self._take_events():
            batches.append(self._batch(Word.EVENTS, found))
        if self._pages is not None and self._seen == self._events.sequence:
            batches.append(self._take_page(self._pages))
        return batches

    def heartbeat(self) -> Batch:
        """Says where the follower is, though nothing has happened."""
        return self._batch(Word.HEARTBEAT, [])

    def close(self) -> None:
        """Follow no more; call it once."""
        self._pages = None
        self._events.leave(self)

    def wait(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, when there is something to be told."""
        if self._seen != self._events.sequence or self._pages is not None or not self._begun:
            wake()
        else:
            self._events.wait(self, wake)

    def _begin(self) -> Batch:
        events = self._events
        lacks = not events.reaches(self._seen)
        if lacks:
            events.gaps += 1 if self._begun else 0
            fresh = self._seen < 0
            self._seen = events.sequence
            self._pages = self._paged() if self._snapshot else None
            lacks = self._snapshot or not fresh
        self.complete = self._pages is None
        self._begun = True
        self.told = self._seen
        return self._batch(Word.RESET if lacks else Word.RESUMED, [])

    def _take_events(self) -> list[Event]:
        found = self._events.since(self._seen, STEP)
        self._seen += len(found)
        return [event for event in found if self._wants(event.entry.shard.namespace)]

    def _take_page(self, pages: Iterator[list[Entry]]) -> Batch:
        page = next(pages, None)
        if page is None:
            self._pages = None
            self.complete = True
        told = [
            Event(Change.STORED, entry.state & _TIERS, entry)
            for entry in page or ()
            if entry.committed
        ]
        return self._batch(Word.SNAPSHOT, told)

    def _paged(self) -> Iterator[list[Entry]]:
        for shard in self._events.index.shards:
            if self._wants(shard.namespace):
                entries = list(shard.committed.values())
                for start in range(0, len(entries), STEP):
                    yield entries[start : start + STEP]

    def _wants(self, namespace: bytes) -> bool:
        return not self._namespaces or namespace in self._namespaces

    def _batch(self, word: Word, events: list[Event]) -> Batch:
        after, self.told = self.told, self._seen
        return Batch(word, after, self._seen, self.complete, events)
