"""The other machine, as a test in the first sees it.

Orders and answers are files in the folder that both machines share with the host, so they get
through whatever a test does to the network, and never show in a capture of it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.guest.machine import SHARE

ADDRESSES = {"a": "198.51.100.1", "b": "198.51.100.2"}
"""Of the two machines on their LAN (RFC 5737's range for documentation)."""

CAPTURE = SHARE / "lan.pcap"
"""What went over the LAN so far: the first bytes of each frame."""

PEER_FILES = SHARE / "b"
ORDERS = PEER_FILES / "orders"
ANSWERS = PEER_FILES / "answers"
PROCESSES = PEER_FILES / "processes"
READY = PEER_FILES / "ready"

_POLL = 0.1


class PeerError(Exception):
    """The other machine didn't do as it was told."""


class RemoteProcess:
    """A process on the other machine."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        self._number = number
        self._files = PROCESSES / str(number)

    @property
    def output(self) -> str:
        """What it has written so far, to stdout and stderr together."""
        return (self._files / "output").read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 30) -> str:
        """Waits until it has written `text`; what it has written by then.

        Raises:
            PeerError: it ended first, or the time did.
        """
        deadline = time.monotonic() + timeout
        while text not in (output := self.output):
            if self._status() is not None:
                if text in (output := self.output):
                    break
                raise PeerError(f"ended without {text!r}:\n{output}")
            if time.monotonic() > deadline:
                raise PeerError(f"no {text!r} within {timeout} s:\n{output}")
            time.sleep(_POLL)
        return output

    def wait(self, timeout: float = 30) -> int:
        """Its exit status, negative for a signal.

        Raises:
            PeerError: it still runs.
        """
        deadline = time.monotonic() + timeout
        while (status := self._status()) is None:
            if time.monotonic() > deadline:
                raise PeerError(f"still runs after {timeout} s:\n{self.output}")
            time.sleep(_POLL)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal; it has been sent when this returns."""
        self._peer.order({"signal": int(number), "process": self._number})

    def _status(self) -> int | None:
        text = _text(self._files / "status")
        return int(text) if text else None


class Peer:
    """The other machine."""

    address = ADDRESSES["b"]

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._processes: list[RemoteProcess] = []
        self._crashed_boot = ""

    def wait_until_up(self, timeout: float = 90) -> None:
        """Waits until it takes orders, after a crash only once it has booted again.

        Raises:
            PeerError: it doesn't, after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while _text(READY) in ("", self._crashed_boot):
            if time.monotonic() > deadline:
                raise PeerError(f"the other machine isn't up after {timeout} s")
            time.sleep(_POLL)

    def start(self, command: Sequence[str]) -> RemoteProcess:
        """Starts a process at the repository's root."""
        number = self.order({"start": list(command)})
        process = RemoteProcess(self, number)
        self._processes.append(process)
        return process

    def end_processes(self) -> None:
        """Kills what still runs of the processes it was told to start."""
        for process in self._processes:
            if process._status() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self._processes.clear()

    def crash(self) -> None:
        """Resets it, which is as good as a power cut: nothing is closed, nobody is told.

        It boots again by itself: `wait_until_up`.
        """
        self._processes.clear()
        self._crashed_boot = _text(READY)
        self.order({"crash": True})

    def order(self, order: dict[str, object], timeout: float = 30) -> int:
        """Has an order done; its number."""
        number = next(self._numbers)
        put_file(ORDERS / str(number), json.dumps(order))
        deadline = time.monotonic() + timeout
        while not (ANSWERS / str(number)).exists():
            if time.monotonic() > deadline:
                raise PeerError(f"no answer to {order} within {timeout} s")
            time.sleep(_POLL)
        return number


def put_file(path: Path, text: str) -> None:
    """Makes a file that has all of its content from the moment it can be seen."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text)
    os.rename(unfinished, path)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
