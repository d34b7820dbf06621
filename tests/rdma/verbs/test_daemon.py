"""A daemon and its clients over ``rdma``, end to end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from client.blocking import Client
from kvstore import logs
from kvstore.config import Config
from kvstore.daemon import serve
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import Abort, Get, Reserve, Write, request_header
from rdma.errors import RegionError
from rdma.verbs.adapter import DEVICE_FAILED
from rdma.verbs.client import VerbsClientTransport, shared_device
from rdma.verbs.memory import Arena
from tests.client.sync_facade import AsyncFacade
from tests.kvstore.peer import Peer, content
from tests.kvstore.watched import Watched, chain, connected
from tests.rdma.verbs.forked import Channel, Forked
from tests.running import make_config, wait_for

BLOCK = 64 << 10
LARGE = 1 << 20
SECONDS = 30.0
"""Deadline of calls that nothing happens to; emulation is slow."""
LOST_SECONDS = 1.5
"""Within which a peer that is gone counts as lost."""


def namespace(block_bytes: int = BLOCK, tenant: str = "default") -> Namespace:
    return Namespace("m", "float32", "rdma", 16, block_bytes, tenant=tenant)


def make(directory: Path, **sections: dict[str, Any]) -> Config:
    given: dict[str, dict[str, Any]] = {
        "listen": {"tcp": "127.0.0.1:0", "insecure": True},
        "dram": {"capacity": "96MiB", "segment": "48MiB"},
        "rdma": {"mode": "require", "device": "rxe0", "bytes_in_flight": "1MiB"},
    }
    for name, values in sections.items():
        given.setdefault(name, {}).update(values)
    return make_config(directory, **given)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A daemon that all tests share which leave it as it was."""
    with Watched(make(tmp_path_factory.mktemp("node"))) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "node" in request.fixturenames:
        request.getfixturevalue("node").check()


def connect(url: str, block_bytes: int = BLOCK, *, transport: str = "rdma", **more: Any) -> Client:
    found = namespace(block_bytes)
    return kvstore.connect(url, found, transport=transport, **{"deadline": SECONDS, **more})


def connect_by_asyncio(url: str, block_bytes: int) -> AsyncFacade:
    return AsyncFacade(url, namespace(block_bytes), transport="rdma", deadline=SECONDS)


def blocks(number: int, size: int = BLOCK) -> list[bytes]:
    return [os.urandom(size) for _ in range(number)]


def room(number: int, size: int = BLOCK) -> list[bytearray]:
    return [bytearray(size) for _ in range(number)]


# --- what is stored comes back ------------------------------------------------------------------


@pytest.mark.parametrize("size", [BLOCK, LARGE])
def test_blocks_come_back_byte_for_byte(node: Watched, size: int) -> None:
    hashes, stored = chain("bytes", size, length=8), blocks(8, size)
    with connect(node.tcp_url, size) as client:
        assert client.put(hashes[:6], stored[:6]).stored == 6
        assert client.put(hashes[:6], stored[:6]).held == 6
        received = room(8, size)
        asked = [*hashes[:3], *chain("never", length=2), *hashes[3:6]]
        got = client.get(asked, received)
        assert got.hits == [True] * 3 + [False] * 2 + [True] * 3
        assert received[:3] + received[5:] == stored[:6]
        assert received[3:5] == room(2, size)
        part = np.zeros((6, 777), np.uint8)
        assert client.get(hashes[:6], part, offset=1001, length=777).found == 6
        assert [bytes(row) for row in part] == [block[1001:1778] for block in stored[:6]]
        with client.view([hashes[5], hashes[7], hashes[0]]) as views:
            assert [view and bytes(view) for view in views] == [stored[5], None, stored[0]]
        stats = client.stats()
        assert (stats.transport, stats.transport_why, stats.failures) == ("rdma", "", 0)


async def test_asyncio_calls_share_a_session(node: Watched) -> None:
    client = await kvstore.aconnect(node.tcp_url, namespace(), transport="rdma", deadline=SECONDS)
    async with client:
        chains = [chain("async", number, length=16) for number in range(4)]
        stored = [blocks(16) for _ in chains]
        puts = [client.put(*each) for each in zip(chains, stored, strict=True)]
        assert [put.stored for put in await asyncio.gather(*puts)] == [16] * 4
        received = [room(16) for _ in chains]
        gets = [client.get(*each) for each in zip(chains, received, strict=True)]
        assert [got.found for got in await asyncio.gather(*gets)] == [16] * 4
        assert received == stored
        async with client.view(chains[0]) as views:
            assert [view and bytes(view) for view in views] == stored[0]
        assert client.stats().transport == "rdma"
        assert client.stats().connects == 1


def test_a_get_waits_for_what_another_writes(node: Watched) -> None:
    hashes, received = chain("handover", length=4), room(4)
    with connect(node.tcp_url) as client, connected(node, namespace()) as writer:
        number = writer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(client.get, hashes, received, wait=True)
            wait_for(lambda: node.waiting == 1)
            writer.ask(Write(number, [0, 1, 2, 3], 0, BLOCK), b"".join(map(content, hashes)))
            assert got.result(SECONDS).found == 4
    assert received == [content(each) for each in hashes]


def test_what_dram_cannot_hold_comes_up_from_ssd(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "dram": {"capacity": "8MiB", "segment": "4MiB"},
        "ssd": {"capacity": "64MiB"},
        "policy": {"integrity": "always", "low_watermark": 0.4, "high_watermark": 0.5},
    }
    with Watched(make(tmp_path, **sections)) as node, connect(node.tcp_url) as client:
        chains = [chain("ssd", number, length=32) for number in range(8)]
        stored = [blocks(32) for _ in chains]
        for hashes, given in zip(chains, stored, strict=True):
            wait_for(lambda: node.used <= 4 << 20, SECONDS)
            assert client.put(hashes, given).stored == 32
        tiers = set()
        for hashes, given in zip(chains, stored, strict=True):
            for start in range(0, 32, 16):
                part = slice(start, start + 16)
                for _ in range(2):
                    received = room(16)
                    got = client.get(hashes[part], received)
                    assert got.found == 16, node.metrics.misses
                    assert received == given[part]
                    tiers.update(got.tiers)
        assert tiers == {"dram", "ssd"}


def test_a_pool_is_registered_once(node: Watched) -> None:
    hashes, stored = chain("pool", length=16), blocks(16)
    pool = np.zeros((16, BLOCK), np.uint8)
    with connect(node.tcp_url) as client:
        memory = shared_device().memory
        with client.register(pool) as registered:
            assert registered.pinned
            for _ in range(3):
                pool[:] = np.frombuffer(b"".join(stored), np.uint8).reshape(pool.shape)
                client.put(hashes, pool)
                pool[:] = 0
                assert client.get(hashes, pool).found == 16
                assert pool.tobytes() == b"".join(stored)
                assert len(memory._cache) == 1
        assert len(memory._cache) == 0
        assert client.get(hashes, pool).found == 16


# --- which transport ----------------------------------------------------------------------------


def test_auto_takes_rdma_and_says_so(node: Watched) -> None:
    with connect(node.tcp_url, transport="auto") as client:
        assert client.stats().transport == "rdma"
        status = node.call(node.inspection().status)
        assert status.transports["rdma"] == 1
        assert status.rdma.startswith("rxe0")
        assert node.daemon.metrics_url is not None
        page = urllib.request.urlopen(node.daemon.metrics_url, timeout=10).read().decode()
        for line in (
            'kvstore_transport_sessions{transport="rdma"} 1.0',
            "kvstore_rdma_up 1.0",
            "kvstore_rdma_queue_pairs 1.0",
        ):
            assert line in page.splitlines()


def test_a_node_without_rdma_is_reached_by_tcp_and_the_reason_told(tmp_path: Path) -> None:
    with Watched(make(tmp_path, rdma={"mode": "off"})) as node:
        with connect(node.tcp_url, transport="auto") as client:
            stats = client.stats()
            assert (stats.transport, "rdma is off" in stats.transport_why) == ("tcp", True)
        with pytest.raises(InvalidRequest, match="rdma is off"):
            connect(node.tcp_url)


def test_a_node_that_may_not_pin_its_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RegionError("this process may lock 65536 bytes (ulimit -l)")

    monkeypatch.setattr(Arena, "register", refuse)
    with Watched(make(tmp_path)) as node:
        wait_for(lambda: node.daemon.verbs.absence)
        with connect(node.tcp_url, transport="auto") as client:
            assert client.stats().transport == "tcp"
            assert "ulimit -l" in client.stats().transport_why
        assert not node.call(node.daemon.verbs.state).up


# --- memory and devices that change -------------------------------------------------------------


def test_memory_that_another_tenant_takes_over_is_registered_anew(tmp_path: Path) -> None:
    sections = {"dram": {"capacity": "16MiB", "segment": "8MiB"}}
    with Watched(make(tmp_path, **sections)) as node:
        for turn in range(3):
            for tenant in ("one", "another", "a third"):
                where = namespace(LARGE, tenant)
                hashes, stored = chain(turn, tenant, length=8), blocks(8, LARGE)
                received = room(8, LARGE)
                with kvstore.connect(
                    node.tcp_url, where, transport="rdma", deadline=SECONDS
                ) as client:
                    assert client.put(hashes, stored).stored == 8
                    assert client.get(hashes, received).found == 8
                assert received == stored
        assert node.call(node.daemon.verbs.state).registered_bytes <= 16 << 20


def test_a_device_that_failed_is_opened_anew_for_the_next_session(tmp_path: Path) -> None:
    with Watched(make(tmp_path)) as node, connect(node.tcp_url) as client:
        hashes, stored, received = chain("failed", length=4), blocks(4), room(4)
        assert client.put(hashes, stored).stored == 4
        driver = node.daemon.verbs.driver
        assert driver is not None
        node.call(driver._take_event, DEVICE_FAILED)
        assert "failed" in node.call(node.inspection().status).rdma
        wait_for(lambda: client.get(hashes, received).found == 4)
        assert received == stored
        assert (client.stats().transport, client.stats().connects) == ("rdma", 2)
        state = node.call(node.daemon.verbs.state)
        assert (state.up, state.openings, state.queue_pairs) == (True, 2, 1)
        assert state.failures == {"DEVICE_FATAL": 1}


def use_in_child(url: str, channel: Channel) -> None:
    hashes, stored, received = chain("child", length=4), blocks(4), room(4)
    with connect(url) as client:
        channel.tell([client.put(hashes, stored).stored, client.get(hashes, received).found])
    gc.unfreeze()
    gc.collect()


def test_a_child_of_a_fork_has_a_device_of_its_own(node: Watched) -> None:
    with connect(node.tcp_url) as client:
        hashes, stored, received = chain("parent", length=4), blocks(4), room(4)
        assert client.put(hashes, stored).stored == 4
        with Forked(partial(use_in_child, node.tcp_url)) as child:
            assert child.hear() == [4, 4]
            assert child.wait() == 0
        assert client.get(hashes, received).found == 4
        assert received == stored
        assert client.stats().connects == 1


# --- clients that fail --------------------------------------------------------------------------


def put_much(url: str, channel: Channel) -> None:
    """Store 32 blocks, getting them back if it lives that long."""
    hashes, stored = chain("much", os.getpid(), length=32), blocks(32, LARGE)
    with connect(url, LARGE) as client:
        channel.tell("connected")
        result = client.put(hashes, stored)
        received = room(32, LARGE)
        got = client.get(hashes, received)
        channel.tell([result.stored, got.found, received == stored])


def moving(node: Watched) -> int:
    counters = node.daemon.verbs.driver.counters  # type: ignore[union-attr]
    return counters.bytes_read + counters.bytes_written


def others_go_on(node: Watched) -> None:
    stored, received = blocks(4), room(4)
    with connect(node.tcp_url) as client:
        hashes = chain(time.monotonic(), length=4)
        assert client.put(hashes, stored).stored == 4
        assert client.get(hashes, received).found == 4
        assert received == stored


def test_a_client_killed_while_the_node_reads_leaves_nothing(node: Watched) -> None:
    with Forked(partial(put_much, node.tcp_url)) as child:
        assert child.hear() == "connected"
        begun = moving(node)
        wait_for(lambda: moving(node) > begun + (3 << 20))
        child.kill()
    wait_for(lambda: node.metrics.sessions == 0, LOST_SECONDS)
    node.check()
    others_go_on(node)


def test_a_client_that_is_stopped_for_a_while_notices_nothing(node: Watched) -> None:
    with Forked(partial(put_much, node.tcp_url)) as child:
        assert child.hear() == "connected"
        begun = moving(node)
        wait_for(lambda: moving(node) > begun + (3 << 20))
        child.signal(signal.SIGSTOP)
        others_go_on(node)
        child.signal(signal.SIGCONT)
        assert child.hear() == [32, 32, True]
        assert child.wait() == 0


def test_a_key_that_is_not_the_clients_ends_its_session_alone(node: Watched) -> None:
    with connect(node.tcp_url) as other:
        hashes, stored, received = chain("key", length=2), blocks(2), room(2)
        other.put(hashes, stored)
        transport = VerbsClientTransport()
        with Peer(node.path) as peer:
            transport.accept(peer.hello(namespace(), "rdma", offer=transport.offer()).details)
            named = [4096, 12345, BLOCK, 4096 + BLOCK, 12345, BLOCK]
            with pytest.raises(Unavailable, match="REM_ACCESS"):
                peer.ask(Get(hashes, 0, 0, False, named))
            with pytest.raises(EOFError):
                peer.receive()
        transport.close()
        assert other.get(hashes, received).found == 2
        assert received == stored


@pytest.mark.parametrize("together", [False, True])
def test_blocks_given_up_while_the_node_reads_them_stay_until_it_is_done(
    node: Watched, together: bool
) -> None:
    transport = VerbsClientTransport()
    source = memoryview(bytearray(16 * LARGE))
    with Peer(node.path) as peer:
        where = namespace(LARGE)
        transport.accept(peer.hello(where, "rdma", offer=transport.offer()).details)
        hashes = chain("given up", length=16)
        number = peer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
        sources = transport.sources([source])
        assert sources is not None
        triples = [
            value
            for start in range(0, len(source), LARGE)
            for value in (sources[0] + start, sources[1], LARGE)
        ]
        begun, used = moving(node), node.used
        write = Write(number, list(range(16)), 0, LARGE, sources=triples)
        frames = [
            encode(request_header(70, 30_000, write), 0),
            encode(request_header(71, 30_000, Abort(number)), 0),
        ]
        if together:
            peer.sock.sendall(b"".join(frames))
        else:
            peer.sock.sendall(frames[0])
            wait_for(lambda: moving(node) > begun)
            peer.sock.sendall(frames[1])
        answers = {answer[0]: answer for answer, _ in (peer.receive(), peer.receive())}
        assert answers[71][1] == 0
        assert answers[70][1] == 1 or not any(answers[70][2])
        assert moving(node) == begun + (0 if together else len(source))
        wait_for(lambda: node.used == used - 16 * LARGE)
        transport.done(sources)
    transport.close()


# --- nodes that fail ----------------------------------------------------------------------------


def serve_forever(config: Config, channel: Channel) -> None:
    logs.configure(config.log)
    serve(config, on_ready=lambda: channel.tell("ready"))


class Daemons:
    """Daemons in processes of their own, one after the other at the same address."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"tcp://{address}"
        listen = {"tcp": address, "insecure": True}
        self._config = make(directory, listen=listen, rdma={"bytes_in_flight": "1MiB"})
        self.process: Forked | None = None

    def start(self) -> Forked:
        self.process = Forked(partial(serve_forever, self._config))
        assert self.process.hear() == "ready"
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path)
    yield daemons
    daemons.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("direction", "kind"), [("get", connect), ("put", connect), ("get", connect_by_asyncio)]
)
def test_a_node_that_fails_in_a_call_is_a_miss_and_touches_nothing_afterwards(
    daemons: Daemons, number: int, direction: str, kind: Callable[[str, int], Any]
) -> None:
    daemon = daemons.start()
    hashes, stored = chain("failing", length=48), blocks(48, LARGE)
    received = [memoryview(block) for block in room(48, LARGE)]
    with contextlib.closing(kind(daemons.url, LARGE)) as client:
        if direction == "get":
            assert client.put(hashes, stored).stored == 48
        timer = threading.Timer(0.4, daemon.signal, [number])
        timer.start()
        began = time.monotonic()
        if direction == "get":
            got = client.get(hashes, received, deadline=1.0)
            assert (got.found, got.failure is not None) == (0, True)
        else:
            put = client.put(hashes, stored, deadline=1.0)
            assert put.failed
            assert put.failure is not None
        assert time.monotonic() - began < 1.5
        timer.join()
        before = [zlib.crc32(block) for block in received]
        for block in received[:8]:
            block[:64] = b"ours again" * 6 + b"...."
        marked = [bytes(block[:64]) for block in received[:8]]
        time.sleep(0.2)
        if number == signal.SIGSTOP:
            daemon.signal(signal.SIGCONT)
            time.sleep(0.5)
        else:
            daemon.wait()
            daemons.start()
        assert [bytes(block[:64]) for block in received[:8]] == marked
        assert [zlib.crc32(block) for block in received[8:]] == before[8:]
        few, given, back = chain("after", length=4), blocks(4, LARGE), room(4, LARGE)
        wait_for(lambda: client.put(few, given).failed == 0, SECONDS)
        assert client.get(few, back).found == 4
        assert back == given
        assert client.stats().connects == 2
        assert client.stats().transport == "rdma"
