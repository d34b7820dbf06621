"""The node's GPUs: what comes to them, where it lies, who may have it, what a fault costs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from kvstore.departures import DepartureReason
from kvstore.dram_pins import DramPins
from kvstore.entry import IN_HBM, Entry
from kvstore.errors import AccessDenied, Unavailable
from kvstore.gpus import OFFSET_BITS, SEGMENT_BITS
from kvstore.hbm_promotion import Promotion
from tests.kvstore.gpu_node import BLOCK, HBM_SEGMENT, Card, GpuNode, cards, content, until
from tests.process_end import ProcessEnd

ROOM = 2 * HBM_SEGMENT // BLOCK


def names(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest() for number in range(first, first + count)]


@pytest.fixture
def world() -> Iterator[GpuNode]:
    made = GpuNode(cards(2))
    yield made
    made.close()


class Running:
    """Promotion in the background, on a node."""

    def __init__(self, world: GpuNode) -> None:
        self.world = world
        self.pins = DramPins(world.dram, world.tiers[0])
        self.promotion = Promotion(world.node, world.gpus, self.pins)

    async def __aenter__(self) -> Running:
        self.pins.open()
        self.promotion.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.promotion.close()
        self.pins.close()


def in_hbm(entries: list[Entry]) -> int:
    return sum(bool(entry.state & IN_HBM) for entry in entries)


def use(world: GpuNode, entries: list[Entry], gpu: int | None = 0, times: int = 2) -> None:
    for _ in range(times):
        world.gpus.used(entries, gpu)


async def promoted(world: GpuNode, entries: list[Entry], gpu: int = 0) -> None:
    use(world, entries, gpu)
    await until(lambda: in_hbm(entries) == len(entries))


async def idle() -> None:
    """Wait until promotion has done all that it was asked for."""
    await until(lambda: not any(one.get_name()[:9] == "promotion" for one in asyncio.all_tasks()))


def bytes_of(world: GpuNode, entry: Entry) -> bytes:
    place = world.gpus.place(entry, {0, 1})
    assert place is not None
    return world.at(place, entry.shard.block_bytes)


def test_the_second_get_for_a_gpu_brings_a_block_there(world: GpuNode) -> None:
    async def go() -> None:
        entries = world.put(world.shard("a"), names(4))
        async with Running(world):
            use(world, entries, gpu=None)
            use(world, entries[:2], times=1)
            await promoted(world, entries[2:], gpu=1)
        assert in_hbm(entries) == 2
        assert [world.gpus.place(entry, {0, 1}) for entry in entries[:2]] == [None, None]
        for entry in entries[2:]:
            assert world.gpus.place(entry, {0}) is None
            place = world.gpus.place(entry, {1})
            assert place is not None
            assert place >> OFFSET_BITS + SEGMENT_BITS == 1
            assert world.at(place, BLOCK) == content(entry)
        assert world.node.metrics.promotions["dram", "hbm"] == 2
        assert world.node.metrics.pins == 0

    asyncio.run(go())


def test_the_first_get_does_where_that_is_asked_for() -> None:
    world = GpuNode(cards(1), promote_after=1)

    async def go() -> None:
        entries = world.put(world.shard("a"), names(2))
        async with Running(world):
            use(world, entries, times=1)
            await until(lambda: in_hbm(entries) == 2)

    asyncio.run(go())
    world.close()


def test_what_is_used_stays_and_what_is_not_makes_room(world: GpuNode) -> None:
    async def go() -> None:
        shard = world.shard("a")
        old = world.put(shard, names(ROOM))
        new = world.put(shard, names(4, first=100))
        async with Running(world):
            await promoted(world, old)
            use(world, old[:4], times=1)
            await promoted(world, new)
        assert in_hbm(old) == ROOM - 4
        assert in_hbm(old[:4]) == 4
        metrics = world.node.metrics
        assert metrics.evictions["hbm", DepartureReason.CAPACITY] == 4
        assert metrics.demotions["hbm", "dram"] == 4
        assert all(bytes_of(world, entry) == content(entry) for entry in [*old[:4], *new])
        # Leaving HBM took nothing from DRAM.
        assert all(entry.dram is not None for entry in old)

    asyncio.run(go())


def test_where_all_is_pinned_nothing_comes_and_nothing_is_lost(world: GpuNode) -> None:
    async def go() -> None:
        shard = world.shard("a")
        old, new = world.put(shard, names(ROOM)), world.put(shard, names(4, first=100))
        async with Running(world):
            await promoted(world, old)
            world.node.pin(old)
            use(world, new)
            await idle()
        assert in_hbm(new) == 0
        assert in_hbm(old) == ROOM
        world.node.unpin(old)
        assert world.node.metrics.pins == 0

    asyncio.run(go())


def test_for_a_block_that_never_fits_nothing_goes(world: GpuNode) -> None:
    async def go() -> None:
        old = world.put(world.shard("a"), names(ROOM))
        (large,) = world.put(world.shard("a", HBM_SEGMENT + BLOCK), names(1, first=100))
        async with Running(world):
            await promoted(world, old)
            use(world, [large])
            await idle()
        assert in_hbm(old) == ROOM
        assert in_hbm([large]) == 0

    asyncio.run(go())


def test_a_tenant_takes_what_another_has_not_mapped(world: GpuNode) -> None:
    async def go() -> None:
        theirs = world.put(world.shard("a"), names(ROOM))
        ours = world.put(world.shard("b"), names(1, first=100))
        async with Running(world):
            await promoted(world, theirs)
            places = [world.gpus.place(entry, {0}) for entry in theirs]
            numbers = {place >> OFFSET_BITS for place in places if place is not None}
            assert len(numbers) == 2
            for number in numbers:
                size, handle = world.gpus.share(number, "a")
                assert (size, len(handle)) == (HBM_SEGMENT, 64)
                with pytest.raises(AccessDenied):
                    world.gpus.share(number, "b")
            use(world, ours)
            await idle()
            assert in_hbm(theirs) == ROOM
            world.gpus.unshare(numbers.pop())
            await promoted(world, ours)
        assert in_hbm(theirs) == ROOM // 2
        assert bytes_of(world, ours[0]) == content(ours[0])

    asyncio.run(go())


def test_a_tenant_makes_room_from_its_own_where_others_keep_theirs() -> None:
    world = GpuNode(cards(1), hbm_segment=70 * BLOCK, segments=2, dram_segments=10)

    async def go() -> None:
        theirs = world.put(world.shard("a"), names(70))
        ours = world.put(world.shard("b"), names(70, first=100))
        more = world.put(world.shard("b"), names(3, first=200))
        async with Running(world):
            await promoted(world, theirs)
            await promoted(world, ours)
            place = world.gpus.place(theirs[0], {0})
            assert place is not None
            world.gpus.share(place >> OFFSET_BITS, "a")
            # Theirs are older, and more than may be evicted for one block.
            await promoted(world, more)
        assert in_hbm(theirs) == 70
        assert in_hbm(ours) == 67
        assert all(bytes_of(world, entry) == content(entry) for entry in [*theirs, *more])

    asyncio.run(go())
    world.close()


@pytest.mark.parametrize("number", [0, 999, 1 << SEGMENT_BITS, 7 << SEGMENT_BITS, -1])
def test_a_segment_that_is_not_there_is_nobodys(world: GpuNode, number: int) -> None:
    with pytest.raises(AccessDenied):
        world.gpus.share(number, "a")


def test_the_room_of_a_reader_that_may_live_on_is_not_used_again(world: GpuNode) -> None:
    async def go() -> None:
        shard = world.shard("a")
        old, new = world.put(shard, names(ROOM)), world.put(shard, names(ROOM, first=100))
        async with Running(world):
            await promoted(world, old)
            world.node.pin(old)
            places = [world.gpus.place(entry, {0}) for entry in old]
            end = Ending()
            world.gpus.lease(old, end)
            world.node.unpin(old)
            world.node.drop(old[0], "dram", DepartureReason.ADMIN)
            assert in_hbm(old) == 0
            use(world, new)
            await idle()
            assert in_hbm(new) == 0
            for entry, place in zip(old, places, strict=True):
                assert place is not None
                assert world.at(place, BLOCK) == content(entry)
            end.over.set()
            await promoted(world, new)

    asyncio.run(go())


class Ending:
    def __init__(self) -> None:
        self.over = threading.Event()

    def done(self) -> bool:
        return self.over.is_set()


@pytest.mark.parametrize("call", ["copy", "wait"])
def test_a_gpu_that_fails_is_not_used_any_more(world: GpuNode, call: str) -> None:
    async def go() -> None:
        shard = world.shard("a")
        entries, more = world.put(shard, names(2)), world.put(shard, names(2, first=10))
        async with Running(world):
            await promoted(world, entries)
            number = (world.gpus.place(entries[0], {0}) or 0) >> OFFSET_BITS
            world.gpus.share(number, "a")
            world.devices[0].refused.add(call)
            use(world, more)
            await until(lambda: world.gpus.failed() == [0])
            await idle()
            assert in_hbm([*entries, *more]) == 0
            with pytest.raises(Unavailable):
                world.gpus.share(number, "a")
            world.gpus.unshare(number)
            use(world, entries)
            await promoted(world, more, gpu=1)
        assert in_hbm(entries) == 0
        assert all(entry.dram is not None for entry in entries)
        metrics = world.node.metrics
        assert metrics.evictions["hbm", DepartureReason.MEDIUM_FAILED] == 2
        assert world.gpus.statistics().capacity == 2 * HBM_SEGMENT

    asyncio.run(go())


class Held(Card):
    """Does not finish what it copies before it may."""

    def __init__(self) -> None:
        super().__init__(0)
        self.may = threading.Event()
        self.asked = threading.Event()

    def run(self, stream: int, position: int | None = None) -> None:
        if threading.current_thread().name.startswith("hbm-copy"):
            self.asked.set()
            assert self.may.wait(30)
        super().run(stream, position)


def test_a_block_that_goes_while_it_is_copied_is_never_there() -> None:
    device = Held()
    world = GpuNode([device])

    async def go() -> None:
        shard = world.shard("a")
        entries = world.put(shard, names(3))
        async with Running(world):
            use(world, entries)
            await until(device.asked.is_set)
            assert in_hbm(entries) == 0
            world.node.drop(entries[1], "dram", DepartureReason.ADMIN)
            again = world.put(shard, names(3))
            device.may.set()
            await until(lambda: in_hbm(entries) == 1)
            assert [bool(entry.state & IN_HBM) for entry in entries] == [True, False, False]
            assert in_hbm(again[1:]) == 0
            await promoted(world, again)
        assert all(bytes_of(world, entry) == content(entry) for entry in again)
        assert world.tiers[0].statistics().blocks == 3

    asyncio.run(go())
    world.close()


def test_a_node_stops_while_copies_are_under_way() -> None:
    device = Held()
    world = GpuNode([device])

    async def go() -> None:
        entries = world.put(world.shard("a"), names(3))
        async with Running(world):
            use(world, entries)
            await until(device.asked.is_set)
            asyncio.get_running_loop().call_later(0.05, device.may.set)
        assert in_hbm(entries) == 3
        assert world.node.metrics.pins == 0
        # Nothing is wanted of a node that stops.
        use(world, world.put(world.shard("a"), names(1, first=50)))

    asyncio.run(go())
    world.close()
    assert device.registered == {}
    assert device.live == {}


def test_segments_of_dram_are_pinned_and_unpinned(world: GpuNode) -> None:
    device = world.devices[0]

    async def go() -> None:
        addresses = {segment.address for segment in world.dram.segments()}
        async with Running(world) as running:
            await until(lambda: len(running.pins) == len(addresses))
            assert set(device.registered) == addresses
            # Another tenant takes a segment: its memory goes, and new memory comes.
            for entry in world.put(world.shard("a"), names(32)):
                world.node.touch([entry])
            entries = world.put(world.shard("b"), names(4, first=100))
            now = {segment.address for segment in world.dram.segments()}
            assert len(running.pins) == len(device.registered) == 1
            await promoted(world, entries)
            await until(lambda: set(device.registered) == now)
            assert len(now) == 2
            assert all(bytes_of(world, entry) == content(entry) for entry in entries)
        assert device.registered == {}

    asyncio.run(go())


def test_memory_that_can_not_be_pinned_is_copied_all_the_same(world: GpuNode) -> None:
    world.devices[0].refused.add("register")

    async def go() -> None:
        entries = world.put(world.shard("a"), names(4))
        async with Running(world) as running:
            await promoted(world, entries)
            assert len(running.pins) == 0
        assert all(bytes_of(world, entry) == content(entry) for entry in entries)
        assert world.gpus.failed() == []

    asyncio.run(go())


def test_a_block_dropped_while_pinned_keeps_its_copy_until_the_last_pin(world: GpuNode) -> None:
    async def go() -> None:
        (entry,) = world.put(world.shard("a"), names(1))
        async with Running(world):
            await promoted(world, [entry])
        place = world.gpus.place(entry, {0})
        assert place is not None
        world.node.pin((entry,))
        world.node.pin((entry,))
        world.node.drop(entry, "dram", DepartureReason.ADMIN)
        assert not world.gpus.evict(entry, DepartureReason.ADMIN)
        assert entry.shard.in_hbm == 0
        world.node.unpin((entry,))
        assert world.at(place, BLOCK) == content(entry)
        assert world.tiers[0].used == BLOCK
        world.node.unpin((entry,))
        assert world.tiers[0].used == 0
        assert len(world.gpus.copies) == 0

    asyncio.run(go())


def test_a_process_end_is_a_lease_over_several_gpus(world: GpuNode) -> None:
    async def go() -> None:
        entries = world.put(world.shard("a"), names(2))
        async with Running(world):
            await promoted(world, entries[:1], gpu=0)
            await promoted(world, entries[1:], gpu=1)
        child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
        end = ProcessEnd(os.pidfd_open(child.pid))
        world.node.pin(entries)
        world.gpus.lease(entries, end)
        world.node.unpin(entries)
        world.node.drop(entries[0], "dram", DepartureReason.ADMIN)
        assert [tier.statistics().departing for tier in world.tiers] == [BLOCK, BLOCK]
        child.communicate()
        assert [tier.statistics().departing for tier in world.tiers] == [0, 0]

    asyncio.run(go())
