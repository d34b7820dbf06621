"""The node's rules for storing, making room and letting go, as a state machine over real memory."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.catalog import Catalog
from kvstore.departures import DepartureReason, Departures
from kvstore.entry import Entry
from kvstore.errors import ParentAbsent
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.index import Index
from kvstore.metrics import Metrics
from kvstore.node import Node
from kvstore.protocol.messages import BUSY, FILL, HELD, REFUSED
from kvstore.reservation import Reservation
from tiers.dram import DramTier
from tiers.policies import make_policy

BLOCK = 4096
SEGMENT = 64 * 1024
CAPACITY = 2 * SEGMENT


def make_node(capacity: int = CAPACITY) -> Node:
    dram = DramTier(capacity, segment_bytes=SEGMENT, prefault=False)
    dram.open()
    return Node(
        index=Index(make_policy("lru", capacity // BLOCK)),
        dram=dram,
        ssd=None,
        catalog=Catalog(None),
        departures=Departures(1000),
        metrics=Metrics(),
        clock=iter(range(10**9)).__next__,  # type: ignore[arg-type]
    )


def name(*path: int) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def chain(path: tuple[int, ...]) -> list[bytes]:
    return [name(*path[: end + 1]) for end in range(len(path))]


def content(block: bytes) -> bytes:
    return block * (BLOCK // len(block))


NAMESPACE = Namespace("m", "float32", "test", 16, BLOCK)


class NodeMachine(RuleBasedStateMachine):
    """Several writers and readers on a node that is always short of room."""

    def __init__(self) -> None:
        super().__init__()
        self.node = make_node()
        self.shard = self.node.shard(NAMESPACE, 0)
        self.reservations: list[Reservation] = []
        self.leases: list[list[tuple[Entry, bytes]]] = []

    def teardown(self) -> None:
        for reservation in self.reservations:
            self.node.abort(reservation)
        for lease in self.leases:
            self.node.unpin([entry for entry, _ in lease])
        self.node.dram.close()

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple))
    def put(self, path: tuple[int, ...]) -> None:
        hashes = chain(path)
        verdicts, reservation = self.node.reserve(
            self.shard, "default", ROOT_PARENT, hashes, number=1, most=8
        )
        assert len(verdicts) == len(hashes)
        assert (
            verdicts.lstrip(bytes([HELD])).lstrip(bytes([FILL])).strip(bytes([BUSY, REFUSED]))
            == b""
        )
        if reservation is None:
            assert FILL not in verdicts
            return
        assert list(reservation.blocks) == [
            position for position, verdict in enumerate(verdicts) if verdict == FILL
        ]
        for entry in reservation.blocks.values():
            self.view(entry)[:] = content(entry.hash)
        self.reservations.append(reservation)

    def view(self, entry: Entry) -> memoryview:
        assert entry.dram is not None
        return self.node.dram.view(entry.dram, BLOCK)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(self.reservations))
        open_blocks = [
            position for position in reservation.blocks if position not in reservation._filled
        ]
        chosen = (
            data.draw(st.lists(st.sampled_from(open_blocks), unique=True)) if open_blocks else []
        )
        for entry in self.node.commit(reservation, chosen).values():
            assert entry.committed
        if not reservation.blocks:
            self.reservations.remove(reservation)

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), expire=st.booleans())
    def abort(self, data: st.DataObject, expire: bool) -> None:
        reservation = data.draw(st.sampled_from(self.reservations))
        if expire:
            self.node.expire(reservation)
        else:
            self.node.abort(reservation)
            self.reservations.remove(reservation)

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple))
    def get(self, path: tuple[int, ...]) -> None:
        entries = self.node.index.lookup(self.shard, chain(path))
        found = [entry for entry in entries if entry is not None]
        held = [entry is not None for entry in entries]
        assert held == sorted(held, reverse=True), "a hole in a prefix"
        self.node.pin(found)
        self.node.index.touch(found, self.node.clock())
        self.leases.append([(entry, entry.hash) for entry in found])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        for entry, block in lease:
            assert bytes(self.view(entry)) == content(block), "a pinned block changed"
        self.node.unpin([entry for entry, _ in lease])

    @precondition(lambda self: self.shard.committed)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.shard.committed)))
        self.node.drop(self.shard.committed[block], "dram", DepartureReason.ADMIN)
        assert self.node.departures.of(NAMESPACE.fingerprint, 0, block) is not None

    @invariant()
    def committed_blocks_are_whole(self) -> None:
        for block, entry in self.shard.committed.items():
            assert bytes(self.view(entry)) == content(block)
            assert entry.parent is None or entry.parent.committed

    @invariant()
    def memory_adds_up(self) -> None:
        live = set(self.shard.committed.values()) | set(self.shard.reserved.values())
        for reservation in self.reservations:
            live.update(reservation.blocks.values())
        for lease in self.leases:
            live.update(entry for entry, _ in lease)
        extents = [entry.dram for entry in live]
        assert None not in extents
        assert len(set(extents)) == len(extents)
        assert self.node.dram.used == len(live) * BLOCK

    @invariant()
    def counters_add_up(self) -> None:
        metrics = self.node.metrics
        assert metrics.pins == sum(map(len, self.leases))
        assert metrics.reservations == sum(len(one.blocks) for one in self.reservations)


TestNodeMachine = NodeMachine.TestCase


@pytest.fixture
def node() -> Node:
    node = make_node()
    yield node
    node.dram.close()


def put(node: Node, path: tuple[int, ...]) -> bytes:
    shard = node.shard(NAMESPACE, 0)
    verdicts, reservation = node.reserve(
        shard, "default", ROOT_PARENT, chain(path), number=1, most=100
    )
    if reservation is not None:
        node.commit(reservation, list(reservation.blocks))
    return verdicts


def test_least_recently_used_leaves_go_first(node: Node) -> None:
    put(node, (0, 0))
    for branch in range(1, CAPACITY // BLOCK):
        put(node, (0, branch))
    shard = node.shard(NAMESPACE, 0)
    assert name(0) in shard.committed
    assert name(0, 0) not in shard.committed
    assert name(0, 1) in shard.committed
    departure = node.departures.of(NAMESPACE.fingerprint, 0, name(0, 0))
    assert departure is not None
    assert departure.reason is DepartureReason.CAPACITY


def test_a_chain_longer_than_the_tier_keeps_its_beginning(node: Node) -> None:
    fits = CAPACITY // BLOCK
    verdicts = put(node, (0,) * (fits + 5))
    assert verdicts == bytes([FILL]) * fits + bytes([REFUSED]) * 5


def test_child_of_an_absent_parent_is_an_error(node: Node) -> None:
    shard = node.shard(NAMESPACE, 0)
    with pytest.raises(ParentAbsent):
        node.reserve(shard, "default", name(7), [name(7, 7)], number=1, most=1)


def test_what_another_writes_is_busy_until_it_expires(node: Node) -> None:
    shard = node.shard(NAMESPACE, 0)
    _, first = node.reserve(shard, "default", ROOT_PARENT, chain((0, 0)), number=1, most=9)
    verdicts, second = node.reserve(
        shard, "default", ROOT_PARENT, chain((0, 0, 0)), number=2, most=9
    )
    assert verdicts == bytes([BUSY] * 3)
    assert second is None
    assert first is not None
    node.expire(first)
    verdicts, second = node.reserve(
        shard, "default", ROOT_PARENT, chain((0, 0, 0)), number=2, most=9
    )
    assert verdicts == bytes([FILL] * 3)
    assert second is not None
    assert node.commit(first, [0, 1]) == {}, "an expired reservation must not become visible"
    assert list(node.commit(second, [0, 1, 2])) == [0, 1, 2]
    assert node.dram.used == 3 * BLOCK


def test_room_is_taken_from_other_block_sizes(node: Node) -> None:
    for branch in range(CAPACITY // BLOCK):
        put(node, (branch,))
    large = Namespace("m", "float32", "test", 16, SEGMENT // 2)
    shard = node.shard(large, 0)
    verdicts, reservation = node.reserve(shard, "default", ROOT_PARENT, [name(1)], number=1, most=1)
    assert verdicts == bytes([FILL])
    assert reservation is not None
    node.abort(reservation)
