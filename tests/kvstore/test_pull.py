"""One node pulls blocks from another, over ``tcp``; and from peers that fail it."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from kvstore.identity import ROOT_PARENT
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import (
    Exists,
    ExistsAnswer,
    Get,
    GetAnswer,
    Reserve,
    Write,
    answer_header,
)
from tests.client.scripted_node import Session
from tests.kvstore.peer import BLOCK, Peer, content
from tests.kvstore.pulling import LISTEN, Home, port_of, pulling, scripted_peer
from tests.kvstore.watched import Watched, chain, connected, name
from tests.running import daemon_process, make_config, wait_for

DRAM = b"\2"


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Watched]:
    config = make_config(tmp_path / "owner", listen=LISTEN, dram={"capacity": "16MiB"})
    with Watched(config) as running:
        yield running


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make_config(tmp_path / "home")) as running:
        yield running


@pytest.fixture
def home(owner: Watched, daemon: Watched) -> Iterator[Home]:
    with pulling(daemon, port_of(owner)) as home:
        yield home


def store(owner: Watched, hashes: list[bytes], parent: bytes = ROOT_PARENT) -> None:
    with connected(owner) as peer:
        peer.put(hashes, parent)


def test_a_chain_is_pulled_and_served(owner: Watched, daemon: Watched, home: Home) -> None:
    hashes = chain("pulled", length=20)
    store(owner, hashes)
    assert home(hashes) == (20, "")
    assert home.has(hashes)
    with connected(daemon) as client:
        answer, payload = client.ask(Get(hashes))
        assert answer.tiers == DRAM * 20
        assert payload == b"".join(map(content, hashes))
    session = home.puller.peer.session
    assert session is not None
    assert (session.transport, session.welcome.node) == ("tcp", owner.config.node.name)
    assert daemon.metrics.pulls == {"stored": 20, "held": 0, "busy": 0, "refused": 0, "aborted": 0}
    assert daemon.metrics.moved_bytes["tcp", "in"] == 20 * BLOCK
    assert not daemon.metrics.puts.total()


def test_what_is_here_is_not_pulled_again(owner: Watched, daemon: Watched, home: Home) -> None:
    hashes = chain("half", length=6)
    store(owner, hashes)
    store(daemon, hashes[:3])
    assert home(hashes) == (6, "")
    assert home(hashes) == (6, "")
    assert home(hashes[4:], parent=hashes[3]) == (2, "")
    assert daemon.metrics.moved_bytes["tcp", "out"] == 0
    assert owner.metrics.moved_bytes["tcp", "out"] == 3 * BLOCK


def test_more_is_pulled_than_may_be_reserved_at_once(
    owner: Watched, daemon: Watched, home: Home
) -> None:
    hashes = chain("long", length=100)
    for start in range(0, 100, 50):
        store(owner, hashes[start : start + 50], hashes[start - 1] if start else ROOT_PARENT)
    assert home(hashes) == (100, "")
    assert home.has(hashes)
    assert owner.metrics.requests["exists"] == 1
    assert owner.metrics.requests["get"] == 2


def test_what_the_peer_does_not_hold_ends_the_pull(
    owner: Watched, daemon: Watched, home: Home
) -> None:
    hashes = chain("short", length=5)
    assert home(hashes) == (0, "absent")
    store(owner, hashes[:2])
    assert home(hashes) == (2, "absent")
    assert home([]) == (0, "")
    assert home.has(hashes[:2])
    assert daemon.used == 2 * BLOCK


def test_a_parent_that_is_not_here_ends_the_pull(owner: Watched, home: Home) -> None:
    hashes = chain("orphan", length=3)
    store(owner, hashes)
    assert home(hashes[1:], parent=hashes[0]) == (0, "no_space")


def test_concurrent_pulls_of_a_block_pull_it_once(
    owner: Watched, daemon: Watched, home: Home
) -> None:
    hashes = chain("wanted", length=24)
    store(owner, hashes)
    pulls = [home.start(hashes[: 8 * (index % 3 + 1)]) for index in range(9)]
    assert [home.result(pull) for pull in pulls] == [(8, ""), (16, ""), (24, "")] * 3
    assert owner.metrics.moved_bytes["tcp", "out"] == 24 * BLOCK
    assert owner.metrics.sessions_opened == 2


def test_two_ways_to_the_same_peer_pull_a_block_once(
    owner: Watched, daemon: Watched, home: Home
) -> None:
    hashes = chain("twice", length=16)
    store(owner, hashes)
    with pulling(daemon, port_of(owner)) as other:
        pulls = [one.start(hashes) for one in (home, other, home, other)]
        assert [home.result(pull) for pull in pulls] == [(16, "")] * 4
    assert owner.metrics.moved_bytes["tcp", "out"] == 16 * BLOCK


def test_what_a_client_is_writing_is_waited_for(
    owner: Watched, daemon: Watched, home: Home
) -> None:
    hashes = chain("written", length=3)
    store(owner, hashes)
    with connected(daemon) as writer:
        number = writer.ask(Reserve(ROOT_PARENT, hashes[:1]))[0].reservation
        assert home(hashes, 0.2) == (0, "deadline")
        assert home(hashes[1:], 0.2, parent=hashes[0]) == (0, "deadline")
        pull = home.start(hashes)
        writer.ask(Write(number, [0], 0, BLOCK), content(hashes[0]))
        assert home.result(pull) == (3, "")
    assert owner.metrics.moved_bytes["tcp", "out"] == 2 * BLOCK


def test_what_a_client_gives_up_is_pulled(owner: Watched, daemon: Watched, home: Home) -> None:
    hashes = chain("given up", length=2)
    store(owner, hashes)
    with connected(daemon) as writer:
        writer.ask(Reserve(ROOT_PARENT, hashes))
        pull = home.start(hashes)
        time.sleep(0.05)
    assert home.result(pull) == (2, "")
    assert home.has(hashes)


def test_room_is_made_for_what_is_pulled_and_only_then(
    owner: Watched, daemon: Watched, home: Home
) -> None:
    old, new = chain("old", length=128), chain("new", length=40)
    for start in range(0, 128, 32):
        store(daemon, old[start : start + 32], old[start - 1] if start else ROOT_PARENT)
    assert daemon.used == 8 << 20
    assert home(new) == (0, "absent")
    assert home.has(old), "nothing is evicted for what nobody has"
    store(owner, new)
    assert home(new) == (40, "")
    assert home.has([*old[:88], *new])


def test_there_is_no_room_where_all_is_pinned(owner: Watched, daemon: Watched, home: Home) -> None:
    hashes = chain("crowded", length=4)
    store(owner, hashes)
    with connected(daemon) as one, connected(daemon) as other:
        one.ask(Reserve(ROOT_PARENT, chain("one", length=64)))
        other.ask(Reserve(ROOT_PARENT, chain("other", length=62)))
        assert home(hashes) == (2, "no_space")
    assert home(hashes) == (4, "")


def test_checksums_are_compared(owner: Watched, daemon: Watched, home: Home) -> None:
    hashes = chain("summed", length=6)
    store(owner, hashes)
    sums = {block: crc32c(content(block)) for block in hashes}
    assert home(hashes, checksums=sums | {hashes[4]: 7}) == (4, "corrupt")
    assert home.has(hashes[:4])
    assert home(hashes, checksums=sums) == (6, "")


def test_a_pull_ends_with_its_node(owner: Watched, daemon: Watched, home: Home) -> None:
    hashes = chain("closing", length=2)
    store(owner, hashes)
    with connected(daemon) as writer:
        writer.ask(Reserve(ROOT_PARENT, hashes[:1]))
        pull = home.start(hashes, 30)
        time.sleep(0.05)
        home.close()
        assert home.result(pull) == (0, "unavailable")
    assert home(hashes) == (0, "unavailable")


def test_a_pull_that_is_cancelled_leaves_nothing(
    owner: Watched, daemon: Watched, home: Home
) -> None:
    hashes = chain("cancelled", length=32)
    store(owner, hashes)
    for delay in (0.0, 0.001, 0.002, 0.004, 0.008):
        pull = home.start(hashes)
        time.sleep(delay)
        daemon.call(pull.cancel)
        wait_for(pull.done)
        assert daemon.metrics.reservations == 0
    assert home(hashes) == (32, "")
    assert home.has(hashes)


# --- peers that fail ------------------------------------------------------------------------------


def test_a_peer_that_is_not_there_is_a_miss_and_left_alone(daemon: Watched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pulling(daemon, port) as home:
        began = time.monotonic()
        for _ in range(20):
            assert home([name(1)]) == (0, "unavailable")
        assert time.monotonic() - began < 4
    assert daemon.used == 0


def test_a_peer_that_is_killed_and_comes_back(tmp_path: Path, daemon: Watched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = make_config(tmp_path / "owner", listen={"tcp": f"127.0.0.1:{port}"})
    hashes = chain("killed", length=8)
    with daemon_process(config) as owner, pulling(daemon, port) as home:
        with Peer(config.listen.unix or "") as peer:
            peer.hello()
            peer.put(hashes)
        assert home(hashes[:4]) == (4, "")
        owner.kill()
        assert home(hashes) == (4, "unavailable")
        assert daemon.used == 4 * BLOCK
        owner.start()
        wait_for(lambda: home(hashes) == (4, "absent"))
        with Peer(config.listen.unix or "") as peer:
            peer.hello()
            peer.put(hashes)
        assert home(hashes) == (8, "")


def test_a_peer_that_is_stopped_costs_the_deadline_once(tmp_path: Path, daemon: Watched) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = make_config(tmp_path / "owner", listen={"tcp": f"127.0.0.1:{port}"})
    hashes = chain("stopped", length=8)
    with daemon_process(config) as owner, pulling(daemon, port) as home:
        with Peer(config.listen.unix or "") as peer:
            peer.hello()
            peer.put(hashes)
        assert home(hashes[:2]) == (2, "")
        owner.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert home(hashes, 0.3) == (2, "deadline")
        assert 0.25 < time.monotonic() - began < 4
        # A peer in doubt is not asked at once, for times that grow.
        wait_for(lambda: home(hashes, 0.3) == (2, "unavailable"))
        assert home.puller.peer.doubtful
        owner.signal(signal.SIGCONT)
        # That it answers again is found out without anybody asking.
        wait_for(lambda: not home.puller.peer.doubtful)
        wait_for(lambda: home(hashes, 1.0) == (8, ""))
    assert home.has(hashes)


def holds(session: Session, request_id: int, request: Any) -> None:
    assert isinstance(request, Exists)
    session.answer(request_id, ExistsAnswer(DRAM * len(request.hashes)))


def payload_of(request: Any) -> bytes:
    return b"".join(map(content, request.hashes))


def cut(session: Session) -> None:
    """Close in the middle of a payload."""
    session.welcome(block_bytes=BLOCK)
    holds(session, *session.ask())
    request_id, request = session.ask()
    payload = payload_of(request)
    header = encode(answer_header(request_id, GetAnswer(0, DRAM * 3, None)), len(payload))
    session.sock.sendall(header + payload[: len(payload) // 2])


def stall(session: Session) -> None:
    """Go silent in the middle of a payload, then send the rest when it is too late."""
    cut(session)
    time.sleep(0.6)
    session.sock.sendall(b"\xee" * (3 * BLOCK // 2))
    session.ask()


def short(session: Session) -> None:
    """Send less than is announced to be found."""
    session.welcome(block_bytes=BLOCK)
    holds(session, *session.ask())
    request_id, request = session.ask()
    session.answer(request_id, GetAnswer(0, DRAM * 3, None), payload_of(request)[BLOCK:])
    session.ask()


def long(session: Session) -> None:
    """Send more than was asked for."""
    session.welcome(block_bytes=BLOCK)
    holds(session, *session.ask())
    request_id, request = session.ask()
    session.answer(request_id, GetAnswer(0, DRAM * 3, None), payload_of(request) + bytes(BLOCK))
    session.ask()


def strange(session: Session) -> None:
    """Name memory of its own."""
    session.welcome(block_bytes=BLOCK)
    holds(session, *session.ask())
    request_id, request = session.ask()
    answer = GetAnswer(0, DRAM * 3, [1, 2, 3])
    session.answer(request_id, answer, payload_of(request))
    session.ask()


def other_size(session: Session) -> None:
    """Have blocks of another size."""
    session.welcome(block_bytes=BLOCK * 2)
    session.ask()


def other_transport(session: Session) -> None:
    """Choose a transport that was not offered."""
    session.welcome(block_bytes=BLOCK, transport="shm")
    session.ask()


def nonsense(session: Session) -> None:
    """Speak no frames at all."""
    session.welcome(block_bytes=BLOCK)
    session.ask()
    session.sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    session.ask()


def liar(session: Session) -> None:
    """Hold everything, and find nothing."""
    session.welcome(block_bytes=BLOCK)
    holds(session, *session.ask())
    request_id, _ = session.ask()
    session.answer(request_id, GetAnswer(0, bytes(3), None))
    session.ask()


def mute(session: Session) -> None:
    """Take the request, and answer nothing."""
    session.welcome(block_bytes=BLOCK)
    holds(session, *session.ask())
    session.ask()
    session.ask()


def no_welcome(session: Session) -> None:
    """Do not even greet."""
    session.ask()
    session.ask()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (cut, "unavailable"),
        (stall, "deadline"),
        (short, "unavailable"),
        (long, "unavailable"),
        (strange, "unavailable"),
        (other_size, "unavailable"),
        (other_transport, "unavailable"),
        (nonsense, "unavailable"),
        (liar, "unavailable"),
        (mute, "deadline"),
        (no_welcome, "deadline"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_bad_peer_is_a_miss_and_leaves_nothing(daemon: Watched, script: Any, why: str) -> None:
    hashes = chain("bad", length=3)
    with scripted_peer(script) as port, pulling(daemon, port) as home:
        began = time.monotonic()
        assert home(hashes, 0.5) == (0, why)
        assert time.monotonic() - began < 2
        assert (daemon.used, daemon.metrics.reservations, daemon.metrics.pins) == (0, 0, 0)
        with connected(daemon) as client:
            # The memory is other blocks' at once, and stays as they write it.
            client.put(chain("next", length=60))
            if script is stall:
                time.sleep(0.5)
            _, payload = client.ask(Get(chain("next", length=60)))
            assert payload == b"".join(map(content, chain("next", length=60)))


def test_a_pull_ends_with_its_node_before_the_peer_has_greeted(daemon: Watched) -> None:
    with scripted_peer(no_welcome) as port, pulling(daemon, port) as home:
        pulls = [home.start([name(1)], 30) for _ in range(3)]
        time.sleep(0.05)
        home.close()
        assert [home.result(pull) for pull in pulls] == [(0, "unavailable")] * 3


def test_blocks_are_kept_up_to_the_first_that_did_not_come(daemon: Watched) -> None:
    hashes = chain("holes", length=4)

    def holey(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        holds(session, *session.ask())
        request_id, request = session.ask()
        found = [request.hashes[index] for index in (0, 1, 3)]
        payload = b"".join(map(content, found))
        session.answer(request_id, GetAnswer(0, b"\2\2\0\2", None), payload)
        session.ask()

    with scripted_peer(holey) as port, pulling(daemon, port) as home:
        assert home(hashes) == (2, "unavailable")
        assert home.has(hashes[:2])
        assert daemon.used == 2 * BLOCK
