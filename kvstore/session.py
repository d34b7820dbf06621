"""One client's session on a node: what it may ask, and all that it holds.

A session answers what it can at once and returns a coroutine for what has to wait: a block that
comes up from SSD or from another node, one that another session is writing, or a checksum. It does
no I/O of its own: ``kvstore.connection`` brings it requests and carries its replies away.

All that it holds, leases (pins of blocks handed out), reservations and a feed of its shard that it
follows, is bounded and ends with it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from kvstore.checksums import check_written, sum_unknown
from kvstore.entry import Entry, ShardIndex
from kvstore.errors import InvalidRequest, NamespaceMismatch
from kvstore.feed import Feed
from kvstore.fetch import Fetch
from kvstore.gpu_get import GpuGet
from kvstore.gpu_session import GpuSession
from kvstore.identity import Namespace
from kvstore.matching import Matching
from kvstore.movement import Movement
from kvstore.node import Node
from kvstore.protocol.fields import JoinedHashes
from kvstore.protocol.messages import (
    ABSENT,
    DRAM,
    FILL,
    HBM,
    MAX_HASHES,
    REMOTE,
    SSD,
    Abort,
    AbortAnswer,
    AnyRequest,
    DeviceSegments,
    Exists,
    Follow,
    FollowAnswer,
    Get,
    GetAnswer,
    Match,
    Ping,
    PingAnswer,
    Release,
    Reserve,
    ReserveAnswer,
    Segments,
    Take,
    Unmapped,
    Write,
    WriteAnswer,
)
from kvstore.remote import Remote
from kvstore.replication import Replication
from kvstore.reply import Handled, Reply, at_once, finished
from kvstore.reservation import Reservation
from kvstore.sharing import share_segments
from kvstore.taking import Taking
from rdma.errors import TransportError
from rdma.shm import ShmNodeTransport
from rdma.transport import Delivery, NodeTransport

_ALL_IN_DRAM: Final = bytes([DRAM]) * MAX_HASHES
_TIERS: Final = ((HBM, "hbm"), (DRAM, "dram"), (SSD, "ssd"), (REMOTE, "remote"))
_NO_REPLY: Final = Reply(None)


class Session:
    """A client's view of one namespace, from one shard, over one transport.

    Args:
        node: where the blocks are.
        movement: brings blocks up from SSD; None where there is no SSD.
        namespace: the client's namespace.
        shard: the client's shard of each block.
        transport: moves the payload.
        most_bytes: bytes that the session may hold pinned or reserved at once.
        verify: whether checksums are taken at put and compared at every get.
        remote: the rest of the pool; None where the node is alone.
        replication: copies blocks to it; likewise.
        taking: takes blocks from it; likewise.
        gpu: its part of the node's GPUs, taken over; None where it has none.

    Raises:
        NamespaceMismatch: the namespace has no such shard, or its blocks are too large.
    """

    def __init__(
        self,
        node: Node,
        movement: Movement | None,
        namespace: Namespace,
        shard: int,
        *,
        transport: NodeTransport,
        most_bytes: int,
        verify: bool,
        remote: Remote | None = None,
        replication: Replication | None = None,
        taking: Taking | None = None,
        gpu: GpuSession | None = None,
    ) -> None:
        if shard >= namespace.shards:
            raise NamespaceMismatch(
                f"shard {shard} of a namespace that has {namespace.shards}, counted from 0"
            )
        largest = min(node.dram.largest_block, most_bytes)
        if namespace.block_bytes > largest:
            raise NamespaceMismatch(
                f"blocks of {namespace.block_bytes} bytes; this node takes up to {largest}"
            )
        self.namespace = namespace
        self.transport = transport
        self._node = node
        self._shard: ShardIndex = node.shard(namespace, shard)
        self._size = namespace.block_bytes
        self._most_blocks = most_bytes // self._size
        self._verify = verify
        self._matching = Matching(node, movement, namespace, self._shard, remote)
        self._replication = replication
        self._taking = taking
        self._gpu = gpu
        self._fetch = Fetch(node, movement, self._shard, namespace, verify=verify, remote=remote)
        self._gpu_get: GpuGet | None = None
        if gpu is not None and not verify:  # there is no comparing a block on a GPU
            self._gpu_get = GpuGet(node, gpu, self._shard, self._fetch)
        self._numbers = itertools.count(1)
        self._leases: dict[int, list[Entry]] = {}
        self._reservations: dict[int, Reservation] = {}
        self._turns: dict[int, asyncio.Event] = {}  # of the last write begun in each
        self._held = 0
        self._feed: Feed | None = None  # of the shard, once it was asked for

    def __repr__(self) -> str:
        return (
            f"<Session {self.transport.name} tenant={self.namespace.tenant} "
            f"shard={self._shard.number} leases={len(self._leases)} "
            f"reservations={len(self._reservations)}>"
        )

    @property
    def writing(self) -> bool:
        """Whether there are blocks that are reserved and not committed."""
        return bool(self._reservations)

    @property
    def holds_memory(self) -> bool:
        """Whether the client may be reading or writing memory that it shares with the node."""
        shared = self.transport.name == "shm"
        return shared and bool(self._leases or self._reservations)

    @property
    def reading_gpu(self) -> bool:
        """Whether the client may be reading blocks on a GPU."""
        return self._gpu is not None and self._gpu.reading

    def handle(self, request: AnyRequest, deadline: float) -> Handled:
        """Do what a request asks.

        Args:
            request: anything but HELLO. A WRITE's payload has landed already.
            deadline: seconds on the event loop's clock.

        Raises:
            KVStoreError: the answer to this request.
        """
        kind = type(request)
        if kind is Get:
            return self._get(request, deadline)  # type: ignore[arg-type]
        if kind is Write:
            return self._write(request, deadline)  # type: ignore[arg-type]
        if kind is Match:
            return self._matching.match(request, deadline)  # type: ignore[arg-type]
        if kind is Take:
            return self._take(request, deadline)  # type: ignore[arg-type]
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise InvalidRequest("the session is open already")
        handled: Handled = handler(self, request)
        return handled

    def close(self) -> None:
        """Give up all that it holds. The client can't touch the node's memory any more."""
        self.transport.close()
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None
        for entries in self._leases.values():
            self._node.unpin(entries)
        self._leases.clear()
        for reservation in self._reservations.values():
            self._node.abort(reservation)
        self._reservations.clear()
        self._held = 0
        if self._feed is not None:
            self._feed = None
            self._node.unfollow(self._shard)

    def expire(self, now: float) -> None:
        """Let others store what this session reserved long ago and never committed.

        Args:
            now: seconds on the node's clock.
        """
        for reservation in self._reservations.values():
            if reservation.expires <= now:
                self._node.expire(reservation)

    # --- get -----------------------------------------------------------------------------------

    def _get(self, request: Get, deadline: float) -> Handled:
        began = time.perf_counter()
        length = self._length(request)
        if request.checksums:
            return self._get_with_checksums(request, length, deadline, began)
        if request.device and self._gpu_get is not None:
            return self._get_on_gpu(self._gpu_get, request, length, deadline, began)
        entries = self._node.index.lookup(self._shard, request.hashes)
        if self._verify or self.transport.waits:
            return self._get_later(request, length, deadline, began)
        try:
            places = [entry.dram for entry in entries]  # type: ignore[union-attr]
        except AttributeError:
            return self._get_some(request, entries, length, deadline, began)
        if None in places:
            return self._get_later(request, length, deadline, began)
        self._node.pin(entries)  # type: ignore[arg-type]
        tiers = _ALL_IN_DRAM[: len(entries)]
        return self._hand_out(request, length, entries, places, tiers, deadline, began)  # type: ignore[arg-type]

    def _get_some(
        self,
        request: Get,
        entries: Sequence[Entry | None],
        length: int,
        deadline: float,
        began: float,
    ) -> Handled:
        """A get of which at least one block is missing."""
        found = [entry for entry in entries if entry is not None]
        if (
            request.wait
            or any(entry.dram is None for entry in found)
            or self._fetch.reaches(request.hashes)
        ):
            return self._get_later(request, length, deadline, began)
        tiers = bytes([ABSENT if entry is None else DRAM for entry in entries])
        self._count_absent(request.hashes, tiers)
        self._node.pin(found)
        places: list[int] = [entry.dram for entry in found]  # type: ignore[misc]
        return self._hand_out(request, length, found, places, tiers, deadline, began)

    def _get_on_gpu(
        self, gpu: GpuGet, request: Get, length: int, deadline: float, began: float
    ) -> Handled:
        """A get by a client that reads blocks where they lie on a GPU."""

        def hand_out(found: list[Entry], places: list[int], tiers: bytes) -> Handled:
            return self._hand_out(request, length, found, places, tiers, deadline, began)

        return gpu.get(request, deadline, hand_out)

    def _length(self, request: Get) -> int:
        length = request.length or self._size - request.offset
        if length <= 0 or request.offset + length > self._size:
            raise InvalidRequest(
                f"bytes {request.offset} to {request.offset + length} are outside a block "
                f"of {self._size}"
            )
        return length

    def _count_absent(self, hashes: Sequence[bytes], tiers: bytes) -> None:
        metrics, reserved = self._node.metrics, self._shard.reserved
        for block, tier in zip(hashes, tiers, strict=True):
            if tier == ABSENT:
                metrics.miss("pending" if block in reserved else "absent")

    async def _get_later(self, request: Get, length: int, deadline: float, began: float) -> Reply:
        got = await self._fetch.fetch(request.hashes, wait=request.wait, deadline=deadline)
        for reason in got.misses:
            self._node.metrics.miss(reason)
        found = [entry for entry in got.entries if entry is not None]
        places: list[int] = [entry.dram for entry in found]  # type: ignore[misc]
        return await finished(
            self._hand_out(request, length, found, places, bytes(got.tiers), deadline, began)
        )

    async def _get_with_checksums(
        self, request: Get, length: int, deadline: float, began: float
    ) -> Reply:
        """What another node gets: what this one holds itself, to be compared on arrival."""
        if length != self._size:
            raise InvalidRequest("checksums are those of whole blocks")
        got = await self._fetch.fetch(
            request.hashes, wait=request.wait, deadline=deadline, own=True
        )
        for reason in got.misses:
            self._node.metrics.miss(reason)
        found = [entry for entry in got.entries if entry is not None]
        try:
            await sum_unknown(self._node, found, self._size)
        except BaseException:
            self._node.unpin(found)
            raise
        places: list[int] = [entry.dram for entry in found]  # type: ignore[misc]
        reply = await finished(
            self._hand_out(request, length, found, places, got.tiers, deadline, began)
        )
        assert isinstance(reply.answer, GetAnswer)
        reply.answer.checksums = [self._node.checksum(entry) or 0 for entry in found]
        return reply

    def _hand_out(
        self,
        request: Get,
        length: int,
        found: list[Entry],
        places: list[int],
        tiers: bytes,
        deadline: float,
        began: float,
    ) -> Handled:
        """Answer a get. ``found`` is what it returns: pinned, and in DRAM at ``places``."""
        if self._held + len(found) > self._most_blocks:
            tiers = self._cut(found, tiers)
            del places[len(found) :]
        if offset := request.offset:
            places = [place + offset for place in places]
        transport = self.transport
        try:
            destinations = transport.select(request.destinations, length, tiers)
            pushed = transport.push(places, length, destinations, deadline)
            if transport.waits:
                return self._hand_out_later(pushed, length, found, tiers, began)
            delivery = at_once(pushed)
        except TransportError:
            self._node.unpin(found)
            raise
        return self._answer_get(delivery, length, found, tiers, began)

    async def _hand_out_later(
        self,
        pushed: Coroutine[Any, Any, Delivery],
        length: int,
        found: list[Entry],
        tiers: bytes,
        began: float,
    ) -> Reply:
        delivery = None
        try:
            delivery = await pushed
        finally:
            if delivery is None:
                self._node.unpin(found)
        return self._answer_get(delivery, length, found, tiers, began)

    def _answer_get(
        self, delivery: Delivery, length: int, found: list[Entry], tiers: bytes, began: float
    ) -> Reply:
        metrics = self._node.metrics
        for code, tier in _TIERS:
            if count := tiers.count(code):
                metrics.hit(tier, count)
        metrics.moved(self.transport.name, "out", len(found) * length)
        lease = self._lease(found) if found and delivery.holds else 0
        answer = GetAnswer(lease, tiers, delivery.locations)
        metrics.get_seconds.observe(time.perf_counter() - began)
        return Reply(answer, delivery.payload, () if lease else found, found)

    def _cut(self, found: list[Entry], codes: bytes) -> bytes:
        """Turn into misses what is more than the session may hold; return the tiers left."""
        tiers = bytearray(codes)
        room = max(self._most_blocks - self._held, 0)
        extra = found[room:]
        del found[room:]
        self._node.unpin(extra)
        self._node.metrics.miss("no_space", len(extra))
        for position in reversed(range(len(tiers))):
            if not extra:
                break
            if tiers[position]:
                tiers[position] = ABSENT
                extra.pop()
        return bytes(tiers)

    def _lease(self, entries: list[Entry]) -> int:
        number = next(self._numbers)
        self._leases[number] = entries
        self._held += len(entries)
        return number

    def _release(self, request: Release) -> Reply:
        for number in request.leases:
            entries = self._leases.pop(number, None)
            if entries is not None:
                self._held -= len(entries)
                self._node.unpin(entries)
        if self._gpu is not None:
            self._gpu.released(request.leases)
        return _NO_REPLY

    # --- put -----------------------------------------------------------------------------------

    def _reserve(self, request: Reserve) -> Reply:
        number = next(self._numbers)
        verdicts, reservation = self._node.reserve(
            self._shard,
            self.namespace.tenant,
            request.parent,
            request.hashes,
            number=number,
            most=self._most_blocks - self._held if self._node.accepts_puts else 0,
        )
        copies = 0
        if self._replication is not None:
            copies = self._replication.wanted(self._shard, request, verdicts)
        elif request.copies > 1:
            self._node.metrics.copies["short"] += verdicts.count(FILL)
        if reservation is None:
            return Reply(ReserveAnswer(0, verdicts, self.transport.grant([])))
        reservation.copies = copies
        self._reservations[number] = reservation
        self._held += len(reservation.blocks)
        places: list[int] = [entry.dram for entry in reservation.blocks.values()]  # type: ignore[misc]
        return Reply(ReserveAnswer(number, verdicts, self.transport.grant(places)))

    def landing(self, request: Write) -> list[memoryview]:
        """Where the payload of a WRITE goes.

        Raises:
            InvalidRequest: the reservation or a block is not this session's to fill, or the bytes
                are outside a block.
        """
        blocks = self._reservation(request.reservation).select(request.indexes)
        views = self.transport.landing(self._places(request, blocks), request.length)
        if views is None:
            raise InvalidRequest(f"the {self.transport.name} transport takes no payload here")
        return views

    def _places(self, request: Write, blocks: Sequence[Entry]) -> list[int]:
        start, end = request.offset, request.offset + request.length
        if end > self._size:
            raise InvalidRequest(f"bytes {start} to {end} are outside a block of {self._size}")
        return [entry.dram + start for entry in blocks]  # type: ignore[operator]

    def _reservation(self, number: int) -> Reservation:
        reservation = self._reservations.get(number)
        if reservation is None:
            raise InvalidRequest(f"there is no reservation {number}")
        return reservation

    def _write(self, request: Write, deadline: float) -> Handled:
        reservation = self._reservation(request.reservation)
        blocks = reservation.select(request.indexes)
        places = self._places(request, blocks)
        later = request.commit and self._verify
        if request.length:
            if self.transport.waits:
                later = True
            else:
                at_once(self.transport.pull(places, request.length, request.sources, deadline))
        if later:
            # At once: a request that came with this one must not change what is written here.
            reservation.checking.update(request.indexes)
            return self._write_later(request, reservation, blocks, places, deadline)
        return self._landed(request, reservation) or self._commit(request, reservation)

    async def _write_later(
        self,
        request: Write,
        reservation: Reservation,
        blocks: Sequence[Entry],
        places: Sequence[int],
        deadline: float,
    ) -> Reply:
        if self._reservations.get(reservation.number) is not reservation:
            # By a request that came with this one; the memory may be other blocks' by now.
            raise InvalidRequest(f"reservation {reservation.number} was given up meanwhile")
        before, over = self._turns.get(reservation.number), asyncio.Event()
        self._turns[reservation.number] = over
        # The transport writes to the blocks until it returns, even if they are given up meanwhile.
        self._node.pin(blocks)
        try:
            if request.length and self.transport.waits:
                await self.transport.pull(places, request.length, request.sources, deadline)
            if (reply := self._landed(request, reservation)) is not None:
                return reply
            if self._verify:
                await check_written(self._node, reservation, request.indexes, blocks, self._size)
            if before is not None:
                # Else blocks whose parents come a little later would be answered for as lost.
                await before.wait()
            reservation.checking.difference_update(request.indexes)
            return self._commit(request, reservation)
        finally:
            reservation.checking.difference_update(request.indexes)
            self._node.unpin(blocks)
            over.set()
            if self._turns[reservation.number] is over:
                del self._turns[reservation.number]

    def _landed(self, request: Write, reservation: Reservation) -> Reply | None:
        """Take note of a write whose bytes are all there; a reply where no more is asked."""
        count = len(request.indexes)
        self._node.metrics.moved(self.transport.name, "in", count * request.length)
        if not request.commit:
            return Reply(WriteAnswer(bytes(count)))
        if request.checksums is not None:
            reservation.checksums.update(zip(request.indexes, request.checksums, strict=True))
        return None

    def _commit(self, request: Write, reservation: Reservation) -> Reply:
        began = time.perf_counter()
        before = len(reservation.blocks)
        committed = self._node.commit(reservation, request.indexes)
        self._held -= before - len(reservation.blocks)
        if not reservation.blocks:
            self._reservations.pop(reservation.number, None)
        self._node.metrics.put_seconds.observe(time.perf_counter() - began)
        flags = bytes([position in committed for position in request.indexes])
        if committed:
            if self._replication is not None and reservation.copies > 1:
                self._replication.ask(list(committed.values()), reservation.copies)
            # The blocks before the new ones, too: no parent may look older than its child.
            self._node.renew(committed[max(committed)].path())
        return Reply(WriteAnswer(flags))

    def _abort(self, request: Abort) -> Reply:
        reservation = self._reservations.pop(request.reservation, None)
        if reservation is None:
            raise InvalidRequest(f"there is no reservation {request.reservation}")
        self._held -= len(reservation.blocks)
        self._node.abort(reservation)
        return Reply(AbortAnswer())

    # --- the rest ------------------------------------------------------------------------------

    def _exists(self, request: Exists) -> Reply:
        return self._matching.exists(request)

    def _segments(self, request: Segments) -> Reply:
        if not isinstance(self.transport, ShmNodeTransport):
            raise InvalidRequest("segments are shared with sessions of the transport shm only")
        return share_segments(self._node.dram, self.namespace.tenant, request.numbers)

    def _device_segments(self, request: DeviceSegments) -> Reply:
        if self._gpu is None:
            raise InvalidRequest("the client has none of the node's GPUs within reach")
        return Reply(self._gpu.share(request.numbers))

    def _unmapped(self, request: Unmapped) -> Reply:
        if self._gpu is not None:
            self._gpu.unmapped(request.numbers)
        return _NO_REPLY

    async def _take(self, request: Take, deadline: float) -> Reply:
        if self._taking is None:
            raise InvalidRequest("this node is in no pool")
        return Reply(await self._taking.take(self.namespace, self._shard, request, deadline))

    def _follow(self, request: Follow) -> Reply:
        if self._feed is None:
            self._feed = self._node.follow(self._shard)
        recorded = self._feed.since(request.after, request.limit)
        hashes = JoinedHashes(recorded.hashes)
        return Reply(FollowAnswer(recorded.sequence, recorded.complete, recorded.kinds, hashes))

    def _ping(self, request: Ping) -> Reply:
        return Reply(PingAnswer())


_HANDLERS: Final[dict[type, Any]] = {
    DeviceSegments: Session._device_segments,
    Exists: Session._exists,
    Follow: Session._follow,
    Release: Session._release,
    Reserve: Session._reserve,
    Segments: Session._segments,
    Abort: Session._abort,
    Ping: Session._ping,
    Unmapped: Session._unmapped,
}
