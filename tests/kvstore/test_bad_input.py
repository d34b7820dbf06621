"""What a client can do wrong: an answer to it alone, nothing lost, and the daemon goes on."""

from __future__ import annotations

import hashlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvstore.errors import AccessDenied, InvalidRequest, NamespaceMismatch, ParentAbsent
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Exists,
    Get,
    Hello,
    Match,
    Ping,
    Release,
    Reserve,
    Segments,
    Write,
    request_header,
)
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content
from tests.running import DaemonThread, make_config, wait_for


def name(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonThread]:
    config = make_config(tmp_path_factory.mktemp("bad"), limits={"max_payload": "1MiB"})
    with DaemonThread(config) as running:
        yield running


@pytest.fixture
def path(daemon: DaemonThread) -> Path:
    assert daemon.config.listen.unix is not None
    return daemon.config.listen.unix


@pytest.fixture
def peer(path: Path) -> Iterator[Peer]:
    with Peer(path) as peer:
        peer.hello()
        yield peer


@pytest.fixture(autouse=True)
def the_daemon_goes_on(daemon: DaemonThread, path: Path) -> Iterator[None]:
    """After each test another client still finds what it stored, and nothing has leaked."""
    with Peer(path) as witness:
        witness.hello()
        witness.put([name(0)])
        yield
        _, payload = witness.ask(Get([name(0)]))
        assert payload == content(name(0))
    metrics = daemon.daemon.metrics
    wait_for(lambda: metrics.sessions == 0)
    wait_for(lambda: metrics.reservations == 0 and metrics.pins == 0)
    assert metrics.internal_errors == 0


def is_ended(peer: Peer) -> bool:
    """Whether the node has closed the connection, after the answers still to be read."""
    try:
        while True:
            peer.receive()
    except (EOFError, ConnectionResetError):
        return True


def prefix(magic: int = 0x564B, version: int = 1, header: int = 0, payload: int = 0) -> bytes:
    return struct.pack("<HBBIQ", magic, version, 0, header, payload)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        pytest.param(prefix(magic=0x1234) + bytes(64), "protocol", id="no frame"),
        pytest.param(prefix(version=9), "protocol", id="another version"),
        pytest.param(prefix(header=9 << 20), "frame_too_large", id="a header of 9 MiB"),
        pytest.param(
            encode(request_header(9, 0, Ping()))[:8] + struct.pack("<Q", 16 << 30),
            "frame_too_large",
            id="a payload of 16 GiB",
        ),
        pytest.param(prefix(header=3) + b"\xc1\xc1\xc1", "protocol", id="not msgpack"),
        pytest.param(prefix(header=3) + b"abc", "protocol", id="not an array"),
        pytest.param(prefix(header=1) + b"\x90", "protocol", id="an empty array"),
        pytest.param(
            prefix(header=5) + b"\xdd\xff\xff\xff\xff", "protocol", id="an array of 4 Gi items"
        ),
        pytest.param(encode(["x", 1, 0]), "protocol", id="a request id that is text"),
        pytest.param(
            prefix(header=40) + msgpack.packb([1, 10, 0]) + bytes(36),
            "protocol",
            id="a wrong length",
        ),
    ],
)
def test_broken_frame_ends_the_connection(peer: Peer, frame: bytes, code: str) -> None:
    peer.sock.sendall(frame)
    answer, _ = peer.receive()
    assert answer[:3] == [0, 1, code]
    assert is_ended(peer)


def test_truncated_frame_ends_the_connection(peer: Peer) -> None:
    peer.sock.sendall(encode(request_header(1, 0, Match([name(1)])))[:-5])
    peer.sock.shutdown(socket.SHUT_WR)
    answer, _ = peer.receive()
    assert answer[:3] == [0, 1, "protocol"]
    assert is_ended(peer)


def test_payload_that_breaks_off_leaves_nothing(peer: Peer, path: Path) -> None:
    answer = peer.ask(Reserve(ROOT_PARENT, [name(1)]))[0]
    write = Write(answer.reservation, [0], 0, BLOCK)
    peer.send(request_header(9, 0, write), bytes(BLOCK // 2), BLOCK)
    peer.sock.close()
    with Peer(path) as other:
        other.hello()

        def held() -> bytes:
            tiers: bytes = other.ask(Exists([name(1)]))[0].tiers
            return tiers

        assert held() == b"\0"
        wait_for(lambda: other.put([name(1)]) == b"\0")
        assert held() == b"\x02"


@pytest.mark.parametrize(
    "header",
    [
        pytest.param([7, 99, 0], id="unknown operation"),
        pytest.param([7, "match", 0], id="an operation that is text"),
        pytest.param([7, 2], id="too short"),
        pytest.param([7, 2, -1, b"", False], id="a negative deadline"),
        pytest.param([7, 2, 0], id="no arguments"),
        pytest.param([7, 2, 0, bytes(31), False], id="a hash of 31 bytes"),
        pytest.param([7, 2, 0, "x" * 32, False], id="a hash that is text"),
        pytest.param([7, 3, 0, bytes(33)], id="exists of 33 bytes"),
        pytest.param([7, 4, 0, bytes(32), 0, 1 << 63, False, None], id="get of 8 EiB"),
        pytest.param([7, 4, 0, bytes(32), BLOCK, 0, False, None], id="get beyond the block"),
        pytest.param([7, 4, 0, bytes(32), 0, BLOCK + 1, False, None], id="get too long"),
        pytest.param([7, 4, 0, bytes(32), 0, 0, False, bytes(8)], id="destinations over tcp"),
        pytest.param([7, 6, 0, bytes(5), bytes(32)], id="a parent of 5 bytes"),
        pytest.param([7, 7, 0, 12345, [0], 0, 0, True, None, None], id="no such reservation"),
        pytest.param([7, 8, 0, 12345], id="abort of no reservation"),
        pytest.param([7, 9, 0, [1]], id="segments over tcp"),
        pytest.param([0, 2, 0, bytes(32), False], id="request id 0"),
    ],
)
def test_malformed_request_is_answered_alone(peer: Peer, header: list[Any]) -> None:
    if header[0] == 0:
        peer.send(header)
    elif header[1] == 4 and header[-1] is not None:
        peer.put([bytes(32)[:-1] + b"\1"])
        header = [*header[:3], bytes(31) + b"\1", *header[4:]]
        assert peer.error(header) == "invalid_request"
    else:
        assert peer.error(header) == "invalid_request"
    peer.ask(Ping())


def test_repeated_request_id_ends_the_connection(peer: Peer, path: Path) -> None:
    with Peer(path) as writer:
        writer.hello()
        writer.ask(Reserve(ROOT_PARENT, [name(5)]))
        waiting = request_header(77, 5000, Get([name(5)], wait=True))
        peer.send(waiting)
        assert peer.error(waiting) == "protocol"
        assert is_ended(peer)


def test_first_request_must_be_hello(path: Path) -> None:
    with Peer(path) as peer:
        with pytest.raises(InvalidRequest, match="HELLO"):
            peer.ask(Match([name(1)]))
        peer.hello()
        with pytest.raises(InvalidRequest, match="open already"):
            peer.hello()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": 99}, "protocol"),
        ({"namespace": {}}, "invalid_request"),
        ({"namespace": dict(NAMESPACE.describe(), block_bytes=0)}, "invalid_request"),
        ({"namespace": dict(NAMESPACE.describe(), block_bytes=1 << 30)}, "namespace_mismatch"),
        ({"namespace": dict(NAMESPACE.describe(), color="red")}, "invalid_request"),
        ({"tenant": "somebody else"}, "invalid_request"),
        ({"shard": 1}, "namespace_mismatch"),
        ({"transports": ["carrier pigeon"]}, "invalid_request"),
        ({"transports": []}, "invalid_request"),
    ],
)
def test_impossible_hello_is_refused(path: Path, change: dict[str, Any], error: str) -> None:
    hello = Hello(PROTOCOL_VERSION, "default", None, dict(NAMESPACE.describe()), 0, ["tcp"])
    for field, value in change.items():
        setattr(hello, field, value)
    with Peer(path) as peer:
        assert peer.error(request_header(1, 0, hello)) == error
        peer.hello()


def test_wrong_token_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, auth={"session_token": "secret"})
    with DaemonThread(config), Peer(tmp_path / "kvstore.sock") as peer:
        with pytest.raises(AccessDenied):
            peer.hello()
        hello = Hello(PROTOCOL_VERSION, "default", "secret", dict(NAMESPACE.describe()), 0, ["tcp"])
        peer.ask(hello)


def test_child_of_an_absent_parent_is_refused(peer: Peer) -> None:
    with pytest.raises(ParentAbsent):
        peer.ask(Reserve(name(1000), [name(1001)]))


def test_payload_that_does_not_match_is_refused(peer: Peer) -> None:
    answer = peer.ask(Reserve(ROOT_PARENT, [name(20)]))[0]
    wrong = [
        (Write(answer.reservation, [0], 0, BLOCK), bytes(BLOCK - 1)),
        (Write(answer.reservation, [0], 0, BLOCK + 1), bytes(BLOCK + 1)),
        (Write(answer.reservation, [0], 1, BLOCK), bytes(BLOCK)),
        (Write(answer.reservation, [1], 0, BLOCK), bytes(BLOCK)),
        (Write(answer.reservation + 1, [0], 0, BLOCK), bytes(BLOCK)),
        (Write(answer.reservation, [0, 0], 0, 16), bytes(32)),
    ]
    for write, payload in wrong:
        with pytest.raises(InvalidRequest):
            peer.ask(write, payload)
    assert peer.error([99, 2, 0, name(1), False], b"payload") == "invalid_request"
    assert peer.ask(Exists([name(20)]))[0].tiers == b"\0"
    good = Write(answer.reservation, [0], 0, BLOCK)
    assert peer.ask(good, content(name(20)))[0].committed == b"\1"
    with pytest.raises(InvalidRequest):
        peer.ask(good, content(name(20)))


def test_commit_in_pieces_and_out_of_order(peer: Peer) -> None:
    hashes = [name(30 + index) for index in range(3)]
    number = peer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
    half = BLOCK // 2
    blocks = [content(block) for block in hashes]
    first_halves = b"".join(block[:half] for block in blocks)
    second_halves = b"".join(block[half:] for block in blocks[1:])
    peer.ask(Write(number, [0, 1, 2], 0, half, commit=False), first_halves)
    answer, _ = peer.ask(Write(number, [1, 2], half, half), second_halves)
    assert answer.committed == b"\0\0", "children wait for their parent"
    assert peer.ask(Match(hashes))[0].tiers == b""
    answer, _ = peer.ask(Write(number, [0], half, half), blocks[0][half:])
    assert answer.committed == b"\1"
    assert peer.ask(Match(hashes))[0].tiers == b"\2\2\2"
    assert peer.ask(Get(hashes))[1] == b"".join(blocks)
    assert peer.ask(Get(hashes, 100, 7))[1] == b"".join(block[100:107] for block in blocks)


def test_abort_frees_the_blocks(peer: Peer) -> None:
    number = peer.ask(Reserve(ROOT_PARENT, [name(40)]))[0].reservation
    peer.ask(Abort(number))
    assert peer.put([name(40)]) == b"\0"


def test_release_of_what_is_not_leased_changes_nothing(peer: Peer) -> None:
    peer.send([0, Release.op, 0, [1, 2, 3]])
    peer.ask(Ping())


def test_segments_of_another_tenant_are_refused(path: Path) -> None:
    other = Namespace("m", "float32", "test", 16, BLOCK, tenant="other")
    with Peer(path) as mine, Peer(path) as theirs:
        mine.hello(transport="shm")
        number = mine.ask(Reserve(ROOT_PARENT, [name(50)]))[0].locations[0] >> 44
        theirs.hello(other, transport="shm")
        for segment in (number, 999):
            with pytest.raises(AccessDenied):
                theirs.ask(Segments([segment]))


def test_blocks_larger_than_a_segment_are_refused(path: Path) -> None:
    huge = Namespace("m", "float32", "test", 16, 5 << 20)
    with Peer(path) as peer, pytest.raises(NamespaceMismatch):
        peer.hello(huge)
