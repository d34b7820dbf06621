"""What a node has to tell the directory, until it is told. Pure.

The last word on a place is the one that counts, and words on one place are told in the order in
which they were said. Changes are handed out in batches of one tag; what could not be told is given
back, save where there is a later word by now. Where more waits than there is room for, everything
is forgotten, and the owner of the queue is told so: it then begins anew as another member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.directory.names import NAME_BYTES, NUMBER_BYTES, pack_numbers

MOST_CHANGES: Final = 200_000
"""Changes that wait at most: some 60 MB."""

_STORED: Final = b"S"
_REMOVED: Final = b"R"
RECORD_BYTES: Final = 1 + NAME_BYTES + NUMBER_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Changes under one tag that are being told.

    Attributes:
        tag: whose.
        changes: whether a block is held, by the name of the block and the number of the member, 0
            for this node.
        generation: which filling of the queue they are from.
    """

    tag: bytes
    changes: dict[tuple[bytes, int], bool]
    generation: int

    def records(self, me: int) -> bytes:
        """The changes as the script takes them: kind, name and number of each."""
        return b"".join(
            (_STORED if held else _REMOVED) + name + pack_numbers([number or me])
            for (name, number), held in self.changes.items()
        )


class Changes:
    """The queue.

    Args:
        capacity: changes that wait at most, with those that are being told.

    Attributes:
        overflowed: whether it had to forget everything since it was cleared last.
    """

    def __init__(self, capacity: int = MOST_CHANGES) -> None:
        self.overflowed = False
        self._capacity = capacity
        self._waiting: dict[bytes, dict[tuple[bytes, int], bool]] = {}
        self._urgent: dict[bytes, None] = {}  # in the order in which they became so
        self._full: dict[bytes, None] = {}
        self._flying: dict[bytes, Batch] = {}
        self._count = 0
        self._generation = 0

    def __len__(self) -> int:
        return self._count

    @property
    def urgent(self) -> bool:
        """Whether something waits that ``take`` would hand out, but for what is being told."""
        return bool(self._urgent or self._full)

    def ready(self, limit: int) -> int:
        """How many batches of up to ``limit`` changes ``take`` could hand out by and by."""
        return sum(
            -(-len(self._waiting[tag]) // limit) for tag in self._urgent.keys() | self._full.keys()
        )

    def note(
        self, tag: bytes, name: bytes, number: int, held: bool, *, batch: int, urgent: bool = True
    ) -> None:
        """Take note that a member holds a block, or no longer does.

        Args:
            tag: the tag of its chain.
            name: the block under it.
            number: of the member, 0 for this node.
            held: whether it holds the block.
            batch: how many changes make a batch worth telling if none of them is urgent.
            urgent: whether this is to be told as soon as may be.
        """
        waiting = self._waiting.setdefault(tag, {})
        key = (name, number)
        if key not in waiting:
            self._count += 1
        waiting[key] = held
        if urgent:
            self._urgent[tag] = None
        elif len(waiting) >= batch:
            self._full[tag] = None
        if self._count > self._capacity:
            self.clear()
            self.overflowed = True

    def hurry(self) -> None:
        """Make everything that waits urgent."""
        self._urgent.update(dict.fromkeys(self._waiting))

    def take(self, limit: int) -> Batch | None:
        """Hand out up to ``limit`` changes of one tag, none of which is being told already."""
        for ready in (self._urgent, self._full):
            tag = next((tag for tag in ready if tag not in self._flying), None)
            if tag is not None:
                return self._hand_out(tag, limit)
        return None

    def _hand_out(self, tag: bytes, limit: int) -> Batch:
        waiting = self._waiting.pop(tag)
        urgent = tag in self._urgent
        self._urgent.pop(tag, None)
        self._full.pop(tag, None)
        keys = list(waiting)[:limit] if len(waiting) > limit else list(waiting)
        batch = Batch(tag, {key: waiting.pop(key) for key in keys}, self._generation)
        if waiting:
            self._waiting[tag] = waiting
            # At the end of the line: other tags get their turn.
            (self._urgent if urgent else self._full)[tag] = None
        self._flying[tag] = batch
        return batch

    def told(self, batch: Batch) -> None:
        """Take note that a batch has been told."""
        if self._land(batch):
            self._count -= len(batch.changes)

    def give_back(self, batch: Batch) -> None:
        """Take back a batch of which it is not known whether it has been told."""
        if not self._land(batch):
            return
        later = self._waiting.get(batch.tag, {})
        self._count -= sum(key in later for key in batch.changes)
        self._waiting[batch.tag] = batch.changes | later
        self._urgent[batch.tag] = None

    def _land(self, batch: Batch) -> bool:
        if batch.generation != self._generation:
            return False
        del self._flying[batch.tag]
        return True

    def clear(self) -> None:
        """Forget everything; batches that are being told are no longer awaited."""
        self._waiting.clear()
        self._urgent.clear()
        self._full.clear()
        self._flying.clear()
        self._count = 0
        self._generation += 1
        self.overflowed = False
