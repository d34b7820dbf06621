"""Pulling blocks from another node into this one's DRAM.

What comes is received straight into extents of this node's arena, which are reserved like those
of a put: invisible until all bytes are there, then committed with parents before children. So a
peer that dies, stalls or lies costs misses, and what was reserved for it is freed.

Nothing is reserved, and so nothing evicted, before the peer has said that it holds the blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import structlog
from crc32c import crc32c

from kvstore.entry import Entry, ShardIndex
from kvstore.errors import DeadlineExceeded, KVStoreError, ParentAbsent, Unavailable
from kvstore.node import Node
from kvstore.peer import MakeHalves, Peer
from kvstore.peer_session import Getting, Greeting, PeerSession
from kvstore.protocol.messages import REFUSED
from kvstore.reservation import Reservation

_log = structlog.get_logger(__name__)

_PART_BYTES: Final = 8 << 20
"""Bytes of one get: they become visible together."""
_AHEAD: Final = 3
"""Gets under way at once, so that the peer never waits for the next."""
_RESERVED_BYTES: Final = 256 << 20
"""Bytes reserved at once at most: what a peer that breaks off can cost."""

Shortfall = Literal["", "absent", "no_space", "corrupt", "deadline", "unavailable"]
"""Why not all was pulled: the peer says that it does not hold the next block; there is no room for
it, or its parent had to make room; it does not match its checksum; time was up; the peer does not
answer, or has not brought what it said it holds."""


class Pulled(NamedTuple):
    """What came of a pull.

    Attributes:
        held: how many blocks of the chain, from its first on, this node holds now.
        why_not_more: empty where it is all of them.
    """

    held: int
    why_not_more: Shortfall


@dataclass(slots=True)
class _Part:
    """Blocks asked for together.

    Attributes:
        positions: in the reservation.
        views: the memory of each.
        getting: the call.
    """

    positions: list[int]
    views: list[memoryview]
    getting: Getting


class Puller:
    """Pulls blocks of one shard from one other node.

    Args:
        node: where the blocks are wanted.
        greeting: the other node, and the shard.
        transports: makes this node's halves of the transports to offer, the best first.
        most_bytes: bytes that one pull may hold reserved at once.

    Attributes:
        peer: the other node, with the session that there is.
    """

    def __init__(
        self, node: Node, greeting: Greeting, transports: MakeHalves, *, most_bytes: int
    ) -> None:
        self.peer = Peer(greeting, transports)
        self._node = node
        self._owner = greeting.namespace.tenant
        self._size = greeting.namespace.block_bytes
        self._most = max(1, min(most_bytes, _RESERVED_BYTES) // self._size)
        self._shard: ShardIndex = node.shard(greeting.namespace, greeting.shard)
        self._running: set[asyncio.Future[None]] = set()
        self._arrivals: set[asyncio.Future[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Puller from {self.peer!r}>"

    async def pull(
        self,
        parent: bytes,
        hashes: Sequence[bytes],
        *,
        deadline: float,
        checksums: Mapping[bytes, int] | None = None,
    ) -> Pulled:
        """Bring a chain of blocks here, as far as it is not here yet.

        What others are bringing or writing already is waited for, not pulled again. Blocks can be
        had one after the other as they come (``Node.arrival``), before this returns.

        Args:
            parent: hash of the block before the first; ``ROOT_PARENT`` where there is none.
            hashes: the chain, each block the parent of the next.
            deadline: seconds on the event loop's clock, at which this returns at the latest.
            checksums: crc32c of blocks by hash, from somebody who knows. A block that does not
                match is not kept.
        """
        done = asyncio.get_running_loop().create_future()
        self._running.add(done)
        why: Shortfall
        try:
            why = await self._pull(parent, hashes, deadline, checksums or {})
        except DeadlineExceeded:
            why = "deadline"
        except ParentAbsent:
            why = "no_space"
        except KVStoreError as error:
            why = "unavailable"
            _log.info("pull failed", peer=repr(self.peer), error=str(error))
        finally:
            self._running.discard(done)
            done.set_result(None)
        held = self._held(hashes, 0)
        return Pulled(held, "" if held == len(hashes) else why or "no_space")

    async def close(self) -> None:
        """End the session and all pulls; when this returns they have freed what they reserved."""
        self._closed = True
        self.peer.close()
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_result(None)
        while self._running:
            await asyncio.wait(self._running)

    # --- one pull ------------------------------------------------------------------------------

    def _held(self, hashes: Sequence[bytes], start: int) -> int:
        """The position of the first block from ``start`` on that this node does not hold."""
        committed = self._shard.committed
        while start < len(hashes) and hashes[start] in committed:
            start += 1
        return start

    async def _pull(
        self,
        parent: bytes,
        hashes: Sequence[bytes],
        deadline: float,
        checksums: Mapping[bytes, int],
    ) -> Shortfall:
        known = 0
        while (at := self._held(hashes, 0)) < len(hashes):
            if self._closed:
                raise Unavailable("this node does not pull any more")
            before = parent if at == 0 else hashes[at - 1]
            reserved = self._shard.reserved
            coming = reserved.get(before) or reserved.get(hashes[at])
            if coming is not None:
                await self._wait_for(coming, deadline)
                continue
            if known <= at:
                known = at + await self._ask(hashes[at:], deadline)
                if known == at:
                    return "absent"
                continue  # much may have happened meanwhile
            why = await self._bring(before, hashes[at:known], deadline, checksums)
            if why:
                return why
        return ""

    async def _wait_for(self, coming: Entry, deadline: float) -> None:
        """Wait until a block that somebody is writing is there, or given up.

        Raises:
            DeadlineExceeded: that takes too long.
        """
        arrival = self._node.arrival(coming)
        self._arrivals.add(arrival)
        try:
            async with asyncio.timeout_at(deadline):
                await arrival
        except TimeoutError as error:
            raise DeadlineExceeded("a block that is being written did not come in time") from error
        finally:
            self._arrivals.discard(arrival)

    async def _ask(self, hashes: Sequence[bytes], deadline: float) -> int:
        """How many blocks of the chain, from its first on, the peer holds."""
        session = await self.peer.ready(deadline)
        heard = session.heard
        try:
            tiers = await session.exists(hashes, deadline)
        except KVStoreError as error:
            self.peer.judge(session, heard, error)
            raise
        self.peer.answered()
        absent = tiers.find(0)
        return len(hashes) if absent < 0 else absent

    async def _bring(
        self,
        parent: bytes,
        hashes: Sequence[bytes],
        deadline: float,
        checksums: Mapping[bytes, int],
    ) -> Shortfall:
        """Reserve what the peer holds, as much as may be reserved at once, and receive it."""
        session = await self.peer.ready(deadline)
        verdicts, reservation = self._node.reserve(
            self._shard,
            self._owner,
            parent,
            hashes,
            number=0,
            most=self._most,
            outcomes=self._node.metrics.pulls,
        )
        if reservation is None:
            return "no_space" if verdicts[0] == REFUSED else ""
        reservation.checksums.update(
            (position, checksums[hashes[position]])
            for position in reservation.blocks
            if hashes[position] in checksums
        )
        heard = session.heard
        try:
            return await self._receive(session, reservation, deadline)
        except KVStoreError as error:
            self.peer.judge(session, heard, error)
            raise
        finally:
            self._node.abort(reservation)

    async def _receive(
        self, session: PeerSession, reservation: Reservation, deadline: float
    ) -> Shortfall:
        """Fill a reservation; what it then still holds has not come."""
        positions = list(reservation.blocks)
        step = session.blocks_at_once(self._size, _PART_BYTES)
        waiting = deque(positions[at : at + step] for at in range(0, len(positions), step))
        under_way: deque[_Part] = deque()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < _AHEAD:
                    part = self._begin(session, reservation, waiting.popleft(), deadline)
                    under_way.append(part)
                tiers = await session.finish(under_way[0].getting)
                why = await self._take(session, reservation, under_way.popleft(), tiers)
                if why:
                    return why
        finally:
            for part in under_way:
                session.give_up(part.getting)
        return ""

    def _begin(
        self,
        session: PeerSession,
        reservation: Reservation,
        positions: list[int],
        deadline: float,
    ) -> _Part:
        entries = reservation.select(positions)
        views = [self._node.dram.view(entry.dram, self._size) for entry in entries]  # type: ignore[arg-type]
        getting = session.begin_get([entry.hash for entry in entries], views, deadline)
        return _Part(positions, views, getting)

    async def _take(
        self, session: PeerSession, reservation: Reservation, part: _Part, tiers: bytes
    ) -> Shortfall:
        """Commit what has come of a part, up to the first block that has not, or not rightly."""
        count = tiers.find(0)
        why: Shortfall = "unavailable"
        if count < 0:
            count, why = len(tiers), ""
        sound = await self._count_sound(reservation, part, count)
        if sound < count:
            _log.error("pulled block corrupt", peer=repr(self.peer), transport=session.transport)
            count, why = sound, "corrupt"
        self._node.metrics.moved(session.transport, "in", count * self._size)
        committed = self._node.commit(reservation, part.positions[:count])
        if committed:
            self._node.renew(committed[max(committed)].path())
        if len(committed) < count:
            why = why or "no_space"  # a parent had to make room meanwhile
        return why

    async def _count_sound(self, reservation: Reservation, part: _Part, count: int) -> int:
        """How many blocks, of the first ``count``, come before one that fails its checksum."""
        expected = [reservation.checksums.get(position) for position in part.positions[:count]]
        if expected.count(None) == count:
            return count
        return await asyncio.to_thread(_sound, expected, part.views)


def _sound(expected: Sequence[int | None], views: Sequence[memoryview]) -> int:
    """The position of the first of ``views`` that does not have the checksum expected of it."""
    for position, checksum in enumerate(expected):
        if checksum is not None and crc32c(views[position]) != checksum:
            return position
    return len(expected)
