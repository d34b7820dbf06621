"""What the benchmark starts for a peer runs apart from everybody, says why it can't, and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.peers.contender import Contender, PeerFailed, Place
from benchmarks.peers.isolation import first_line, loopback, running, server
from benchmarks.peers.servers import PEERS
from benchmarks.tcp import free_port

WAIT = 30.0
NOBODYS = 0
"""A port that nobody can listen on."""
LISTEN = (
    "import socket, sys, time\n"
    "listener = socket.create_server(('0.0.0.0', int(sys.argv[1])))\n"
    "print('listening', flush=True)\n"
    "time.sleep(600)\n"
)
CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5).close()"
INTERFACES = "import socket; print([name for _, name in socket.if_nameindex()])"


@pytest.fixture
def apart() -> Iterator[tuple[str, ...]]:
    try:
        with loopback() as prefix:
            yield prefix
    except PeerFailed as error:
        pytest.skip(str(error))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def gone(pid: int) -> bool:
    """Whether a process is no more, or waits for nothing but its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def program_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]


def test_a_network_of_its_own_has_only_a_loopback(apart: tuple[str, ...]) -> None:
    said = subprocess.run([*apart, *python(INTERFACES)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "['lo']"


def test_a_server_is_reached_from_within_and_not_from_outside(
    apart: tuple[str, ...], log: Path
) -> None:
    port = free_port()
    with server([*apart, *python(LISTEN, port)], log, port):
        within = subprocess.run([*apart, *python(CONNECT, port)], check=False)
        assert within.returncode == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


def test_two_of_them_may_want_the_same_port(apart: tuple[str, ...], log: Path) -> None:
    port = 50051
    with (
        loopback() as other,
        server([*apart, *python(LISTEN, port)], log, port) as first,
        server([*other, *python(LISTEN, port)], log, port) as second,
    ):
        assert first != second


def test_a_server_ends_with_its_block(apart: tuple[str, ...], log: Path) -> None:
    with server([*apart, *python(LISTEN, 50051)], log, 50051) as pid:
        assert not gone(pid)
    assert gone(pid)


def test_a_server_ends_when_the_user_interrupts(apart: tuple[str, ...], log: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        server([*apart, *python(LISTEN, 50051)], log, 50051) as pid,
    ):
        raise KeyboardInterrupt
    assert gone(pid)


def test_a_server_ends_with_a_benchmark_that_is_killed(log: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from benchmarks.peers.isolation import running\n"
        "with running(sys.argv[2:], Path(sys.argv[1])) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = python(code, log, *python("import time; time.sleep(600)"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        try:
            # Until then nothing ties it to its parent.
            assert until(lambda: program_of(pid) == sys.executable)
            benchmark.kill()
            benchmark.wait()
            assert until(lambda: gone(pid))
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_server_that_ends_says_why(log: Path) -> None:
    command = python("raise OSError('no such device')")
    why = "its server ended: OSError: no such device"
    with pytest.raises(PeerFailed, match=why), server(command, log, NOBODYS):
        pytest.fail("it does not listen")


def test_a_program_that_is_not_there_is_said(log: Path) -> None:
    # It is `setpriv` that can't find it, after it was itself started.
    why = "no-such-program"
    with pytest.raises(PeerFailed, match=why), server(["no-such-program"], log, NOBODYS):
        pytest.fail("it does not listen")


def test_the_first_line_of_a_process_is_read(log: Path) -> None:
    with running(python("print('ready')"), log, output=subprocess.PIPE) as process:
        assert first_line(process, log) == b"ready\n"


def test_a_process_that_ends_without_a_line_says_why(log: Path) -> None:
    command = python("raise RuntimeError('no memory to register')")
    with (
        running(command, log, output=subprocess.PIPE) as process,
        pytest.raises(PeerFailed, match="no memory to register"),
    ):
        first_line(process, log)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.key)
def test_a_peer_that_is_not_installed_says_how_it_is(
    peer: Contender, apart: tuple[str, ...], tmp_path: Path
) -> None:
    place = Place(tmp_path, environments=tmp_path / "none")
    with pytest.raises(PeerFailed, match="scripts/setup-peers"), peer.start(place):
        pytest.fail("it is not there")
