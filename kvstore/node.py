"""A node: the index over its tiers, and the rules by which blocks come, are found and leave.

Everything here runs on the event loop's thread and never waits for a medium. What has to wait
(reads from SSD, demotion, reclaim) is in ``kvstore.movement``.

Memory is freed only when nobody can touch it: a block that leaves the index while it is pinned, by
a reader or by the session that fills it, keeps its extents until its last pin is off.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import Final

from kvstore.accounts import Account
from kvstore.catalog import Catalog
from kvstore.departures import Departure, DepartureReason, Departures
from kvstore.entry import IN_HBM, Entry, ShardIndex
from kvstore.errors import ParentAbsent
from kvstore.feed import Feed
from kvstore.gpus import Gpus
from kvstore.identity import Namespace
from kvstore.index import Index
from kvstore.metrics import Metrics, PutOutcome
from kvstore.protocol.messages import BUSY, FILL, HELD, REFUSED
from kvstore.reservation import Reservation
from tiers.dram import DramTier
from tiers.ssd import SsdTier
from tiers.tier import Extent

RESERVATION_SECONDS: Final = 60.0
"""After this long others may store the blocks of a reservation that was never committed."""

_MOST_EVICTIONS_A_BLOCK: Final = 64
"""Evictions in policy order to find room for one block before a whole slab is cleared for it."""

_POLICY_SLACK: Final = 1 / 16
"""By what share the policy's capacity may be wrong before it is set anew; that costs it ghosts."""


class Node:
    """The blocks of one daemon.

    Args:
        index: says what is held.
        dram: the memory tier.
        ssd: None where there is no SSD tier.
        catalog: names namespaces.
        departures: remembers what left.
        metrics: is counted into.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        index: Index,
        dram: DramTier,
        ssd: SsdTier | None,
        catalog: Catalog,
        departures: Departures,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.dram = dram
        self.ssd = ssd
        self.catalog = catalog
        self.departures = departures
        self.metrics = metrics
        self.clock = clock
        self.gpus: Gpus | None = None
        """Where copies of blocks lie on GPUs; None where there is no HBM tier."""
        self.accepts_puts = True
        """Whether clients may store blocks: not while what the node holds moves to others."""
        self.on_crowding: Callable[[], None] = lambda: None
        """Called when a block needs evictions to find room; movement works ahead from then on."""
        self.on_growth: Callable[[], None] = lambda: None
        """Called after DRAM was handed out; movement hangs its watermark check here."""
        self._taking: tuple[str, int] | None = None
        self._waiters: dict[Entry, list[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<Node dram={self.dram!r} ssd={self.ssd!r} index={self.index!r}>"

    # --- finding -------------------------------------------------------------------------------

    def shard(self, namespace: Namespace, number: int) -> ShardIndex:
        """The index of one shard of a namespace, made when first asked for; remembers both."""
        self.catalog.add(namespace)
        return self.index.shard(
            namespace.fingerprint, number, namespace.block_bytes, namespace.tenant
        )

    def shards(self, namespace: Namespace) -> list[ShardIndex]:
        """The index of each shard of a namespace; none where some shard has never been heard of."""
        known = (
            self.index.known_shard(namespace.fingerprint, number)
            for number in range(namespace.shards)
        )
        found = [shard for shard in known if shard is not None]
        return found if len(found) == namespace.shards else []

    def pin(self, entries: Sequence[Entry]) -> None:
        """Promise that the extents of ``entries`` are not reused until ``unpin``."""
        self.index.pin(entries)
        self.metrics.pins += len(entries)

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Take back one pin of each entry, and free those that were dropped meanwhile."""
        self.metrics.pins -= len(entries)
        for entry in self.index.unpin(entries):
            self._free_extents(entry)

    def checksum(self, entry: Entry) -> int | None:
        """The crc32c of a block: the one taken at its put, else that of its SSD copy, if any."""
        if entry.checksum is None and entry.ssd is not None and self.ssd is not None:
            return self.ssd.checksum(entry.ssd)
        return entry.checksum

    @staticmethod
    def holds(entry: Entry) -> bool:
        """Whether an entry is still in the index: others may have dropped it during a wait."""
        return not entry.gone

    def arrival(self, entry: Entry) -> asyncio.Future[None]:
        """A future that is done when a reserved block is committed or given up."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(entry, []).append(future)
        return future

    # --- following -----------------------------------------------------------------------------

    def follow(self, shard: ShardIndex) -> Feed:
        """The feed of a shard, which records from its first follower to its last."""
        if shard.feed is None:
            shard.feed = Feed(1 + secrets.randbits(62))
        shard.feed.followers += 1
        return shard.feed

    def unfollow(self, shard: ShardIndex) -> None:
        """Take note that one of those who follow a shard is gone."""
        assert shard.feed is not None
        shard.feed.followers -= 1
        if not shard.feed.followers:
            shard.feed = None

    # --- storing -------------------------------------------------------------------------------

    def reserve(
        self,
        shard: ShardIndex,
        owner: str,
        parent: bytes,
        hashes: Sequence[bytes],
        *,
        number: int,
        most: int,
        outcomes: Counter[PutOutcome] | None = None,
        replica: bool = False,
        used: float | None = None,
    ) -> tuple[bytes, Reservation | None]:
        """Reserve what is missing of a chain of blocks.

        Args:
            shard: where the blocks belong.
            owner: the tenant, whose segments the blocks go to.
            parent: hash of the parent of the first block.
            hashes: the chain, each block the parent of the next.
            number: the reservation's name.
            most: blocks that may be reserved at most.
            outcomes: where to count what becomes of the blocks; the puts by default.
            replica: whether another node has the blocks, so that they are to go before others.
            used: when they were last used, on the node's clock, where others have used them: what
                was used since, and has no other copy, makes no room for them.

        Returns:
            A verdict for each hash, and the reservation if any block is to be filled.

        Raises:
            ParentAbsent: the parent of the first block is not held.
        """
        if outcomes is None:
            outcomes = self.metrics.puts
        if parent in shard.reserved:
            # Below a block that is being written nothing can be committed before it is.
            outcomes["busy"] += len(hashes)
            return bytes([BUSY]) * len(hashes), None
        self._fit_policy()
        now = self.clock()
        blocks: dict[int, Entry] = {}
        verdicts = self._reserve_chain(
            shard, owner, parent, hashes, most, now, blocks, replica=replica, used=used
        )
        for outcome, verdict in (("held", HELD), ("busy", BUSY), ("refused", REFUSED)):
            outcomes[outcome] += verdicts.count(verdict)  # type: ignore[index]
        if not blocks:
            return bytes(verdicts), None
        self.metrics.reservations += len(blocks)
        self.on_growth()
        return bytes(verdicts), Reservation(number, blocks, now + RESERVATION_SECONDS, outcomes)

    def _reserve_chain(
        self,
        shard: ShardIndex,
        owner: str,
        parent: bytes,
        hashes: Sequence[bytes],
        most: int,
        now: float,
        blocks: dict[int, Entry],
        *,
        replica: bool,
        used: float | None,
    ) -> bytearray:
        """Fill ``blocks`` with what was reserved, by position; return a verdict for each hash."""
        verdicts = bytearray()
        victims = self.index.victims()
        if used is not None:
            victims = takewhile(partial(_is_worth_less, used), victims)
        for position, block in enumerate(hashes):
            if block in shard.committed:
                verdicts.append(HELD)
            elif block in shard.reserved:
                # Whoever writes this block most likely writes what follows as well.
                break
            elif len(blocks) == most or not (
                entry := self._reserve_one(
                    shard, owner, parent, block, now, victims, not position, replica, used
                )
            ):
                verdicts.append(REFUSED)
                break
            else:
                verdicts.append(FILL)
                blocks[position] = entry
            parent = block
        left = len(hashes) - len(verdicts)
        rest = REFUSED if verdicts and verdicts[-1] == REFUSED else BUSY
        verdicts.extend([rest] * left)
        return verdicts

    def _fit_policy(self) -> None:
        """Tell the policy how many blocks a full DRAM holds, going by the sizes of those held."""
        accounts = self.index.accounts
        held = sum(map(len, accounts)) + self.metrics.reservations
        if not held or not self.dram.used:
            return
        for account in accounts:
            room = self.dram.capacity
            if account.quota.dram is not None:
                room = min(room, account.quota.dram)
            fitting, policy = max(held * room // self.dram.used, 1), account.policy
            if abs(fitting - policy.capacity) > policy.capacity * _POLICY_SLACK:
                policy.resize(fitting)

    def _reserve_one(
        self,
        shard: ShardIndex,
        owner: str,
        parent: bytes,
        block: bytes,
        now: float,
        victims: Iterator[Entry],
        is_first: bool,
        replica: bool,
        used: float | None,
    ) -> Entry | None:
        try:
            entry = self.index.reserve(shard, block, parent, now, replica=replica)
        except ParentAbsent:
            if is_first:
                raise
            return None  # making room for the blocks before cost the parent
        extent = self.allocate(owner, shard.block_bytes, entry, victims, used)
        if extent is None or entry.gone:
            if extent is not None:
                self.dram.free(extent)
            if not entry.gone:
                self.index.abort(entry)
            return None
        self.index.place(entry, "dram", extent)
        self.index.pin((entry,))
        return entry

    def commit(self, reservation: Reservation, positions: Sequence[int]) -> dict[int, Entry]:
        """Make filled blocks visible, as far as their parents are.

        Returns:
            The entries that became visible now, by position.

        Raises:
            InvalidRequest: a position is not that of a block to be filled.
        """
        now = self.clock()
        ready = reservation.fill(positions)
        committed: dict[int, Entry] = {}
        for position, entry in ready:
            if not entry.gone:
                entry.checksum = reservation.checksums.get(position)
                committed[position] = entry
        self.index.commit(list(committed.values()), now)
        for entry in committed.values():
            shard = entry.shard
            self.departures.returned(shard.namespace, shard.number, entry.hash)
            self._wake(entry)
        self._let_go([entry for _, entry in ready])
        reservation.outcomes["stored"] += len(committed)
        reservation.outcomes["aborted"] += len(ready) - len(committed)
        return committed

    def touch(self, entries: Sequence[Entry]) -> None:
        """Note a use of blocks, given from root to leaf."""
        self.index.touch(entries, self.clock())

    def renew(self, entries: Sequence[Entry]) -> None:
        """Note that blocks were followed by a new one."""
        self.index.renew(entries, self.clock())

    def abort(self, reservation: Reservation) -> None:
        """Give up what was not committed. Its session has stopped writing to it."""
        self.expire(reservation)
        entries = list(reservation.blocks.values())
        reservation.blocks.clear()
        self._let_go(entries)
        reservation.outcomes["aborted"] += len(entries)

    def _let_go(self, entries: Sequence[Entry]) -> None:
        self.metrics.reservations -= len(entries)
        for entry in self.index.unpin(entries):
            self._free_extents(entry)

    def expire(self, reservation: Reservation) -> None:
        """Let others store the blocks, but keep the memory: its session may still write to it."""
        for entry in reservation.blocks.values():
            if not entry.gone:
                for gone in self.index.abort(entry):
                    self._wake(gone)

    def _wake(self, entry: Entry) -> None:
        for future in self._waiters.pop(entry, ()):
            if not future.done():
                future.set_result(None)

    # --- making room and letting go --------------------------------------------------------------

    def allocate(
        self,
        owner: str,
        size: int,
        tag: Entry,
        victims: Iterator[Entry] | None = None,
        used: float | None = None,
    ) -> Extent | None:
        """An extent of DRAM, evicting for it what the policy says; None if nothing can go.

        Args:
            owner: the tenant.
            size: bytes of the block.
            tag: the block.
            victims: the scan for victims to go on with, where several blocks need room at once.
            used: as in ``reserve``.
        """
        extent = self.dram.reserve(owner, size, tag)
        if extent is not None:
            return extent
        self.on_crowding()
        account = tag.shard.account
        is_beyond = account.beyond("dram", size) > 0

        others_are = not is_beyond and any(one.beyond("dram") for one in self.index.accounts)
        if others_are and (extent := self._clear(owner, size, tag, _is_beyond, used)) is not None:
            return extent
        if victims is None:
            victims = self.index.victims_for(account, size)
        for victim in islice(victims, _MOST_EVICTIONS_A_BLOCK):
            # Where another tenant's block goes, its segment is no less that tenant's.
            if victim.shard.tenant not in (owner, None):
                continue
            self.evict(victim, self._pressure_on(victim, size))
            extent = self.dram.reserve(owner, size, tag)
            if extent is not None:
                return extent
        return self._clear(owner, size, tag, lambda one: one is account or not is_beyond, used)

    def _clear(
        self,
        owner: str,
        size: int,
        tag: Entry,
        whose: Callable[[Account], bool],
        used: float | None,
    ) -> Extent | None:
        """Clear a slab of the tenant's, or a segment of another's, and take room there."""
        crowd = self._crowd(owner, size, whose, used)
        if any(entry.shard.tenant != owner for entry in crowd):
            self._taking = owner, size
        for entry in crowd:
            if not (entry.gone or entry.pins):
                self.evict(entry, self._pressure_on(entry))
        return self.dram.reserve(owner, size, tag)

    def _crowd(
        self, owner: str, size: int, whose: Callable[[Account], bool], used: float | None = None
    ) -> list[Entry]:
        """The blocks that would go so that a tenant has room; none where that can't be."""

        def movable(one: object) -> bool:
            return (
                isinstance(one, Entry)
                and not one.pins
                and whose(one.shard.account)
                and (used is None or _is_worth_less(used, one))
            )

        crowd = self.dram.crowding(owner, size, movable)
        return [one for one in crowd if isinstance(one, Entry)]

    def cleared_next(self) -> list[Entry]:
        """The blocks of the segment that the last tenant to take one would take next.

        Only where it would be taken from a tenant beyond its quota: whose turn comes is known then.
        """
        if self._taking is None or not any(map(_is_beyond, self.index.accounts)):
            return []
        (owner, size), self._taking = self._taking, None
        return self._crowd(owner, size, _is_beyond)

    def _pressure_on(self, entry: Entry, size: int = 0) -> DepartureReason:
        if entry.shard.account.beyond("dram", size):
            return DepartureReason.QUOTA
        if self.ssd is None or entry.ssd is not None:
            return DepartureReason.CAPACITY
        return DepartureReason.SSD_BUSY

    def evict(self, entry: Entry, reason: DepartureReason) -> int:
        """Take an unpinned block out of DRAM.

        Returns:
            How many blocks are gone: none where the SSD has a copy, else it and all below it.
        """
        if entry.ssd is None:
            return self.drop(entry, "dram", reason)
        self.dram.free(self.index.displace(entry, "dram"))
        self.metrics.evictions["dram", reason] += 1
        return 0

    def forget_ssd(self, entry: Entry, reason: DepartureReason) -> None:
        """Give up the SSD copy of a block that is in DRAM too."""
        assert self.ssd is not None
        assert entry.dram is not None
        entry.checksum = self.checksum(entry)
        self.ssd.free(self.index.displace(entry, "ssd"))
        self.metrics.evictions["ssd", reason] += 1

    def drop(self, entry: Entry, tier: str, reason: DepartureReason) -> int:
        """Forget a block and all below it, in all tiers.

        Args:
            entry: the block.
            tier: where it was lost from, for the record.
            reason: why.

        Returns:
            How many blocks are gone.
        """
        gone = self.index.drop(entry)
        departure = Departure(self.clock(), tier, reason)
        for lost in gone:
            shard = lost.shard
            self.departures.record(shard.namespace, shard.number, lost.hash, departure)
            self.metrics.evictions[tier, reason] += 1
            self._wake(lost)
            if not lost.pins:
                self._free_extents(lost)
        return len(gone)

    def _free_extents(self, entry: Entry) -> None:
        if entry.dram is not None:
            self.dram.free(entry.dram)
            entry.dram = None
        if entry.ssd is not None and self.ssd is not None:
            self.ssd.free(entry.ssd)
            entry.ssd = None
        if entry.state & IN_HBM and self.gpus is not None:
            self.gpus.forget(entry)


def _is_worth_less(used: float, entry: Entry) -> bool:
    """Whether an entry may make room for a block of another node that was last used at a time."""
    return entry.replica or entry.ssd is not None or entry.last_use < used


def _is_beyond(account: Account) -> bool:
    return account.beyond("dram") > 0
