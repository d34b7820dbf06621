"""The log of a node's events, its followers, and the maps that they make of it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TypeAlias

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.control.block_map import BatchMissing, BlockMap, EventBatch, Position
from kvstore.control.event_client import decode_batch
from kvstore.control.event_service import EventService
from kvstore.entry import IN_DRAM, IN_HBM, IN_SSD, Entry, ShardIndex
from kvstore.events import STEP, Batch, Change, Events, Follower, Word
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.index import Index, TierName
from kvstore.metrics import Metrics
from tests.kvstore.test_index import BLOCK, block_hash, chain, new_index
from tiers.policies import make_policy

NAMESPACES = (b"a" * 32, b"b" * 32)
Held: TypeAlias = dict[tuple[bytes, int, bytes], tuple[str, ...]]


def tiers_of(entry: Entry) -> tuple[str, ...]:
    bits = (("hbm", IN_HBM), ("dram", IN_DRAM), ("ssd", IN_SSD))
    return tuple(name for name, bit in bits if entry.state & bit)


def held_by(index: Index, namespaces: Sequence[bytes] = ()) -> Held:
    return {
        (shard.namespace, shard.number, entry.hash): tiers_of(entry)
        for shard in index.shards
        for entry in shard.committed.values()
        if not namespaces or shard.namespace in namespaces
    }


def known_by(known: BlockMap) -> Held:
    return {
        (fingerprint, number, block): tiers
        for fingerprint in (*NAMESPACES, b"n" * 32)
        for number in range(2)
        for block, tiers in known.blocks(fingerprint, number).items()
    }


class History(Events):
    """Events that remember what was held after each of them, as an observer of its own saw it."""

    def __init__(self, index: Index, capacity: int) -> None:
        super().__init__(index, capacity)
        self.held: Held = {}
        self.then: dict[int, Held] = {}

    def _record(self, change: int, entry: Entry) -> None:
        super()._record(change, entry)
        name = (entry.shard.namespace, entry.shard.number, entry.hash)
        if change == Change.REMOVED:
            del self.held[name]
        else:
            self.held[name] = tiers_of(entry)
        self.then[self.sequence] = dict(self.held)

    def begin(self) -> None:
        self.held = held_by(self.index)
        self.then[self.sequence] = dict(self.held)


class Reader:
    """A follower's two ends, with the wire's form of what is told between them."""

    def __init__(self, events: History, incarnation: str, namespaces: Sequence[bytes]) -> None:
        self.events = events
        self.namespaces = namespaces
        self.map = BlockMap()
        self.follower: Follower | None = None
        self._wire = EventService(events, "node", incarnation, Metrics())

    def connect(self) -> None:
        position = self.map.position
        fresh = not self.events.followers
        self.follower = self.events.follow(position and position.sequence, self.namespaces)
        if fresh:
            self.events.begin()

    def disconnect(self) -> None:
        assert self.follower is not None
        self.follower.close()
        self.follower = None

    def step(self) -> bool:
        assert self.follower is not None
        batches = self.follower.take()
        for batch in batches:
            self.apply(decode_batch(self._wire._encode(batch)))
        self.apply(decode_batch(self._wire._encode(self.follower.heartbeat())))
        return bool(batches)

    def apply(self, batch: EventBatch) -> None:
        self.map.apply(batch)
        if batch.complete:
            then = self.events.then[batch.sequence]
            wanted = self.namespaces or NAMESPACES
            assert known_by(self.map) == {at: it for at, it in then.items() if at[0] in wanted}

    def catch_up(self) -> None:
        for _ in range(1000):
            more = self.step()
            if not more and self.map.sequence == self.events.sequence:
                break
        assert self.map.complete
        assert known_by(self.map) == held_by(self.events.index, self.namespaces)


class EventMachine(RuleBasedStateMachine):
    """A node beside followers that come, go, read slowly and resume; its log is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(make_policy("lru", 64))
        self.events = History(self.index, capacity=6)
        self.shards = [self.index.shard(name, at, BLOCK) for name in NAMESPACES for at in range(2)]
        self.readers = [Reader(self.events, "i", chosen) for chosen in ((), (), NAMESPACES[:1])]
        self.entries: list[Entry] = []

    def pick(self, data: st.DataObject, dram: bool, ssd: bool) -> Entry | None:
        wanted = IN_DRAM * dram | IN_SSD * ssd
        self.entries = [entry for entry in self.entries if not entry.gone]
        found = [one for one in self.entries if one.state & (IN_DRAM | IN_SSD) == wanted]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(shard=st.integers(0, 3), length=st.integers(1, 4), data=st.data())
    def store(self, shard: int, length: int, data: st.DataObject) -> None:
        into = self.shards[shard]
        parents = [ROOT_PARENT, *(one.hash for one in self.entries if one.shard is into)]
        parent = data.draw(st.sampled_from(parents))
        parent = parent if parent in into.committed else ROOT_PARENT
        new = [number for number in range(30) if block_hash(number) not in into.committed]
        self.entries += chain(self.index, into, new[:length], parent)

    @rule(data=st.data(), tier=st.sampled_from(["dram", "ssd"]))
    def copy(self, data: st.DataObject, tier: TierName) -> None:
        entry = self.pick(data, dram=tier == "ssd", ssd=tier == "dram")
        if entry is not None:
            self.index.place(entry, tier, 1)

    @rule(data=st.data(), dram=st.booleans(), ssd=st.booleans())
    def come_to_a_gpu_or_leave_it(self, data: st.DataObject, dram: bool, ssd: bool) -> None:
        entry = self.pick(data, dram, ssd)
        if entry is not None and entry.state & IN_HBM:
            self.index.remove_copy(entry)
        elif entry is not None:
            self.index.add_copy(entry)

    @rule(data=st.data(), tier=st.sampled_from(["dram", "ssd"]))
    def leave_a_tier(self, data: st.DataObject, tier: TierName) -> None:
        entry = self.pick(data, dram=True, ssd=True)
        if entry is not None:
            self.index.displace(entry, tier)

    @rule(data=st.data())
    def change_tiers(self, data: st.DataObject) -> None:
        entry = self.pick(data, dram=True, ssd=False)
        if entry is not None:
            self.index.displace(entry, "dram")
            self.index.place(entry, "ssd", 1)

    @rule(data=st.data(), displaced=st.booleans())
    def drop(self, data: st.DataObject, displaced: bool) -> None:
        entry = self.pick(data, dram=True, ssd=False)
        if entry is not None:
            if displaced:
                self.index.displace(entry, "dram")
            self.index.drop(entry)

    @rule(at=st.integers(0, 2), steps=st.integers(0, 3))
    def read(self, at: int, steps: int) -> None:
        reader = self.readers[at]
        if reader.follower is None:
            reader.connect()
        for _ in range(steps):
            reader.step()

    @rule(at=st.integers(0, 2))
    def disconnect(self, at: int) -> None:
        if self.readers[at].follower is not None:
            self.readers[at].disconnect()

    @precondition(lambda self: not self.events.followers)
    @rule()
    def rest(self) -> None:
        self.events.rest()
        assert not self.index.observers

    @rule(at=st.integers(0, 2))
    def catch_up(self, at: int) -> None:
        if self.readers[at].follower is None:
            self.readers[at].connect()
        self.readers[at].catch_up()

    @invariant()
    def counts_its_followers(self) -> None:
        following = [reader for reader in self.readers if reader.follower is not None]
        assert self.events.followers == len(following)

    def teardown(self) -> None:
        for at in range(3):
            self.catch_up(at)


TestEventMachine = EventMachine.TestCase


# --- one property at a time ----------------------------------------------------------------------


def node(capacity: int = 100) -> tuple[Index, ShardIndex, Events]:
    index, shard = new_index()
    return index, shard, Events(index, capacity)


def drain(follower: Follower) -> list[Batch]:
    told: list[Batch] = []
    while batches := follower.take():
        told += batches
    return told


def words(batches: Sequence[Batch]) -> list[Word]:
    return [batch.word for batch in batches]


def test_nothing_is_recorded_while_nobody_follows() -> None:
    index, shard, events = node()
    chain(index, shard, range(3))
    assert events.sequence == 0
    follower = events.follow()
    chain(index, shard, [3])
    assert events.sequence == 2  # the first number of a recording is left out
    follower.close()
    events.rest()
    chain(index, shard, [4])
    assert events.sequence == 2
    assert index.observers == ()


def test_rest_does_not_end_what_somebody_follows() -> None:
    index, shard, events = node()
    first, second = events.follow(), events.follow()
    first.close()
    events.rest()
    drain(second)
    chain(index, shard, [1])
    assert [event.entry.hash for batch in drain(second) for event in batch.events] == [
        block_hash(1)
    ]


def test_what_is_told_of_a_block() -> None:
    index, shard, events = node()
    follower = events.follow()
    assert words(drain(follower)) == [Word.RESET, Word.SNAPSHOT]
    parent, child = chain(index, shard, [1, 2])
    index.place(child, "ssd", 5)
    index.displace(child, "dram")
    index.relocate(child, "ssd", 6)
    index.touch([parent], 1.0)
    index.drop(parent)
    (batch,) = drain(follower)
    assert [
        (change, tiers, entry.hash, entry.parent_hash) for change, tiers, entry in batch[4]
    ] == [
        (Change.STORED, IN_DRAM, parent.hash, ROOT_PARENT),
        (Change.STORED, IN_DRAM, child.hash, parent.hash),
        (Change.MOVED, IN_DRAM | IN_SSD, child.hash, parent.hash),
        (Change.MOVED, IN_SSD, child.hash, parent.hash),
        (Change.REMOVED, 0, child.hash, parent.hash),
        (Change.REMOVED, 0, parent.hash, ROOT_PARENT),
    ]


def test_a_block_is_never_told_to_be_nowhere_and_yet_held() -> None:
    index, shard, events = node()
    moved, lost = (chain(index, shard, [number])[0] for number in (1, 2))
    follower = events.follow()
    drain(follower)
    for entry in (moved, lost):
        index.displace(entry, "dram")
    index.place(moved, "ssd", 1)
    index.drop(lost)
    (batch,) = drain(follower)
    assert [(change, tiers) for change, tiers, _ in batch.events] == [
        (Change.MOVED, IN_SSD),
        (Change.REMOVED, 0),
    ]


def test_blocks_not_committed_are_not_told_of() -> None:
    index, shard, events = node()
    follower = events.follow()
    drain(follower)
    entry = index.reserve(shard, block_hash(1), ROOT_PARENT, 0.0)
    index.place(entry, "dram", 1)
    index.abort(entry)
    assert follower.take() == []


def test_a_snapshot_is_told_in_pages_and_events_between_them() -> None:
    index, shard, events = node(capacity=10_000)
    held = [chain(index, shard, [number])[0] for number in range(2 * STEP + 1)]
    follower = events.follow()
    assert words(follower.take()) == [Word.RESET]
    assert words(follower.take()) == [Word.SNAPSHOT]
    index.drop(held[0])
    index.drop(held[-1])
    assert words(follower.take()) == [Word.EVENTS, Word.SNAPSHOT]
    rest = drain(follower)
    assert words(rest) == [Word.SNAPSHOT, Word.SNAPSHOT]
    assert [batch.complete for batch in rest] == [False, True]
    assert [len(batch.events) for batch in rest] == [0, 0]


def test_a_burst_does_not_let_a_step_grow() -> None:
    index, shard, events = node(capacity=10_000)
    follower = events.follow()
    drain(follower)
    chain(index, shard, range(3 * STEP))
    assert [len(batch.events) for batch in drain(follower)] == [STEP] * 3


def test_a_page_waits_for_the_events_before_it() -> None:
    index, shard, events = node(capacity=10_000)
    chain(index, shard, [0])
    follower = events.follow()
    assert words(follower.take()) == [Word.RESET]
    chain(index, shard, range(1, 2 * STEP + 2))
    told = [follower.take() for _ in range(3)]
    assert [words(each) for each in told] == [
        [Word.EVENTS],
        [Word.EVENTS],
        [Word.EVENTS, Word.SNAPSHOT],
    ]
    assert not any(batch.complete for each in told for batch in each)


@pytest.mark.parametrize("more", [0, 1])
def test_a_follower_resumes_as_far_as_the_log_reaches_back(more: int) -> None:
    index, shard, events = node(capacity=8)
    follower = events.follow()
    drain(follower)
    position = follower.told
    follower.close()
    chain(index, shard, range(8 + more))
    follower = events.follow(position)
    told = drain(follower)
    if more:
        assert words(told) == [Word.RESET, Word.SNAPSHOT, Word.SNAPSHOT]
        assert events.gaps == 0  # it was not here to be told
    else:
        assert words(told) == [Word.RESUMED, Word.EVENTS]
        assert [len(batch.events) for batch in told] == [0, 8]


def test_a_follower_that_is_too_slow_begins_anew() -> None:
    index, shard, events = node(capacity=8)
    follower = events.follow()
    drain(follower)
    chain(index, shard, range(9))
    assert words(drain(follower)) == [Word.RESET, Word.SNAPSHOT, Word.SNAPSHOT]
    assert events.gaps == 1


@pytest.mark.parametrize("position", [0, 1, 4, 2**63])
def test_a_position_of_another_recording_is_none_here(position: int) -> None:
    index, shard, events = node()
    events.follow().close()
    chain(index, shard, range(3))
    events.rest()
    follower = events.follow(position)
    chain(index, shard, [4])
    assert words(follower.take()) == [Word.RESET]


def test_from_now_leaves_out_what_is_held() -> None:
    index, shard, events = node(capacity=4)
    chain(index, shard, range(3))
    follower = events.follow(snapshot=False)
    told = drain(follower)
    assert words(told) == [Word.RESUMED]
    assert told[0].complete
    chain(index, shard, [3])
    assert [len(batch.events) for batch in drain(follower)] == [1]
    chain(index, shard, range(4, 9))
    assert words(drain(follower)) == [Word.RESET]  # told that it has lost some


def test_those_who_wait_are_woken_once() -> None:
    index, shard, events = node()
    follower = events.follow()
    woken: list[int] = []
    follower.wait(lambda: woken.append(1))
    assert woken == [1]  # it has not been told where it is
    drain(follower)
    follower.wait(lambda: woken.append(2))
    assert woken == [1]
    chain(index, shard, [1, 2])
    assert woken == [1, 2]
    drain(follower)
    follower.wait(lambda: woken.append(3))
    follower.close()
    chain(index, shard, [3])
    assert woken == [1, 2]


def test_the_log_lets_go_of_blocks_that_are_gone() -> None:
    index, shard, events = node(capacity=4)
    follower = events.follow()
    chain(index, shard, [1])

    def gone() -> int:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is Entry]
        return sum(one.gone and one.shard is shard for one in found)

    index.drop(shard.committed[block_hash(1)])
    assert gone() == 1
    chain(index, shard, range(2, 6))
    assert gone() == 0
    index.drop(shard.committed[block_hash(2)])
    assert gone() == 4
    follower.close()
    events.rest()
    assert gone() == 0


# --- the map -------------------------------------------------------------------------------------


def test_a_missing_batch_is_noticed_and_not_taken_in() -> None:
    known = BlockMap()
    known.apply(EventBatch("reset", 7, 7, True, "n", "i"))
    assert known.position == Position("i", 7)
    with pytest.raises(BatchMissing):
        known.apply(EventBatch("events", 8, 9, True))
    assert known.sequence == 7
    known.apply(EventBatch("events", 7, 9, True))
    with pytest.raises(BatchMissing):
        known.apply(EventBatch("resumed", 9, 9, True, "n", "another start"))
    known.apply(EventBatch("resumed", 9, 9, True, "n", "i"))
    known.forget()
    assert known.position is None


def test_a_prefix_ends_where_a_shard_lacks_a_block_and_is_as_slow_as_the_slowest() -> None:
    namespace = Namespace("m", "u1", "raw", 4, BLOCK, tp_size=2)
    index = Index(make_policy("lru", 64))
    events = Events(index)
    known = BlockMap()
    hashes = [block_hash(number) for number in range(5)]
    shards = [index.shard(namespace.fingerprint, number, BLOCK) for number in range(2)]
    first = chain(index, shards[0], range(4))
    follower = events.follow()
    wire = EventService(events, "node", "i", Metrics())

    def prefix() -> tuple[str, ...]:
        while batches := follower.take():
            for batch in batches:
                known.apply(decode_batch(wire._encode(batch)))
        return known.prefix(namespace, hashes)

    assert prefix() == ()
    chain(index, shards[1], range(3))
    assert prefix() == ("dram",) * 3
    index.place(first[1], "ssd", 1)
    assert prefix() == ("dram",) * 3
    index.displace(first[1], "dram")
    assert prefix() == ("dram", "ssd", "dram")
    index.drop(first[1])
    assert prefix() == ("dram",)
    assert known.prefix(Namespace("other", "u1", "raw", 4, BLOCK), hashes) == ()
