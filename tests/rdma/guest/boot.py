"""From a command to the machine, or the two, that run it."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.rdma.guest.errors import GuestError
from tests.rdma.guest.initramfs import build_initramfs, find_kernel
from tests.rdma.guest.machine import SHARE, Description, Machine
from tests.rdma.guest.packages import ensure_packages
from tests.rdma.guest.peer import ADDRESSES, CAPTURE

REPOSITORY = Path(__file__).resolve().parents[3]
CACHE = REPOSITORY / ".guest"

_AGENT = ("python", "-m", "tests.rdma.guest.agent")
_KEPT_OF_A_FRAME = 128
_FRAME_BYTES = 9000  # the largest RoCE MTU, 4096, and its headers go into one


@dataclass(frozen=True)
class Wish:
    """What the caller wants."""

    command: Sequence[str]
    pair: bool = False
    """A second machine on the same LAN, that the first orders about: `peer.Peer`."""
    timeout: float = 300
    """Seconds from the start of QEMU."""
    memory: str = "3G"
    results: Path | None = None
    """Where the files go that the command leaves in $RDMA_GUEST_RESULTS."""


def end_cleanly_on_sigterm() -> None:
    """Has SIGTERM end this process the way that Ctrl-C does: machines and files are cleared up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run(wish: Wish) -> int:
    """Boots, runs the command, cleans up; the command's exit status.

    Raises:
        GuestError: there was no guest to run it in.
        TimeoutError: it was ended for its time.
    """
    with _one_at_a_time():
        ensure_packages()
        kernel = find_kernel()
        initramfs = build_initramfs(kernel, CACHE)
        with tempfile.TemporaryDirectory(prefix="rdma-guest-") as name:
            share = Path(name)
            (share / "results").mkdir()
            plan = Plan(wish, kernel.image, initramfs, share)
            try:
                return plan.run_pair() if wish.pair else plan.run_alone()
            finally:
                if wish.results is not None:
                    shutil.copytree(share / "results", wish.results, dirs_exist_ok=True)


@dataclass(frozen=True)
class Plan:
    """A wish, and all that it takes."""

    wish: Wish
    kernel: Path
    initramfs: Path
    share: Path

    def run_alone(self) -> int:
        """One machine, whose device is on its loopback interface."""
        setup = [
            ("ip", "link", "set", "lo", "up"),
            ("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "lo"),
        ]
        alone = self._describe("a", 2, (), setup, {})
        with Machine(alone, self.wish.command, _Printer()) as machine:
            return machine.wait(self.wish.timeout)

    def run_pair(self) -> int:
        """Two machines, whose devices are on the LAN between them; the second obeys the first."""
        deadline = time.monotonic() + self.wish.timeout
        socket = self.share / "lan.socket"
        environment = {"RDMA_GUEST_PEER": ADDRESSES["b"]}
        dump = f"filter-dump,id=dump,netdev=lan,maxlen={_KEPT_OF_A_FRAME},file="
        first = self._describe(
            "a",
            1,  # each: emulated processors that wait for a real one hold each other up
            (*_card("a", socket, "on"), "-object", dump + str(self.share / CAPTURE.name)),
            _lan_setup("a"),
            environment,
        )
        second = self._describe("b", 1, _card("b", socket, "off"), _lan_setup("b"), {})
        with Machine(first, self.wish.command, _Printer()) as machine:
            _wait_until(socket.exists, 10, "the first machine opened no LAN")
            with Machine(replace(second, reboots=True), _AGENT, _Printer("[b] ")):
                return machine.wait(max(0.0, deadline - time.monotonic()))

    def _describe(
        self,
        name: str,
        processors: int,
        network: Sequence[str],
        setup: Sequence[Sequence[str]],
        environment: dict[str, str],
    ) -> Description:
        return Description(
            name=name,
            kernel=self.kernel,
            initramfs=self.initramfs,
            share=self.share,
            processors=processors,
            memory=self.wish.memory,
            network=network,
            setup=setup,
            environment=_environment(name) | environment,
            directory=REPOSITORY,
        )


def _card(name: str, socket: Path, server: str) -> tuple[str, ...]:
    mac = f"52:54:00:12:34:{ord(name):02x}"
    return (
        "-netdev",
        f"stream,id=lan,server={server},addr.type=unix,addr.path={socket}",
        "-device",
        f"virtio-net-pci,netdev=lan,mac={mac},host_mtu={_FRAME_BYTES}",
    )


def _lan_setup(name: str) -> list[Sequence[str]]:
    return [
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"),
        ("ip", "link", "set", "eth0", "mtu", str(_FRAME_BYTES), "up"),
        ("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0"),
    ]


def _environment(name: str) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "RDMA_GUEST": name,
        "RDMA_GUEST_RESULTS": str(SHARE / "results"),
    }


class _Printer:
    """Passes a machine's output on, by whole lines where they need a prefix."""

    _lock = threading.Lock()

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        if self._prefix:
            *lines, self._rest = (self._rest + data).split(b"\n")
            data = b"".join(self._prefix + line + b"\n" for line in lines)
        with self._lock:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Emulation takes every processor that there is: a second guest waits for the first."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wait_until(condition: Callable[[], bool], timeout: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise GuestError(otherwise)
        time.sleep(0.02)
