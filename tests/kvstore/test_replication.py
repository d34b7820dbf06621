"""Copies on other nodes that a put asks for, in pools of daemons in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import AccessDenied, InvalidRequest
from kvstore.protocol.messages import Take
from tests.kvstore.peer import NAMESPACE, content
from tests.kvstore.pooled import Pool, PooledNode, pool
from tests.kvstore.watched import Watched, chain, connected
from tests.running import make_config, wait_for

HASHES = chain("copies", length=8)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Pool]:
    with pool(tmp_path, 3) as running:
        yield running


def put(
    node: PooledNode, hashes: Sequence[bytes], replicas: int | None = None, **more: bytes
) -> kvstore.PutResult:
    with kvstore.connect(node.url, NAMESPACE, deadline=5.0) as client:
        blocks = [content(block) for block in hashes]
        return client.put(hashes, blocks, replicas=replicas, **more)  # type: ignore[arg-type]


def holds(node: PooledNode, hashes: Sequence[bytes]) -> bool:
    """Whether a node itself holds all of a chain."""

    def look() -> bool:
        return all(node.daemon.node.index.find(block) for block in hashes)

    found: bool = node.call(look)
    return found


def replicas(node: PooledNode, hashes: Sequence[bytes]) -> int:
    """How many of the blocks are replicas there, which go first."""

    def look() -> int:
        return sum(
            entry.replica for block in hashes for entry in node.daemon.node.index.find(block)
        )

    found: int = node.call(look)
    return found


def made(node: PooledNode) -> int:
    return node.metrics.copies["made"]


def test_a_put_is_copied_to_as_many_nodes_as_it_asks_for(three: Pool) -> None:
    one, *others = three.nodes
    assert put(one, HASHES, 2).stored == len(HASHES)
    wait_for(lambda: made(one) == len(HASHES))
    assert [holds(other, HASHES) for other in others].count(True) == 1
    assert put(one, chain("all", length=3), 3).stored == 3
    wait_for(lambda: made(one) == len(HASHES) + 3)
    for other in others:
        assert holds(other, chain("all", length=3))
        assert replicas(other, HASHES + chain("all", length=3)) == 0
        if holds(other, HASHES):
            other.get(HASHES)


def test_without_a_word_there_are_as_many_copies_as_the_node_is_told(tmp_path: Path) -> None:
    with pool(tmp_path, 2, cluster={"replicas": 2}) as running:
        one, other = running.nodes
        put(one, HASHES)
        wait_for(lambda: holds(other, HASHES))
        put(one, chain("alone", length=2), 1)
        put(one, chain("last", length=1))
        wait_for(lambda: holds(other, chain("last", length=1)))
        assert not holds(other, chain("alone", length=2)[:1])


def test_a_chain_that_goes_on_is_copied_to_where_it_began(three: Pool) -> None:
    one, *others = three.nodes
    put(one, HASHES[:3], 2)
    wait_for(lambda: made(one) == 3)
    (copy,) = [other for other in others if holds(other, HASHES[:3])]
    put(one, HASHES[3:], 2, parent=HASHES[2])
    wait_for(lambda: made(one) == len(HASHES))
    assert holds(copy, HASHES)
    assert copy.metrics.offered["taken"] == len(HASHES)


def test_what_is_held_already_is_copied_when_it_is_asked_for(three: Pool) -> None:
    one, *others = three.nodes
    put(one, HASHES)
    assert put(one, HASHES, 3).held == len(HASHES)
    wait_for(lambda: made(one) == len(HASHES))
    assert all(holds(other, HASHES) for other in others)
    # Asked for once more it is known to be there.
    offered = others[0].metrics.requests["take"]
    put(one, HASHES, 3)
    put(one, chain("after", length=1), 3)
    wait_for(lambda: made(one) == len(HASHES) + 1)
    assert others[0].metrics.requests["take"] == offered + 1


def test_a_replica_that_was_pulled_becomes_a_copy_that_stays(three: Pool) -> None:
    one, other, _ = three.nodes
    put(one, HASHES)
    other.match(HASHES)
    other.get(HASHES)
    assert replicas(other, HASHES) == len(HASHES)
    put(one, HASHES, 3)
    wait_for(lambda: made(one) == len(HASHES))
    assert replicas(other, HASHES) == 0
    assert other.metrics.offered["held"] == len(HASHES)


def test_no_two_copies_are_on_one_machine(tmp_path: Path) -> None:
    with pool(tmp_path, 3, cluster={"host": "the only one"}) as running:
        one, *others = running.nodes
        put(one, HASHES, 2)
        wait_for(lambda: one.metrics.copies["short"] == len(HASHES))
        assert not any(holds(other, HASHES[:1]) for other in others)


def test_where_there_are_fewer_machines_each_has_a_copy(three: Pool) -> None:
    one, *others = three.nodes
    put(one, HASHES, 5)
    wait_for(lambda: one.metrics.copies["short"] == len(HASHES))
    assert all(holds(other, HASHES) for other in others)


def test_a_node_that_fails_is_passed_over(three: Pool) -> None:
    one, *others = three.nodes
    for dead in range(4):
        # A port where nobody listens.
        three.claim(f"127.0.0.1:{dead + 1}", chain("elsewhere", length=1))
    for at in range(6):
        put(one, chain("passed", at, length=2), 2)
    wait_for(lambda: made(one) == 12)
    for at in range(6):
        assert any(holds(other, chain("passed", at, length=2)) for other in others)


def test_a_node_alone_stores_and_counts_what_is_not_copied(tmp_path: Path) -> None:
    with pool(tmp_path, 1) as running:
        (one,) = running.nodes
        assert put(one, HASHES, 2).stored == len(HASHES)
        wait_for(lambda: one.metrics.copies["short"] == len(HASHES))


def test_only_members_of_the_pool_may_offer_blocks(three: Pool) -> None:
    one, other, _ = three.nodes
    put(one, HASHES)
    me = one.daemon.incarnation
    with connected(other) as stranger:
        for number, incarnation in ((one.number, "made up"), (99, me), (other.number, me)):
            with pytest.raises(AccessDenied):
                stranger.ask(Take(number, incarnation, HASHES))
    assert not holds(other, HASHES[:1])
    assert other.metrics.offered.total() == 0


def test_a_node_takes_nothing_that_the_member_does_not_hold(three: Pool) -> None:
    one, other, _ = three.nodes
    with connected(other) as liar:
        answer = liar.ask(Take(one.number, one.daemon.incarnation, HASHES))[0]
    assert (answer.held, answer.why_not_more) == (0, "absent")
    assert other.used == 0


def test_a_node_in_no_pool_takes_nothing(tmp_path: Path) -> None:
    with (
        Watched(make_config(tmp_path)) as lone,
        connected(lone) as peer,
        pytest.raises(InvalidRequest),
    ):
        peer.ask(Take(1, "1", HASHES))


def test_copies_make_no_room_of_what_was_used_later(tmp_path: Path) -> None:
    with pool(tmp_path, 2) as running:
        one, other = running.nodes
        full = chain("full", length=128)
        assert put(other, full[:64]).stored == 64
        assert put(other, full[64:], parent=full[63]).stored == 64
        put(one, HASHES)
        with connected(other) as peer:
            old = Take(one.number, one.daemon.incarnation, HASHES, idle_ms=3_600_000)
            answer = peer.ask(old)[0]
            assert (answer.held, answer.why_not_more) == (0, "no_space")
            assert holds(other, full)
            # Used just now they are worth more than what has been there for a while.
            assert peer.ask(Take(one.number, one.daemon.incarnation, HASHES))[0].held == len(HASHES)


@pytest.mark.parametrize("replicas", [0, 17, -1, True, "2"])
def test_a_number_of_copies_that_makes_no_sense_is_refused(three: Pool, replicas: int) -> None:
    with pytest.raises(InvalidRequest):
        put(three.nodes[0], HASHES, replicas)
