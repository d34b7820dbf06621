"""Memory that a client registers once, and transports that a machine does not have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore
from client import registration
from client.blocking import Client
from client.endpoint import Endpoint, Settings
from client.operations import names_memory
from client.registration import register
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import ROOT_PARENT
from kvstore.protocol.messages import Get, Match, Request, Write
from rdma.errors import RegionError
from rdma.verbs import adapter
from tests.kvstore.peer import NAMESPACE
from tests.kvstore.watched import Watched
from tests.running import make_config


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "list_devices", list)


@pytest.fixture
def daemon(no_device: None, tmp_path: Path) -> Iterator[Watched]:
    listen = {"tcp": "127.0.0.1:0", "insecure": True}
    with Watched(make_config(tmp_path, listen=listen)) as running:
        yield running


class Memory:
    """Registers nothing, and says what it was asked."""

    def __init__(self, refusal: str = "") -> None:
        self.live: list[memoryview] = []
        self._refusal = refusal

    def register(self, buffer: memoryview) -> memoryview:
        if self._refusal:
            raise RegionError(self._refusal)
        self.live.append(buffer)
        return buffer

    def release(self, region: memoryview) -> None:
        self.live.remove(region)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(registration, "shared_device", lambda: SimpleNamespace(memory=memory))
    return memory


def settings(*offers: str) -> Settings:
    return Settings(Endpoint.parse("tcp://127.0.0.1:1"), NAMESPACE, 0, list(offers))


POOL = np.zeros((4, 1000), np.float32)


def test_memory_is_registered_until_it_is_closed(memory: Memory) -> None:
    with register(settings("rdma", "tcp"), "rdma", POOL) as pool:
        assert pool.pinned
        assert [view.nbytes for view in memory.live] == [16_000]
    pool.close()
    assert memory.live == []
    assert not pool.pinned


def test_the_child_of_a_fork_leaves_the_parents_registrations(memory: Memory) -> None:
    pool = register(settings("rdma"), "", POOL)
    child = os.fork()
    if not child:
        pool.close()
        os._exit(len(memory.live))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    pool.close()
    assert memory.live == []


@pytest.mark.parametrize(
    ("offers", "transport"), [(["shm", "tcp"], "shm"), (["rdma", "tcp"], "tcp"), (["tcp"], "")]
)
def test_nothing_is_registered_where_nothing_has_to_be(
    memory: Memory, offers: list[str], transport: str
) -> None:
    with register(settings(*offers), transport, POOL) as pool:
        assert not pool.pinned
        assert memory.live == []


def test_memory_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory("this process may lock 65536 bytes (ulimit -l)")
    monkeypatch.setattr(registration, "shared_device", lambda: SimpleNamespace(memory=memory))
    with pytest.raises(ConfigError, match="ulimit -l"):
        register(settings("rdma"), "rdma", POOL)
    with pytest.raises(InvalidRequest):
        register(settings("rdma"), "rdma", "no buffer")


def test_without_a_device_auto_takes_tcp_and_says_why(daemon: Watched) -> None:
    with kvstore.connect(daemon.tcp_url, NAMESPACE, transport="auto") as client:
        stats = client.stats()
        assert stats.transport == "tcp"
        assert stats.transport_why.startswith("rdma: ")
        assert not client.register(POOL).pinned


async def test_without_a_device_auto_takes_tcp_with_asyncio_too(daemon: Watched) -> None:
    async with await kvstore.aconnect(daemon.tcp_url, NAMESPACE) as client:
        assert client.stats().transport == "tcp"
        assert client.stats().transport_why.startswith("rdma: ")
        assert not (await client.register(POOL)).pinned


def test_without_a_device_rdma_is_an_error_that_says_so(daemon: Watched) -> None:
    with pytest.raises(ConfigError, match="this machine has no RDMA device"):
        kvstore.connect(daemon.tcp_url, NAMESPACE, transport="rdma")


async def test_without_a_device_rdma_is_an_error_with_asyncio_too(daemon: Watched) -> None:
    with pytest.raises(ConfigError, match="this machine has no RDMA device"):
        await kvstore.aconnect(daemon.tcp_url, NAMESPACE, transport="rdma")


def test_a_node_that_must_have_a_device_does_not_start_without(
    no_device: None, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match="rdma.mode is require: "),
        Watched(make_config(tmp_path, rdma={"mode": "require"})),
    ):
        pass


def test_a_client_that_has_not_connected_yet_registers_all_the_same(memory: Memory) -> None:
    client = Client(settings("rdma", "tcp"), 1.0)
    with client.register(POOL) as pool:
        assert pool.pinned
    client.close()


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Get([ROOT_PARENT], destinations=[1, 2, 3]), True),
        (Get([ROOT_PARENT]), False),
        (Write(1, [0], 0, 4096, sources=[1, 2, 3]), True),
        (Write(1, [0], 0, 4096), False),
        (Match([ROOT_PARENT]), False),
    ],
)
def test_only_calls_that_name_memory_end_a_session_with_them(
    request_: Request[Any], named: bool
) -> None:
    assert names_memory(request_) is named
