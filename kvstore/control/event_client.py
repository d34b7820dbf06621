"""Following a node from the other end: batches, and a map that outlives connections."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final, cast, get_args

import structlog

from kvstore.control import events_pb2 as pb
from kvstore.control.block_map import (
    BatchMissing,
    BlockEvent,
    BlockMap,
    Change,
    EventBatch,
    Position,
    Word,
)
from kvstore.control.channel import ControlChannel
from kvstore.control.events_grpc import EventsStub
from kvstore.errors import DeadlineExceeded, InternalError, OutOfSpace, Unavailable

_WORDS: Final = cast(tuple[Word, ...], ("", *get_args(Word)))
_CHANGES: Final = cast(tuple[Change, ...], ("", *get_args(Change)))
_TIERS: Final = ("", "hbm", "dram", "ssd")
_RETRY_SECONDS: Final = 0.2
_LONGEST_RETRY_SECONDS: Final = 5.0

_log = structlog.get_logger(__name__)


class EventClient(ControlChannel):
    """A connection to one node, to follow it.

    The node sends something every few seconds, so a ``timeout`` of 10 s tells one that is dead.
    """

    def follow(
        self, after: Position | None = None, namespaces: Sequence[bytes] = ()
    ) -> AsyncGenerator[EventBatch, None]:
        """See ``follow``."""
        return follow(self, after, namespaces)


async def follow(
    channel: ControlChannel,
    after: Position | None = None,
    namespaces: Sequence[bytes] = (),
    *,
    from_now: bool = False,
) -> AsyncGenerator[EventBatch, None]:
    """What a node tells, until the connection is lost.

    Args:
        channel: the connection.
        after: from where to resume.
        namespaces: fingerprints of those to be told of; of all, where there are none.
        from_now: leave out what the node holds already.

    Raises:
        Unavailable: nothing answers, or the node has stopped.
        DeadlineExceeded: nothing was heard for as long as the channel waits.
        OutOfSpace: too many follow the node.
        AccessDenied: the token is wrong.
    """
    request = pb.FollowRequest(namespaces=namespaces, from_now=from_now)
    if after is not None:
        request.after.incarnation, request.after.sequence = after
    stub = EventsStub(channel.channel)
    async with aclosing(channel.stream(stub.Follow, request)) as batches:
        async for batch in batches:
            yield decode_batch(batch)


class Following:
    """What one node holds, kept up to date for as long as ``batches`` is iterated.

    Args:
        connect: makes a client of the node; called for each connection.
        namespaces: fingerprints of those to be told of; of all, where there are none.

    Attributes:
        map: what is known. It stays while the node can't be reached, as it may be back with all of
            it; ``connected`` says so.
        connected: whether the node is being heard.
        connections: how often it was reached.
    """

    def __init__(
        self, connect: Callable[[], EventClient], namespaces: Sequence[bytes] = ()
    ) -> None:
        self.map = BlockMap()
        self.connected = False
        self.connections = 0
        self._connect = connect
        self._namespaces = namespaces

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        """Follow without end, resuming after each loss; each batch is in ``map`` already.

        Raises:
            AccessDenied: the token is wrong.
        """
        delay = _RETRY_SECONDS
        while True:
            try:
                async with aclosing(self._until_lost()) as batches:
                    async for batch in batches:
                        delay = _RETRY_SECONDS
                        yield batch
                why = "the node ended the stream"
            except (Unavailable, DeadlineExceeded, OutOfSpace, InternalError) as error:
                why = str(error)
            except BatchMissing as error:
                self.map.forget()
                why = str(error)
            finally:
                self.connected = False
            _log.info("not following", node=self.map.node, reason=why, retry_seconds=delay)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, _LONGEST_RETRY_SECONDS)

    async def run(self) -> None:
        """The same for those who only want the map. Ends by being cancelled."""
        async with aclosing(self.batches()) as batches:
            async for _ in batches:
                pass

    async def _until_lost(self) -> AsyncGenerator[EventBatch, None]:
        # A connection of its own each time: one that is stuck would be used again otherwise.
        async with self._connect() as client:
            follow = client.follow(self.map.position, self._namespaces)
            async with aclosing(follow) as batches:
                async for batch in batches:
                    self.map.apply(batch)
                    if not self.connected:
                        self.connected = True
                        self.connections += 1
                    yield batch


def decode_batch(batch: pb.EventBatch) -> EventBatch:
    """A batch as it came over the wire.

    Raises:
        Unavailable: it says what this version doesn't know.
    """
    try:
        return EventBatch(
            word=_WORDS[batch.word],
            after=batch.after,
            sequence=batch.sequence,
            complete=batch.complete,
            node=batch.node,
            incarnation=batch.incarnation,
            events=tuple(_decode_event(event, batch.shards) for event in batch.events),
        )
    except IndexError as error:
        raise Unavailable("the node tells events of another version") from error


def _decode_event(event: pb.BlockEvent, shards: Sequence[pb.Shard]) -> BlockEvent:
    shard = shards[event.shard]
    return BlockEvent(
        change=_CHANGES[event.change],
        namespace=shard.namespace,
        shard=shard.number,
        hash=event.hash,
        parent=event.parent,
        tiers=tuple(_TIERS[tier] for tier in event.tiers),
    )
