"""Sessions over TLS: both clients against a real node, and those who are not let in."""

from __future__ import annotations

import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from client import connect as connect_module
from kvstore.errors import AccessDenied, ConfigError, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.identity import Namespace, prefix_hashes
from rdma.certificates import CertificateFiles
from tests.client.sync_facade import CONNECT
from tests.kvstore.directory.servers import free_port
from tests.running import DaemonThread, daemon_process, make_config, wait_for
from tests.tls import Authority

BLOCK = 1 << 20
BLOCKS = 24
MODELS = count()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def strict(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonThread]:
    """A node that wants certificates of its clients."""
    config = make_config(
        tmp_path_factory.mktemp("strict"),
        listen={"tcp": "127.0.0.1:0"},
        tls=authority.section(clients="certificate"),
        dram={"capacity": "64MiB", "segment": "32MiB"},
        limits={"session_pinned": 0.9},
    )
    with DaemonThread(config) as running:
        yield running


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Any:
    return CONNECT[request.param]


def tls_url(daemon: DaemonThread, host: str = "localhost") -> str:
    url = next(url for url in daemon.daemon.server.urls if url.startswith("tls://"))
    return url.replace("127.0.0.1", host)


def options(files: CertificateFiles) -> dict[str, Any]:
    return {"ca": files.ca, "certificate": files.certificate, "key": files.key, "deadline": 10.0}


def new_namespace(block_bytes: int = BLOCK) -> Namespace:
    return Namespace(f"tls {next(MODELS)}", "uint8", "raw", 4, block_bytes)


def hashes(blocks: int) -> list[bytes]:
    return prefix_hashes(range(4 * blocks), 4)


def content(blocks: int, size: int = BLOCK) -> Any:
    return np.random.default_rng(7).integers(0, 256, (blocks, size), np.uint8)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_blocks_go_and_come(
    strict: DaemonThread, authority: Authority, connect: Any, host: str
) -> None:
    files = authority.files("client", hosts=("engine-7",))
    data, names = content(BLOCKS), hashes(BLOCKS)
    with connect(tls_url(strict, host), new_namespace(), **options(files)) as client:
        assert client.put(names, data).stored == BLOCKS
        into = np.zeros_like(data)
        got = client.get(names, into)
        assert (got.found, got.failure) == (BLOCKS, None)
        assert np.array_equal(into, data)
        for number in (3, 0, BLOCKS - 1):
            piece = np.zeros((1, 70_001), np.uint8)
            assert client.get([names[number]], piece, offset=999, length=70_001).found == 1
            assert np.array_equal(piece[0], data[number, 999:71_000])
        assert client.match([*names, bytes(32)]).blocks == BLOCKS


def test_many_small_calls(strict: DaemonThread, authority: Authority, connect: Any) -> None:
    files = authority.files("client", hosts=("engine-7",))
    size = 4096
    data, names = content(64, size), hashes(64)
    with connect(tls_url(strict), new_namespace(size), **options(files)) as client:
        for number, name in enumerate(names):
            assert client.put([name], data[number : number + 1]).stored == 1
            row = np.zeros((1, size), np.uint8)
            assert client.get([name], row).found == 1
            assert np.array_equal(row[0], data[number])
        assert client.match(names).blocks == 64


def test_the_unix_socket_is_as_before(strict: DaemonThread, connect: Any) -> None:
    with connect(strict.url, new_namespace(4096), deadline=10.0) as client:
        assert client.match(hashes(2)).failure is None


def refusal(connect: Any, url: str, **given: Any) -> KVStoreError:
    given.setdefault("deadline", 10.0)
    with pytest.raises(KVStoreError) as refused:
        connect(url, new_namespace(), **given)
    return refused.value


def test_who_has_no_certificate_is_refused(
    strict: DaemonThread, authority: Authority, connect: Any
) -> None:
    told = refusal(connect, tls_url(strict), ca=authority.ca)
    assert isinstance(told, AccessDenied), repr(told)
    assert "does not accept this end's certificate: tlsv13 alert certificate required" in str(told)


@pytest.mark.parametrize("expired", [False, True])
def test_strangers_and_the_expired_are_refused(
    strict: DaemonThread, authority: Authority, connect: Any, tmp_path: Path, expired: bool
) -> None:
    other = None if expired else Authority(tmp_path / "other")
    files = authority.files(f"stranger {expired}", expired=expired, signed_by=other)
    before = strict.daemon.metrics.errors["access_denied"]
    told = refusal(connect, tls_url(strict), **options(files))
    assert isinstance(told, AccessDenied), repr(told)
    assert ("expired" if expired else "unknown ca") in str(told)
    wait_for(lambda: strict.daemon.metrics.errors["access_denied"] > before)


def test_a_node_that_nobody_vouches_for_is_not_trusted(
    strict: DaemonThread, authority: Authority, connect: Any, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    told = refusal(connect, tls_url(strict), **options(other.files("client")))
    assert isinstance(told, AccessDenied)
    assert "the other end's certificate is not trusted: " in str(told)
    told = refusal(connect, tls_url(strict))
    assert "the other end's certificate is not trusted: " in str(told)


def test_a_node_of_another_name_is_not_trusted(
    authority: Authority, connect: Any, tmp_path: Path
) -> None:
    files = authority.files("elsewhere", hosts=("elsewhere.example",))
    tls = {"certificate": str(files.certificate), "key": str(files.key)}
    config = make_config(tmp_path, listen={"tcp": "127.0.0.1:0"}, tls=tls)
    with DaemonThread(config) as daemon:
        for host in ("localhost", "127.0.0.1"):
            told = refusal(connect, tls_url(daemon, host), ca=authority.ca)
            assert isinstance(told, AccessDenied)
            assert "match" in str(told)


def test_a_plain_client_is_told_of_tls(strict: DaemonThread, connect: Any) -> None:
    before = strict.daemon.metrics.errors["protocol"]
    told = refusal(connect, tls_url(strict).replace("tls", "tcp"))
    assert "this node speaks TLS here: its address begins with tls://" in str(told)
    wait_for(lambda: strict.daemon.metrics.errors["protocol"] > before)


def test_a_plain_node_is_told_of(authority: Authority, connect: Any, tmp_path: Path) -> None:
    config = make_config(tmp_path, listen={"tcp": "127.0.0.1:0"})
    with DaemonThread(config) as daemon:
        told = refusal(connect, daemon.tcp_url.replace("tcp", "tls"), ca=authority.ca)
    assert isinstance(told, Unavailable)
    assert "the other end does not speak TLS" in str(told)


def test_a_node_that_says_nothing_costs_no_more_than_the_deadline(
    authority: Authority, connect: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tls://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        told = refusal(connect, url, ca=authority.ca, deadline=0.3)
        assert time.monotonic() - began < 10
    assert isinstance(told, DeadlineExceeded)


def test_a_handshake_that_hangs_is_cut_and_holds_nobody_up(
    strict: DaemonThread, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.handshakes.HANDSHAKE_SECONDS", 1.0)
    port = int(tls_url(strict).rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as silent,
        socket.create_connection(("127.0.0.1", port)) as slow,
    ):
        slow.sendall(b"\x16\x03\x01")
        files = authority.files("client")
        with kvstore.connect(tls_url(strict), new_namespace(), **options(files)) as client:
            assert client.exists(hashes(1)).failure is None
        for sock in (silent, slow):
            sock.settimeout(20)
            assert sock.recv(100) == b""
    assert strict.call(lambda: len(strict.daemon.server._handshakes or ())) == 0


def test_no_more_than_so_many_handshakes_at_once(
    strict: DaemonThread, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.handshakes._MOST", 2)
    before = strict.daemon.metrics.errors["unavailable"]
    port = int(tls_url(strict).rpartition(":")[2])
    with ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)
        ]
        wait_for(lambda: strict.daemon.metrics.errors["unavailable"] > before)
        socks[2].settimeout(20)
        assert socks[2].recv(1) == b""
    wait_for(lambda: not len(strict.daemon.server._handshakes or ()))
    files = authority.files("client")
    with kvstore.connect(tls_url(strict), new_namespace(), **options(files)) as client:
        assert client.exists(hashes(1)).failure is None


def test_a_node_that_stops_is_a_miss_in_time_and_is_used_again(
    authority: Authority, connect: Any, tmp_path: Path
) -> None:
    config = make_config(
        tmp_path,
        listen={"tcp": f"127.0.0.1:{free_port()}"},
        tls=authority.section(clients="certificate"),
        dram={"capacity": "64MiB", "segment": "32MiB"},
        limits={"session_pinned": 0.9},
    )
    files, data, names = authority.files("client"), content(BLOCKS), hashes(BLOCKS)
    with (
        daemon_process(config) as daemon,
        connect(f"tls://{config.listen.tcp}", new_namespace(), **options(files)) as client,
    ):
        assert client.put(names[:4], data[:4]).stored == 4
        into = np.zeros_like(data)
        daemon.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert client.get(names[:4], into[:4], deadline=0.3).failure == "deadline_exceeded"
            assert client.put(names, data, deadline=0.3).failure is not None
            assert time.monotonic() - began < 10
        finally:
            daemon.signal(signal.SIGCONT)
        wait_for(lambda: client.put(names, data).failure is None, 30)
        assert client.get(names, into).found == BLOCKS
        assert np.array_equal(into, data)


def test_who_only_looks_whether_somebody_listens_is_no_failure(strict: DaemonThread) -> None:
    port = int(tls_url(strict).rpartition(":")[2])
    before = strict.daemon.metrics.errors.total()
    socket.create_connection(("127.0.0.1", port)).close()
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.settimeout(20)
        assert b"this node speaks TLS" in plain.recv(1000)
    wait_for(lambda: not len(strict.daemon.server._handshakes or ()))
    assert strict.daemon.metrics.errors.total() == before + 1


def test_older_versions_of_tls_are_refused(strict: DaemonThread) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    port = int(tls_url(strict).rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        context.wrap_socket(plain)


def test_certificates_are_for_tls_only(authority: Authority, connect: Any) -> None:
    with pytest.raises(ConfigError, match="certificates are for tls://"):
        connect("tcp://localhost:1", new_namespace(), ca=authority.ca)
    with pytest.raises(ConfigError, match=r"nothing\.pem can't be read"):
        connect("tls://localhost:1", new_namespace(), ca="/nothing.pem")


def test_certificates_are_renewed_while_sessions_go_on(
    connect: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    config = make_config(
        tmp_path / "state",
        listen={"tcp": "127.0.0.1:0"},
        tls=old.section("node", clients="certificate"),
    )
    with DaemonThread(config) as daemon:
        trusted = {"ca": old.ca, "deadline": 10.0}
        ours = old.files("client")
        mine = {"certificate": ours.certificate, "key": ours.key}
        with connect(tls_url(daemon), new_namespace(4096), **trusted, **mine) as before:
            assert before.put(hashes(1), content(1, 4096)).stored == 1
            # A file that is broken changes nothing for anybody.
            assert config.tls.certificate is not None
            config.tls.certificate.write_text("half a certifi")
            for _ in range(2):
                with connect(tls_url(daemon), new_namespace(4096), **trusted, **mine) as client:
                    assert client.exists(hashes(1)).failure is None
            # The node's next certificate is of another authority: who trusts the old one only is
            # as little able to check it as the one who trusts the new one was before.
            told = refusal(connect, tls_url(daemon), ca=new.ca, **mine)
            assert isinstance(told, AccessDenied)
            old.files("node", signed_by=new)
            with connect(tls_url(daemon), new_namespace(4096), ca=new.ca, **mine, deadline=10) as c:
                assert c.exists(hashes(1)).failure is None
            assert isinstance(refusal(connect, tls_url(daemon), **trusted, **mine), AccessDenied)
            # And so are clients, when the node's authorities are others.
            old.ca.write_bytes(new.ca.read_bytes())
            assert isinstance(refusal(connect, tls_url(daemon), ca=new.ca, **mine), AccessDenied)
            fresh = new.files("client")
            given = {"certificate": fresh.certificate, "key": fresh.key, "deadline": 10.0}
            with connect(tls_url(daemon), new_namespace(4096), ca=new.ca, **given) as client:
                assert client.exists(hashes(1)).failure is None
            assert before.exists(hashes(1)).hits == [True]
    logged = capfd.readouterr().err
    assert logged.count("the certificates read before stay in force") == 1
    assert "the certificates have changed and are in force" in logged


def test_a_client_reads_its_renewed_certificate(
    strict: DaemonThread, authority: Authority, tmp_path: Path
) -> None:
    files = authority.files("renewed", signed_by=Authority(tmp_path / "other"))
    given = options(files) | {"required": False}
    with pytest.raises(AccessDenied):
        kvstore.connect(tls_url(strict), new_namespace(4096), **given)
    client = connect_module.prepare(tls_url(strict), new_namespace(4096), **options(files))
    with client:
        assert client.exists(hashes(1)).failure == "access_denied"
        authority.files("renewed")
        wait_for(lambda: client.exists(hashes(1)).failure is None)
