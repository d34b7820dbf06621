"""A bounded memory of the blocks that left the node, so that a miss can be explained.

Remembering a departure costs a few hundred bytes, so only the most recent ones are kept. A hash
that is not found here was either never stored or left too long ago to be remembered, and
:attr:`Departures.forgotten` says whether the second is possible.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import NamedTuple


class DepartureReason(StrEnum):
    """Why a block is no longer held."""

    CAPACITY = "capacity"
    """Evicted to make room, in the order of the tier's policy."""
    SSD_BUSY = "ssd_busy"
    """Evicted to make room before the SSD tier had taken a copy: it could not keep up."""
    QUOTA = "quota"
    """Evicted to make room while its tenant held more than its quota."""
    SSD_RECLAIM = "ssd_reclaim"
    """Its region of the SSD log was reclaimed."""
    CORRUPT = "corrupt"
    """Its bytes no longer matched their checksum."""
    MEDIUM_FAILED = "medium_failed"
    """The medium could not be read."""
    ADMIN = "admin"
    """Evicted by an operator."""


class Departure(NamedTuple):
    """One block's departure.

    Attributes:
        when: seconds on the node's monotonic clock.
        tier: the last tier that held it, ``"dram"`` or ``"ssd"``.
        reason: why it left.
    """

    when: float
    tier: str
    reason: DepartureReason


class Departures:
    """The last ``capacity`` departures, by namespace fingerprint, shard and hash."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_block: OrderedDict[tuple[bytes, int, bytes], Departure] = OrderedDict()
        self.forgotten = 0
        """How many departures have been forgotten to stay within the bound."""

    def __len__(self) -> int:
        return len(self._by_block)

    def __repr__(self) -> str:
        return f"<Departures {len(self)} of {self._capacity}, {self.forgotten} forgotten>"

    def record(self, namespace: bytes, shard: int, block: bytes, departure: Departure) -> None:
        """Remember that ``block`` left, forgetting the oldest departure if there are too many."""
        if self._capacity == 0:
            self.forgotten += 1
            return
        key = (namespace, shard, block)
        self._by_block[key] = departure
        self._by_block.move_to_end(key)
        if len(self._by_block) > self._capacity:
            self._by_block.popitem(last=False)
            self.forgotten += 1

    def returned(self, namespace: bytes, shard: int, block: bytes) -> None:
        """Forget the departure of a block that is held again."""
        self._by_block.pop((namespace, shard, block), None)

    def of(self, namespace: bytes, shard: int, block: bytes) -> Departure | None:
        """The departure of a block, or None if it never left or is forgotten."""
        return self._by_block.get((namespace, shard, block))
