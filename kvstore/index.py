"""Which blocks a node holds, where, and which must stay: the truth that everything else asks.

Pure and synchronous: no I/O, no clock, no locks. Rules that hold between any two calls:

* A committed block's parent is committed. Dropping a block drops all that follow it.
* A block is reserved (being written, not served), committed, or gone. `Entry`s are handed out, and
  one that is gone says so for as long as anybody has it.
* The index never frees an extent. Whoever drops or displaces gets to know the entry and frees its
  extents, at once if it has no pins, else when `unpin` says that the last one is off.

Only DRAM residents are ordered, by a policy. Replicas, blocks that another node has too, are in an
order of their own and go before all others. SSD space comes back by the region, and which residents
of a region are worth writing anew is answered by `Entry.worth_keeping_on_ssd`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final, Literal, Protocol

from kvstore.entry import (
    COMMITTED,
    GONE,
    IN_DRAM,
    IN_SSD,
    REPLICA,
    TIER_CODES,
    USED,
    Entry,
    ShardIndex,
)
from kvstore.errors import ParentAbsent
from kvstore.identity import HASH_BYTES, ROOT_PARENT
from tiers.links import HELD, PARKED, Link
from tiers.lru import Lru
from tiers.policy import Policy

TierName = Literal["dram", "ssd"]

_NOTHING: Final = Entry(ShardIndex(b"", 0, 0), b"", None, 0.0)


class AlreadyPresent(Exception):
    """A reservation for a block that is held, or being written by somebody else."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(f"{entry!r} is already here")
        self.entry = entry


class Observer(Protocol):
    """Is told what the node gains and loses, as it happens. Asks nothing and changes nothing."""

    def stored(self, entry: Entry) -> None:
        """A block can be served from now on."""

    def moved(self, entry: Entry) -> None:
        """A block that could be served has come to a tier, or left one: see its state.

        It may be in none for the moment, until it is placed or removed.
        """

    def removed(self, entry: Entry) -> None:
        """A block that could be served is held no longer, in no tier."""


class Index:
    """All blocks of a node. Not thread-safe: it belongs to the thread of the event loop.

    Args:
        policy: the order in which DRAM gives up its blocks.

    Attributes:
        policy: has the blocks of DRAM that are no replicas.
        replicas: has those that are. Whatever the policy, that longest unused goes first.
        observers: are told what comes and goes; see ``observe``.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.replicas = Lru(1)
        self.observers: tuple[Observer, ...] = ()
        self._shards: dict[tuple[bytes, int], ShardIndex] = {}

    # Being watched

    def observe(self, observer: Observer) -> None:
        """Tell somebody of all blocks that are stored, moved and removed from now on."""
        self.observers = (*self.observers, observer)

    def leave(self, observer: Observer) -> None:
        """Tell somebody nothing more; of no effect where it isn't told anything."""
        self.observers = tuple(one for one in self.observers if one is not observer)

    # Shards

    def shard(self, namespace: bytes, number: int, block_bytes: int) -> ShardIndex:
        """The shard of that namespace (fingerprint) and rank, made when first asked for."""
        shard = self._shards.get((namespace, number))
        if shard is None:
            shard = ShardIndex(namespace, number, block_bytes)
            self._shards[namespace, number] = shard
        return shard

    def known_shard(self, namespace: bytes, number: int) -> ShardIndex | None:
        """The shard of that namespace (fingerprint) and rank, or None if nobody asked for it."""
        return self._shards.get((namespace, number))

    @property
    def shards(self) -> list[ShardIndex]:
        """All shards, in the order in which they came."""
        return list(self._shards.values())

    def find(self, hash: bytes) -> list[Entry]:
        """The committed blocks of that hash, in whatever namespace and shard."""
        return [
            entry
            for shard in self._shards.values()
            if (entry := shard.committed.get(hash)) is not None
        ]

    def __len__(self) -> int:
        """Committed blocks."""
        return sum(len(shard.committed) for shard in self._shards.values())

    # Looking up

    def match(self, shards: Sequence[ShardIndex], hashes: Sequence[bytes]) -> bytes:
        """How far the prefix `hashes` is held in every one of `shards`.

        Returns:
            One tier code for each block held, up to the first that some shard lacks: 1 hbm, 2 dram,
            3 ssd, the slowest over the shards.
        """
        codes = []
        for shard in shards:
            codes.append(_prefix_codes(shard, hashes))
            hashes = hashes[: len(codes[-1])]
        return _slowest(codes)

    def match_joined(self, shards: Sequence[ShardIndex], joined: bytes) -> bytes:
        """What `match` says of the hashes that `joined` is made of, in less time if they chain.

        A committed block's parents are committed, so the end of a chain is found by bisection, and
        its blocks by going from parent to parent. The hashes met on the way show whether it is one.
        """
        codes = []
        for shard in shards:
            codes.append(_chain_codes(shard, joined))
            joined = joined[: len(codes[-1]) * HASH_BYTES]
        return _slowest(codes)

    def exists(self, shards: Sequence[ShardIndex], hashes: Sequence[bytes]) -> bytes:
        """The tier code of each block on its own: 0 where some shard lacks it."""
        codes = [_codes(shard, hashes) for shard in shards]
        if len(codes) == 1:
            return codes[0]
        return bytes(max(block) if all(block) else 0 for block in zip(*codes, strict=True))

    def lookup(self, shard: ShardIndex, hashes: Iterable[bytes]) -> list[Entry | None]:
        """The committed entry of each hash, or None."""
        return list(map(shard.committed.get, hashes))

    # Coming

    def reserve(
        self,
        shard: ShardIndex,
        hash: bytes,
        parent_hash: bytes,
        now: float,
        *,
        replica: bool = False,
    ) -> Entry:
        """Announce a block that is about to be written. It isn't served before `commit`.

        Args:
            shard: where it belongs.
            hash: its prefix hash.
            parent_hash: hash of the block before it, which is held or reserved; `ROOT_PARENT` for
                the first of a prompt.
            now: seconds on the caller's clock.
            replica: whether another node has the block too: then it is to go before others.

        Raises:
            ParentAbsent: no block has the hash `parent_hash`.
            AlreadyPresent: the block is held or reserved.
        """
        present = shard.get(hash)
        if present is not None:
            raise AlreadyPresent(present)
        parent = None
        if parent_hash != ROOT_PARENT:
            parent = shard.get(parent_hash)
            if parent is None:
                raise ParentAbsent(f"no block {parent_hash.hex()} to follow")
        entry = Entry(shard, hash, parent, now)
        if replica:
            entry.state = REPLICA
        if parent is not None:
            _adopt(parent, entry)
        shard.reserved[hash] = entry
        return entry

    def commit(self, entries: Sequence[Entry], now: float) -> None:
        """Let reserved blocks be served. Given from root to leaf, each with an extent.

        Raises:
            ParentAbsent: a parent isn't committed. The entries before that one are.
            ValueError: an entry isn't reserved, or has no extent.
        """
        done = 0
        try:
            for entry in entries:
                self._commit_one(entry, now)
                done += 1
        finally:
            for entry in reversed(entries[:done]):
                if entry.state & IN_DRAM:
                    self._order_of(entry).insert(entry)

    def _commit_one(self, entry: Entry, now: float) -> None:
        if not entry.reserved or not entry.state & (IN_DRAM | IN_SSD):
            raise ValueError(f"{entry!r} is not a reserved block with an extent")
        parent = entry.parent
        if parent is not None and not parent.state & COMMITTED:
            raise ParentAbsent(f"block {parent.hash.hex()} is not committed")
        shard = entry.shard
        del shard.reserved[entry.hash]
        shard.committed[entry.hash] = entry
        entry.state |= COMMITTED
        entry.last_use = now
        if shard.feed is not None:
            shard.feed.stored(entry.hash)
        for observer in self.observers:
            observer.stored(entry)

    def abort(self, entry: Entry) -> list[Entry]:
        """Take a reservation back, and those of the blocks that were to follow it.

        Returns:
            What `drop` returns.

        Raises:
            ValueError: the entry isn't reserved.
        """
        if not entry.reserved:
            raise ValueError(f"{entry!r} is not reserved")
        return self.drop(entry)

    # Being somewhere

    def place(self, entry: Entry, tier: TierName, extent: int) -> None:
        """Note that a reserved or committed block has an extent in `tier`.

        Raises:
            ValueError: it has one there already, or is gone.
        """
        bit = _BITS[tier]
        if entry.state & (bit | GONE):
            raise ValueError(f"{entry!r} can't be placed in {tier}")
        if tier == "dram":
            entry.dram = extent
            entry.shard.in_dram += 1
            entry.state |= IN_DRAM
            if entry.state & COMMITTED:
                self._order_of(entry).insert(entry)
        else:
            entry.ssd = extent
            entry.shard.in_ssd += 1
            entry.state = (entry.state | IN_SSD) & ~USED
            if entry.queue & HELD:
                self._order_of(entry).release(entry)
        if self.observers and entry.state & COMMITTED:
            self._tell_moved(entry)

    def _tell_moved(self, entry: Entry) -> None:
        for observer in self.observers:
            observer.moved(entry)

    def displace(self, entry: Entry, tier: TierName, *, evicted: bool = True) -> int:
        """Note that a block has left `tier`.

        A committed block left without any extent must be dropped, or placed elsewhere, before the
        event loop goes on; until then it counts as absent.

        Args:
            entry: the block.
            tier: where it was.
            evicted: it made room for others (as opposed to a medium that was lost or taken away).

        Returns:
            The extent it had, the caller's to free.

        Raises:
            ValueError: it has no extent there.
        """
        if not entry.state & _BITS[tier] or entry.state & GONE:
            raise ValueError(f"{entry!r} is not in {tier}")
        entry.state &= ~_BITS[tier]
        if tier == "dram":
            extent, entry.dram = entry.dram, None
            entry.shard.in_dram -= 1
            if entry.queue:
                self._order_of(entry).remove(entry, evicted=evicted)
        else:
            extent, entry.ssd = entry.ssd, None
            entry.shard.in_ssd -= 1
        if self.observers and entry.state & COMMITTED:
            self._tell_moved(entry)
        assert extent is not None
        return extent

    def relocate(self, entry: Entry, tier: TierName, extent: int) -> int:
        """Note that a block has moved within `tier`. Its place in the order stays.

        Returns:
            The extent it had, the caller's to free.

        Raises:
            ValueError: it has no extent there.
        """
        if not entry.state & _BITS[tier] or entry.state & GONE:
            raise ValueError(f"{entry!r} is not in {tier}")
        if tier == "dram":
            old, entry.dram = entry.dram, extent
        else:
            old, entry.ssd = entry.ssd, extent
            entry.state &= ~USED
        assert old is not None
        return old

    # Being used

    def touch(self, entries: Sequence[Entry], now: float) -> None:
        """Note a use of `entries`, given from root to leaf; the policy sees them leaf first."""
        for entry in entries:
            entry.last_use = now
            entry.state |= USED
        if len(self.replicas):
            self.replicas.touch([entry for entry in reversed(entries) if entry.state & REPLICA])
            entries = [entry for entry in entries if not entry.state & REPLICA]
        self.policy.touch(reversed(entries))

    def own(self, entries: Sequence[Entry]) -> None:
        """Make replicas blocks like others, where no other node has them any more.

        Args:
            entries: given from root to leaf. Those that are no replicas, or gone, stay as they are.
        """
        for entry in reversed(entries):
            if not entry.state & REPLICA or entry.state & GONE:
                continue
            ordered = entry.queue
            if ordered:
                self.replicas.remove(entry, evicted=False)
            entry.state &= ~REPLICA
            if ordered:
                self.policy.insert(entry)

    def date(self, entries: Iterable[Entry], used: float) -> None:
        """Note when blocks were last used elsewhere, before they came here.

        Args:
            entries: given from root to leaf; what follows them was used no later.
            used: seconds on the caller's clock.
        """
        for entry in entries:
            entry.last_use = used

    def renew(self, entries: Iterable[Entry], now: float) -> None:
        """Note that blocks were followed by a new one: they are as recent as it is.

        That is no use of them, and their place in the order stays. A policy that tells blocks seen
        once from those seen again would count every new block twice otherwise; and no parent goes
        before its children anyway.
        """
        for entry in entries:
            entry.last_use = now

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep the extents of `entries` from being reused, until as many calls of `unpin`."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take one pin off each entry.

        Returns:
            Those that were dropped while pinned and have no pin left: their extents are the
            caller's to free now.
        """
        free: list[Entry] = []
        for entry in entries:
            entry.pins -= 1
            if not entry.pins:
                if entry.queue & PARKED:
                    self._order_of(entry).release(entry)
                elif entry.state & GONE:
                    free.append(entry)
        return free

    # Going

    def victims(self, tier: Literal["dram"] = "dram", *, parents: bool = False) -> Iterator[Entry]:
        """Entries to take out of DRAM, next to go first: replicas, then others as the policy says.

        Skips what is pinned. Skips parents whose only copy is here, unless `parents`: these can't
        go without all that follows them. What is skipped is set aside until its last pin or child
        goes, so a scan costs no more than the entries it yields plus those newly set aside.

        The caller may do anything between two steps. What it leaves as it is isn't offered again
        by this scan; a parent that it frees by dropping the last child comes next.
        """
        for item in self._line(parents):
            assert isinstance(item, Entry)
            if not self._set_aside(item, parents):
                yield item
                if item.queue:
                    self._set_aside(item, parents)

    def _line(self, held: bool) -> Iterator[Link]:
        others = self.policy.victims(held=held)
        if not len(self.replicas):
            return others
        return _replicas_first(self.replicas.watch(held=held), others)

    def _order_of(self, entry: Entry) -> Policy:
        return self.replicas if entry.state & REPLICA else self.policy

    def _set_aside(self, entry: Entry, parents: bool) -> bool:
        if entry.pins:
            self._order_of(entry).park(entry)
            return True
        if not parents and entry.first_child is not None and not entry.state & IN_SSD:
            self._order_of(entry).hold(entry)
            return True
        return False

    def drop(self, entry: Entry, *, evicted: bool = True) -> list[Entry]:
        """Remove an entry and all its descendants, reserved ones included.

        Args:
            entry: the first to go.
            evicted: they made room for others (as opposed to being withdrawn or lost).

        Returns:
            All entries removed, each child before its parent. They keep `dram`, `ssd` and `parent`.
            The caller frees the extents of those without pins, and those of the others when `unpin`
            returns them.

        Raises:
            ValueError: the entry is gone already.
        """
        if entry.state & GONE:
            raise ValueError(f"{entry!r} is gone already")
        parent = entry.parent
        if parent is not None:
            _part(parent, entry)
        gone = entry.subtree()
        gone.reverse()
        for one in gone:
            self._remove(one, evicted)
        if parent is not None and parent.first_child is None and parent.queue & HELD:
            self._order_of(parent).release(parent)
        return gone

    def _remove(self, entry: Entry, evicted: bool) -> None:
        shard = entry.shard
        if entry.queue:
            self._order_of(entry).remove(entry, evicted=evicted)
        if entry.state & COMMITTED:
            del shard.committed[entry.hash]
            if shard.feed is not None:
                shard.feed.removed(entry.hash)
            for observer in self.observers:
                observer.removed(entry)
        else:
            del shard.reserved[entry.hash]
        shard.in_dram -= bool(entry.state & IN_DRAM)
        shard.in_ssd -= bool(entry.state & IN_SSD)
        entry.state = (entry.state & ~COMMITTED) | GONE
        entry.first_child = entry.next_sibling = entry.previous_sibling = None


_BITS: Final[dict[TierName, int]] = {"dram": IN_DRAM, "ssd": IN_SSD}


def _codes(shard: ShardIndex, hashes: Iterable[bytes]) -> bytes:
    entries = map(shard.committed.get, hashes, repeat(_NOTHING))
    return bytes([entry.state for entry in entries]).translate(TIER_CODES)


def _slowest(codes: Sequence[bytes]) -> bytes:
    if len(codes) == 1:
        return codes[0]
    return bytes(map(max, *codes)) if codes else b""


def _chain_codes(shard: ShardIndex, joined: bytes) -> bytes:
    length = _reach(shard.committed, joined)
    states: list[int] = []
    hashes: list[bytes] = []
    entry = shard.committed.get(joined[(length - 1) * HASH_BYTES : length * HASH_BYTES])
    for _ in range(length):
        if entry is None:
            break
        states.append(entry.state)
        hashes.append(entry.hash)
        entry = entry.parent
    hashes.reverse()
    if b"".join(hashes) != joined[: length * HASH_BYTES]:
        each = range(0, len(joined), HASH_BYTES)
        return _prefix_codes(shard, [joined[at : at + HASH_BYTES] for at in each])
    states.reverse()
    return _until_absent(bytes(states).translate(TIER_CODES))


def _reach(committed: Mapping[bytes, Entry], joined: bytes) -> int:
    """A number of hashes of which the last is committed and the next, if there is one, isn't."""
    low, high = 0, len(joined) // HASH_BYTES
    while low < high:
        middle = (low + high) // 2
        if joined[middle * HASH_BYTES : (middle + 1) * HASH_BYTES] in committed:
            low = middle + 1
        else:
            high = middle
    return low


def _prefix_codes(shard: ShardIndex, hashes: Iterable[bytes]) -> bytes:
    return _until_absent(_codes(shard, hashes))


def _until_absent(codes: bytes) -> bytes:
    end = codes.find(0)
    return codes if end < 0 else codes[:end]


def _replicas_first(replicas: Iterator[Link | None], others: Iterator[Link]) -> Iterator[Link]:
    while (item := next(replicas, None) or next(others, None)) is not None:
        yield item


def _adopt(parent: Entry, child: Entry) -> None:
    eldest = parent.first_child
    if eldest is not None:
        child.next_sibling = eldest
        eldest.previous_sibling = child
    parent.first_child = child


def _part(parent: Entry, child: Entry) -> None:
    before, after = child.previous_sibling, child.next_sibling
    if before is None:
        parent.first_child = after
    else:
        before.next_sibling = after
    if after is not None:
        after.previous_sibling = before
