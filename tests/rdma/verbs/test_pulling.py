"""One node pulls from another over ``rdma``, and what the other one can touch meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import logs
from kvstore.config import Config
from kvstore.daemon import serve
from kvstore.errors import DeadlineExceeded
from kvstore.identity import Namespace
from kvstore.peer_session import Greeting, PeerSession
from kvstore.pull import Puller
from kvstore.transports import to_pull
from rdma.verbs.adapter import Adapter
from rdma.verbs.errors import RemoteAccessError
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.pulling import VerbsPullTransport
from rdma.verbs.settings import QueueSettings
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.pulling import Home, port_of
from tests.kvstore.watched import Watched, chain
from tests.rdma.verbs.ends import Node, soon
from tests.rdma.verbs.forked import Channel, Forked
from tests.running import make_config, wait_for

SECONDS = 30.0
SIZE = 64 << 10
LARGE = 1 << 20
MANY = Namespace("m", "float32", "large", 16, LARGE)


def make(directory: Path, tcp: str = "127.0.0.1:0") -> Config:
    return make_config(
        directory,
        listen={"tcp": tcp, "insecure": True},
        dram={"capacity": "96MiB", "segment": "48MiB"},
        rdma={"mode": "require", "device": "rxe0", "bytes_in_flight": "1MiB"},
    )


# --- what the owner can touch ---------------------------------------------------------------------


@pytest.fixture
def arena() -> memoryview:
    """The memory of the node that pulls; one extent in the middle is being filled."""
    return memoryview(bytearray(3 * SIZE))


def join(adapter: Adapter, node: Node) -> tuple[VerbsPullTransport, VerbsNodeTransport]:
    puller = VerbsPullTransport(adapter, QueueSettings())
    owner = VerbsNodeTransport(node.driver, node.arena, puller.offer())
    puller.accept(owner.welcome())
    node.adopt(owner, puller)
    return puller, owner


async def test_an_owner_writes_what_it_was_told(
    adapter: Adapter, node: Node, arena: memoryview
) -> None:
    puller, owner = join(adapter, node)
    places, _ = node.blocks(1, SIZE)
    named = puller.destinations([arena[SIZE : 2 * SIZE]])
    await owner.push(places, SIZE, named, soon(5))
    puller.done(named)
    assert node.same(places, [arena[SIZE : 2 * SIZE]])
    assert not any(arena[:SIZE])
    assert not any(arena[2 * SIZE :])


@pytest.mark.parametrize("offset", [-SIZE, -1, 1, SIZE])
async def test_an_owner_cannot_write_beside_it(
    adapter: Adapter, node: Node, arena: memoryview, offset: int
) -> None:
    puller, owner = join(adapter, node)
    places, _ = node.blocks(1, SIZE)
    address, key, length = puller.destinations([arena[SIZE : 2 * SIZE]])  # type: ignore[misc]
    with pytest.raises(RemoteAccessError):
        await owner.push(places, SIZE, [address + offset, key, length], soon(5))
    assert not any(arena)


async def test_an_owner_cannot_read(adapter: Adapter, node: Node, arena: memoryview) -> None:
    puller, owner = join(adapter, node)
    arena[:] = os.urandom(len(arena))
    places, _ = node.blocks(1, SIZE)
    before = bytes(node.memory.view(places[0], SIZE))
    named = puller.destinations([arena[SIZE : 2 * SIZE]])
    with pytest.raises(RemoteAccessError):
        await owner.pull(places, SIZE, named, soon(5))
    assert node.memory.view(places[0], SIZE) == before


async def test_an_owner_cannot_write_once_the_call_has_ended(
    adapter: Adapter, node: Node, arena: memoryview
) -> None:
    puller, owner = join(adapter, node)
    places, _ = node.blocks(1, SIZE)
    named = puller.destinations([arena[SIZE : 2 * SIZE]])
    assert named is not None
    puller.done(named)
    with pytest.raises(RemoteAccessError):
        await owner.push(places, SIZE, named, soon(5))
    assert not any(arena)


async def test_one_owner_cannot_use_the_keys_of_another(
    adapter: Adapter, node: Node, arena: memoryview
) -> None:
    puller, owner = join(adapter, node)
    _, its_owner = join(adapter, node)
    places, _ = node.blocks(1, SIZE)
    named = puller.destinations([arena[SIZE : 2 * SIZE]])
    with pytest.raises(RemoteAccessError):
        await its_owner.push(places, SIZE, named, soon(5))
    assert not any(arena)
    await owner.push(places, SIZE, named, soon(5))
    assert node.same(places, [arena[SIZE : 2 * SIZE]])


# --- two daemons ----------------------------------------------------------------------------------


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make(tmp_path / "owner")) as running:
        yield running


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make(tmp_path / "home")) as running:
        yield running


def test_two_daemons_pull_from_each_other(owner: Watched, daemon: Watched) -> None:
    there, back = chain("there", length=24), chain("back", length=24)
    with kvstore.connect(owner.url, NAMESPACE) as client:
        assert client.put(there, [content(block) for block in there]).stored == 24
    with kvstore.connect(daemon.url, NAMESPACE) as client:
        assert client.put(back, [content(block) for block in back]).stored == 24
    home = Home(daemon, port_of(owner), tcp=False)
    away = Home(owner, port_of(daemon), tcp=False)
    pulls = [(home, home.start(there, SECONDS)), (away, away.start(back, SECONDS))]
    assert [one.result(pull) for one, pull in pulls] == [(24, "")] * 2
    assert home.has(there)
    assert away.has(back)
    for one in (home, away):
        session = one.puller.peer.session
        assert session is not None
        assert session.transport == "rdma"
        assert session._caller.counters.payload_in == 0, "no payload on the stream"
    for metrics in (owner.metrics, daemon.metrics):
        assert metrics.moved_bytes["rdma", "out"] == 24 * BLOCK
        assert metrics.moved_bytes["rdma", "in"] == 24 * BLOCK
    home.close()
    away.close()


def test_a_pull_that_is_cancelled_ends_the_session_and_leaves_nothing(
    owner: Watched, daemon: Watched
) -> None:
    hashes = chain("cancelled", length=48)
    with kvstore.connect(owner.url, NAMESPACE) as client:
        client.put(hashes, [content(block) for block in hashes])
    home = Home(daemon, port_of(owner), tcp=False)
    for delay in (0.0, 0.02, 0.05):
        pull = home.start(hashes, SECONDS)
        time.sleep(delay)
        daemon.call(pull.cancel)
        wait_for(pull.done)
        assert (daemon.metrics.reservations, daemon.metrics.pins) == (0, 0)
    wait_for(lambda: home(hashes, SECONDS) == (48, ""), SECONDS)
    assert home.has(hashes)
    home.close()


# --- an owner that fails --------------------------------------------------------------------------


def serve_forever(config: Config, channel: Channel) -> None:
    logs.configure(config.log)
    serve(config, on_ready=lambda: channel.tell("ready"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_fails_in_a_pull_is_a_miss_and_touches_nothing_afterwards(
    tmp_path: Path, number: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = make(tmp_path / "owner", f"127.0.0.1:{port}")
    hashes = chain("failing", length=40)
    with Forked(partial(serve_forever, config)) as owner:
        assert owner.hear() == "ready"
        with Watched(make(tmp_path / "home")) as daemon:
            fail_in_a_pull(daemon, owner, port, hashes, number)


def fail_in_a_pull(
    daemon: Watched, owner: Forked, port: int, hashes: list[bytes], number: int
) -> None:
    stored = [os.urandom(LARGE) for _ in hashes]
    url = f"tcp://127.0.0.1:{port}"
    with kvstore.connect(url, MANY, transport="rdma", deadline=SECONDS) as client:
        assert client.put(hashes, stored).stored == len(hashes)
    node, verbs = daemon.daemon.node, daemon.daemon.verbs
    greeting = Greeting("127.0.0.1", port, MANY, 0)
    puller: Puller = daemon.call(
        lambda: Puller(node, greeting, lambda: to_pull(verbs), most_bytes=64 << 20, verify=False)
    )
    parent = bytes(32)

    def pull(seconds: float) -> Any:
        async def run() -> Any:
            return await puller.pull(parent, hashes, deadline=soon(seconds))

        return daemon.call(run)

    timer = threading.Timer(0.4, owner.signal, [number])
    timer.start()
    began = time.monotonic()
    held, why = pull(2.0)
    assert time.monotonic() - began < 3
    timer.join()
    assert held < len(hashes)
    assert why in ("deadline", "unavailable")
    assert (daemon.metrics.reservations, daemon.metrics.pins) == (0, 0)
    assert daemon.used == held * LARGE
    others = chain("others", length=40)
    given = [os.urandom(LARGE) for _ in others]
    with kvstore.connect(daemon.url, MANY, deadline=SECONDS) as client:
        assert client.put(others, given).stored == len(others)
        if number == signal.SIGSTOP:
            owner.signal(signal.SIGCONT)
        time.sleep(0.5)
        received = [bytearray(LARGE) for _ in others]
        assert client.get(others, received).found == len(others)
        assert list(map(zlib.crc32, received)) == list(map(zlib.crc32, given))
        if number == signal.SIGSTOP:
            wait_for(lambda: pull(SECONDS)[0] == len(hashes), SECONDS)
            received = [bytearray(LARGE) for _ in hashes]
            assert client.get(hashes, received).found == len(hashes)
            assert received == stored
    daemon.call(puller.close)


async def test_a_session_with_nobody_is_given_back(adapter: Adapter) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    greeting = Greeting("127.0.0.1", listener.getsockname()[1], NAMESPACE, 0)
    half = VerbsPullTransport(adapter, QueueSettings())
    with pytest.raises(DeadlineExceeded):
        await PeerSession.open(greeting, {"rdma": half}, soon(0.2))
    listener.close()
    assert half._closed
