"""The index against a model of it: whatever is done to it, and in whatever order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.entry import DRAM_CODE, IN_DRAM, IN_SSD, SSD_CODE, Entry
from kvstore.errors import ParentAbsent
from kvstore.identity import ROOT_PARENT
from kvstore.index import AlreadyPresent, Index, TierName
from tests.kvstore.index_rules import check
from tests.kvstore.test_index import BLOCK, block_hash
from tiers.policies import make_policy

TIERS: Sequence[TierName] = ("dram", "ssd")


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
