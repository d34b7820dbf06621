"""What a shard gained and lost of late: a bounded log that clients read at their own pace.

Every change has a number, one above that of the change before it. A follower keeps the number of
the last change that it knows, its position, and asks for what came after it. A position that the
log doesn't reach back to, or that another recording gave (before a restart, or at another node), is
answered with where the log is now and the word that changes were lost: what the follower believed
is void then, and it begins anew from what it asks the node.

That holds because the numbers of a recording begin somewhere else each time: at a random one of
2^62, drawn by whoever makes the feed. An old position falls among the at most 65,536 numbers that
another recording can still answer with a probability of 2^-46.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvstore.identity import HASH_BYTES
from kvstore.protocol.messages import BLOCK_REMOVED, BLOCK_STORED

MOST_CHANGES: Final = 65_536
"""Changes that one feed remembers: 2.1 MiB, taken as they come."""


class Recorded(NamedTuple):
    """What a feed has to say to one follower.

    Attributes:
        sequence: number of the last change included: the follower's position from now on.
        complete: whether no change between the follower's position and ``sequence`` is missing.
            Where it is false there are no changes.
        kinds: for each change ``BLOCK_STORED`` or ``BLOCK_REMOVED``, in the order in which they
            happened.
        hashes: the blocks, 32 bytes for each change.
    """

    sequence: int
    complete: bool
    kinds: bytes
    hashes: bytes


class Feed:
    """The changes of one shard since somebody began to follow it.

    Args:
        start: the number before that of the first change, at least 1 (0 is no position).
        capacity: changes remembered.

    Attributes:
        sequence: number of the last change.
        followers: how many follow; kept by ``kvstore.node``.
    """

    __slots__ = ("_capacity", "_hashes", "_kinds", "_start", "followers", "sequence")

    def __init__(self, start: int, capacity: int = MOST_CHANGES) -> None:
        if start < 1 or capacity < 1:
            raise ValueError(f"a feed of {capacity} changes can't begin after number {start}")
        self.sequence = start
        self.followers = 0
        self._start = start
        self._capacity = capacity
        self._kinds = bytearray()  # a ring, once it is full
        self._hashes = bytearray()

    def __repr__(self) -> str:
        return f"<Feed at {self.sequence}, {len(self._kinds)} changes, {self.followers} followers>"

    def stored(self, block: bytes) -> None:
        """Note that a block can be served from now on."""
        self._record(BLOCK_STORED, block)

    def removed(self, block: bytes) -> None:
        """Note that a block is held no longer, in no tier."""
        self._record(BLOCK_REMOVED, block)

    def _record(self, kind: int, block: bytes) -> None:
        if len(self._kinds) < self._capacity:
            self._kinds.append(kind)
            self._hashes += block
        else:
            place = (self.sequence - self._start) % self._capacity
            self._kinds[place] = kind
            self._hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES] = block
        self.sequence += 1

    def since(self, after: int, limit: int) -> Recorded:
        """The oldest changes above a position.

        Args:
            after: the position; 0 for a follower that has none.
            limit: how many changes at most.
        """
        behind = self.sequence - after
        if not 0 <= behind <= len(self._kinds):
            return Recorded(self.sequence, False, b"", b"")
        count = min(behind, limit)
        first = (after - self._start) % self._capacity
        last = first + count
        kinds, hashes = self._part(first, min(last, self._capacity))
        if last > self._capacity:
            more_kinds, more_hashes = self._part(0, last - self._capacity)
            kinds, hashes = kinds + more_kinds, hashes + more_hashes
        return Recorded(after + count, True, kinds, hashes)

    def _part(self, first: int, last: int) -> tuple[bytes, bytes]:
        hashes = self._hashes[first * HASH_BYTES : last * HASH_BYTES]
        return bytes(self._kinds[first:last]), bytes(hashes)
