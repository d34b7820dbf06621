"""Nodes that are dead, slow, stopped, restarted or mad: misses in time, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import AccessDenied, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.identity import Namespace, prefix_hashes
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import (
    Get,
    GetAnswer,
    Hello,
    MatchAnswer,
    Release,
    Segments,
    error_header,
)
from tests.client.scripted_node import NAMESPACE, Session, scripted_node
from tests.client.sync_facade import CONNECT
from tests.running import DaemonProcess, DaemonThread, daemon_process, make_config

BLOCK = 64 << 10
SLACK = 0.4
"""Seconds that a call may come late on a machine with much else to do."""


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon_process(make_config(tmp_path)) as running:
        yield running


def namespace() -> Namespace:
    return Namespace("m", "uint8", "raw", 4, BLOCK)


def hashes(blocks: int) -> list[bytes]:
    return prefix_hashes(range(4 * blocks), 4)


def content(blocks: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (blocks, BLOCK), np.uint8)


def timed(call: Any, *args: Any, **options: Any) -> tuple[Any, float]:
    began = time.monotonic()
    return call(*args, **options), time.monotonic() - began


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_daemon_is_a_miss_and_its_successor_is_found(
    daemon: DaemonProcess, kind: str, transport: str
) -> None:
    names, data = hashes(4), content(4)
    with CONNECT[kind](daemon.url, namespace(), transport=transport, deadline=2.0) as client:
        assert client.put(names, data).stored == 4
        daemon.kill()
        for _ in range(20):
            got, seconds = timed(client.get, names, np.zeros_like(data), deadline=0.5)
            assert (got.found, got.failure) == (0, "unavailable")
            assert seconds < 0.5 + SLACK
        assert client.match(names).failure == "unavailable"
        assert client.put(names, data).failed == 4
        with client.view(names) as views:
            assert (views.found, views.failure) == (0, "unavailable")
        daemon.start()
        until = time.monotonic() + 10
        while client.put(names, data, deadline=2.0).stored != 4:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert client.get(names, data).found == 4
        assert client.stats().connects == 2


def test_a_restart_between_two_calls_goes_unnoticed(daemon: DaemonProcess, kind: str) -> None:
    names, data = hashes(4), content(4)
    with CONNECT[kind](daemon.url, namespace(), deadline=5.0) as client:
        assert client.put(names, data).stored == 4
        daemon.kill()
        daemon.start()
        assert client.put(names, data).stored == 4


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_daemon_is_a_miss_in_time(
    daemon: DaemonProcess, kind: str, transport: str
) -> None:
    names, data = hashes(40), content(40)
    with CONNECT[kind](daemon.url, namespace(), transport=transport, deadline=2.0) as client:
        assert client.put(names, data).stored == 40
        daemon.signal(signal.SIGSTOP)
        try:
            calls = [
                (client.match, (names,)),
                (client.exists, (names,)),
                (client.get, (names, np.zeros_like(data))),
                (client.put, (names, data)),
            ]
            slow = 0
            for call, args in calls * 3:
                result, seconds = timed(call, *args, deadline=0.2)
                assert result.failure in ("deadline_exceeded", "unavailable")
                assert seconds < 0.2 + SLACK
                slow += seconds > 0.1
            assert slow < 8, "a node in doubt must not cost a deadline at every call"
        finally:
            daemon.signal(signal.SIGCONT)
        until = time.monotonic() + 10
        while client.get(names, np.zeros_like(data), deadline=2.0).found != 40:
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.mark.parametrize("again", [False, True])
def test_a_node_that_answers_again_is_trusted_again(
    daemon: DaemonProcess, kind: str, again: bool
) -> None:
    """Whether its answers come between calls, or all of them while another call waits."""
    with CONNECT[kind](daemon.url, namespace(), deadline=5.0) as client:
        names = hashes(2)
        client.match(names)
        daemon.signal(signal.SIGSTOP)
        assert client.match(names, deadline=0.1).failure == "deadline_exceeded"
        if again:
            time.sleep(0.1)  # so that the next call is tried at all
            threading.Timer(0.2, daemon.signal, (signal.SIGCONT,)).start()
        else:
            daemon.signal(signal.SIGCONT)
            time.sleep(0.2)
        client.match(names)
        failures = [client.match(names).failure for _ in range(10)]
        assert failures == [None] * 10
        assert client.stats().connected
        assert client.stats().connects == 1


def test_signals_do_not_stretch_a_deadline(daemon: DaemonProcess, kind: str) -> None:
    """A signal restarts a wait within the kernel, and a profiler's come all the time."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    with CONNECT[kind](daemon.url, namespace(), transport="tcp", deadline=5.0) as client:
        names, data = hashes(128), content(128)
        client.match(names)
        daemon.signal(signal.SIGSTOP)
        watchdog = threading.Timer(4.0, daemon.signal, (signal.SIGCONT,))
        watchdog.start()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            answer, took = timed(client.match, names, deadline=0.3)
            assert answer.failure == "deadline_exceeded"
            assert took < 0.3 + SLACK
            big, took = timed(client.put, names, data, deadline=0.3)
            assert big.stored == 0
            assert took < 0.3 + SLACK
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
            watchdog.cancel()
            daemon.signal(signal.SIGCONT)


def test_a_large_put_to_a_stopped_daemon_ends_in_time(daemon: DaemonProcess, kind: str) -> None:
    big = Namespace("big", "uint8", "raw", 4, 1 << 20)
    data = np.zeros((4, 1 << 20), np.uint8)
    with CONNECT[kind](daemon.url, big, transport="tcp", deadline=2.0) as client:

        class Stopping(list[Any]):
            """Blocks that stop the daemon once they are asked for, after the reservation."""

            block_bytes = 1 << 20

            def __getitem__(self, index: Any) -> Any:
                daemon.signal(signal.SIGSTOP)
                return super().__getitem__(index)

        try:
            result, seconds = timed(client.put, hashes(4), Stopping(data), deadline=0.3)
        finally:
            daemon.signal(signal.SIGCONT)
        assert result.stored == 0
        assert result.failure == "deadline_exceeded"
        assert seconds < 0.3 + SLACK
        until = time.monotonic() + 10
        while client.put(hashes(4), data, deadline=2.0).held + 0 != 4:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_nothing_is_left_after_close(daemon: DaemonProcess, kind: str) -> None:
    names, data = hashes(4), content(4)
    with CONNECT[kind](daemon.url, namespace()):
        pass
    threads, files = set(threading.enumerate()), open_files()
    for transport in ("shm", "tcp"):
        client = CONNECT[kind](daemon.url, namespace(), transport=transport, deadline=2.0)
        client.put(names, data)
        into = np.zeros_like(data)
        client.get(names, into)
        with client.view(names):
            pass
        client.close()
        client.close()
        gone = weakref.ref(into)
        del into
        gc.collect()
        assert gone() is None
    assert set(threading.enumerate()) == threads
    assert open_files() == files


def test_no_buffer_is_kept_after_a_timeout(daemon: DaemonProcess) -> None:
    with kvstore.connect(daemon.url, namespace(), transport="tcp", deadline=2.0) as client:
        client.put(hashes(4), content(4))
        daemon.signal(signal.SIGSTOP)
        try:
            into = content(4)
            got = client.get(hashes(4), into, deadline=0.1)
        finally:
            daemon.signal(signal.SIGCONT)
        assert got.failure == "deadline_exceeded"
        gone = weakref.ref(into)
        del into
        gc.collect()
        assert gone() is None


def test_a_closed_client_gives_misses(daemon: DaemonProcess) -> None:
    client = kvstore.connect(daemon.url, namespace())
    client.close()
    assert client.match(hashes(1)).failure == "unavailable"
    assert not client.stats().connected


def test_nobody_there(tmp_path: Path, kind: str) -> None:
    url = f"unix://{tmp_path / 'nobody.sock'}"
    with pytest.raises(Unavailable):
        CONNECT[kind](url, namespace())
    with CONNECT[kind](url, namespace(), required=False) as client:
        result, seconds = timed(client.match, hashes(1))
        assert result.failure == "unavailable"
        assert seconds < SLACK
        with daemon_process(make_config(tmp_path, listen={"unix": url[7:]})):
            until = time.monotonic() + 10
            while client.match(hashes(1)).failure is not None:
                assert time.monotonic() < until
                time.sleep(0.02)


def test_a_node_that_wants_a_token(tmp_path: Path, kind: str) -> None:
    with DaemonThread(make_config(tmp_path, auth={"session_token": "secret"})) as running:
        for required in (True, False):
            with pytest.raises(AccessDenied):
                CONNECT[kind](running.url, namespace(), token="wrong", required=required)
        with CONNECT[kind](running.url, namespace(), token="secret") as client:
            assert client.match(hashes(1)).failure is None


# --- a scripted node ---------------------------------------------------------------------------


def late_answer(session: Session) -> None:
    """Answers a get after its deadline, then everything at once."""
    session.welcome()
    request_id, get = session.ask()
    payload = b"x" * NAMESPACE.block_bytes * len(get.hashes)
    header = encode([request_id, 0, *GetAnswer(0, b"\2" * len(get.hashes)).values()], len(payload))
    session.sock.sendall(header + payload[:500])
    time.sleep(0.3)
    session.sock.sendall(payload[500:])
    while True:
        request_id, match = session.ask()
        session.answer(request_id, MatchAnswer(b"\2" * len(match.hashes)))


def test_a_late_payload_lands_nowhere(tmp_path: Path, kind: str) -> None:
    with (
        scripted_node(tmp_path, late_answer) as url,
        CONNECT[kind](url, NAMESPACE, transport="tcp") as client,
    ):
        into = np.zeros((2, NAMESPACE.block_bytes), np.uint8)
        got, seconds = timed(client.get, hashes(2), into, deadline=0.1)
        assert (got.found, got.failure) == (0, "deadline_exceeded")
        assert seconds < 0.1 + 0.15
        into[:] = 7
        time.sleep(0.4)
        assert client.match(hashes(2), deadline=2.0).blocks == 2
        assert (into == 7).all()
        assert client.stats().connects == 1


def dripping(session: Session) -> None:
    """Sends a payload a byte at a time, never to be done."""
    session.welcome()
    request_id, _ = session.ask()
    session.sock.sendall(encode([request_id, 0, *GetAnswer(0, b"\2").values()], 1000))
    while True:
        session.sock.sendall(b"x")
        time.sleep(0.02)


def test_a_drip_cannot_stretch_the_deadline(tmp_path: Path, kind: str) -> None:
    with (
        scripted_node(tmp_path, dripping) as url,
        CONNECT[kind](url, NAMESPACE, transport="tcp") as client,
    ):
        got, seconds = timed(client.get, hashes(1), [bytearray(1000)], deadline=0.2)
        assert got.failure == "deadline_exceeded"
        assert 0.19 < seconds < 0.2 + SLACK


def garbage(session: Session) -> None:
    session.welcome()
    session.ask()
    session.sock.sendall(b"this is not the protocol" * 10)
    session.sock.recv(1)


def wrong_count(session: Session) -> None:
    session.welcome()
    request_id, _ = session.ask()
    session.answer(request_id, GetAnswer(0, b"\2\2\2"))
    session.sock.recv(1)


def wrong_payload(session: Session) -> None:
    session.welcome()
    request_id, get = session.ask()
    session.answer(request_id, GetAnswer(0, b"\2" * len(get.hashes)), b"short")
    session.sock.recv(1)


def good(session: Session) -> None:
    session.welcome()
    while True:
        request_id, get = session.ask()
        count = len(get.hashes)
        session.answer(request_id, GetAnswer(0, b"\2" * count), b"y" * count * 1000)


@pytest.mark.parametrize("script", [garbage, wrong_count, wrong_payload])
def test_a_node_that_talks_nonsense_is_left(
    tmp_path: Path, kind: str, script: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        scripted_node(tmp_path, script, good) as url,
        CONNECT[kind](url, NAMESPACE, transport="tcp") as client,
    ):
        into = [bytearray(1000), bytearray(1000)]
        assert client.get(hashes(2), into).found == 2
        assert bytes(into[1]) == b"y" * 1000
        assert client.stats().connects == 2
    assert "nonsense" in caplog.text


@pytest.mark.parametrize("script", [garbage, wrong_count, wrong_payload])
def test_a_node_that_keeps_talking_nonsense_is_a_miss(
    tmp_path: Path, kind: str, script: Any
) -> None:
    with (
        scripted_node(tmp_path, script, script) as url,
        CONNECT[kind](url, NAMESPACE, transport="tcp") as client,
    ):
        got = client.get(hashes(2), [bytearray(1000), bytearray(1000)])
        assert (got.found, got.failure) == (0, "unavailable")


def ends_within_an_answer(session: Session) -> None:
    session.welcome()
    request_id, _ = session.ask()
    session.sock.sendall(encode([request_id, 0, *GetAnswer(0, b"\2\2").values()], 2000) + b"z" * 99)


def test_a_session_that_ends_within_an_answer_is_tried_once_more(tmp_path: Path, kind: str) -> None:
    with (
        scripted_node(tmp_path, ends_within_an_answer, good) as url,
        CONNECT[kind](url, NAMESPACE, transport="tcp") as client,
    ):
        into = [bytearray(1000), bytearray(1000)]
        assert client.get(hashes(2), into).found == 2
        assert client.stats().connects == 2


def late_segments(session: Session) -> None:
    """Sends a segment after the deadline of the call that needed it, then serves views of it."""
    session.welcome(transport="shm")
    request_id, _ = session.ask()
    session.answer(request_id, GetAnswer(1, b"\2", [0]))
    request_id, segments = session.ask()
    time.sleep(0.3)
    session.answer_with_memory(request_id, segments, 1000)
    released: list[int] = []
    while sorted(released) != [1, 2]:
        request_id, asked = session.ask()
        if isinstance(asked, Segments):
            session.answer_with_memory(request_id, asked, 1000)
        elif isinstance(asked, Get):
            session.answer(request_id, GetAnswer(2, b"\2", [0]))
        else:
            assert isinstance(asked, Release)
            released += asked.leases
    session.sock.recv(1)


def test_a_segment_that_comes_late_does_no_harm(tmp_path: Path, kind: str) -> None:
    with (
        scripted_node(tmp_path, late_segments) as url,
        CONNECT[kind](url, NAMESPACE, transport="shm") as client,
    ):
        with client.view(hashes(1), deadline=0.1) as views:
            assert (views.found, views.failure) == (0, "deadline_exceeded")
        time.sleep(0.4)
        with client.view(hashes(1), deadline=5.0) as views:
            assert bytes(views[0]) == bytes(1000)
        assert client.stats().connects == 1


@pytest.mark.parametrize("place", [500, 1 << 40, (7 << 44) + 1])
def test_a_place_outside_the_memory_shared_is_a_miss(tmp_path: Path, kind: str, place: int) -> None:
    def misplaced(session: Session) -> None:
        session.welcome(transport="shm")
        while True:
            request_id, asked = session.ask()
            if isinstance(asked, Segments):
                session.answer_with_memory(request_id, asked, 1000)
            else:
                session.answer(request_id, GetAnswer(1, b"\2", [place]))

    with (
        scripted_node(tmp_path, misplaced, misplaced) as url,
        CONNECT[kind](url, NAMESPACE, transport="shm") as client,
    ):
        with client.view(hashes(1)) as views:
            assert (views.found, views.failure) == (0, "protocol")
        got = client.get(hashes(1), [bytearray(1000)])
        assert (got.found, got.failure) == (0, "protocol")


def other_block_size(session: Session) -> None:
    session.welcome(block_bytes=999)


def wrong_transport(session: Session) -> None:
    session.welcome(transport="pigeon")


def refuses(session: Session) -> None:
    request_id, hello = session.ask()
    assert isinstance(hello, Hello)
    session.sock.sendall(encode(error_header(request_id, Unavailable("full"))))


def silent(session: Session) -> None:
    session.ask()
    session.sock.recv(1)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (other_block_size, "namespace_mismatch"),
        (wrong_transport, "unavailable"),
        (refuses, "unavailable"),
        (silent, "deadline_exceeded"),
    ],
)
def test_a_session_that_cannot_be_opened(tmp_path: Path, kind: str, script: Any, code: str) -> None:
    files = open_files()
    with scripted_node(tmp_path, script) as url:
        with pytest.raises(KVStoreError) as caught:
            CONNECT[kind](url, NAMESPACE, transport="tcp", deadline=0.3)
        assert caught.value.code == code
    assert open_files() == files


def test_a_deadline_that_has_passed(daemon: DaemonProcess, kind: str) -> None:
    with CONNECT[kind](daemon.url, namespace(), deadline=10.0) as client:
        assert client.match(hashes(1), deadline=0.0).failure == DeadlineExceeded.code
        assert client.match(hashes(1), deadline=-1.0).failure == DeadlineExceeded.code
        assert client.match(hashes(1)).failure is None
