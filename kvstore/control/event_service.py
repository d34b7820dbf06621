"""The node's answers to ``Events.Follow``: one stream for each follower, at the follower's pace."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

import structlog
from grpclib.server import Stream

from kvstore.control import events_pb2 as pb
from kvstore.control.arguments import checked_hash
from kvstore.control.boundary import answering
from kvstore.control.events_grpc import EventsBase
from kvstore.entry import IN_DRAM, IN_HBM, IN_SSD, ShardIndex
from kvstore.errors import InvalidRequest, OutOfSpace, Unavailable
from kvstore.events import Batch, Events, Follower, Word
from kvstore.metrics import Metrics

MOST_FOLLOWERS: Final = 64
"""Followers of one node; each costs it a few microseconds an event."""
MOST_NAMESPACES: Final = 1000
"""Namespaces that one follower may name."""

_GATHER_SECONDS: Final = 0.01
"""Wait for more after the first event, so that a burst of puts is a few messages."""
_HOST_TIERS: Final = {
    0: (),
    IN_DRAM: (pb.TIER_DRAM,),
    IN_SSD: (pb.TIER_SSD,),
    IN_DRAM | IN_SSD: (pb.TIER_DRAM, pb.TIER_SSD),
}
_TIERS: Final = _HOST_TIERS | {
    bits | IN_HBM: (pb.TIER_HBM, *tiers) for bits, tiers in _HOST_TIERS.items()
}
"""By the bits of an entry's state."""

_log = structlog.get_logger(__name__)


class EventService(EventsBase):
    """Tells followers what the node gains and loses.

    Args:
        events: of the node.
        name: the node's.
        incarnation: of this start.
        metrics: is counted into.
        on_fault: called for every exception that is not one of ``kvstore.errors``, to count it.
        heartbeat: seconds after which a follower hears from the node though nothing happens.
        patience: seconds in which a follower must take a message.
        linger: seconds that events are still recorded after the last follower has gone, so that it
            can resume.
    """

    def __init__(
        self,
        events: Events,
        name: str,
        incarnation: str,
        metrics: Metrics,
        on_fault: Callable[[], None] = lambda: None,
        *,
        heartbeat: float = 3.0,
        patience: float = 30.0,
        linger: float = 60.0,
    ) -> None:
        self._events = events
        self._name = name
        self._incarnation = incarnation
        self._metrics = metrics
        self._on_fault = on_fault
        self._heartbeat = heartbeat
        self._patience = patience
        self._linger = linger
        self._ending: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Record nothing more. The server has been closed, so that nobody follows."""
        self._stay()
        self._events.rest()

    async def Follow(self, stream: Stream[pb.FollowRequest, pb.EventBatch]) -> None:
        """Answer with batches, until the follower goes away or takes no more."""
        async with answering(stream, self._on_fault) as request:
            follower = self._follow(request)
            try:
                await self._tell(stream, follower)
            finally:
                self._part(follower)

    def _follow(self, request: pb.FollowRequest) -> Follower:
        if self._events.followers >= MOST_FOLLOWERS:
            raise OutOfSpace(f"{MOST_FOLLOWERS} follow this node, and no more can")
        if len(request.namespaces) > MOST_NAMESPACES:
            raise InvalidRequest(f"at most {MOST_NAMESPACES} namespaces can be named")
        namespaces = [checked_hash(one) for one in request.namespaces]
        position = None
        if request.HasField("after"):
            mine = request.after.incarnation == self._incarnation
            position = request.after.sequence if mine else 0
        self._stay()
        self._metrics.followers += 1
        return self._events.follow(position, namespaces, snapshot=not request.from_now)

    def _part(self, follower: Follower) -> None:
        follower.close()
        self._metrics.followers -= 1
        if not self._events.followers:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(self._linger, self._events.rest)

    def _stay(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    async def _tell(
        self, stream: Stream[pb.FollowRequest, pb.EventBatch], follower: Follower
    ) -> None:
        clock = asyncio.get_running_loop().time
        due = clock() + self._heartbeat
        while True:
            batches = follower.take()
            self._metrics.follower_failures["gap"] = self._events.gaps
            if not batches and not await _happens(follower, due - clock()):
                batches = [follower.heartbeat()]
            for batch in batches:
                await self._send(stream, batch)
                due = clock() + self._heartbeat
            # What was sent may have waited for nothing.
            await asyncio.sleep(0)

    async def _send(self, stream: Stream[pb.FollowRequest, pb.EventBatch], batch: Batch) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await stream.send_message(self._encode(batch))
        except TimeoutError as error:
            self._metrics.follower_failures["stuck"] += 1
            _log.warning("follower too slow", seconds=self._patience, peer=stream.peer.addr())
            await _break_off(stream)
            raise Unavailable(f"the follower took nothing for {self._patience:g} s") from error

    def _encode(self, batch: Batch) -> pb.EventBatch:
        message = pb.EventBatch(
            word=cast(Any, int(batch.word)),
            after=batch.after,
            sequence=batch.sequence,
            complete=batch.complete,
        )
        if batch.word in (Word.RESET, Word.RESUMED):
            message.node, message.incarnation = self._name, self._incarnation
        shards: dict[ShardIndex, int] = {}
        for change, tiers, entry in batch.events:
            message.events.add(
                change=cast(Any, int(change)),
                shard=shards.setdefault(entry.shard, len(shards)),
                hash=entry.hash,
                parent=entry.parent_hash,
                tiers=_TIERS[tiers],
            )
        for shard in shards:
            message.shards.add(
                namespace=shard.namespace, number=shard.number, block_bytes=shard.block_bytes
            )
        return message


async def _happens(follower: Follower, seconds: float) -> bool:
    """Wait until there is something to be told, and gather what else is just happening."""
    happened = asyncio.Event()
    follower.wait(happened.set)
    try:
        async with asyncio.timeout(seconds):
            await happened.wait()
            await asyncio.sleep(_GATHER_SECONDS)
    except TimeoutError:
        return False
    return True


async def _break_off(stream: Any) -> None:
    """End a stream within a message, where no status can follow.

    The connection is kept for other calls, unless its peer reads nothing at all.
    """
    inner = stream._stream
    if inner.connection.write_ready.is_set():
        await stream.cancel()
    else:
        inner._transport.abort()
