"""Never a wrong byte from a GPU: whatever happens while copies are under way, as a state machine.

GPUs do what is queued late, and may fail at any call. At each moment every copy that the node
knows of, and every place that it has given out, must hold the bytes of its block: those of readers
with a pin, and those of readers that are gone while their process still may read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.departures import DepartureReason
from kvstore.entry import IN_HBM, Entry
from kvstore.errors import AccessDenied
from kvstore.gpus import OFFSET_BITS, SEGMENT_BITS
from kvstore.hbm_promotion import Move, Promotion
from tests.kvstore.gpu_node import BLOCK, GpuNode, cards, content
from tests.kvstore.index_rules import check
from tiers.device import Event
from tiers.errors import MediumFailed
from tiers.policies import POLICIES

GPUS = 2
TENANTS = {"a": BLOCK, "b": 2 * BLOCK}
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
TROUBLES = ("copy", "zero", "allocate", "release", "register", "all")
"""What a GPU may refuse. One that can't say what is done refuses all, and does nothing any more."""
ALL_CALLS = frozenset(
    {"copy", "done", "wait", "zero", "allocate", "release", "stream", "register", "allocate_host"}
)


def chain(tenant: str, path: tuple[int, ...]) -> list[bytes]:
    return [
        hashlib.sha256(repr((tenant, path[: end + 1])).encode()).digest()
        for end in range(len(path))
    ]


class Process:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over


@dataclass(eq=False)
class Reader:
    """Who has been given places: of each, which block it is said to hold."""

    entries: list[Entry]
    places: list[tuple[int, Entry]]
    process: Process = field(default_factory=Process)


@dataclass(eq=False)
class Flight:
    """Copies under way."""

    gpu: int
    moves: list[Move]
    ends: list[Event] | None = None


class Pins:
    """Pins DRAM segments when the test says so."""

    def __init__(self, world: GpuNode) -> None:
        self._world = world
        self._pinned: dict[int, int] = {}
        world.dram.on_release = self._released

    def covers(self, number: int) -> bool:
        return number in self._pinned

    def pin(self, number: int) -> None:
        segment = self._world.dram.segment(number)
        if number in self._pinned:
            return
        try:
            self._world.tiers[0].pin(segment.address, segment.size)
        except MediumFailed:
            return
        self._pinned[number] = segment.address

    def _released(self, number: int) -> None:
        address = self._pinned.pop(number, None)
        if address is not None:
            self._world.tiers[0].unpin(address)


class GpuMachine(RuleBasedStateMachine):
    """Readers and writers of two tenants on a node with two small GPUs."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), after=st.integers(1, 2))
    def start(self, policy: str, after: int) -> None:
        self.devices = cards(GPUS)
        self.world = GpuNode(
            self.devices, policy=policy, promote_after=after, hbm_segment=4 * BLOCK
        )
        self.node, self.gpus = self.world.node, self.world.gpus
        self.pins = Pins(self.world)
        self.promotion = Promotion(self.node, self.gpus, self.pins)  # type: ignore[arg-type]
        self.gpus.wanted = self.promotion.note
        self.shards = {name: self.world.shard(name, size) for name, size in TENANTS.items()}
        self.readers: list[Reader] = []
        self.leaving: list[Reader] = []
        self.flights: dict[int, Flight] = {}
        self.shares: list[int] = []
        self.dead: set[int] = set()
        for tenant in TENANTS:
            self.world.put(self.shards[tenant], chain(tenant, (0, 0, 0, 0)))
            self.world.put(self.shards[tenant], chain(tenant, (1, 1, 1, 1)))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for gpu in list(self.flights):
                self.end(gpu)
            for device in self.devices:
                # What a GPU that has failed still had to do is not done any more.
                device.refused.add("wait")
            self.world.close()

    # What clients do.

    @rule(tenant=st.sampled_from(sorted(TENANTS)), path=PATHS)
    def put(self, tenant: str, path: tuple[int, ...]) -> None:
        self.world.put(self.shards[tenant], chain(tenant, path))

    @precondition(lambda self: len(self.node.index))
    @rule(
        data=st.data(),
        gpu=st.sampled_from([0, 0, 0, 1, None]),
        reach=st.sampled_from([{0, 1}, {0, 1}, {0}, {1}, set[int]()]),
        promoted=st.booleans(),
        count=st.integers(1, 3),
    )
    def get(
        self, data: st.DataObject, gpu: int | None, reach: set[int], promoted: bool, count: int
    ) -> None:
        for _ in range(count):
            entries = self.some(data).path()
            self.node.touch(entries)
            self.gpus.used(entries, gpu)
            if promoted and gpu is not None:
                self.gpus.used(entries, gpu)
                self.promote(gpu)
        self.node.pin(entries)
        places = [(self.gpus.place(entry, reach), entry) for entry in entries]
        given = [(place, entry) for place, entry in places if place is not None]
        for place, _ in given:
            assert place >> OFFSET_BITS + SEGMENT_BITS in reach
        self.readers.append(Reader(entries, given))

    def some(self, data: st.DataObject) -> Entry:
        held = [entry for shard in self.shards.values() for entry in shard.committed.values()]
        return data.draw(st.sampled_from(held))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.node.unpin(reader.entries)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        """A session closes while its process may still read."""
        reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.gpus.lease(reader.entries, reader.process)
        self.node.unpin(reader.entries)
        self.leaving.append(reader)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        reader = self.leaving.pop(data.draw(st.integers(0, len(self.leaving) - 1)))
        reader.process.over = True

    @precondition(lambda self: len(self.gpus.copies))
    @rule(data=st.data(), owner=st.sampled_from(sorted(TENANTS)))
    def share(self, data: st.DataObject, owner: str) -> None:
        entry = data.draw(st.sampled_from(self._copied()))
        place = self.gpus.place(entry, range(GPUS))
        assert place is not None
        number = place >> OFFSET_BITS
        try:
            self.gpus.share(number, owner)
        except AccessDenied:
            assert owner != entry.shard.tenant
            return
        assert owner == entry.shard.tenant
        self.shares.append(number)

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def unshare(self, data: st.DataObject) -> None:
        self.gpus.unshare(self.shares.pop(data.draw(st.integers(0, len(self.shares) - 1))))

    # What becomes of blocks.

    @precondition(lambda self: len(self.node.index))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.node.drop(self.some(data), "dram", DepartureReason.ADMIN)

    @precondition(lambda self: len(self.node.index))
    @rule(data=st.data())
    def copy_down(self, data: st.DataObject) -> None:
        for entry in self.some(data).path():
            if entry.ssd is None:
                self.world.copy_down(entry)

    @precondition(lambda self: len(self.node.index))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        entry = self.some(data)
        if entry.dram is not None and not entry.pins:
            self.node.evict(entry, DepartureReason.CAPACITY)

    @precondition(lambda self: len(self.gpus.copies))
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self._copied()))
        assert self.gpus.evict(entry, DepartureReason.ADMIN) == (not entry.pins)

    # What GPUs do.

    @rule(gpu=st.integers(0, GPUS - 1))
    def begin_one(self, gpu: int) -> None:
        self.begin(gpu)

    def begin(self, gpu: int) -> None:
        if gpu not in self.flights and (moves := self.promotion.begin(gpu)):
            self.flights[gpu] = Flight(gpu, moves)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def queue(self, data: st.DataObject) -> None:
        flight = self.flights[data.draw(st.sampled_from(sorted(self.flights)))]
        if flight.ends is None:
            try:
                flight.ends = self.promotion.queue(flight.gpu, flight.moves)
            except MediumFailed as error:
                self._finish(flight, str(error))

    @rule(gpu=st.integers(0, GPUS - 1), steps=st.integers(1, 5))
    def go_on(self, gpu: int, steps: int) -> None:
        if gpu not in self.dead:
            device = self.devices[gpu]
            for stream in device.streams:
                for _ in range(steps):
                    device.step(stream)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.flights))))

    def promote(self, gpu: int) -> None:
        self.begin(gpu)
        if gpu in self.flights:
            self.end(gpu)

    def end(self, gpu: int) -> None:
        flight = self.flights[gpu]
        try:
            if flight.ends is None:
                flight.ends = self.promotion.queue(gpu, flight.moves)
            for end in flight.ends:
                end.wait()
        except (MediumFailed, OSError) as error:
            self._finish(flight, str(error))
        else:
            self._finish(flight, None)

    def _finish(self, flight: Flight, failure: str | None) -> None:
        del self.flights[flight.gpu]
        self.promotion.finish(flight.gpu, flight.moves, failure)
        assert self.gpus[flight.gpu].failed or failure is None

    @rule(data=st.data())
    def pin_segment(self, data: st.DataObject) -> None:
        numbers = [segment.number for segment in self.world.dram.segments()]
        self.pins.pin(data.draw(st.sampled_from(numbers)))

    @rule(gpu=st.integers(0, GPUS - 1), what=st.sampled_from(TROUBLES), chance=st.integers(0, 5))
    def fail(self, gpu: int, what: str, chance: int) -> None:
        """Rarely, or most runs would be of GPUs that are out of use."""
        device = self.devices[gpu]
        if what == "all" and chance == 1:
            self.dead.add(gpu)
            device.refused.update(ALL_CALLS)
        elif what != "all" and gpu not in self.dead:
            device.refused = {what} if chance == 1 else set()

    # What must hold.

    def _copied(self) -> list[Entry]:
        return [copy.entry for gpu in range(GPUS) for copy in self.gpus.copies.on(gpu)]

    @invariant()
    def the_index_holds_together(self) -> None:
        if hasattr(self, "world"):
            check(self.node.index)

    @invariant()
    def places_given_out_hold_their_blocks(self) -> None:
        if not hasattr(self, "world"):
            return
        for reader in [*self.readers, *self.leaving]:
            for place, entry in reader.places:
                if place >> OFFSET_BITS + SEGMENT_BITS not in self.dead:
                    assert self.world.at(place, entry.shard.block_bytes) == content(entry)

    @invariant()
    def copies_hold_their_blocks(self) -> None:
        if not hasattr(self, "world"):
            return
        for entry in self._copied():
            place = self.gpus.place(entry, range(GPUS))
            assert place is not None
            gpu, number = divmod(place >> OFFSET_BITS, 1 << SEGMENT_BITS)
            assert self.world.tiers[gpu].segment(number).owner == entry.shard.tenant
            assert entry.pins or not entry.gone
            if gpu not in self.dead:
                assert self.world.at(place, entry.shard.block_bytes) == content(entry)

    @invariant()
    def nothing_else_takes_room(self) -> None:
        if not hasattr(self, "world"):
            return
        for gpu, tier in enumerate(self.world.tiers):
            copies = self.gpus.copies.on(gpu)
            if self.gpus[gpu].failed:
                assert copies == []
                continue
            coming = self.flights[gpu].moves if gpu in self.flights else []
            assert tier.statistics().blocks == len(copies) + len(coming)
        held = [entry for shard in self.shards.values() for entry in shard.committed.values()]
        marked = {entry for entry in held if entry.state & IN_HBM}
        assert marked == {entry for entry in self._copied() if not entry.gone}


TestGpuMachine = GpuMachine.TestCase
TestGpuMachine.settings = settings(stateful_step_count=100)
