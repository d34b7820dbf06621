"""The contract of all transports, over a real queue pair, and what is special to this one."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack

import numpy
import pytest

from rdma.errors import BadPlace, RegionError
from rdma.transport import place_of
from rdma.verbs.adapter import Adapter
from rdma.verbs.client import ClientDevice, VerbsClientTransport
from rdma.verbs.driver import Driver
from rdma.verbs.errors import HandshakeError
from rdma.verbs.memory import VerbsRegistrar
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.settings import QueueSettings
from tests.rdma.node_memory import NodeMemory
from tests.rdma.transport_contract import Pair, TransportContract
from tests.rdma.verbs.ends import LITTLE_AT_ONCE, Node, soon


class TestVerbs(TransportContract):
    @pytest.fixture
    async def pair(self, node: Node, memory: NodeMemory) -> Pair:
        session = node.session()
        return Pair(memory, session.node, session.client)


async def test_a_block_in_several_pieces_is_gathered_and_scattered(node: Node) -> None:
    session = node.session()
    (place,), _ = node.blocks(1, 3000)
    parts = [memoryview(bytearray(size)) for size in (1, 999, 2000)]
    named = session.client.destinations(parts)
    await session.node.push([place], 3000, named, soon(5))
    assert b"".join(parts) == node.memory.view(place, 3000)
    for part in parts:
        part[:] = os.urandom(len(part))
    await session.node.pull([place], 3000, named, soon(5))
    assert b"".join(parts) == node.memory.view(place, 3000)
    session.client.done(named)


async def test_blocks_side_by_side_at_the_client_go_in_fewer_work_requests(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(64, 4096)
    await session.get(places, buffers)
    assert node.same(places, buffers)
    assert node.driver.counters.works == 64 // session.node._queue.pair.pieces + 1  # the proof
    for buffer in buffers:
        buffer[:] = os.urandom(4096)
    await session.put(places, buffers)
    assert node.same(places, buffers)


@pytest.mark.parametrize(
    "settings", [QueueSettings(depth=4, chain=3, bytes_in_flight=16384, work_bytes=4096)]
)
async def test_more_than_may_be_under_way_goes_through_all_the_same(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(200, 5000)
    await session.get(places, buffers, 20)
    assert node.same(places, buffers)
    assert node.driver.counters.chains > 100


@pytest.mark.parametrize("settings", [LITTLE_AT_ONCE])
async def test_sessions_take_turns(node: Node) -> None:
    big, small = node.session(), node.session()
    places, buffers = node.blocks(14, 1 << 20)
    long = asyncio.create_task(big.get(places, buffers, 20))
    await asyncio.sleep(0)
    for _ in range(3):
        await small.get(places[:1], [memoryview(bytearray(4096))], 20)
    assert not long.done()
    await long
    assert node.same(places, buffers)


async def test_busy_polling_brings_the_bytes_too(adapter: Adapter, node: Node) -> None:
    driver = Driver(adapter, QueueSettings(busy_poll=True))
    driver.start()
    client = VerbsClientTransport(node.device)
    transport = VerbsNodeTransport(driver, node.arena, client.offer())
    client.accept(transport.welcome())
    places, buffers = node.blocks(8, 65536)
    await transport.push(places, 65536, client.destinations(buffers), soon(5))
    assert node.same(places, buffers)
    transport.close()
    client.close()
    driver.close()


async def test_registered_memory_is_used_in_place(node: Node) -> None:
    session = node.session()
    pool = numpy.zeros((8, 4096), numpy.uint8)
    region = session.client.register(memoryview(pool).cast("B"))
    places, _ = node.blocks(8, 4096)
    buffers = [memoryview(row).cast("B") for row in pool]
    for _ in range(3):
        await session.get(places, buffers)
    assert node.same(places, buffers)
    assert session.client._named == {}
    session.client.release(region)


async def test_only_the_blocks_found_are_written(node: Node) -> None:
    session = node.session()
    places, buffers = node.blocks(3, 512)
    named = session.client.destinations(buffers)
    chosen = session.node.select(named, 512, bytes([1, 0, 1]))
    await session.node.push([places[0], places[2]], 512, chosen, soon(5))
    assert node.same([places[0], places[2]], [buffers[0], buffers[2]])
    assert bytes(buffers[1]) == bytes(512)
    session.client.done(named)


async def test_a_client_must_name_its_memory(node: Node) -> None:
    session = node.session()
    with pytest.raises(BadPlace):
        await session.node.push([place_of(1, 0)], 64, None, soon(5))
    assert session.node.landing([place_of(1, 0)], 64) is None
    assert session.node.broken is None
    with pytest.raises(BadPlace):
        session.client.place([1], [])


@pytest.mark.parametrize("change", [{"gid": b"\x20\x01\x0d\xb8" + b"\1" * 12}, {"queue": 0}])
async def test_an_offer_that_leads_nowhere_is_refused(
    node: Node, change: dict[str, object]
) -> None:
    client = VerbsClientTransport(node.device)
    with pytest.raises(HandshakeError):
        VerbsNodeTransport(node.driver, node.arena, {**client.offer(), **change})
    client.close()


def test_memory_that_the_kernel_does_not_give_is_a_typed_error(adapter: Adapter) -> None:
    registrar = VerbsRegistrar(adapter, shared=True)
    with pytest.raises(RegionError, match="mapped"):
        registrar.register(4096, 4096, True)


async def test_a_node_pulls_blocks_of_another_into_its_own_memory(
    node: Node, device: ClientDevice
) -> None:
    """The node that pulls is the passive end, and its arena the memory that it names."""
    with NodeMemory() as own, ExitStack() as registered:
        for number in (1, 2):
            region = device.memory.register(own.view(place_of(number, 0), own.size))
            registered.callback(device.memory.release, region)
        del region
        session = node.session()
        places, _ = node.blocks(8, 65536)
        ours = own.places(8, 65536)
        await session.get(places, [own.view(place, 65536) for place in ours])
        for place, our in zip(places, ours, strict=True):
            assert own.view(our, 65536) == node.memory.view(place, 65536)
        assert session.client._named == {}
