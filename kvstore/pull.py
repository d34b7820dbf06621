"""Pulling blocks from other nodes into this one's DRAM.

What comes is received straight into extents of this node's arena, which are reserved like those
of a put: invisible until all bytes are there, then committed with parents before children. So a
peer that dies, stalls or lies costs misses, and what was reserved for it is freed. What is pulled
is a replica: it makes room before blocks that no other node has.

Nothing is reserved, and so nothing evicted, before a peer has said that it holds the blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import structlog

from kvstore.entry import Entry, ShardIndex
from kvstore.errors import DeadlineExceeded, KVStoreError, ParentAbsent, Unavailable
from kvstore.filling import Filling, Part
from kvstore.node import Node
from kvstore.peer import MakeHalves, Peer
from kvstore.peer_session import Getting, Greeting, PeerSession
from kvstore.protocol.messages import REFUSED

_log = structlog.get_logger(__name__)

_PART_BYTES: Final = 4 << 20
"""Bytes of one get at most: they become visible together."""
_AHEAD: Final = 3
"""Gets under way at once with a peer, so that it never waits for the next."""
_RESERVED_BYTES: Final = 256 << 20
"""Bytes reserved at once at most: what peers that break off can cost."""
_ASKED: Final = 1024
"""Blocks that a peer is asked about at least, where the chain has as many."""
_PATIENCE: Final = 0.25
"""Seconds that a peer gets at least, where others could be asked in its place."""

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
class _UnderWay:
    """Blocks that a peer was asked for.

    Attributes:
        part: which.
        getting: the call.
    """

    part: Part
    getting: Getting


class Puller:
    """Pulls blocks of one shard from one other node.

    Args:
        node: where the blocks are wanted.
        greeting: the other node, and the shard.
        transports: makes this node's halves of the transports to offer, the best first.
        most_bytes: bytes that one pull may hold reserved at once.
        verify: whether to ask the other node for checksums and to compare.

    Attributes:
        peer: the other node, with the session that there is.
        shard: whose blocks.
    """

    def __init__(
        self,
        node: Node,
        greeting: Greeting,
        transports: MakeHalves,
        *,
        most_bytes: int,
        verify: bool = True,
    ) -> None:
        self.peer = Peer(greeting, transports)
        self.shard: ShardIndex = node.shard(greeting.namespace, greeting.shard)
        self.owner = greeting.namespace.tenant
        self.closed = False
        self._node = node
        self._verify = verify
        self._most_bytes = most_bytes
        self._ends: set[asyncio.Future[None]] = set()
        self._arrivals: set[asyncio.Future[None]] = set()

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
        """Bring a chain of blocks here from this peer alone; see :class:`Pull`."""
        pull = Pull(self._node, [self], parent, hashes, self._most_bytes, checksums=checksums)
        return await pull.run(deadline)

    async def close(self) -> None:
        """End the session; when this returns the pulls from here have freed what they reserved."""
        self.closed = True
        self.peer.close()
        for arrival in self._arrivals:
            if not arrival.done():
                arrival.set_result(None)
        while self._ends:
            await asyncio.wait(self._ends)

    # --- for a pull ----------------------------------------------------------------------------

    @contextmanager
    def busy(self) -> Iterator[None]:
        """For the time of a pull from here, which ``close`` waits for."""
        end = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            yield
        finally:
            self._ends.discard(end)
            end.set_result(None)

    @contextmanager
    def interrupting(self, arrival: asyncio.Future[None]) -> Iterator[None]:
        """For the time that a pull waits for something which ``close`` ends."""
        self._arrivals.add(arrival)
        try:
            yield
        finally:
            self._arrivals.discard(arrival)

    async def ask(self, hashes: Sequence[bytes], deadline: float) -> int:
        """How many blocks of the chain, from its first on, the peer holds.

        Raises:
            KVStoreError: it does not say.
        """
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

    def blocks_at_once(self) -> int:
        """How many blocks the peer gives at once, as far as is known."""
        size, session = self.shard.block_bytes, self.peer.session
        if session is None:
            return max(1, _PART_BYTES // size)
        return session.blocks_at_once(size, _PART_BYTES)

    async def fill(
        self, filling: Filling, end: int, patience: Callable[[], float]
    ) -> tuple[Shortfall, int]:
        """Bring parts of a reservation as long as there are any.

        Args:
            filling: the reservation.
            end: the first position that the peer does not hold.
            patience: until when to wait for what is asked for now, on the event loop's clock.

        Returns:
            Why it stopped before, empty where it did not; and the position up to which the peer is
            known to hold the chain.

        Raises:
            KVStoreError: the peer does not bring what it was asked for.
        """
        session = await self.peer.ready(patience())
        heard = session.heard
        try:
            return await self._fill(session, filling, end, patience)
        except KVStoreError as error:
            self.peer.judge(session, heard, error)
            raise

    async def _fill(
        self,
        session: PeerSession,
        filling: Filling,
        end: int,
        patience: Callable[[], float],
    ) -> tuple[Shortfall, int]:
        under_way: deque[_UnderWay] = deque()
        try:
            while True:
                while len(under_way) < _AHEAD and (part := filling.take(end)) is not None:
                    under_way.append(self._begin(session, filling, part, patience()))
                if under_way:
                    tiers = await session.finish(under_way[0].getting)
                    # At once, so that the peer goes on while this part is looked at.
                    if (part := filling.take(end)) is not None:
                        under_way.append(self._begin(session, filling, part, patience()))
                    why, lacks = await self._finish(session, filling, under_way, tiers)
                    if why:
                        return why, end if lacks is None else lacks
                elif not await filling.more(end):
                    return "no_space" if filling.broken else "", end
        finally:
            for asked in under_way:
                session.give_up(asked.getting)
                filling.give_back(asked.part)

    def _begin(
        self, session: PeerSession, filling: Filling, part: Part, deadline: float
    ) -> _UnderWay:
        try:
            hashes = [entry.hash for entry in filling.entries(part)]
            views = filling.views(part)
            return _UnderWay(
                part, session.begin_get(hashes, views, deadline, checksums=self._verify)
            )
        except BaseException:
            filling.give_back(part)
            raise

    async def _finish(
        self,
        session: PeerSession,
        filling: Filling,
        under_way: deque[_UnderWay],
        tiers: bytes,
    ) -> tuple[Shortfall, int | None]:
        """Land what has come of the first part under way, up to what has not, or not rightly.

        Returns:
            Why not all of it, and the position of the first block that the peer lacks, if any.
        """
        part, getting = under_way[0].part, under_way[0].getting
        found = tiers.find(0)
        count = len(part) if found < 0 else found
        why: Shortfall = "" if found < 0 else "unavailable"
        if getting.checksums is not None:
            filling.expect(dict(zip(part[:count], getting.checksums, strict=False)))
        sums = None if getting.sums is None else getting.sums.done[:count]
        sound = await filling.count_sound(part, count, sums)
        lacks = part[count] if count < len(part) else None
        if sound < count:
            _log.error("pulled block corrupt", peer=repr(self.peer), transport=session.transport)
            count, why, lacks = sound, "corrupt", part[sound]
        metrics, size = self._node.metrics, count * self.shard.block_bytes
        metrics.moved(session.transport, "in", size)
        metrics.pulled(session.welcome.node, count, size)
        under_way.popleft()
        filling.land(part, count)
        return "no_space" if filling.broken else why, lacks


class Pull:
    """Brings a chain of blocks of one shard here, as far as it is not here yet.

    Several peers that hold it share the work. One that fails is not asked again: what it did not
    bring the others do. What others are bringing or writing already is waited for, not pulled
    again. Blocks can be had one after the other as they come (``Node.arrival``).

    Args:
        node: where the blocks are wanted.
        pullers: ways to peers that may hold the chain; at least one, all of one shard.
        parent: hash of the block before the first; ``ROOT_PARENT`` where there is none.
        hashes: the chain, each block the parent of the next.
        most_bytes: bytes that may be reserved at once.
        checksums: crc32c of blocks by hash, from somebody who knows. A block that does not match
            is not kept.
        replica: whether what is brought is a replica, and makes room before other blocks.
        used: when the blocks were last used elsewhere; see ``Node.reserve``.
        wanted: how many leading blocks of the chain are wanted by now; all where left out.
        on_reserved: called whenever blocks have been reserved and are under way.

    Attributes:
        failed: why each peer that failed did.
        lacking: the position of the first block that a peer is known not to hold rightly.
    """

    def __init__(
        self,
        node: Node,
        pullers: Sequence[Puller],
        parent: bytes,
        hashes: Sequence[bytes],
        most_bytes: int,
        *,
        checksums: Mapping[bytes, int] | None = None,
        replica: bool = True,
        used: float | None = None,
        wanted: Callable[[], int] | None = None,
        on_reserved: Callable[[], None] = lambda: None,
    ) -> None:
        self.failed: dict[Puller, Shortfall] = {}
        self.lacking: dict[Puller, int] = {}
        self._node = node
        self._pullers = pullers
        self._shard = pullers[0].shard
        self._parent = parent
        self._hashes = hashes
        self._most = max(1, min(most_bytes, _RESERVED_BYTES) // self._shard.block_bytes)
        self._checksums = checksums or {}
        self._replica = replica
        self._used = used
        self._wanted = wanted or (lambda: len(hashes))
        self._on_reserved = on_reserved
        self._known: dict[Puller, int] = {}
        self._filling: Filling | None = None
        self._first = 0
        self._deadline = 0.0
        self._at = 0

    async def run(self, deadline: float) -> Pulled:
        """Pull; returns at ``deadline``, seconds on the event loop's clock, at the latest."""
        self._deadline = deadline
        why: Shortfall
        with ExitStack() as stack:
            for puller in self._pullers:
                stack.enter_context(puller.busy())
            try:
                why = await self._run()
            except DeadlineExceeded:
                why = "deadline"
            except Unavailable:
                why = "unavailable"
        held = self._held()
        return Pulled(held, "" if held >= self._wanted() else why or "no_space")

    def _held(self) -> int:
        """How many blocks of the chain, from its first on, this node holds."""
        committed, hashes, at = self._shard.committed, self._hashes, self._at
        if at and hashes[at - 1] not in committed:
            at = 0
        while at < len(hashes) and hashes[at] in committed:
            at += 1
        self._at = at
        return at

    def _coming(self, at: int) -> Entry | None:
        """What somebody else has to finish before the block at a position can be pulled."""
        reserved = self._shard.reserved
        return reserved.get(self._before(at)) or reserved.get(self._hashes[at])

    def _before(self, at: int) -> bytes:
        return self._parent if at == 0 else self._hashes[at - 1]

    async def _run(self) -> Shortfall:
        while (at := self._held()) < self._wanted():
            able = [one for one in self._pullers if one not in self.failed]
            if all(one.closed for one in self._pullers):
                raise Unavailable("this node does not pull any more")
            coming = self._coming(at)
            if coming is not None:
                await self._wait_for(coming)
            elif not able:
                return self.failed[self._pullers[-1]]
            elif (why := await self._round(at, able)) != "":
                return why
        return ""

    async def _wait_for(self, coming: Entry) -> None:
        """Wait until a block that somebody is writing is there, or given up.

        Raises:
            DeadlineExceeded: that takes too long.
        """
        arrival = self._node.arrival(coming)
        try:
            with ExitStack() as stack:
                for puller in self._pullers:
                    stack.enter_context(puller.interrupting(arrival))
                async with asyncio.timeout_at(self._deadline):
                    await arrival
        except TimeoutError as error:
            raise DeadlineExceeded("a block that is being written did not come in time") from error

    # --- a round: one reservation, filled by all who can -----------------------------------------

    async def _round(self, at: int, able: Sequence[Puller]) -> Shortfall:
        """Bring what comes next, as much as may be reserved at once."""
        try:
            if len(able) == 1:
                return await self._serve(able[0], at, 1)
            return await self._share(at, able)
        finally:
            if self._filling is not None:
                self._filling.close()
                self._filling = None

    async def _share(self, at: int, able: Sequence[Puller]) -> Shortfall:
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._serve(one, at, len(able))) for one in able}
        why: Shortfall = ""
        waiting = tasks
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                for task in done:
                    why = task.result() or why
                filling = self._filling
                if why or (filling is not None and (filling.complete or filling.broken)):
                    break  # whoever has not answered by now is not needed
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return why

    async def _serve(self, puller: Puller, at: int, able: int) -> Shortfall:
        """Have one peer do its share.

        Returns:
            Why no peer can bring more; empty where that is not known.
        """
        loop = asyncio.get_running_loop()

        def patience() -> float:
            left = self._deadline - loop.time()
            return (
                self._deadline
                if able == 1
                else loop.time() + max(min(left, _PATIENCE), left / able)
            )

        try:
            known = self._known.get(puller, 0)
            if known <= at:
                rest = self._hashes[at : max(self._wanted(), at + _ASKED)]
                known = at + await puller.ask(rest, patience())
                self._known[puller] = known
                if known == at:
                    self._fail(puller, "absent", at)
                    return ""
            if self._filling is None:
                if self._held() != at or self._coming(at) is not None:
                    return ""  # much may have happened meanwhile
                if (
                    why := self._reserve(at, min(known, self._wanted()), able)
                ) or self._filling is None:
                    return why
            why, end = await puller.fill(self._filling, known - self._first, patience)
        except KVStoreError as error:
            late = isinstance(error, DeadlineExceeded)
            self._fail(puller, "deadline" if late else "unavailable", None)
            _log.info("pull failed", peer=repr(puller.peer), error=str(error))
            return ""
        if why and why != "no_space":
            self._fail(puller, why, self._first + end)
            why = ""
        return why

    def _fail(self, puller: Puller, why: Shortfall, lacking: int | None) -> None:
        self.failed[puller] = why
        if lacking is not None:
            self.lacking[puller] = lacking

    def _reserve(self, at: int, end: int, able: int) -> Shortfall:
        """Reserve blocks from a position on, as many as may be, for peers to fill."""
        hashes = self._hashes[at:end]
        try:
            verdicts, reservation = self._node.reserve(
                self._shard,
                self._pullers[0].owner,
                self._before(at),
                hashes,
                number=0,
                most=self._most,
                outcomes=self._node.metrics.pulls,
                replica=self._replica,
                used=self._used,
            )
        except ParentAbsent:
            return "no_space"
        if reservation is None:
            return "no_space" if verdicts[0] == REFUSED else ""
        known = {place: self._checksums.get(hashes[place]) for place in reservation.blocks}
        part = min(one.blocks_at_once() for one in self._pullers)
        if able > 1:
            part = min(part, -(-len(known) // (2 * able)))
        self._filling = Filling(self._node, reservation, self._shard.block_bytes, part)
        self._filling.expect(known)
        self._first = at
        self._on_reserved()
        return ""
