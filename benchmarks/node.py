"""A real daemon in its own process, for one group of rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kvstore
from kvstore.identity import Namespace

START_TIMEOUT = 60.0
STOP_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """Where the daemon listens."""

    unix: str
    tcp: str
    pid: int


def namespace(block_bytes: int) -> Namespace:
    """A namespace whose blocks have ``block_bytes`` bytes."""
    return Namespace(
        model="benchmark", dtype="uint8", layout="raw", block_tokens=16, block_bytes=block_bytes
    )


@contextmanager
def node(directory: Path, **values: object) -> Iterator[Node]:
    """Run ``kvstore serve`` with its state in ``directory``; SIGTERM it at the end.

    Args:
        directory: an existing, short path.
        values: configuration as ``section__key``.

    Raises:
        RuntimeError: the daemon ended instead of starting, or didn't end when told to.
    """
    environment = _environment(directory, values)
    log_path = directory / "daemon.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "serve"], env=environment, stderr=log, stdout=log
        )
    try:
        socket_path = directory / "kvstore.sock"
        _wait_until_up(process, socket_path, log_path)
        yield Node(f"unix://{socket_path}", _tcp_address(environment), process.pid)
    finally:
        _stop(process, log_path)


def _environment(directory: Path, values: Mapping[str, object]) -> dict[str, str]:
    chosen: dict[str, object] = {
        "node__state_directory": directory,
        "listen__control": "off",
        "listen__metrics": "off",
    }
    chosen |= values
    variables = {f"KVSTORE_{key.upper()}": str(value) for key, value in chosen.items()}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return kept | variables


def _tcp_address(environment: Mapping[str, str]) -> str:
    return f"tcp://{environment.get('KVSTORE_LISTEN__TCP', '')}"


def _wait_until_up(process: subprocess.Popen[bytes], socket_path: Path, log_path: Path) -> None:
    until = time.monotonic() + START_TIMEOUT
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the daemon ended with {process.returncode}: {_tail(log_path)}")
        if socket_path.exists() and _answers(socket_path):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the daemon did not answer in {START_TIMEOUT:.0f} s: {_tail(log_path)}")


def _answers(socket_path: Path) -> bool:
    try:
        kvstore.connect(f"unix://{socket_path}", namespace(4096)).close()
    except kvstore.KVStoreError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes], log_path: Path) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise RuntimeError(f"the daemon did not stop: {_tail(log_path)}") from None


def _tail(log_path: Path) -> str:
    return log_path.read_text(errors="replace")[-2000:]
