"""What lies on which GPU and what goes first, as a state machine against a model."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.entry import HBM_CODE, IN_HBM, WANTED, Entry
from kvstore.hbm_copies import Copy, HbmCopies
from kvstore.identity import ROOT_PARENT
from kvstore.index import Index
from tests.kvstore.index_rules import check
from tiers.policies import POLICIES, make_policy

GPUS = 2


def name(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def stored(index: Index, number: int) -> Entry:
    shard = index.shard(bytes(32), 0, 4096, "a")
    entry = index.reserve(shard, name(number), ROOT_PARENT, 0.0)
    index.place(entry, "dram", number)
    index.commit([entry], 0.0)
    return entry


class Copies(RuleBasedStateMachine):
    """Blocks that come, are copied, used, pinned and dropped."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.index = Index(make_policy("lru", 8))
        self.copies = HbmCopies(self.index, [make_policy(policy, 4) for _ in range(GPUS)])
        self.blocks: list[Entry] = []
        self.model: dict[Entry, Copy] = {}
        self.count = 0

    def one(self, data: st.DataObject) -> Entry:
        return data.draw(st.sampled_from(self.blocks))

    @rule()
    def store(self) -> None:
        self.blocks.append(stored(self.index, self.count))
        self.count += 1

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), gpu=st.integers(0, GPUS - 1))
    def add(self, data: st.DataObject, gpu: int) -> None:
        entry = self.one(data)
        copy = Copy(entry, gpu, len(self.model))
        if entry in self.model or entry.gone:
            with pytest.raises(ValueError, match="can't have a copy"):
                self.copies.add(copy)
        else:
            self.copies.add(copy)
            self.model[entry] = copy

    @precondition(lambda self: self.model)
    @rule(data=st.data(), evicted=st.booleans())
    def remove(self, data: st.DataObject, evicted: bool) -> None:
        entry = data.draw(st.sampled_from(list(self.model)))
        copy = self.model.pop(entry)
        self.copies.remove(copy, evicted=evicted)
        if entry.gone:
            self.blocks.remove(entry)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.copies.touch(data.draw(st.lists(st.sampled_from(self.blocks), unique=True)))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.index.pin([self.one(data)])

    @precondition(lambda self: any(entry.pins for entry in self.blocks))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([entry for entry in self.blocks if entry.pins]))
        for lost in self.index.unpin([entry]):
            if lost in self.model:
                self.copies.remove(self.model.pop(lost), evicted=False)
            self.blocks.remove(lost)

    @precondition(lambda self: any(not entry.gone for entry in self.blocks))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([entry for entry in self.blocks if not entry.gone]))
        self.index.drop(entry)
        if not entry.pins:
            if entry in self.model:
                self.copies.remove(self.model.pop(entry), evicted=False)
            self.blocks.remove(entry)

    @rule(gpu=st.integers(0, GPUS - 1), most=st.integers(0, 3))
    def evict(self, gpu: int, most: int) -> None:
        victims = self.copies.victims(gpu)
        for _ in range(most):
            victim = next(victims, None)
            if victim is None:
                break
            assert not victim.entry.pins
            assert self.model.pop(victim.entry) is victim
            self.copies.remove(victim, evicted=True)

    @rule(gpu=st.integers(0, GPUS - 1))
    def all_that_is_not_pinned_may_go(self, gpu: int) -> None:
        free = [copy for entry, copy in self.model.items() if copy.gpu == gpu and not entry.pins]
        found = list(self.copies.victims(gpu))
        assert len(found) == len(set(found))
        assert set(found) == set(free)

    @rule(gpu=st.integers(0, GPUS - 1))
    def fit(self, gpu: int) -> None:
        self.copies.fit(gpu)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "index"):
            return
        check(self.index)
        assert len(self.copies) == len(self.model)
        for entry in self.blocks:
            assert self.copies.of(entry) is self.model.get(entry)
            assert bool(entry.state & IN_HBM) is (entry in self.model)
            if not entry.gone:
                assert (entry.tier_code == HBM_CODE) is (entry in self.model)
        for gpu in range(GPUS):
            there = {copy for copy in self.model.values() if copy.gpu == gpu}
            assert set(self.copies.on(gpu)) == there


TestCopies = Copies.TestCase


def copied(index: Index, copies: HbmCopies, count: int) -> list[Entry]:
    entries = [stored(index, number) for number in range(count)]
    for entry in entries:
        copies.add(Copy(entry, 0, 0))
    return entries


def test_what_is_longest_unused_goes_first_and_what_is_pinned_stays() -> None:
    index = Index(make_policy("lru", 8))
    copies = HbmCopies(index, [make_policy("lru", 8)])
    a, b, c, d = copied(index, copies, 4)
    copies.touch([a])
    index.pin([c])
    assert [copy.entry for copy in copies.victims(0)] == [b, d, a]
    assert [copy.entry for copy in copies.victims(0)] == [b, d, a]
    index.unpin([c])
    assert [copy.entry for copy in copies.victims(0)] == [c, b, d, a]
    index.pin([b])
    assert next(copies.victims(0)).entry is c
    copies.touch([b])
    index.unpin([b])
    assert [copy.entry for copy in copies.victims(0)] == [c, d, a, b]


def test_only_what_is_held_below_may_have_a_copy() -> None:
    index = Index(make_policy("lru", 8))
    copies = HbmCopies(index, [make_policy("lru", 8)])
    entry = index.reserve(index.shard(bytes(32), 0, 4096, "a"), name(0), ROOT_PARENT, 0.0)
    with pytest.raises(ValueError, match="no extent"):
        copies.add(Copy(entry, 0, 0))
    index.place(entry, "dram", 0)
    with pytest.raises(ValueError, match="can't have a copy"):
        copies.add(Copy(entry, 0, 0))
    index.commit([entry], 0.0)
    copies.add(Copy(entry, 0, 0))
    # Between two tiers for a moment, it is nowhere.
    index.displace(entry, "dram")
    assert entry.tier_code == 0


def test_a_block_is_wanted_anew_when_it_has_left() -> None:
    index = Index(make_policy("lru", 8))
    copies = HbmCopies(index, [make_policy("lru", 8)])
    entry = stored(index, 0)
    assert [index.want(entry), index.want(entry)] == [False, True]
    copy = Copy(entry, 0, 0)
    copies.add(copy)
    copies.remove(copy, evicted=True)
    assert not entry.state & WANTED
    assert not index.want(entry)


def test_bytes_follow_a_shard_to_its_tenants_account() -> None:
    index = Index(make_policy("lru", 8))
    copies = HbmCopies(index, [make_policy("lru", 8)])
    entries = copied(index, copies, 3)
    (account,) = index.accounts
    assert account.hbm == sum(entry.shard.block_bytes for entry in entries)
    index.drop(entries[0])
    assert account.hbm == 2 * 4096


def test_an_order_is_told_how_much_fits() -> None:
    index = Index(make_policy("lru", 8))
    order = make_policy("arc", 1000)
    copies = HbmCopies(index, [order])
    copied(index, copies, 20)
    copies.fit(0)
    assert order.capacity == 20
    copied_more = stored(index, 100)
    copies.add(Copy(copied_more, 0, 0))
    copies.fit(0)
    assert order.capacity == 20
