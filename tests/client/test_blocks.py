"""The block level against a real node: both clients, each transport."""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

import kvstore
from client import operations, putting
from client.layout import HeadMajorLayout
from kvstore.errors import ConfigError, InvalidRequest, NamespaceMismatch, ParentAbsent
from kvstore.identity import Namespace, prefix_hashes
from tests.client.sync_facade import CONNECT
from tests.running import DaemonThread, make_config, wait_for
from tests.tls import Authority

BLOCK = 16 << 10
MODELS = count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonThread]:
    config = make_config(
        tmp_path_factory.mktemp("blocks"),
        listen={"tcp": "127.0.0.1:0"},
        limits={"max_payload": "256KiB"},
    )
    with DaemonThread(config) as running:
        yield running


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(f"model {next(MODELS)}", "uint8", "raw", 4, BLOCK)


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonThread]:
    """A node that speaks TLS."""
    config = make_config(
        tmp_path_factory.mktemp("secure"),
        listen={"tcp": "127.0.0.1:0"},
        limits={"max_payload": "256KiB"},
        tls=authority.section(),
    )
    with DaemonThread(config) as running:
        yield running


@pytest.fixture(params=["unix shm", "unix tcp", "tcp tcp", "tls tcp"])
def way(request: pytest.FixtureRequest) -> str:
    """Socket and transport of the client."""
    return str(request.param)


@pytest.fixture
def home(way: str, request: pytest.FixtureRequest) -> DaemonThread:
    """The node of the client."""
    node: DaemonThread = request.getfixturevalue("secure" if "tls" in way else "daemon")
    return node


@pytest.fixture
def client(
    way: str, home: DaemonThread, authority: Authority, namespace: Namespace, kind: str
) -> Iterator[Any]:
    socket, transport = way.split()
    url = next(url for url in home.daemon.server.urls if url.startswith(f"{socket}://"))
    trusted = {"ca": authority.ca} if socket == "tls" else {}
    with CONNECT[kind](url, namespace, transport=transport, deadline=5.0, **trusted) as made:
        yield made


def hashes(blocks: int) -> list[bytes]:
    return prefix_hashes(range(4 * blocks), 4)


def content(blocks: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (blocks, BLOCK), np.uint8)


def test_put_match_get(client: Any) -> None:
    names, data = hashes(5), content(5)
    assert client.match(names).blocks == 0
    result = client.put(names, data)
    assert (result.stored, result.failure, result.outcomes) == (5, None, ["stored"] * 5)
    assert client.match(names).tiers == ["dram"] * 5
    assert client.match([*names, bytes(32)]).blocks == 5
    assert client.exists([names[3], bytes(32)]).hits == [True, False]
    into = np.zeros_like(data)
    got = client.get(names, into)
    assert (got.found, got.prefix, got.tiers, got.failure) == (5, 5, ["dram"] * 5, None)
    assert np.array_equal(into, data)
    assert client.put(names, data).held == 5


def test_misses_leave_the_other_blocks(client: Any) -> None:
    names, data = hashes(4), content(4)
    client.put(names[:3], data[:3])
    wanted = [names[0], names[3], names[2], os.urandom(32)]
    into = np.zeros((4, BLOCK), np.uint8)
    got = client.get(wanted, into)
    assert got.hits == [True, False, True, False]
    assert got.prefix == 1
    assert np.array_equal(into[[0, 2]], data[[0, 2]])
    assert not into[[1, 3]].any()
    with client.view(wanted) as views:
        assert [view is not None for view in views] == got.hits
        assert bytes(views[2]) == data[2].tobytes()


def test_views_are_read_only_and_end_with_the_block(client: Any) -> None:
    names, data = hashes(3), content(3)
    client.put(names, data)
    with client.view(names) as views:
        assert (views.found, len(views), views.valid) == (3, 3, True)
        kept = views[0]
        assert kept is not None
        assert [bytes(view) for view in views] == [row.tobytes() for row in data]
        with pytest.raises(TypeError):
            kept[0] = 1
        array_of_it = np.frombuffer(views[1], np.uint8)
    with pytest.raises(ValueError, match="released"):
        bytes(kept)
    assert list(views) == [None] * 3
    del array_of_it


def test_byte_ranges(client: Any) -> None:
    names, data = hashes(3), content(3)
    client.put(names, data)
    into = np.zeros((3, 1000), np.uint8)
    assert client.get(names, into, offset=5000, length=1000).found == 3
    assert np.array_equal(into, data[:, 5000:6000])
    tail = np.zeros((3, 10), np.uint8)
    assert client.get(names, tail, offset=BLOCK - 10).found == 3
    assert np.array_equal(tail, data[:, -10:])


def test_any_buffer(client: Any) -> None:
    torch = pytest.importorskip("torch")
    names, data = hashes(5), content(5)
    tensor = torch.from_numpy(data[3].copy()).view(torch.bfloat16)
    words = array("Q")
    words.frombytes(data[2].tobytes())
    blocks = [data[0].tobytes(), bytearray(data[1]), words, tensor, data[4].reshape(4, -1)]
    assert client.put(names, blocks).stored == 5
    landed = torch.zeros(BLOCK // 2, dtype=torch.bfloat16)
    into = [
        bytearray(BLOCK),
        memoryview(bytearray(BLOCK)),
        array("d", bytes(BLOCK)),
        landed,
        np.zeros((2, BLOCK), np.uint8)[1],
    ]
    assert client.get(names, into).found == 5
    assert bytes(into[0]) == data[0].tobytes()
    assert bytes(into[1]) == data[1].tobytes()
    assert into[2].tobytes() == data[2].tobytes()
    assert torch.equal(landed.view(torch.uint8), tensor.view(torch.uint8))
    assert np.array_equal(into[4], data[4])


def test_larger_buffers_are_filled_from_the_front(client: Any) -> None:
    names, data = hashes(1), content(1)
    client.put(names, data)
    into = np.zeros(BLOCK + 5, np.uint8)
    assert client.get(names, [into]).found == 1
    assert np.array_equal(into[:BLOCK], data[0])
    assert not into[BLOCK:].any()


def test_batches_are_split(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "BATCH_BYTES", 5 * BLOCK)
    monkeypatch.setattr(putting, "RESERVE_BYTES", 7 * BLOCK)
    monkeypatch.setattr(putting, "WRITE_BYTES", 2 * BLOCK)
    names, data = hashes(37), content(37)
    assert client.put(names[:3], data[:3]).stored == 3
    result = client.put(names, data)
    assert (result.held, result.stored) == (3, 34)
    into = np.zeros_like(data)
    assert client.get(names, into).found == 37
    assert np.array_equal(into, data)
    with client.view(names) as views:
        assert b"".join(views) == data.tobytes()


def test_nothing_asked_nothing_answered(client: Any) -> None:
    assert client.match([]).blocks == 0
    assert client.get([], []).found == 0
    assert client.put([], []).stored == 0
    with client.view([]) as views:
        assert len(views) == 0


def test_mistakes_of_the_caller_raise(client: Any) -> None:
    names, data = hashes(2), content(2)
    for bad in ([b"short"], [bytes(33)], [*names, b""]):
        for call in (client.match, client.exists):
            with pytest.raises(InvalidRequest, match="32 bytes"):
                call(bad)
    with pytest.raises(InvalidRequest, match="bytes"):
        client.get(names, [bytearray(BLOCK), bytearray(BLOCK - 1)])
    with pytest.raises(InvalidRequest, match="read-only"):
        client.get(names, [bytes(BLOCK)] * 2)
    with pytest.raises(InvalidRequest, match="as many"):
        client.get(names, [bytearray(BLOCK)])
    with pytest.raises(InvalidRequest, match="outside"):
        client.get(names, data, offset=BLOCK)
    with pytest.raises(InvalidRequest, match="outside"):
        client.get(names, data, offset=1, length=BLOCK)
    with pytest.raises(NamespaceMismatch, match="bytes"):
        client.put(names, [data[0], data[1][:-1]])
    with pytest.raises(InvalidRequest, match="as many"):
        client.put(names, data[:1])
    with pytest.raises(ParentAbsent):
        client.put(names[1:], data[1:], parent=names[0])
    with pytest.raises(InvalidRequest):
        client.put(names, data, parent=b"short")
    assert client.put(names, data).stored == 2


def test_what_another_session_writes_is_waited_for(
    client: Any, home: DaemonThread, namespace: Namespace
) -> None:
    names, data = hashes(2), content(2)
    into = np.zeros_like(data)
    busy = []

    class SlowBlocks(list[Any]):
        """Blocks of which the last takes its time."""

        block_bytes = BLOCK

        def __getitem__(self, index: Any) -> Any:
            if index == 1:
                busy.append(True)
                threading.Event().wait(0.3)
            return super().__getitem__(index)

    with kvstore.connect(home.url, namespace, deadline=20.0) as other:
        writer = threading.Thread(target=other.put, args=(names, SlowBlocks(data)))
        writer.start()
        wait_for(lambda: busy)
        assert client.get(names, into).found == 0
        assert client.put(names, data).busy == 2
        assert client.get(names, into, wait=True, deadline=20.0).found == 2
        writer.join()
    assert np.array_equal(into, data)


def test_waiting_for_what_never_comes_ends_with_the_deadline(client: Any) -> None:
    got = client.get(hashes(1), [bytearray(BLOCK)], wait=True, deadline=0.1)
    assert got.found == 0


def test_a_full_node_refuses(client: Any) -> None:
    names, data = hashes(20), content(20)
    assert client.put(names, data).stored == 20
    with client.view(names) as views:
        assert views.found == 20


def test_stats(client: Any, home: DaemonThread) -> None:
    names, data = hashes(2), content(2)
    client.put(names, data)
    client.get([*names, bytes(32)], np.zeros((3, BLOCK), np.uint8))
    stats = client.stats()
    assert stats.connected
    assert stats.transport in ("shm", "tcp")
    assert stats.incarnation == home.daemon.incarnation
    assert (stats.hits, stats.misses, stats.stored) == (2, 1, 2)
    assert stats.bytes_read == stats.bytes_written == 2 * BLOCK
    assert stats.connects == 1


def test_all_pins_and_reservations_are_given_back(client: Any, home: DaemonThread) -> None:
    names, data = hashes(4), content(4)
    client.put(names, data)
    for _ in range(10):
        with client.view(names):
            pass
        client.get(names, np.zeros_like(data))
    metrics = home.daemon.metrics
    wait_for(lambda: (metrics.pins, metrics.reservations) == (0, 0))


def test_auto_chooses_by_socket(daemon: DaemonThread, namespace: Namespace, kind: str) -> None:
    for url, expected in ((daemon.url, "shm"), (daemon.tcp_url, "tcp")):
        with CONNECT[kind](url, namespace) as made:
            assert made.stats().transport == expected


def test_the_transport_is_logged(
    daemon: DaemonThread, namespace: Namespace, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvstore.client"), CONNECT[kind](daemon.url, namespace):
        pass
    assert "over shm" in caplog.text


@pytest.mark.parametrize(
    ("url", "transport"),
    [
        ("tcp://127.0.0.1:1", "shm"),
        ("tcp://127.0.0.1:1", "rdma"),
        ("unix:///x", "carrier pigeon"),
        ("unix://host/x", "auto"),
        ("unix://", "auto"),
        ("http://127.0.0.1:1", "auto"),
        ("tcp://127.0.0.1", "auto"),
        ("tcp://127.0.0.1:99999", "auto"),
        ("tcp://127.0.0.1:1/path", "auto"),
        ("", "auto"),
    ],
)
def test_what_cannot_be_had_is_said(
    url: str, transport: str, namespace: Namespace, kind: str
) -> None:
    with pytest.raises(ConfigError):
        CONNECT[kind](url, namespace, transport=transport)


def test_a_shard_that_is_not_there(daemon: DaemonThread, namespace: Namespace, kind: str) -> None:
    with pytest.raises(InvalidRequest, match="shard"):
        CONNECT[kind](daemon.url, namespace, shard=1)
    with pytest.raises(ConfigError, match="deadline"):
        CONNECT[kind](daemon.url, namespace, deadline=0)


def test_a_prefix_needs_every_shard(daemon: DaemonThread, namespace: Namespace, kind: str) -> None:
    two = replace(namespace, tp_size=2)
    names, data = hashes(3), content(3)
    with (
        CONNECT[kind](daemon.url, two, shard=0, deadline=5.0) as first,
        CONNECT[kind](daemon.url, two, shard=1, deadline=5.0) as second,
    ):
        first.put(names, data)
        assert first.match(names).blocks == 0
        second.put(names[:2], content(2, 1))
        assert first.match(names).blocks == second.match(names).blocks == 2
        into = np.zeros((2, BLOCK), np.uint8)
        assert second.get(names[:2], into).found == 2
        assert np.array_equal(into, content(2, 1))


def test_another_namespace_is_a_miss(
    client: Any, home: DaemonThread, namespace: Namespace, kind: str
) -> None:
    names, data = hashes(2), content(2)
    client.put(names, data)
    with CONNECT[kind](home.url, replace(namespace, salt="other")) as other:
        assert other.match(names).blocks == 0
        assert other.get(names, np.zeros_like(data)).found == 0


@pytest.mark.parametrize("socket", ["unix", "tcp"])
async def test_prefixes_over_a_real_node(daemon: DaemonThread, socket: str) -> None:
    layout = HeadMajorLayout(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_tokens=4)
    space = layout.namespace(f"prefixes {socket}")
    url = daemon.url if socket == "unix" else daemon.tcp_url
    random = np.random.default_rng(1)

    def tensors() -> Any:
        return [tuple(random.random((2, 40, 8), np.float32) for _ in "kv") for _ in range(2)]

    saved, one, two = tensors(), tensors(), tensors()
    with kvstore.connect(url, space, deadline=5.0) as blocking:
        prefixes = blocking.prefixes(layout)
        assert prefixes.save(range(40), saved).stored == 10
        assert prefixes.load(range(42), tensors_like(one, 44)).tokens == 40
        assert prefixes.load(range(40), one).tiers == {"dram": 40}
    async with await kvstore.aconnect(url, space, deadline=5.0) as client:
        twin = client.prefixes(layout)
        assert (await twin.match(range(40))).tokens == 40
        assert (await twin.load(range(40), two)).tokens == 40
        assert (await twin.save(range(40), saved)).held == 10
    for loaded in (one, two):
        for pair, other in zip(saved, loaded, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(pair, other, strict=True))


def tensors_like(pairs: Any, tokens: int) -> Any:
    return [tuple(np.zeros((2, tokens, 8), np.float32) for _ in pair) for pair in pairs]
