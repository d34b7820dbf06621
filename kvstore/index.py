"""Which blocks a node holds, where, and which must stay: the truth that everything else asks.

Pure and synchronous: no I/O, no clock, no locks. Rules that hold between any two calls:

* A committed block's parent is committed. Dropping a block drops all that follow it.
* A block is reserved (being written, not served), committed, or gone. `Entry`s are handed out, and
  one that is gone says so for as long as anybody has it.
* The index never frees an extent. Whoever drops or displaces gets to know the entry and frees its
  extents, at once if it has no pins, else when `unpin` says that the last one is off.

Only DRAM residents are ordered: those of each tenant with a quota by themselves, in an order that a
policy keeps, and replicas, blocks that another node has too, in another. ``kvstore.victims`` makes
one line of them all. SSD space comes back by the region, and which residents
of a region are worth writing anew is answered by `Entry.worth_keeping_on_ssd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, Protocol

from kvstore.accounts import OTHERS, Account, Accounts
from kvstore.entry import (
    COMMITTED,
    GONE,
    IN_DRAM,
    IN_HBM,
    IN_SSD,
    REPLICA,
    USED,
    WANTED,
    Entry,
    ShardIndex,
)
from kvstore.errors import ParentAbsent
from kvstore.identity import HASH_BYTES, ROOT_PARENT
from kvstore.reach import chain_codes, codes, prefix_codes, slowest
from kvstore.victims import Line
from tiers.links import HELD, PARKED
from tiers.policy import Policy

TierName = Literal["dram", "ssd"]


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
        accounts: of the tenants; a policy where there is one account for all, without a quota.

    Attributes:
        accounts: what each tenant holds, and the orders in which DRAM gives up its blocks.
        observers: are told what comes and goes; see ``observe``.
    """

    def __init__(self, accounts: Accounts | Policy) -> None:
        if isinstance(accounts, Policy):
            accounts = Accounts(Account(OTHERS, accounts))
        self.accounts = accounts
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

    def shard(
        self, namespace: bytes, number: int, block_bytes: int, tenant: str | None = None
    ) -> ShardIndex:
        """The shard of that namespace (fingerprint) and rank, made when first asked for.

        Args:
            namespace: the fingerprint.
            number: the rank.
            block_bytes: size of its blocks.
            tenant: whose it is, where that is known; it may become known later.
        """
        shard = self._shards.get((namespace, number))
        if shard is None:
            account = self.accounts.of(tenant)
            shard = ShardIndex(namespace, number, block_bytes, account, tenant)
            self._shards[namespace, number] = shard
        elif shard.tenant is None and tenant is not None:
            shard.tenant = tenant
            self._transfer(shard, self.accounts.of(tenant))
        return shard

    def _transfer(self, shard: ShardIndex, account: Account) -> None:
        """Count the blocks of a shard in another account from now on."""
        ordered = [entry for entry in shard.committed.values() if entry.queue]
        for entry in ordered:
            self._order_of(entry).remove(entry, evicted=False)
        shard.account.hbm -= shard.hbm_bytes
        shard.account.dram -= shard.dram_bytes
        shard.account.ssd -= shard.ssd_bytes
        shard.account = account
        account.hbm += shard.hbm_bytes
        account.dram += shard.dram_bytes
        account.ssd += shard.ssd_bytes
        # Parents are older than their children in the table, and must not be so in the order.
        for entry in reversed(ordered):
            self._order_of(entry).insert(entry)

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
        found = []
        for shard in shards:
            found.append(prefix_codes(shard, hashes))
            hashes = hashes[: len(found[-1])]
        return slowest(found)

    def match_joined(self, shards: Sequence[ShardIndex], joined: bytes) -> bytes:
        """What `match` says of the hashes that `joined` is made of, in less time if they chain.

        A committed block's parents are committed, so the end of a chain is found by bisection, and
        its blocks by going from parent to parent. The hashes met on the way show whether it is one.
        """
        found = []
        for shard in shards:
            found.append(chain_codes(shard, joined))
            joined = joined[: len(found[-1]) * HASH_BYTES]
        return slowest(found)

    def exists(self, shards: Sequence[ShardIndex], hashes: Sequence[bytes]) -> bytes:
        """The tier code of each block on its own: 0 where some shard lacks it."""
        each = [codes(shard, hashes) for shard in shards]
        if len(each) == 1:
            return each[0]
        return bytes(max(block) if all(block) else 0 for block in zip(*each, strict=True))

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
            entry.shard.account.dram += entry.shard.block_bytes
            entry.state |= IN_DRAM
            if entry.state & COMMITTED:
                self._order_of(entry).insert(entry)
        else:
            entry.ssd = extent
            entry.shard.in_ssd += 1
            entry.shard.account.ssd += entry.shard.block_bytes
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
            entry.shard.account.dram -= entry.shard.block_bytes
            if entry.queue:
                self._order_of(entry).remove(entry, evicted=evicted)
        else:
            extent, entry.ssd = entry.ssd, None
            entry.shard.in_ssd -= 1
            entry.shard.account.ssd -= entry.shard.block_bytes
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

    def add_copy(self, entry: Entry) -> None:
        """Note that a copy of a committed block lies on a GPU, beside its extents below.

        Raises:
            ValueError: it has one already, or isn't committed.
        """
        if entry.state & IN_HBM or not entry.state & COMMITTED:
            raise ValueError(f"{entry!r} can't have a copy in hbm")
        entry.state = (entry.state | IN_HBM) & ~WANTED
        entry.shard.in_hbm += 1
        entry.shard.account.hbm += entry.shard.block_bytes
        self._tell_moved(entry)

    def remove_copy(self, entry: Entry) -> None:
        """Note that the copy on a GPU is no more. Of a block that is gone, it is counted no longer.

        Raises:
            ValueError: it has none.
        """
        if not entry.state & IN_HBM:
            raise ValueError(f"{entry!r} has no copy in hbm")
        entry.state &= ~IN_HBM
        if not entry.state & GONE:
            entry.shard.in_hbm -= 1
            entry.shard.account.hbm -= entry.shard.block_bytes
            self._tell_moved(entry)

    # Being used

    def want(self, entry: Entry) -> bool:
        """Note that a session that computes on a GPU got a block; whether one had before."""
        before = bool(entry.state & WANTED)
        entry.state |= WANTED
        return before

    def touch(self, entries: Sequence[Entry], now: float) -> None:
        """Note a use of `entries`, given from root to leaf; the policy sees them leaf first.

        They are all of one tenant.
        """
        if not entries:
            return
        for entry in entries:
            entry.last_use = now
            entry.state |= USED
        account = entries[0].shard.account
        if len(account.replicas):
            account.replicas.touch([entry for entry in reversed(entries) if entry.state & REPLICA])
            entries = [entry for entry in entries if not entry.state & REPLICA]
        account.policy.touch(reversed(entries))

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
                self._order_of(entry).remove(entry, evicted=False)
            entry.state &= ~REPLICA
            if ordered:
                self._order_of(entry).insert(entry)

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
        """Entries to take out of DRAM, next to go first.

        Those of tenants beyond their quota come first, as long as they are; then replicas, then
        others as the policy says.

        Skips what is pinned. Skips parents whose only copy is here, unless `parents`: these can't
        go without all that follows them. What is skipped is set aside until its last pin or child
        goes, so a scan costs no more than the entries it yields plus those newly set aside.

        The caller may do anything between two steps. What it leaves as it is isn't offered again
        by this scan; a parent that it frees by dropping the last child comes next.
        """
        return self._offer(Line.take, parents)

    def victims_for(self, account: Account, size: int) -> Iterator[Entry]:
        """As `victims`, where a tenant needs room for blocks of `size` bytes.

        While another block takes it beyond its quota these are its own. Else it makes no difference
        who else is beyond a quota: what tenants leave here and there, others can't use.
        """
        return self._offer(lambda line: line.take_for(account, size), False)

    def _offer(self, take: Callable[[Line], Entry | None], parents: bool) -> Iterator[Entry]:
        # Begun with the first step: a generator that is never asked does not get to its end either.
        line = Line(self.accounts, held=parents)
        try:
            while (entry := take(line)) is not None:
                if not self._set_aside(entry, parents):
                    yield entry
                    if entry.queue:
                        self._set_aside(entry, parents)
        finally:
            line.close()

    def _order_of(self, entry: Entry) -> Policy:
        account = entry.shard.account
        return account.replicas if entry.state & REPLICA else account.policy

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
            All entries removed, each child before its parent. They keep `dram`, `ssd`, `IN_HBM`
            and `parent`. The caller frees the extents of those without pins, and those of the
            others when `unpin` returns them.

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
        if entry.state & IN_DRAM:
            shard.in_dram -= 1
            shard.account.dram -= shard.block_bytes
        if entry.state & IN_SSD:
            shard.in_ssd -= 1
            shard.account.ssd -= shard.block_bytes
        if entry.state & IN_HBM:
            shard.in_hbm -= 1
            shard.account.hbm -= shard.block_bytes
        entry.state = (entry.state & ~COMMITTED) | GONE
        entry.first_child = entry.next_sibling = entry.previous_sibling = None


_BITS: Final[dict[TierName, int]] = {"dram": IN_DRAM, "ssd": IN_SSD}


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
