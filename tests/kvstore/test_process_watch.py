"""Waiting for the end of the process at the other end of a socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import process_watch
from kvstore.process_watch import ProcessWatch

_CHILD = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.recv(1)
sock.close()
sys.stdin.read()
"""


def pidfds() -> int:
    """How many processes this one watches."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.fixture(params=["pidfd of the socket", "pid of the socket"])
def peer(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A connection from another process, which lives on when it has closed it."""
    if request.param == "pid of the socket":
        monkeypatch.setattr(process_watch, "_SO_PEERPIDFD", 9999)
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with subprocess.Popen([sys.executable, "-c", _CHILD, path], stdin=subprocess.PIPE) as child:
            sock, _ = listener.accept()
            with sock:
                yield sock, child
            child.kill()


async def test_it_tells_the_end_of_the_process(
    peer: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    sock, child = peer
    watch = ProcessWatch.of_peer(sock)
    assert watch is not None
    over = asyncio.Event()
    watch.when_over(over.set)
    sock.send(b"!")
    assert sock.recv(1) == b""  # it has closed its end, and lives
    assert not watch.done()
    child.kill()
    await asyncio.wait_for(over.wait(), 20)
    assert watch.done()
    watch.close()


async def test_nobody_is_told_after_close(
    peer: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    sock, child = peer
    watch = ProcessWatch.of_peer(sock)
    assert watch is not None
    assert pidfds() == 1
    watch.when_over(lambda: pytest.fail("told"))
    watch.close()
    watch.close()
    assert pidfds() == 0
    child.kill()
    child.wait()
    await asyncio.sleep(0)
    assert not watch.done()


async def test_a_process_that_is_gone_is_not_waited_for(
    peer: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    sock, child = peer
    child.kill()
    child.wait()
    watch = ProcessWatch.of_peer(sock)  # newer kernels still have a pidfd of it
    if watch is not None:
        over = asyncio.Event()
        watch.when_over(over.set)
        await asyncio.wait_for(over.wait(), 20)


def test_a_socket_of_another_kind_has_no_process() -> None:
    with socket.socket(socket.AF_INET) as sock:
        assert ProcessWatch.of_peer(sock) is None
