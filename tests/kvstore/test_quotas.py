"""Whose blocks go first, as state machines: on the index alone, and on a node's memory."""

from __future__ import annotations

import hashlib
from itertools import islice

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.accounts import OTHERS, Account, Accounts, Quota
from kvstore.catalog import Catalog
from kvstore.departures import DepartureReason, Departures
from kvstore.entry import Entry, ShardIndex
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.index import Index
from kvstore.metrics import Metrics
from kvstore.node import Node
from tests.kvstore.index_rules import check
from tiers.dram import DramTier

BLOCK = 4096
SEGMENT = 16 * BLOCK
TENANTS = ("a", "b", "c", "d")
QUOTAS = {"a": Quota(6 * BLOCK, 3 * BLOCK), "b": Quota(20 * BLOCK), OTHERS: Quota(24 * BLOCK)}


def name(*path: object) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def is_beyond(account: Account) -> bool:
    limit = account.quota.dram
    return limit is not None and account.dram > limit


def can_go(entry: Entry) -> bool:
    is_leaf = next(entry.children(), None) is None
    return bool(entry.committed and entry.dram is not None and not entry.pins) and (
        is_leaf or entry.ssd is not None
    )


class QuotasOfAnIndex(RuleBasedStateMachine):
    """Blocks of four tenants, two of them with a quota of their own, come, are used and go."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(Accounts.make(self.policy, 64, QUOTAS))
        self.shards = {
            tenant: self.index.shard(name(tenant), 0, BLOCK, tenant) for tenant in TENANTS
        }
        self.pinned: list[Entry] = []
        self.now = 0.0
        self.places = 0

    def tick(self) -> float:
        self.now += 1
        return self.now

    def entries(self) -> list[Entry]:
        return [entry for shard in self.shards.values() for entry in shard.committed.values()]

    @rule(
        tenant=st.sampled_from(TENANTS),
        path=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        replica=st.booleans(),
    )
    def put(self, tenant: str, path: list[int], replica: bool) -> None:
        shard, parent, new = self.shards[tenant], ROOT_PARENT, []
        for end in range(len(path)):
            block = name(*path[: end + 1])
            if shard.get(block) is None:
                entry = self.index.reserve(shard, block, parent, self.now, replica=replica)
                self.places += 1
                self.index.place(entry, "dram", self.places)
                new.append(entry)
            parent = block
        self.index.commit(new, self.tick())

    @precondition(lambda self: self.entries())
    @rule(data=st.data(), what=st.sampled_from(["touch", "pin", "copy", "own", "lose copy"]))
    def use(self, data: st.DataObject, what: str) -> None:
        entry = data.draw(st.sampled_from(self.entries()))
        if what == "touch":
            self.index.touch(entry.path(), self.tick())
        elif what == "pin":
            self.index.pin([entry])
            self.pinned.append(entry)
        elif what == "own":
            self.index.own(entry.path())
        elif what == "copy" and entry.ssd is None:
            self.places += 1
            self.index.place(entry, "ssd", self.places)
        elif what == "lose copy" and entry.ssd is not None and entry.dram is not None:
            self.index.displace(entry, "ssd")

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(entry)
        self.index.unpin([entry])

    def evict(self, entry: Entry) -> None:
        if entry.ssd is None:
            self.index.drop(entry)
        else:
            self.index.displace(entry, "dram")

    @rule(number=st.integers(1, 6))
    def make_room(self, number: int) -> None:
        victims = self.index.victims()
        for _ in range(number):
            could = [entry for entry in self.entries() if can_go(entry)]
            entry = next(victims, None)
            if entry is None:
                assert not could
                return
            assert entry in could
            beyond = [one for one in could if is_beyond(one.shard.account)]
            if beyond:
                assert entry in beyond, "a tenant within its quota lost a block"
                mine = [one for one in beyond if one.shard.account is entry.shard.account]
                assert entry.replica or not any(one.replica for one in mine)
            else:
                assert entry.replica or not any(one.replica for one in could)
            self.evict(entry)

    @rule(number=st.integers(1, 6), tenant=st.sampled_from(TENANTS))
    def make_room_for(self, number: int, tenant: str) -> None:
        account = self.index.accounts.of(tenant)
        for entry in islice(self.index.victims_for(account, BLOCK), number):
            limit = account.quota.dram
            if limit is not None and account.dram + BLOCK > limit:
                assert entry.shard.account is account
            assert can_go(entry)
            self.evict(entry)

    @invariant()
    def the_rules_of_an_index_hold(self) -> None:
        check(self.index)


class QuotasWithArc(QuotasOfAnIndex):
    policy = "arc"


TestQuotasOfAnIndex = QuotasOfAnIndex.TestCase
TestQuotasWithArc = QuotasWithArc.TestCase


def make_node(segments: int, quotas: dict[str, Quota]) -> Node:
    dram = DramTier(segments * SEGMENT, segment_bytes=SEGMENT, prefault=False)
    dram.open()
    return Node(
        index=Index(Accounts.make("lru", segments * 16, quotas)),
        dram=dram,
        ssd=None,
        catalog=Catalog(None),
        departures=Departures(1000),
        metrics=Metrics(),
        clock=iter(range(10**9)).__next__,  # type: ignore[arg-type]
    )


class Writers:
    """Tenants that store blocks, one at a time."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.shards = {
            tenant: node.shard(Namespace("m", "float32", "t", 16, BLOCK, tenant=tenant), 0)
            for tenant in TENANTS
        }

    def put(self, tenant: str, block: bytes, parent: bytes = ROOT_PARENT) -> bool:
        """Store a block; whether there was room."""
        shard = self.shards[tenant]
        _, reservation = self.node.reserve(shard, tenant, parent, [block], number=1, most=1)
        if reservation is not None:
            self.node.commit(reservation, [0])
        return reservation is not None

    def held(self, tenant: str) -> set[bytes]:
        return set(self.shards[tenant].committed)


class QuotasOfANode(RuleBasedStateMachine):
    """Memory that goes from tenant to tenant by the segment."""

    def __init__(self) -> None:
        super().__init__()
        self.node = make_node(4, QUOTAS)
        self.writers = Writers(self.node)
        self.pinned: list[Entry] = []
        self.count = 0

    def teardown(self) -> None:
        self.node.unpin(self.pinned)
        self.node.dram.close()

    def account(self, tenant: str) -> Account:
        return self.node.index.accounts.of(tenant)

    @rule(tenant=st.sampled_from(TENANTS), number=st.integers(1, 12), data=st.data())
    def put(self, tenant: str, number: int, data: st.DataObject) -> None:
        for _ in range(number):
            held = sorted(self.writers.held(tenant))
            parent = data.draw(st.sampled_from([ROOT_PARENT, *held[:3]]))
            self.count += 1
            before = {one: self.writers.held(one) for one in TENANTS}
            account, others = self.account(tenant), list(self.node.index.accounts)
            limit = account.quota.dram
            too_much = limit is not None and account.dram + BLOCK > limit
            beyond = {one for one in others if is_beyond(one)}
            can_give = bool(self.node._crowd(tenant, BLOCK, is_beyond))
            self.writers.put(tenant, name(self.count), parent)
            lost = {self.account(one) for one in TENANTS if before[one] - self.writers.held(one)}
            if too_much:
                assert lost <= {account}, "a tenant beyond its quota took room from another"
            elif can_give:
                assert lost <= beyond, "a tenant within its quota lost a block"

    @precondition(lambda self: any(map(self.writers.held, TENANTS)))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from([one for one in TENANTS if self.writers.held(one)]))
        block = data.draw(st.sampled_from(sorted(self.writers.held(tenant))))
        entry = self.writers.shards[tenant].committed[block]
        self.node.pin([entry])
        self.pinned.append(entry)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(entry)
        self.node.unpin([entry])

    @invariant()
    def what_is_counted_is_what_is_held(self) -> None:
        check(self.node.index)
        entries = [
            entry for shard in self.writers.shards.values() for entry in shard.committed.values()
        ]
        gone = {entry for entry in self.pinned if entry.gone}
        assert self.node.dram.used == BLOCK * (len(entries) + len(gone))
        assert sum(one.dram for one in self.node.index.accounts) == BLOCK * len(entries)


TestQuotasOfANode = QuotasOfANode.TestCase


# --- one thing at a time --------------------------------------------------------------------------


def fill(writers: Writers, tenant: str, number: int) -> None:
    for at in range(number):
        assert writers.put(tenant, name(tenant, at))


def test_free_room_may_be_used_and_is_given_back() -> None:
    node = make_node(4, {"a": Quota(2 * SEGMENT), "b": Quota(2 * SEGMENT)})
    writers = Writers(node)
    fill(writers, "a", 64)
    fill(writers, "b", 32)
    assert len(writers.held("a")) == 32
    assert len(writers.held("b")) == 32
    assert {reason for _, reason in node.metrics.evictions} <= {
        DepartureReason.QUOTA,
        DepartureReason.CAPACITY,
    }
    assert node.metrics.evictions["dram", DepartureReason.QUOTA] > 0
    node.dram.close()


def test_a_tenant_beyond_its_quota_replaces_its_own_oldest_blocks() -> None:
    node = make_node(4, {"a": Quota(SEGMENT)})
    writers = Writers(node)
    fill(writers, "b", 48)
    fill(writers, "a", 40)
    assert len(writers.held("b")) == 48
    assert writers.held("a") == {name("a", at) for at in range(24, 40)}
    node.dram.close()


def test_a_tenant_beyond_its_quota_with_all_in_use_is_refused() -> None:
    node = make_node(4, {"a": Quota(SEGMENT)})
    writers = Writers(node)
    fill(writers, "b", 48)
    fill(writers, "a", 16)
    pinned = list(writers.shards["a"].committed.values())
    node.pin(pinned)
    assert not writers.put("a", name("more"))
    node.unpin(pinned)
    assert writers.put("a", name("more"))
    node.dram.close()


@pytest.mark.parametrize(("first", "left"), [("a", 112), ("b", 96)])
def test_other_tenants_blocks_are_not_evicted_for_nothing(first: str, left: int) -> None:
    """Either one of the own goes, or a whole segment of who has used its blocks less lately."""
    node = make_node(8, {})
    writers = Writers(node)
    for tenant in (first, "b" if first == "a" else "a"):
        fill(writers, tenant, {"a": 16, "b": 112}[tenant])
    assert writers.put("a", name("more"))
    assert len(writers.held("b")) == left
    assert len(writers.held("a")) == 16 + (left < 112)
    node.dram.close()


def test_many_names_have_one_quota() -> None:
    node = make_node(4, {OTHERS: Quota(SEGMENT)})
    accounts = {id(node.index.accounts.of(f"made up {number}")) for number in range(100)}
    assert len(accounts) == 1
    node.dram.close()


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_a_shard_whose_tenant_becomes_known_moves_to_its_account(tier: str) -> None:
    index = Index(Accounts.make("lru", 64, QUOTAS))
    shard = index.shard(name("a"), 0, BLOCK)
    parent = ROOT_PARENT
    for number in range(4):
        entry = index.reserve(shard, name(number), parent, 0.0)
        index.place(entry, "dram" if tier == "dram" else "ssd", number)
        index.commit([entry], 0.0)
        parent = entry.hash
    assert index.shard(name("a"), 0, BLOCK, "a") is shard
    check(index)
    assert getattr(index.accounts.of("a"), tier) == 4 * BLOCK
    assert getattr(index.accounts.others, tier) == 0
    if tier == "dram":
        assert [entry.hash for entry in _dropped(index)] == [name(n) for n in (3, 2, 1, 0)]


def _dropped(index: Index) -> list[Entry]:
    gone = []
    for victim in index.victims():
        index.drop(victim)
        gone.append(victim)
    return gone


def test_between_tenants_the_oldest_goes_first() -> None:
    index = Index(Accounts.make("lru", 64, {"a": Quota(99 * BLOCK), "b": Quota(99 * BLOCK)}))
    shards: list[ShardIndex] = [index.shard(name(t), 0, BLOCK, t) for t in ("a", "b", "c")]
    made = []
    for at, number in enumerate((2, 0, 1, 1, 2, 0)):
        entry = index.reserve(shards[number], name(at), ROOT_PARENT, float(at))
        index.place(entry, "dram", at)
        index.commit([entry], float(at))
        made.append(entry)
    assert _dropped(index) == made
