"""What clients of one node get of the blocks that other nodes of its pool hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from crc32c import crc32c

from kvstore.identity import Namespace
from kvstore.protocol.messages import (
    Exists,
    ExistsAnswer,
    Get,
    GetAnswer,
    Match,
    Reserve,
    Write,
    request_header,
)
from tests.client.scripted_node import Session
from tests.kvstore.peer import BLOCK, content
from tests.kvstore.pooled import DRAM, REMOTE, Pool, pool
from tests.kvstore.pulling import scripted_peer
from tests.kvstore.watched import chain, connected, name
from tests.running import wait_for

HASHES = chain("pooled", length=20)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Pool]:
    with pool(tmp_path, 2) as running:
        yield running


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Pool]:
    with pool(tmp_path, 3) as running:
        yield running


# --- hits ----------------------------------------------------------------------------------------


def test_what_one_stores_is_a_hit_on_the_other(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    assert other.match(HASHES) == REMOTE * 20
    assert other.match([*HASHES, name("unheard of")]) == REMOTE * 20
    assert other.get(HASHES) == REMOTE * 20
    assert other.match(HASHES) == DRAM * 20
    assert other.get(HASHES) == DRAM * 20
    assert other.metrics.hits == {"remote": 20, "dram": 20}
    assert other.metrics.matched == {"remote": 40, "held": 20, "absent": 1}
    assert other.metrics.pulled_blocks == {"node0": 20}
    assert other.metrics.pulled_bytes == {"node0": 20 * BLOCK}
    assert one.metrics.hits.total() == 20
    assert other.daemon.metrics_url is not None
    with urlopen(other.daemon.metrics_url) as scraped:
        lines = scraped.read().decode().splitlines()
    assert 'kvstore_peer_blocks_total{peer="node0"} 20.0' in lines
    assert 'kvstore_hits_total{tier="remote"} 20.0' in lines
    assert 'kvstore_directory_operations_total{operation="reach"} 2.0' in lines
    assert "kvstore_directory_published_total 20.0" in lines
    # It is told that the other one has it now, too.
    assert two.holders(HASHES[-1]) == [one.number, other.number]


def test_a_get_is_of_any_session_and_in_any_order(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    with connected(other) as asker, connected(other) as getter:
        assert asker.ask(Match(HASHES))[0].tiers == REMOTE * 20
        wanted = [HASHES[7], name("nowhere"), HASHES[3], HASHES[4]]
        answer, payload = getter.ask(Get(wanted))
        assert answer.tiers == b"\4\0\4\4"
        assert payload == content(HASHES[7]) + content(HASHES[3]) + content(HASHES[4])
        # What comes before them came as well, and nothing behind them.
        assert getter.ask(Exists(HASHES))[0].tiers == DRAM * 8 + bytes(12)
    assert one.metrics.hits["dram"] == 8


def test_nothing_is_asked_for_that_nobody_matched(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    assert other.get(HASHES) == bytes(20)
    with connected(other) as peer:
        assert peer.ask(Exists(HASHES))[0].tiers == bytes(20)
    assert one.metrics.sessions_opened == 1


def test_what_is_here_comes_first(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    other.put(HASHES[:5])
    assert other.match(HASHES) == DRAM * 5 + REMOTE * 15
    assert other.get(HASHES) == DRAM * 5 + REMOTE * 15
    assert one.metrics.hits["dram"] == 15


def test_a_prefetch_brings_the_chain(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    assert other.match(HASHES, prefetch=True) == REMOTE * 20
    wait_for(lambda: other.match(HASHES) == DRAM * 20)
    assert other.get(HASHES) == DRAM * 20
    assert one.metrics.hits["dram"] == 20


def test_what_is_pulled_makes_room_first(tmp_path: Path) -> None:
    with pool(tmp_path, 2) as running:
        one, other = running.nodes
        one.put(HASHES)
        other.match(HASHES)
        assert other.get(HASHES) == REMOTE * 20
        own = chain("own", length=120)
        for start in range(0, 120, 20):
            other.put(own[start : start + 20], own[start - 1] if start else bytes(32))
        assert other.match(own) == DRAM * 120
        kept = other.match(HASHES).count(DRAM)
        assert kept == 8
        assert running.holders(HASHES[19]) == [one.number]


def test_first_blocks_are_served_while_the_last_are_under_way(two: Pool) -> None:
    _, other = two.nodes
    gate = []

    def slow(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        serve(session)
        while True:
            if len(gate) == 1:
                gate.append("second part asked for")
                wait_for(lambda: len(gate) > 2)
            if not serve(session):
                continue
            gate.append("a part sent")

    # At most four blocks are reserved at once here, so a long chain takes several rounds.
    with scripted_peer(slow) as port:
        two.claim(f"127.0.0.1:{port}", HASHES)
        assert other.match(HASHES) == REMOTE * 20
        with connected(other) as late, connected(other) as early:
            late.send(request_header(9, 5000, Get(HASHES)))
            wait_for(lambda: len(gate) == 2)
            assert early.ask(Get(HASHES[:2]))[0].tiers in (DRAM * 2, REMOTE * 2)
            gate.append("go on")
            header, payload = late.receive()
            assert header[3] == REMOTE * 20
            assert payload == b"".join(map(content, HASHES))
        other.hang_up()


def serve(session: Session, **wrong: Any) -> bool:
    """Answer one request as a good node would, or with other ``content``; whether it was a get."""
    request_id, request = session.ask()
    if isinstance(request, Exists):
        session.answer(request_id, ExistsAnswer(DRAM * len(request.hashes)))
    else:
        assert isinstance(request, Get)
        payload = b"".join(wrong.get("content", content)(block) for block in request.hashes)
        sums = [crc32c(content(block)) for block in request.hashes]
        answer = GetAnswer(0, DRAM * len(request.hashes), None, sums)
        session.answer(request_id, answer, payload)
    return isinstance(request, Get)


def test_concurrent_gets_bring_a_block_once(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    other.match(HASHES)
    peers = []
    for number in range(8):
        peers.append(connected(other))
        peer = peers[-1].__enter__()
        peers[-1] = (peers[-1], peer)  # type: ignore[call-overload]
        peer.send(request_header(9, 5000, Get(HASHES[: 20 - number])))
    for number, (context, peer) in enumerate(peers):  # type: ignore[misc]
        header, payload = peer.receive()
        assert len(header[3]) == 20 - number
        assert 0 not in header[3]
        assert payload == b"".join(map(content, HASHES[: 20 - number]))
        context.__exit__(None, None, None)
    assert one.metrics.moved_bytes["tcp", "out"] == 20 * BLOCK


def test_all_shards_count(two: Pool) -> None:
    one, other = two.nodes
    both = Namespace("m", "float32", "test", 16, BLOCK, tp_size=2)
    with connected(one, both, 0) as first, connected(one, both, 1) as second:
        first.put(HASHES)
        second.put(HASHES[:7])
    with connected(other, both, 0) as first, connected(other, both, 1) as second:
        assert first.ask(Match(HASHES, prefetch=True))[0].tiers == REMOTE * 7
        assert second.ask(Get(HASHES[:7]))[0].tiers in (REMOTE * 7, DRAM * 7)
        wait_for(lambda: first.ask(Exists(HASHES))[0].tiers == DRAM * 7 + bytes(13))


def test_a_tenant_s_blocks_are_nobody_else_s(two: Pool) -> None:
    one, other = two.nodes
    theirs = Namespace("m", "float32", "test", 16, BLOCK, tenant="another")
    one.put(HASHES)
    assert other.match(HASHES) == REMOTE * 20
    with connected(other, theirs) as peer:
        assert peer.ask(Match(HASHES))[0].tiers == b""
        assert peer.ask(Get(HASHES))[0].tiers == bytes(20)


# --- hints that are wrong ------------------------------------------------------------------------


def test_a_stale_hint_is_withdrawn_and_ends_as_a_miss(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    one.drop(HASHES[12], quietly=True)
    assert other.match(HASHES) == REMOTE * 20
    assert other.get(HASHES) == REMOTE * 12 + bytes(8)
    assert [two.holders(block) for block in HASHES[12:]] == [[]] * 8
    assert other.match(HASHES) == DRAM * 12
    assert (other.metrics.wrong_hints, other.metrics.pull_failures) == (1, {"absent": 1})


def test_the_next_owner_is_tried(three: Pool) -> None:
    one, two, other = three.nodes
    one.put(HASHES)
    two.put(HASHES)
    one.drop(HASHES[0], quietly=True)
    assert other.match(HASHES) == REMOTE * 20
    assert other.get(HASHES) == REMOTE * 20
    assert three.holders(HASHES[19]) == [two.number, other.number]


def test_an_owner_that_the_match_did_not_name_is_found(three: Pool) -> None:
    one, two, other = three.nodes
    one.put(HASHES)
    assert other.match(HASHES) == REMOTE * 20
    two.put(HASHES)
    one.drop(HASHES[0])
    assert other.get(HASHES) == REMOTE * 20
    assert other.metrics.pulled_blocks == {"node1": 20}


def test_a_start_that_is_gone_is_not_asked(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    elsewhere = chain("before the restart", length=3)
    one.put(elsewhere)
    one.drop(elsewhere[0])
    two.claim(one.tcp_url.removeprefix("tcp://"), elsewhere, incarnation="an earlier one")
    assert other.match(elsewhere) == REMOTE * 3
    began = time.monotonic()
    assert other.get(elsewhere) == bytes(3)
    assert time.monotonic() - began < 4
    assert one.metrics.requests["exists"] == 0
    # It is left alone now, so a match does not promise what can't be had.
    assert other.match(elsewhere) == b""


def test_a_node_that_leaves_is_not_asked(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    assert other.match(HASHES) == REMOTE * 20
    one.call(one.cluster.leave)
    assert other.get(HASHES) == bytes(20)
    assert other.match(HASHES) == b""


# --- owners that fail ----------------------------------------------------------------------------


def test_an_owner_that_dies_while_it_sends_is_replaced(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)

    def dies(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        while not serve(session):
            pass

    with scripted_peer(dies) as port:
        two.claim(f"127.0.0.1:{port}", HASHES)
        assert other.match(HASHES) == REMOTE * 20
        assert other.get(HASHES) == REMOTE * 20
    assert other.metrics.pulled_blocks["node0"] >= 12


def test_an_owner_that_is_gone_is_a_miss_at_once(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    assert other.match(HASHES) == REMOTE * 20
    assert other.get(HASHES[:5]) == REMOTE * 5
    one.vanish()
    began = time.monotonic()
    assert other.get(HASHES) == DRAM * 5 + bytes(15)
    assert time.monotonic() - began < 4
    # Its hints stay: others may reach it.
    assert two.holders(HASHES[19]) == [one.number]


def test_a_slow_owner_costs_no_more_than_the_deadline(two: Pool) -> None:
    _, other = two.nodes
    other.put(HASHES[:3])

    def silent(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        while True:
            session.ask()

    with scripted_peer(silent) as port:
        two.claim(f"127.0.0.1:{port}", HASHES)
        assert other.match(HASHES) == DRAM * 3 + REMOTE * 17
        began = time.monotonic()
        assert other.get(HASHES, deadline_ms=400) == DRAM * 3 + bytes(17)
        assert 0.3 < time.monotonic() - began < 4
        began = time.monotonic()
        assert other.get(HASHES) == DRAM * 3 + bytes(17)
        assert time.monotonic() - began < 4, "an owner in doubt is not waited for"
        # Nor is it counted on again, until it has answered something.
        for _ in range(20):
            assert other.match(HASHES) == DRAM * 3
            time.sleep(0.01)
        other.hang_up()


def test_what_is_corrupt_is_not_kept(two: Pool) -> None:
    one, other = two.nodes

    def corrupts(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        while True:
            serve(session, content=lambda block: content(block)[:-1] + b"\0")

    with scripted_peer(corrupts) as port:
        number = two.claim(f"127.0.0.1:{port}", HASHES)
        assert other.match(HASHES) == REMOTE * 20
        assert other.get(HASHES) == bytes(20)
        assert other.metrics.pull_failures == {"corrupt": 1}
        assert number not in two.holders(HASHES[0])
        one.put(HASHES)
        number = two.claim(f"127.0.0.1:{port}", HASHES)
        other.hang_up()
    with scripted_peer(corrupts) as port:
        two.claim(f"127.0.0.1:{port}", HASHES)
        assert other.match(HASHES) == REMOTE * 20
        assert other.get(HASHES) == REMOTE * 20
        other.hang_up()


def test_a_directory_that_fails_leaves_what_is_here(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    other.put(HASHES[:3])
    two.memory.failure = "unavailable"
    assert other.match(HASHES) == DRAM * 3
    assert other.get(HASHES) == DRAM * 3 + bytes(17)
    two.memory.failure = None
    assert other.match(HASHES) == DRAM * 3 + REMOTE * 17


def test_a_block_that_a_client_is_writing_here_is_waited_for(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    with connected(other) as writer, connected(other) as reader:
        number = writer.ask(Reserve(bytes(32), HASHES[:1]))[0].reservation
        assert reader.ask(Match(HASHES))[0].tiers == REMOTE * 20
        reader.send(request_header(9, 5000, Get(HASHES)))
        time.sleep(0.05)
        writer.ask(Write(number, [0], 0, BLOCK), content(HASHES[0]))
        header, payload = reader.receive()
        assert header[3] == REMOTE * 20
        assert payload == b"".join(map(content, HASHES))
    assert one.metrics.moved_bytes["tcp", "out"] == 19 * BLOCK


def test_a_reader_that_leaves_is_forgotten(two: Pool) -> None:
    _, other = two.nodes

    def silent(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        serve(session)
        while True:
            session.ask()

    with scripted_peer(silent) as port:
        two.claim(f"127.0.0.1:{port}", HASHES)
        with connected(other) as reader:
            assert reader.ask(Match(HASHES))[0].tiers == REMOTE * 20
            reader.send(request_header(9, 1000, Get(HASHES)))
            wait_for(lambda: other.metrics.reservations > 0)
        wait_for(lambda: other.metrics.sessions == 0)
        wait_for(lambda: other.metrics.reservations == 0, 3)
        other.hang_up()


# --- publication ---------------------------------------------------------------------------------


def test_a_node_that_joins_tells_all_that_it_holds(tmp_path: Path) -> None:
    with pool(tmp_path, 2, ssd={"capacity": "32MiB"}) as running:
        one, other = running.nodes
        one.put(HASHES)
        one.__exit__()
        assert other.match(HASHES) == b""
        one.__enter__()
        assert other.match(HASHES) == REMOTE * 20
        assert other.get(HASHES) == REMOTE * 20


def test_ways_to_others_are_closed_when_they_are_gone_or_idle(two: Pool) -> None:
    one, other = two.nodes
    one.put(HASHES)
    other.match(HASHES)
    other.get(HASHES[:3])
    owners = other.cluster.remote._owners
    assert len(owners._ways) == 1
    other.call(owners.sweep)
    assert len(owners._ways) == 1
    clock = other.daemon.node.clock
    other.daemon.node.clock = lambda: clock() + 100
    other.call(owners.sweep)
    assert len(owners._ways) == 0
    assert other.get(HASHES) == DRAM * 3 + REMOTE * 17
    one.call(one.cluster.leave)
    other.call(owners.sweep)
    assert len(owners._ways) == 0
    wait_for(lambda: one.metrics.sessions == 0)
