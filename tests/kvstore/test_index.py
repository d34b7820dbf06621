from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.entry import DRAM_CODE, IN_DRAM, IN_SSD, SSD_CODE, Entry, ShardIndex
from kvstore.errors import ParentAbsent
from kvstore.identity import ROOT_PARENT
from kvstore.index import AlreadyPresent, Index, TierName
from tests.kvstore.index_rules import check
from tiers.links import PARKED, Link
from tiers.policies import POLICIES, make_policy

BLOCK = 4096
TIERS: Sequence[TierName] = ("dram", "ssd")


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "little")


def new_index(policy: str = "lru") -> tuple[Index, ShardIndex]:
    index = Index(make_policy(policy, 64))
    return index, index.shard(b"n" * 32, 0, BLOCK)


def chain(
    index: Index,
    shard: ShardIndex,
    numbers: Sequence[int],
    parent: bytes = ROOT_PARENT,
    tier: TierName = "dram",
    now: float = 0.0,
    replica: bool = False,
) -> list[Entry]:
    """Commit blocks, each the parent of the next."""
    entries = []
    for number in numbers:
        entry = index.reserve(shard, block_hash(number), parent, now, replica=replica)
        index.place(entry, tier, number)
        entries.append(entry)
        parent = entry.hash
    index.commit(entries, now)
    return entries


@dataclass
class Block:
    """The model of one block."""

    entry: Entry
    shard: int
    parent: Block | None
    committed: bool = False
    extents: dict[str, int] = field(default_factory=dict)
    pins: int = 0
    used: bool = False
    replica: bool = False

    def code(self) -> int:
        if not self.committed:
            return 0
        return DRAM_CODE if "dram" in self.extents else SSD_CODE if "ssd" in self.extents else 0


class Ledger:
    """Believes what an index tells."""

    def __init__(self) -> None:
        self.held: dict[Entry, int] = {}

    def stored(self, entry: Entry) -> None:
        assert entry.committed
        assert entry not in self.held
        self.held[entry] = tiers_of(entry)

    def moved(self, entry: Entry) -> None:
        assert tiers_of(entry) != self.held[entry]
        self.held[entry] = tiers_of(entry)

    def removed(self, entry: Entry) -> None:
        del self.held[entry]


def tiers_of(entry: Entry) -> int:
    return entry.state & (IN_DRAM | IN_SSD)


class IndexMachine(RuleBasedStateMachine):
    """An index beside a dictionary that knows every block's parent, tiers and pins."""

    kind: ClassVar[str] = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(make_policy(self.kind, 8))
        self.index.observe(Ledger())
        self.index.leave(self.index.observers[0])
        self.observers = Ledger(), Ledger()
        for observer in self.observers:
            self.index.observe(observer)
        self.shards = [self.index.shard(b"n" * 32, number, BLOCK) for number in range(2)]
        self.blocks: dict[tuple[int, bytes], Block] = {}
        self.gone: list[Block] = []
        self.extent = 0
        self.now = 0.0

    # The model's view

    def pick(self, data: st.DataObject, **wanted: bool) -> Block | None:
        found = [
            block
            for block in self.blocks.values()
            if all(getattr(block, name) is value for name, value in wanted.items())
        ]
        return data.draw(st.sampled_from(found)) if found else None

    def below(self, block: Block) -> list[Block]:
        found = [block]
        for one in found:
            found += [child for child in self.blocks.values() if child.parent is one]
        return found

    def forget(self, block: Block, removed: list[Entry]) -> None:
        expected = self.below(block)
        assert {id(entry) for entry in removed} == {id(one.entry) for one in expected}
        order = {id(entry): place for place, entry in enumerate(removed)}
        for one in expected:
            if one.parent is not None and id(one.parent.entry) in order:
                assert order[id(one.entry)] < order[id(one.parent.entry)]
        for one in expected:
            del self.blocks[one.shard, one.entry.hash]
            assert one.entry.gone
            assert one.entry.dram == one.extents.get("dram")
            assert one.entry.ssd == one.extents.get("ssd")
            self.gone.append(one)

    def evictable(self, block: Block, parents: bool) -> bool:
        if not block.committed or "dram" not in block.extents or block.pins:
            return False
        return parents or "ssd" in block.extents or len(self.below(block)) == 1

    # What may happen

    @rule(shard=st.integers(0, 1), number=st.integers(1, 9), replica=st.booleans(), data=st.data())
    def reserve(self, shard: int, number: int, replica: bool, data: st.DataObject) -> None:
        name = block_hash(number)
        parents = [ROOT_PARENT, block_hash(99)]
        parents += [hash for place, hash in self.blocks if place == shard]
        parent = data.draw(st.sampled_from(parents))
        if (shard, name) in self.blocks:
            with pytest.raises(AlreadyPresent) as caught:
                self.index.reserve(self.shards[shard], name, parent, self.now)
            assert caught.value.entry is self.blocks[shard, name].entry
        elif parent == block_hash(99):
            with pytest.raises(ParentAbsent):
                self.index.reserve(self.shards[shard], name, parent, self.now)
        else:
            entry = self.index.reserve(self.shards[shard], name, parent, self.now, replica=replica)
            assert entry.reserved
            assert entry.parent_hash == parent
            block = Block(entry, shard, self.blocks.get((shard, parent)), replica=replica)
            self.blocks[shard, name] = block

    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def place(self, data: st.DataObject, tier: TierName) -> None:
        block = self.pick(data)
        if block is None:
            return
        self.extent += 1
        if tier in block.extents:
            with pytest.raises(ValueError, match="can't be placed"):
                self.index.place(block.entry, tier, self.extent)
            return
        self.index.place(block.entry, tier, self.extent)
        block.extents[tier] = self.extent
        block.used = block.used and tier != "ssd"

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        last = self.pick(data, committed=False)
        if last is None:
            return
        path: list[Block] = []
        step: Block | None = last
        while step is not None and not step.committed:
            path.insert(0, step)
            step = step.parent
        ready = 0
        while ready < len(path) and path[ready].extents:
            ready += 1
        if ready == len(path):
            self.index.commit([block.entry for block in path], self.now)
        else:
            with pytest.raises(ValueError, match="with an extent"):
                self.index.commit([block.entry for block in path], self.now)
        for block in path[:ready]:
            block.committed = True

    @rule(data=st.data())
    def commit_before_the_parent(self, data: st.DataObject) -> None:
        block = self.pick(data, committed=False)
        if block is None or block.parent is None or block.parent.committed or not block.extents:
            return
        with pytest.raises(ParentAbsent):
            self.index.commit([block.entry], self.now)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        block = self.pick(data)
        if block is None:
            return
        if block.committed:
            with pytest.raises(ValueError, match="not reserved"):
                self.index.abort(block.entry)
        else:
            self.forget(block, self.index.abort(block.entry))

    @rule(data=st.data(), evicted=st.booleans())
    def drop(self, data: st.DataObject, evicted: bool) -> None:
        block = self.pick(data)
        if block is not None:
            self.forget(block, self.index.drop(block.entry, evicted=evicted))

    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def displace(self, data: st.DataObject, tier: TierName) -> None:
        block = self.pick(data)
        if block is None:
            return
        if tier not in block.extents:
            with pytest.raises(ValueError, match="is not in"):
                self.index.displace(block.entry, tier)
        elif len(block.extents) == 2 or not block.committed:
            assert self.index.displace(block.entry, tier) == block.extents.pop(tier)

    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def relocate(self, data: st.DataObject, tier: TierName) -> None:
        block = self.pick(data)
        if block is None or tier not in block.extents:
            return
        self.extent += 1
        assert self.index.relocate(block.entry, tier, self.extent) == block.extents[tier]
        block.extents[tier] = self.extent
        block.used = block.used and tier != "ssd"

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        last = self.pick(data)
        if last is None:
            return
        self.now += 1.0
        entries = last.entry.path()
        self.index.touch(entries, self.now)
        for entry in entries:
            assert entry.last_use == self.now
            self.blocks[last.shard, entry.hash].used = True

    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        last = self.pick(data)
        if last is None:
            return
        self.index.own([*last.entry.path(), *(one.entry for one in self.gone[-1:])])
        for entry in last.entry.path():
            self.blocks[last.shard, entry.hash].replica = False

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        block = self.pick(data)
        if block is not None:
            self.index.pin([block.entry])
            block.pins += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [block for block in [*self.blocks.values(), *self.gone] if block.pins]
        if not pinned:
            return
        block = data.draw(st.sampled_from(pinned))
        block.pins -= 1
        free = self.index.unpin([block.entry])
        assert free == ([block.entry] if block.entry.gone and not block.pins else [])

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def use_what_is_gone(self, data: st.DataObject, tier: TierName) -> None:
        entry = data.draw(st.sampled_from(self.gone)).entry
        self.index.touch([entry], self.now)
        for call in (self.index.drop, self.index.abort):
            with pytest.raises(ValueError, match=r"gone already|not reserved"):
                call(entry)
        with pytest.raises(ValueError, match="can't be placed"):
            self.index.place(entry, tier, 1)
        with pytest.raises(ValueError, match="is not in"):
            self.index.displace(entry, tier)
        with pytest.raises(ValueError, match="not a reserved block"):
            self.index.commit([entry], self.now)

    @rule(parents=st.booleans())
    def look_at_all_victims(self, parents: bool) -> None:
        offered = list(self.index.victims("dram", parents=parents))
        expected = [block for block in self.blocks.values() if self.evictable(block, parents)]
        assert len(offered) == len(expected)
        assert {id(entry) for entry in offered} == {id(block.entry) for block in expected}
        assert [entry.replica for entry in offered] == sorted(
            (block.replica for block in expected), reverse=True
        )

    @rule(parents=st.booleans(), number=st.integers(1, 4))
    def make_room(self, parents: bool, number: int) -> None:
        for entry in islice(self.index.victims(parents=parents), number):
            block = self.blocks[entry.shard.number, entry.hash]
            assert self.evictable(block, parents)
            assert block.replica or not any(
                other.replica and self.evictable(other, parents) for other in self.blocks.values()
            )
            if "ssd" in block.extents:
                self.index.displace(entry, "dram")
                del block.extents["dram"]
            else:
                self.forget(block, self.index.drop(entry))

    # What must hold

    @invariant()
    def rules_hold(self) -> None:
        check(self.index)

    @invariant()
    def tells_what_it_holds(self) -> None:
        held = {
            entry: tiers_of(entry)
            for shard in self.index.shards
            for entry in shard.committed.values()
        }
        assert [observer.held for observer in self.observers] == [held, held]

    @invariant()
    def knows_what_the_model_knows(self) -> None:
        held = {
            (shard.number, hash): entry
            for shard in self.index.shards
            for hash, entry in [*shard.committed.items(), *shard.reserved.items()]
        }
        assert held.keys() == self.blocks.keys()
        for key, block in self.blocks.items():
            entry = held[key]
            assert entry is block.entry
            assert entry.committed is block.committed
            assert entry.parent is (block.parent.entry if block.parent else None)
            assert (entry.dram, entry.ssd) == (
                block.extents.get("dram"),
                block.extents.get("ssd"),
            )
            assert entry.pins == block.pins
            assert entry.tier_code == block.code()
            assert entry.replica is block.replica
            alone = len(self.below(block)) == 1
            assert entry.worth_keeping_on_ssd is (block.used or not alone)

    @invariant()
    def matches_what_the_model_holds(self) -> None:
        hashes = [block_hash(number) for number in range(1, 10)]
        codes = [
            [block.code() if (block := self.blocks.get((place, hash))) else 0 for hash in hashes]
            for place in range(2)
        ]
        for place, shard in enumerate(self.shards):
            assert list(self.index.exists([shard], hashes)) == codes[place]
            assert list(self.index.match([shard], hashes)) == prefix(codes[place])
        both = [max(pair) if all(pair) else 0 for pair in zip(*codes, strict=True)]
        assert list(self.index.exists(self.shards, hashes)) == both
        assert list(self.index.match(self.shards, hashes)) == prefix(both)
        self.joined_hashes_match_alike(hashes)
        for block in self.blocks.values():
            chain = [entry.hash for entry in block.entry.path()]
            self.joined_hashes_match_alike([*chain, block_hash(1)])
            self.joined_hashes_match_alike(chain[1:])

    def joined_hashes_match_alike(self, hashes: list[bytes]) -> None:
        for shards in (self.shards, self.shards[:1], self.shards[1:]):
            assert self.index.match_joined(shards, b"".join(hashes)) == self.index.match(
                shards, hashes
            )


def prefix(codes: list[int]) -> list[int]:
    return codes[: codes.index(0)] if 0 in codes else codes


class ArcIndexMachine(IndexMachine):
    kind: ClassVar[str] = "arc"


TestIndexWithLru = IndexMachine.TestCase
TestIndexWithArc = ArcIndexMachine.TestCase


def test_what_stops_a_match() -> None:
    index, shard = new_index()
    entries = chain(index, shard, [1, 2, 3])
    index.place(entries[1], "ssd", 5)
    index.displace(entries[1], "dram")
    reserved = index.reserve(shard, block_hash(4), entries[2].hash, 0.0)
    index.place(reserved, "dram", 9)
    hashes = [block_hash(number) for number in (1, 2, 3, 4)]
    assert index.match([shard], hashes) == bytes([DRAM_CODE, SSD_CODE, DRAM_CODE])
    assert index.match_joined([shard], b"".join(hashes)) == index.match([shard], hashes)
    for nothing in (index.match([shard], []), index.match_joined([shard], b"")):
        assert nothing == b""
    for nothing in (index.match([], hashes), index.match_joined([], b"".join(hashes))):
        assert nothing == b""


@pytest.mark.parametrize(
    ("numbers", "held"),
    [
        ([1, 2, 3, 9], 3),  # a chain
        ([2, 3], 2),  # the middle of one
        ([1, 3], 2),  # one with a gap
        ([3, 2, 1], 3),  # one from its end
        ([4, 1, 2], 3),  # two chains
        ([1, 9, 2, 3, 4], 1),  # where bisection meets what is held behind what is not
        ([1, 9, 9, 9, 2], 1),
        ([9, 1, 2, 3], 0),
    ],
)
def test_joined_hashes_need_not_be_a_chain(numbers: list[int], held: int) -> None:
    index, shard = new_index()
    chain(index, shard, [1, 2, 3])
    chain(index, shard, [4])
    hashes = [block_hash(number) for number in numbers]
    assert index.match_joined([shard], b"".join(hashes)) == bytes([DRAM_CODE]) * held
    assert index.match([shard], hashes) == bytes([DRAM_CODE]) * held


def test_a_prefix_counts_only_where_every_shard_has_it() -> None:
    index, first = new_index()
    second = index.shard(b"n" * 32, 1, BLOCK)
    chain(index, first, [1, 2, 3])
    chain(index, second, [1, 2], tier="ssd")
    hashes = [block_hash(number) for number in (1, 2, 3)]
    assert index.match([first, second], hashes) == bytes([SSD_CODE] * 2)
    assert index.exists([first, second], hashes[1:]) == bytes([SSD_CODE, 0])


def test_the_same_hash_in_two_namespaces_is_two_blocks() -> None:
    index, mine = new_index("arc")
    other = index.shard(b"o" * 32, 0, BLOCK)
    (here,) = chain(index, mine, [1])
    (there,) = chain(index, other, [1])
    assert index.find(block_hash(1)) == [here, there]
    assert here.key() != there.key()
    index.drop(here)
    assert index.find(block_hash(1)) == [there]
    assert index.shard(b"o" * 32, 0, BLOCK) is other


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_come_leaf_first_whatever_the_policy(policy: str) -> None:
    index, shard = new_index(policy)
    chain(index, shard, [1, 2, 3, 4])
    chain(index, shard, [5, 6], parent=block_hash(2))
    order = []
    for victim in index.victims():
        assert victim.first_child is None
        order.append(victim.hash[0])
        index.drop(victim)
    assert sorted(order) == [1, 2, 3, 4, 5, 6]
    assert len(index) == 0


def test_lru_gives_up_the_end_of_the_prefix_longest_unused() -> None:
    index, shard = new_index()
    old = chain(index, shard, [1, 2, 3])
    new = chain(index, shard, [4, 5], parent=old[0].hash)
    index.touch([old[0], *new], 1.0)
    index.touch(old[:2], 2.0)
    order = [victim.hash[0] for victim in index.victims(parents=True)]
    assert order == [3, 5, 4, 2, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_go_before_others_the_longest_unused_first(policy: str) -> None:
    index, shard = new_index(policy)
    chain(index, shard, [1, 2])
    old = chain(index, shard, [3, 4], replica=True)
    chain(index, shard, [5, 6], replica=True)
    index.touch(old, 1.0)
    order = []
    for victim in index.victims():
        order.append(victim.hash[0])
        index.drop(victim)
    assert order[:4] == [6, 5, 4, 3]
    assert sorted(order[4:]) == [1, 2]


def test_a_replica_that_others_follow_waits_for_them_and_comes_next() -> None:
    index, shard = new_index()
    replicas = chain(index, shard, [1, 2], replica=True)
    chain(index, shard, [3], parent=replicas[-1].hash)
    chain(index, shard, [4])
    assert [victim.hash[0] for victim in index.victims()] == [3, 4]
    order = []
    for victim in index.victims():
        order.append(victim.hash[0])
        index.drop(victim)
    assert order == [3, 2, 1, 4]


def test_a_replica_that_is_owned_goes_when_the_policy_says() -> None:
    index, shard = new_index()
    chain(index, shard, [1])
    replicas = chain(index, shard, [2, 3], replica=True)
    chain(index, shard, [4], replica=True)
    index.pin(replicas[:1])
    assert [victim.hash[0] for victim in index.victims()] == [3, 4, 1]
    index.own(replicas)
    index.own(replicas)
    check(index)
    assert [entry.replica for entry in replicas] == [False, False]
    assert [victim.hash[0] for victim in index.victims()] == [4, 1, 3]
    index.unpin(replicas[:1])
    index.drop(replicas[1])
    assert [victim.hash[0] for victim in index.victims()] == [4, 2, 1]


def test_a_use_moves_replicas_and_others_each_in_their_order() -> None:
    index, shard = new_index()
    first, second = chain(index, shard, [1]), chain(index, shard, [2])
    third = chain(index, shard, [3], parent=first[0].hash, replica=True)
    chain(index, shard, [4], replica=True)
    index.touch([*first, *third], 1.0)
    assert [victim.hash[0] for victim in index.victims(parents=True)] == [4, 3, 2, 1]
    assert [entry.last_use for entry in (*first, *second, *third)] == [1.0, 0.0, 1.0]


def test_making_room_steps_over_pinned_replicas_once() -> None:
    index = Index(make_policy("lru", 20_000))
    shard = index.shard(b"n" * 32, 0, BLOCK)
    stuck = [chain(index, shard, [number], replica=True)[0] for number in range(1, 1_001)]
    index.pin(stuck)
    for number in range(20_000, 20_010):
        (entry,) = chain(index, shard, [number])
        assert next(index.victims()) is entry
        assert all(one.queue & PARKED for one in stuck)
        index.drop(entry)


def test_a_parent_may_leave_dram_before_its_children_if_it_has_a_copy() -> None:
    index, shard = new_index()
    parent, child = chain(index, shard, [1, 2])
    index.pin([child])
    assert list(index.victims()) == []
    index.place(parent, "ssd", 7)
    assert list(index.victims()) == [parent]
    assert index.displace(parent, "dram") == 1
    assert index.match([shard], [parent.hash, child.hash]) == bytes([SSD_CODE, DRAM_CODE])


def test_the_last_child_gone_makes_the_parent_next() -> None:
    index, shard = new_index()
    first, second = chain(index, shard, [1, 2])
    chain(index, shard, [3])
    index.touch([second], 1.0)
    assert [victim.hash[0] for victim in index.victims()] == [3, 2]
    index.drop(second)
    assert [victim.hash[0] for victim in index.victims()] == [1, 3]
    assert first.first_child is None


def test_a_victim_pinned_during_a_scan_is_not_offered_by_the_next() -> None:
    index, shard = new_index()
    (entry,) = chain(index, shard, [1])
    for victim in index.victims():
        index.pin([victim])
    assert list(index.victims()) == []
    assert index.unpin([entry]) == []
    assert list(index.victims()) == [entry]


def test_unpinned_chain_goes_leaf_first_again() -> None:
    index, shard = new_index()
    entries = chain(index, shard, [1, 2, 3])
    index.pin(entries)
    assert list(index.victims(parents=True)) == []
    index.unpin(entries)
    assert [victim.hash[0] for victim in index.victims(parents=True)] == [3, 2, 1]


def test_dropped_while_pinned_is_freed_by_the_last_pin() -> None:
    index, shard = new_index()
    parent, child = chain(index, shard, [1, 2])
    index.pin([child, child])
    assert index.drop(parent) == [child, parent]
    assert index.match([shard], [parent.hash]) == b""
    assert index.unpin([child]) == []
    assert index.unpin([child]) == [child]
    assert (child.dram, child.parent_hash) == (2, parent.hash)


def test_drop_takes_reservations_below_with_it() -> None:
    index, shard = new_index()
    (parent,) = chain(index, shard, [1])
    child = index.reserve(shard, block_hash(2), parent.hash, 0.0)
    grandchild = index.reserve(shard, block_hash(3), child.hash, 0.0)
    index.place(child, "dram", 1)
    assert index.drop(parent) == [grandchild, child, parent]
    assert (shard.in_dram, shard.reserved) == (0, {})
    with pytest.raises(ValueError, match="not a reserved block"):
        index.commit([child], 0.0)


def test_a_commit_that_breaks_off_keeps_the_prefix() -> None:
    index, shard = new_index()
    first = index.reserve(shard, block_hash(1), ROOT_PARENT, 0.0)
    second = index.reserve(shard, block_hash(2), first.hash, 0.0)
    index.place(first, "dram", 1)
    with pytest.raises(ValueError, match="with an extent"):
        index.commit([first, second], 1.0)
    check(index)
    assert first.committed
    assert second.reserved
    assert list(index.victims()) == []


def test_used_since_it_was_written_to_ssd() -> None:
    index, shard = new_index()
    (entry,) = chain(index, shard, [1], tier="ssd")
    worth = [entry.worth_keeping_on_ssd]
    index.touch([entry], 1.0)
    worth.append(entry.worth_keeping_on_ssd)
    index.relocate(entry, "ssd", 8)
    worth.append(entry.worth_keeping_on_ssd)
    assert worth == [False, True, False]


def test_pages_list_each_block_that_stays_exactly_once() -> None:
    index, shard = new_index()
    entries = [chain(index, shard, [number])[0] for number in range(1, 41)]
    seen: list[Entry] = []
    after, fresh = b"", iter(range(100, 103))
    while page := shard.page(7, after):
        seen += page
        after = page[-1].hash
        for number in islice(fresh, 1):
            index.drop(entries.pop(0))
            index.drop(entries.pop())
            chain(index, shard, [number])
    assert len(set(seen)) == len(seen)
    assert set(entries) <= set(seen)
    assert [entry.hash for entry in seen] == sorted(entry.hash for entry in seen)


def test_family() -> None:
    index, shard = new_index()
    entries = chain(index, shard, [1, 2, 3])
    branch = chain(index, shard, [4], parent=entries[0].hash)
    assert entries[2].path() == entries
    assert list(entries[0].children()) == [branch[0], entries[1]]
    assert set(entries[0].subtree()) == {*entries, *branch}
    assert entries[1].subtree() == entries[1:]
    assert "shard 0" in repr(entries[0])


def test_a_long_chain_is_dropped_and_freed_without_recursion_or_garbage() -> None:
    index, shard = new_index()
    entries = chain(index, shard, range(1, 50_001))
    gone = index.drop(entries[0])
    assert len(gone) == 50_000
    before = len(gc.get_objects())
    gc.disable()
    try:
        del entries, gone
        assert before - len(gc.get_objects()) >= 50_000
    finally:
        gc.enable()


def test_making_room_does_not_pass_what_it_cannot_take_again() -> None:
    """Ten thousand pinned blocks at the cold end are stepped over once, not each time."""
    index = Index(make_policy("lru", 20_000))
    shard = index.shard(b"n" * 32, 0, BLOCK)
    stuck = [chain(index, shard, [number])[0] for number in range(1, 10_001)]
    index.pin(stuck)
    steps = 0
    policy = index.accounts.others.policy
    scan = policy.scan

    class Counted:
        def __init__(self, *, held: bool = False) -> None:
            self.scan = scan(held=held)
            self.peek, self.close = self.scan.peek, self.scan.close

        def take(self) -> Link | None:
            nonlocal steps
            steps += 1
            return self.scan.take()

    policy.scan = Counted  # type: ignore[method-assign, assignment]
    for number in range(20_000, 20_100):
        chain(index, shard, [number])
        index.drop(next(index.victims()))
    assert steps == 10_000 + 100
