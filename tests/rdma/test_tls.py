"""A socket over TLS that never blocks: whatever is given to it in whatever pieces arrives."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdma.errors import TlsError
from rdma.tls import TlsSocket, explained
from tests.tls import shaken

SIZES = st.lists(
    st.one_of(st.integers(0, 3000), st.sampled_from([16384, 16385, 70_000, 600_000])),
    min_size=1,
    max_size=12,
)


def pair(buffer: int = 0) -> tuple[TlsSocket, TlsSocket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    for sock in (left, right):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    return shaken(left, right)


@pytest.fixture
def ends() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    left, right = pair()
    yield left, right
    left.close()
    right.close()


def rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    queue = deque(parts)
    while queue and sent >= len(queue[0]):
        sent -= len(queue.popleft())
    if queue and sent:
        queue[0] = queue[0][sent:]
    return list(queue)


@given(SIZES, st.lists(st.sampled_from([1, 100, 4096, 16384, 200_000, 1 << 20]), min_size=1))
def test_all_bytes_arrive_in_order(sizes: list[int], reads: list[int]) -> None:
    left, right = pair(buffer=32 << 10)
    data = bytes(range(256)) * 4
    parts = [memoryview((data * (size // 1024 + 1))[:size]) for size in sizes]
    expected, got = b"".join(parts), bytearray()
    turn = 0
    try:
        while len(got) < len(expected):
            if parts:
                with contextlib.suppress(BlockingIOError):
                    parts = rest(parts, left.sendmsg(parts))
            buffer = memoryview(bytearray(reads[turn % len(reads)]))
            turn += 1
            try:
                count = right.recv_into(buffer)
            except BlockingIOError:
                continue
            assert count
            got += buffer[:count]
            # What is in the kernel shows at the descriptor; nothing else is held back unsaid.
            if count < len(buffer):
                assert not right.waiting
    finally:
        left.close()
        right.close()
    assert bytes(got) == expected


def fill(sock: TlsSocket, data: bytes) -> int:
    """Send until there is no room; how many bytes were taken."""
    taken = 0
    while True:
        try:
            taken += sock.sendmsg([data[taken:]])
        except BlockingIOError:
            return taken


def test_what_did_not_fit_may_be_offered_in_other_pieces_with_more_behind_it(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    left, right = ends
    first, second = bytes(range(256)) * (64 << 10), b"second" * 1000
    taken = fill(left, first)
    left_over = memoryview(first)[taken:]
    # The same bytes, cut otherwise.
    parts = [left_over[at : at + 1000] for at in range(0, len(left_over), 1000)]
    parts.append(memoryview(second))
    got = bytearray()
    buffer = memoryview(bytearray(1 << 20))
    while len(got) < len(first) + len(second):
        with contextlib.suppress(BlockingIOError):
            got += buffer[: right.recv_into(buffer)]
        with contextlib.suppress(BlockingIOError):
            parts = rest(parts, left.sendmsg(parts)) if parts else []
    assert bytes(got) == first + second


def test_what_was_decrypted_and_not_taken_is_told_of(ends: tuple[TlsSocket, TlsSocket]) -> None:
    left, right = ends
    assert left.send(bytes(1000)) == 1000
    buffer = memoryview(bytearray(400))
    received = receive(right, buffer)
    assert (received, right.waiting) == (400, True)
    assert [right.recv_into(buffer), right.waiting] == [400, True]
    assert [right.recv_into(buffer), right.waiting] == [200, False]
    with pytest.raises(BlockingIOError):
        right.recv_into(buffer)


def receive(sock: TlsSocket, buffer: memoryview) -> int:
    """Receive once there is something."""
    while True:
        try:
            return sock.recv_into(buffer)
        except BlockingIOError:
            continue


def test_the_end_and_a_failure_come_after_the_bytes_before_them(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    left, right = ends
    left.send(b"last words")
    left.shutdown(socket.SHUT_WR)
    buffer = memoryview(bytearray(100))
    assert receive(right, buffer) == 10
    assert receive(right, buffer) == 0
    # The other direction goes on.
    right.send(b"an answer")
    assert receive(left, buffer) == 9
    # What is no TLS breaks the connection, and stays so.
    right.send(b"good")
    socket.socket.send(right, b"this is no record of TLS")
    assert receive(left, buffer) == 4
    for _ in range(2):
        with pytest.raises(TlsError):
            receive(left, buffer)
    assert left.waiting


def test_nothing_goes_in_the_clear_after_a_shutdown(ends: tuple[TlsSocket, TlsSocket]) -> None:
    left, right = ends
    left.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError):  # noqa: PT011 - what it is matters to nobody
        left.send(b"secret")
    buffer = memoryview(bytearray(10))
    assert receive(left, buffer) == receive(right, buffer) == 0


@pytest.mark.parametrize(
    ("reason", "said", "denied"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "does not accept this end's certificate", True),
        ("TLSV1_ALERT_UNKNOWN_CA", "does not accept this end's certificate", True),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "does not accept this end's certificate", True),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "has shown no certificate", True),
        ("WRONG_VERSION_NUMBER", "does not speak TLS", False),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "TLS failed: tlsv1 alert protocol version", False),
    ],
)
def test_errors_are_said_in_words(reason: str, said: str, denied: bool) -> None:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    found = explained(error)
    assert isinstance(found, TlsError)
    assert said in str(found)
    assert found.denied is denied


def test_other_errors_are_as_they_are() -> None:
    error = ConnectionResetError(104, "reset")
    assert explained(error) is error
