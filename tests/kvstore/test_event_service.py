"""Followers and a node's event service over real loopback sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
from grpclib.client import Channel
from grpclib.config import Configuration
from grpclib.exceptions import StreamTerminatedError

from kvstore.control import event_service
from kvstore.control import events_pb2 as pb
from kvstore.control.block_map import BlockMap, EventBatch, Position
from kvstore.control.event_client import EventClient, Following, decode_batch
from kvstore.control.event_service import EventService
from kvstore.control.events_grpc import EventsStub
from kvstore.control.server import ControlServer
from kvstore.entry import Entry
from kvstore.errors import AccessDenied, InvalidRequest, OutOfSpace, Unavailable
from kvstore.events import Events
from kvstore.metrics import Metrics
from kvstore.units import Address
from tests.kvstore.test_events import held_by, known_by
from tests.kvstore.test_index import block_hash, chain, new_index

ANY_PORT = Address("127.0.0.1", 0)
PATIENCE = 20.0


class Told:
    """A node of which only the index and the event service are real."""

    def __init__(self, capacity: int = 1000, incarnation: str = "first", **times: float) -> None:
        self.index, self.shard = new_index()
        self.events = Events(self.index, capacity)
        self.faults: list[None] = []
        self.metrics = Metrics()
        self.service = EventService(
            self.events,
            "node-1",
            incarnation,
            self.metrics,
            lambda: self.faults.append(None),
            **times,
        )
        self.server: ControlServer
        self._numbers = count()

    async def start(self, address: Address = ANY_PORT, token: str | None = None) -> None:
        self.server = ControlServer([self.service], address, token=token)
        await self.server.start()

    async def stop(self) -> None:
        await self.server.close()
        self.service.close()
        assert self.events.followers == self.metrics.followers == 0
        assert self.index.observers == ()
        assert self.faults == []

    def store(self, blocks: int) -> list[Entry]:
        numbers = [next(self._numbers) for _ in range(blocks)]
        return [chain(self.index, self.shard, [number])[0] for number in numbers]

    def client(self, **given: Any) -> EventClient:
        return EventClient(self.server.address, timeout=PATIENCE, **given)


@asynccontextmanager
async def told(token: str | None = None, **options: Any) -> AsyncIterator[Told]:
    node = Told(**options)
    await node.start(token=token)
    try:
        yield node
    finally:
        await node.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def drained(read: Callable[[], Awaitable[object]]) -> None:
    while await read() is not None:
        pass


def alive(protocol: Any) -> bool:
    return not protocol.connection._transport.is_closing()


@asynccontextmanager
async def following(follower: Following) -> AsyncIterator[list[EventBatch]]:
    """Keeps a map up to date meanwhile, and lists what it was told."""
    batches: list[EventBatch] = []

    async def follow() -> None:
        async with aclosing(follower.batches()) as told:
            async for batch in told:
                batches.append(batch)

    task = asyncio.create_task(follow())
    try:
        yield batches
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def agrees(follower: Following, node: Told) -> Callable[[], bool]:
    return lambda: follower.map.complete and known_by(follower.map) == held_by(node.index)


async def test_a_follower_is_told_what_is_held_and_what_happens() -> None:
    async with told() as node:
        entries = node.store(600)
        follower = Following(node.client)
        async with following(follower) as batches:
            await until(agrees(follower, node))
            assert follower.connected
            assert (follower.map.node, follower.map.incarnation) == ("node-1", "first")
            node.index.place(entries[0], "ssd", 1)
            node.index.displace(entries[0], "dram")
            node.index.drop(entries[1])
            node.store(3)
            await until(agrees(follower, node))
            words = [batch.word for batch in batches]
            assert words[0] == "reset"
            assert set(words[1:4]) == {"snapshot"}
        changes = [
            one.change for batch in batches if batch.word == "events" for one in batch.events
        ]
        assert changes == ["moved", "moved", "removed", "stored", "stored", "stored"]
    assert not follower.connected


async def test_a_lost_connection_is_taken_up_where_it_was_lost() -> None:
    async with told() as node:
        node.store(5)
        follower = Following(node.client)
        async with following(follower):
            await until(agrees(follower, node))
        node.store(7)  # while nobody listens
        async with following(follower) as batches:
            await until(agrees(follower, node))
        assert batches[0].word == "resumed"
        assert sum(len(batch.events) for batch in batches) == 7
        assert follower.connections == 2


async def test_nothing_is_kept_for_those_who_stay_away() -> None:
    async with told(linger=0.05) as node:
        node.store(5)
        follower = Following(node.client)
        async with following(follower):
            await until(agrees(follower, node))
        await until(lambda: not node.index.observers)
        node.store(7)
        async with following(follower) as batches:
            await until(agrees(follower, node))
        assert batches[0].word == "reset"


async def test_one_who_comes_back_in_time_keeps_the_log_alive() -> None:
    async with told(linger=0.3) as node:
        follower = Following(node.client)
        async with following(follower):
            await until(agrees(follower, node))
        async with following(follower):
            await until(lambda: follower.connected)
            assert node.service._ending is None
            assert node.index.observers


async def test_a_node_that_was_started_anew_is_learnt_anew() -> None:
    node = Told()
    await node.start()
    node.store(5)
    follower = Following(node.client)
    async with following(follower) as batches:
        await until(agrees(follower, node))
        address = node.server.address
        await node.stop()
        await until(lambda: not follower.connected)
        assert len(follower.map) == 5  # it may be back with all of it
        again = Told(incarnation="second")
        again.store(2)
        await again.start(address)
        await until(agrees(follower, again))
        assert follower.map.incarnation == "second"
        assert [batch.word for batch in batches].count("reset") == 2
    await again.stop()


async def test_many_follow_one_node() -> None:
    async with told() as node:
        followers = [Following(node.client) for _ in range(12)]
        tasks = [asyncio.create_task(one.run()) for one in followers]
        for _ in range(20):
            for entry in node.store(20)[::3]:
                node.index.drop(entry)
            await asyncio.sleep(0)
        for one in followers:
            await until(agrees(one, node))
        assert node.metrics.followers == 12
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: node.events.followers == 0)


async def test_no_more_follow_than_a_node_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_service, "MOST_FOLLOWERS", 1)
    async with told() as node, node.client() as first, node.client() as second:
        stream = first.follow()
        assert (await anext(stream)).word == "reset"
        with pytest.raises(OutOfSpace, match="1 follow this node"):
            await anext(second.follow())
        await stream.aclose()
        await until(lambda: node.events.followers == 0)
        async with aclosing(second.follow()) as other:
            assert (await anext(other)).word == "reset"


@asynccontextmanager
async def lazy_stream(channel: Channel) -> AsyncIterator[Any]:
    async with EventsStub(channel).Follow.open() as stream:
        await stream.send_message(pb.FollowRequest(), end=True)
        yield stream
        await stream.cancel()


@asynccontextmanager
async def lazy_channel(node: Told) -> AsyncIterator[Channel]:
    """The windows of its streams are so small that little is sent ahead of what is read."""
    least = Configuration(http2_stream_window_size=65_535)
    channel = Channel(node.server.address.host, node.server.address.port, config=least)
    try:
        yield channel
    finally:
        channel.close()


async def test_a_follower_that_is_too_slow_is_told_so_and_recovers() -> None:
    async with (
        told(capacity=1000) as node,
        lazy_channel(node) as channel,
        lazy_stream(channel) as stream,
    ):
        known = BlockMap()
        words = []

        async def read() -> None:
            async with asyncio.timeout(PATIENCE):
                batch = decode_batch(await stream.recv_message())
            known.apply(batch)
            words.append(batch.word)

        await read()
        for _ in range(100):
            for entry in node.store(100)[::2]:
                node.index.drop(entry)
            await asyncio.sleep(0)
        assert len(node.events._entries) == 1000  # nothing is kept for the one who doesn't read
        while not (known.complete and known.sequence == node.events.sequence):
            await read()
        assert known_by(known) == held_by(node.index)
        assert node.metrics.follower_failures["gap"] == node.events.gaps >= 1
        assert words.count("reset") == 1 + node.events.gaps


async def test_a_follower_that_takes_nothing_is_let_go() -> None:
    async with told(capacity=100_000, patience=0.2) as node, lazy_channel(node) as channel:
        node.store(5000)

        async def neglect() -> None:
            async with lazy_stream(channel) as stream:
                await stream.recv_message()
                await until(lambda: node.events.followers == 0)
                async with asyncio.timeout(PATIENCE):
                    await drained(stream.recv_message)

        with pytest.raises(StreamTerminatedError):
            await neglect()
        assert node.metrics.follower_failures["stuck"] == 1
        # The connection is good for another call.
        async with lazy_stream(channel) as stream, asyncio.timeout(PATIENCE):
            assert (await stream.recv_message()).word == pb.EventBatch.RESET


async def test_a_follower_that_reads_nothing_at_all_is_hung_up_on() -> None:
    async with told(capacity=200_000, patience=0.5) as node:
        wide = Configuration(http2_connection_window_size=2**30, http2_stream_window_size=2**30)
        channel = Channel(node.server.address.host, node.server.address.port, config=wide)

        async def freeze() -> None:
            async with EventsStub(channel).Follow.open() as stream:
                await stream.send_message(pb.FollowRequest(), end=True)
                await stream.recv_message()
                transport = stream._stream._transport
                transport.pause_reading()
                for _ in range(100):
                    node.store(1000)  # some 10 MB, more than the kernel keeps for it
                    await asyncio.sleep(0)
                await until(lambda: node.events.followers == 0)
                transport.resume_reading()
                async with asyncio.timeout(PATIENCE):
                    await drained(stream.recv_message)

        with pytest.raises((StreamTerminatedError, ConnectionError)):
            await freeze()
        channel.close()
        await until(lambda: not any(map(alive, node.server._server._connections)))


async def test_a_quiet_node_is_heard_all_the_same() -> None:
    async with told(heartbeat=0.02) as node, node.client() as client:
        async with aclosing(client.follow()) as batches:
            async for batch in batches:
                if batch.word == "heartbeat":
                    break
        assert batch.complete
        assert batch.sequence == node.events.sequence


async def test_what_others_are_told_does_not_keep_a_follower_in_the_dark() -> None:
    async with told(heartbeat=0.1) as node, node.client() as client:
        stop = asyncio.Event()

        async def fill() -> None:
            while not stop.is_set():
                node.store(1)
                await asyncio.sleep(0.001)

        filling = asyncio.create_task(fill())
        told_of: list[EventBatch] = []
        async with asyncio.timeout(PATIENCE), aclosing(client.follow(None, [b"x" * 32])) as batches:
            async for batch in batches:
                told_of.append(batch)
                if batch.word == "heartbeat" and batch.sequence > told_of[0].sequence:
                    break
        stop.set()
        await filling
        assert not any(batch.events for batch in told_of)
        # A position to resume from, though nothing was told of it.
        async with aclosing(client.follow(Position("first", batch.sequence))) as batches:
            assert (await anext(batches)).word == "resumed"


async def test_the_end_of_a_node_ends_its_streams() -> None:
    node = Told()
    await node.start()
    async with node.client() as client:
        stream = client.follow()
        await anext(stream)
        closing = asyncio.create_task(node.stop())
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(Unavailable):
                await drained(partial(anext, stream))
        await closing


async def test_who_may_not_follow_is_told_so() -> None:
    async with told(token="secret") as node:
        with pytest.raises(AccessDenied):
            async with asyncio.timeout(PATIENCE):
                await Following(node.client).run()
        follower = Following(lambda: node.client(token="secret"))
        async with following(follower):
            await until(agrees(follower, node))


async def test_what_makes_no_sense_is_refused() -> None:
    async with told() as node, node.client() as client:
        with pytest.raises(InvalidRequest, match="32 bytes"):
            await anext(client.follow(None, [b"short"]))
        with pytest.raises(InvalidRequest, match="at most 1000"):
            await anext(client.follow(None, [block_hash(n) for n in range(1001)]))
        assert node.events.followers == 0
        assert node.index.observers == ()
