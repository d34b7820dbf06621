"""What goes wrong in a session ends in a typed error, soon, and in that session alone."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest

from rdma.errors import TransportError
from rdma.verbs.adapter import DEVICE_FAILED, Adapter
from rdma.verbs.client import ClientDevice, VerbsClientTransport
from rdma.verbs.driver import Driver
from rdma.verbs.errors import (
    DeviceError,
    PeerLost,
    QueueBroken,
    RemoteAccessError,
    TransferTimeout,
)
from rdma.verbs.handshake import describe, parse
from rdma.verbs.memory import Registration
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.plan import Piece, Work
from rdma.verbs.queue import QueuePair
from rdma.verbs.schedule import READ, Chain, Transfer
from rdma.verbs.settings import QueueSettings
from tests.rdma.verbs.ends import LITTLE_AT_ONCE, Node, Session, Stopwatch, soon

LOST_SECONDS = 1.5
"""Until a silent peer counts as lost: 0.47 s by the settings, and some for the emulation."""


@pytest.fixture
def settings() -> QueueSettings:
    return LITTLE_AT_ONCE


async def still_works(node: Node, session: Session) -> None:
    places, buffers = node.blocks(4, 4096)
    await session.get(places, buffers)
    assert node.same(places, buffers)


async def test_a_wrong_key_is_refused_and_nothing_is_written(node: Node) -> None:
    session, other = node.session(), node.session()
    places, buffers = node.blocks(4, 4096)
    named = list(session.client.destinations(buffers) or ())
    named[1] ^= 0xFFFF00
    with Stopwatch() as watch, pytest.raises(RemoteAccessError) as raised:
        await session.node.push(places[:1], 4096, named[:3], soon(5))
    assert watch.seconds < LOST_SECONDS
    assert not raised.value.retry
    assert bytes(buffers[0]) == bytes(4096)
    assert isinstance(session.node.broken, RemoteAccessError)
    assert node.driver.counters.failures["REM_ACCESS_ERR"] == 1
    with pytest.raises(RemoteAccessError):
        await session.get(places, buffers)
    await still_works(node, other)
    await still_works(node, node.session())


async def test_memory_that_is_taken_back_can_not_be_touched(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(2, 4096)
    named = session.client.destinations(buffers)
    session.client.done(named)
    with pytest.raises(RemoteAccessError):
        await session.node.push(places, 4096, named, soon(5))
    assert bytes(buffers[0]) == bytes(4096)


async def test_memory_beyond_what_was_named_can_not_be_touched(node: Node) -> None:
    session = node.session()
    guarded = bytearray(8192)
    (place,), _ = node.blocks(1, 8192)
    address, key, _ = session.client.destinations([memoryview(guarded)[:4096]]) or ()
    with pytest.raises(RemoteAccessError):
        await session.node.push([place], 8192, [address, key, 8192], soon(5))
    assert guarded[4096:] == bytes(4096)


async def test_what_may_be_read_only_is_not_written(node: Node) -> None:
    session = node.session()
    data = bytes(4096)
    (place,), _ = node.blocks(1, 4096)
    named = session.client.sources([memoryview(data)])
    await session.node.pull([place], 4096, named, soon(5))
    (place,), _ = node.blocks(1, 4096)
    with pytest.raises(RemoteAccessError):
        await session.node.push([place], 4096, named, soon(5))
    assert data == bytes(4096)


async def test_memory_of_the_node_is_closed_to_clients(node: Node, device: ClientDevice) -> None:
    """Even to one that posts work itself and knows the key."""
    session = node.session()
    places, buffers = node.blocks(1, 4096)
    await session.get(places, buffers)
    _, _, region = node.arena._known[1]
    assert isinstance(region.registration, Registration)
    adapter = device.adapter
    completions = adapter.binding.cq.CQ(adapter.context, 16, None, None, 0)
    attacker = QueuePair(adapter, completions, QueueSettings(), active=True)
    victim = node.driver.connect(parse(describe(attacker.local)))
    attacker.connect(victim.pair.local)
    loot = memoryview(bytearray(4096))
    own = device.memory.register(loot)
    assert isinstance(own.registration, Registration)
    piece = Piece(own.address, 4096, own.registration.local)
    work = Work(region.address, region.registration.remote, (piece,), 4096)
    attacker.post(Chain(1, READ, [work], 4096, Transfer(READ, [work])))
    assert await completed(completions)
    assert bytes(loot) == bytes(4096)
    attacker.destroy()
    completions.close()
    device.memory.release(own)


async def completed(completions: Any) -> int:
    """Return the status of the next completion."""
    for _ in range(500):
        number, found = completions.poll(1)
        if number:
            return int(found[0].status)
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was completed")


async def test_a_queue_pair_in_error_fails_all_that_is_outstanding(node: Node) -> None:
    session, other = node.session(), node.session()
    places, _ = node.blocks(14, 1 << 20)
    pools = [memoryview(bytearray(1 << 20)) for _ in range(14)]
    calls = [
        asyncio.create_task(session.get([place], [pool], 20))
        for place, pool in zip(places, pools, strict=True)
    ]
    await asyncio.sleep(0.02)
    session.client._pair.break_off()
    with Stopwatch() as watch:
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert watch.seconds < LOST_SECONDS + 1
    failed = [one for one in ended if one is not None]
    assert failed
    assert all(isinstance(one, QueueBroken) for one in failed)
    assert session.node.broken is not None
    assert session.node._queue.flow.idle
    assert node.driver._schedule.works_out == 0
    await still_works(node, other)


async def test_a_queue_pair_that_the_node_breaks_fails_all_that_is_outstanding(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(14, 1 << 20)
    calls = [
        asyncio.create_task(session.get([place], [buffer], 20))
        for place, buffer in zip(places, buffers, strict=True)
    ]
    await asyncio.sleep(0.02)
    session.node._queue.pair.break_off()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    failed = [one for one in ended if one is not None]
    assert failed
    assert all(isinstance(one, QueueBroken) for one in failed)


async def test_a_peer_that_is_gone_counts_as_lost(node: Node) -> None:
    session, other = node.session(), node.session()
    places, buffers = node.blocks(4, 4096)
    named = session.client.destinations(buffers)
    session.client.close()
    with Stopwatch() as watch, pytest.raises(PeerLost) as raised:
        await session.node.push(places, 4096, named, soon(5))
    assert raised.value.retry
    assert watch.seconds < LOST_SECONDS
    await still_works(node, other)


async def test_the_others_never_notice(node: Node) -> None:
    lost, other = node.session(), node.session()
    places, buffers = node.blocks(4, 65536)
    named = lost.client.destinations(buffers)
    lost.client.close()
    failing = asyncio.create_task(lost.node.push(places, 65536, named, soon(5)))
    count = 0
    while not failing.done():
        await still_works(node, other)
        count += 1
    with pytest.raises(PeerLost):
        await failing
    assert count > 3


async def test_the_deadline_ends_a_call_and_all_access_for_it(node: Node) -> None:
    session, other = node.session(), node.session()
    await still_works(node, session)  # which registers the node's memory
    places, buffers = node.blocks(2, 4096)
    named = session.client.destinations(buffers)
    session.client.close()
    with Stopwatch() as watch, pytest.raises(TransferTimeout) as raised:
        await session.node.push(places, 4096, named, soon(0.1))
    assert raised.value.retry
    assert watch.seconds < 0.4
    assert session.node.broken is not None
    await still_works(node, other)


async def test_a_deadline_that_has_passed_moves_nothing_and_breaks_nothing(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(2, 4096)
    with pytest.raises(TransferTimeout):
        await session.get(places, buffers, -1)
    assert session.node.broken is None
    await still_works(node, session)


async def test_a_call_that_still_waits_for_its_turn_can_end_alone(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(14, 1 << 20)
    long = asyncio.create_task(session.get(places, buffers, 20))
    await asyncio.sleep(0)
    with pytest.raises(TransferTimeout):
        await session.get(places[:1], [memoryview(bytearray(64))], 0.01)
    await long
    assert session.node.broken is None
    assert node.same(places, buffers)


async def test_a_cancelled_call_ends_all_access_for_it(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(14, 1 << 20)
    call = asyncio.create_task(session.put(places, buffers, 20))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert isinstance(session.node.broken, QueueBroken)
    before = [bytes(node.memory.view(place, 1 << 20)) for place in places]
    for buffer in buffers:
        buffer[:] = os.urandom(len(buffer))
    await asyncio.sleep(0.2)
    assert [bytes(node.memory.view(place, 1 << 20)) for place in places] == before


async def test_closing_ends_what_is_under_way(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(14, 1 << 20)
    call = asyncio.create_task(session.get(places, buffers, 20))
    await asyncio.sleep(0.02)
    session.node.close()
    with pytest.raises(QueueBroken):
        await call


async def test_after_the_client_closed_its_memory_is_its_own(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(14, 1 << 20)
    call = asyncio.create_task(session.get(places, buffers, 20))
    await asyncio.sleep(0.02)
    session.client.close()
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    with pytest.raises(TransportError):
        await call
    assert not any(map(any, buffers))


async def test_a_device_that_fails_fails_every_session(adapter: Adapter, node: Node) -> None:
    driver = Driver(adapter)
    driver.start()
    client = VerbsClientTransport(node.device)
    transport = VerbsNodeTransport(driver, node.arena, client.offer())
    places, buffers = node.blocks(2, 4096)
    call = asyncio.create_task(transport.push(places, 4096, client.destinations(buffers), soon(5)))
    await asyncio.sleep(0)
    driver._take_event(DEVICE_FAILED)
    with pytest.raises(QueueBroken, match="failed"):
        await call
    with pytest.raises(DeviceError):
        VerbsNodeTransport(driver, node.arena, client.offer())
    driver.close()
    client.close()


async def test_many_sessions_come_and_go_and_leave_nothing(node: Node) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        session = node.session()
        await still_works(node, session)
        session.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert node.driver._queues == {}
    assert not node.driver.counters.failures
