"""Where the peers' servers and clients run: a network of their own that only has a loopback.

Some of them listen on every interface. In a network namespace nobody else can reach those ports,
two peers never want the same one, and the namespace is gone with the last process in it.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from benchmarks.peers.contender import PeerFailed
from benchmarks.vllm.process import end_group, last_error

REPOSITORY: Final = Path(__file__).parents[2]
START: Final = 120.0
"""Seconds that a server may take until it listens: some import torch first."""
_POLL: Final = 0.05
_UP: Final = "up"
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_LISTENING: Final = "0A"
DIE_WITH_PARENT: Final = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command: ends it with the benchmark even where that is killed and clears up nothing."""


@contextmanager
def loopback() -> Iterator[tuple[str, ...]]:
    """Make a network namespace until the end of the block.

    Yields:
        What goes before a command that is to run in it.

    Raises:
        PeerFailed: the machine lets nobody make one.
    """
    reasons = []
    for user in ((), ("--user", "--map-root-user")):
        command = [*DIE_WITH_PARENT, "unshare", *user, "--net", sys.executable, "-m", __name__]
        try:
            holder = _hold(command)
        except (OSError, PeerFailed) as error:
            reasons.append(str(error))
            continue
        try:
            credentials = ("--user", "--preserve-credentials") if user else ()
            yield ("nsenter", *credentials, "--net", "--target", str(holder.pid), "--")
            return
        finally:
            _let_go(holder)
    raise PeerFailed(f"no network namespace can be made: {reasons[0]}")


@contextmanager
def server(
    command: Sequence[str | Path],
    log: Path,
    port: int,
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Run a server until the end of the block; then it and all that it started are ended.

    Args:
        command: with what `loopback` says before it.
        log: file for what it prints.
        port: of TCP, that it listens on when it is ready.
        environment: variables besides ours.

    Yields:
        Its process id.

    Raises:
        PeerFailed: it isn't there, ended, or doesn't listen in time.
    """
    with running(command, log, environment) as process:
        _wait_until_listening(process, log, port)
        yield process.pid


@contextmanager
def running(
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end of the block, without waiting for anything.

    Args:
        command: with what `loopback` says before it.
        log: file for what it prints.
        environment: variables besides ours.
        output: ``subprocess.PIPE`` to read its stdout; otherwise that goes to the log as well.

    Raises:
        PeerFailed: there is no such program.
    """
    with log.open("ab") as errors:
        try:
            process = subprocess.Popen(
                [*DIE_WITH_PARENT, *command],
                cwd=REPOSITORY,
                env=os.environ | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=errors if output is None else output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerFailed(f"it can't be started: {error}") from error
    try:
        yield process
    finally:
        end_group(process)


def first_line(process: subprocess.Popen[bytes], log: Path) -> bytes:
    """The first line that a process with ``output=subprocess.PIPE`` prints.

    Raises:
        PeerFailed: it ended without, or printed nothing in time.
    """
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START)[0]:
        raise PeerFailed(f"it says nothing in {START:.0f} s: {last_error(log)}")
    line = process.stdout.readline()
    if not line:
        raise PeerFailed(f"it ended: {last_error(log)}")
    return line


def _hold(command: Sequence[str]) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline().strip() == _UP:
        return holder
    lines = holder.stderr.read().strip().splitlines()
    _let_go(holder)
    raise PeerFailed(lines[-1] if lines else "it ended")


def _let_go(holder: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        holder.kill()
    holder.communicate()


def _wait_until_listening(process: subprocess.Popen[bytes], log: Path, port: int) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if process.poll() is not None:
            raise PeerFailed(f"its server ended: {last_error(log)}")
        if _listens(process.pid, port):
            return
        time.sleep(_POLL)
    raise PeerFailed(f"its server does not listen after {START:.0f} s: {last_error(log)}")


def _listens(pid: int, port: int) -> bool:
    """Whether anybody in the process's network listens there. No connection is made."""
    wanted = f":{port:04X}"
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(wanted) and fields[3] == _LISTENING:
                    return True
    return False


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def main() -> None:
    """Hold the namespace that this process was started in until stdin ends."""
    _raise_loopback()
    print(_UP, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
