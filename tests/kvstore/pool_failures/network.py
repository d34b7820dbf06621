"""Machines of their own for the nodes of a pool: network namespaces, whose ways can be cut."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

_SIDES: Final = ("hub", "one", "home")
_numbers = itertools.count()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Network:
    """Two machines and a hub between them, which runs what both of them need.

    What is cut is lost without a word, as with a cable pulled or a switch that drops.
    """

    def __init__(self) -> None:
        self._name = f"kvs{os.getpid()}x{next(_numbers)}"

    def address(self, side: str) -> str:
        """Of a machine, as all others reach it; ``hub`` is the one between them."""
        return f"10.213.{_SIDES.index(side)}.2"

    def inside(self, side: str) -> Sequence[str]:
        """Words before a command that is to run on a machine."""
        return ("ip", "netns", "exec", f"{self._name}{side}")

    def open(self) -> None:
        """Make it.

        Raises:
            CalledProcessError: that can't be done here.
        """
        for side in _SIDES:
            _ip("netns", "add", f"{self._name}{side}")
            self._in(side, "link", "set", "lo", "up")
        self._in("hub", "address", "add", f"{self.address('hub')}/32", "dev", "lo")
        for side in _SIDES[1:]:
            here, there, mine = "eth0", side, self.address(side)
            self._in(
                side,
                "link",
                "add",
                here,
                "type",
                "veth",
                "peer",
                "name",
                there,
                "netns",
                f"{self._name}hub",
            )
            self._in(side, "address", "add", f"{mine}/32", "dev", here)
            self._in(side, "link", "set", here, "up")
            self._in("hub", "link", "set", there, "up")
            self._in(side, "route", "add", "default", "dev", here)
            self._in("hub", "route", "add", f"{mine}/32", "dev", there)
        for side in _SIDES:
            for setting in (
                "ip_forward=1",
                "conf.all.rp_filter=0",
                "conf.all.proxy_arp=1",
                *(f"conf.{name}.proxy_arp=1" for name in _SIDES[1:] if side == "hub"),
            ):
                name, _, value = setting.partition("=")
                path = f"/proc/sys/net/ipv4/{name.replace('.', '/')}"
                self._run(side, "sh", "-c", f"echo {value} > {path}")

    def _in(self, side: str, *words: str) -> None:
        _ip("-netns", f"{self._name}{side}", *words)

    def _run(self, side: str, *words: str) -> None:
        command = [*self.inside(side), *words]
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    @contextlib.contextmanager
    def parted(self) -> Iterator[None]:
        """The two machines don't reach each other for the time of the block; the hub both do."""
        between = [
            ("from", self.address(one), "to", self.address(other), "blackhole")
            for one, other in (_SIDES[1:], _SIDES[:0:-1])
        ]
        for words in between:
            self._in("hub", "rule", "add", *words)
        try:
            yield
        finally:
            for words in between:
                self._in("hub", "rule", "del", *words)

    @contextlib.contextmanager
    def unplugged(self, side: str) -> Iterator[None]:
        """A machine reaches nobody for the time of the block."""
        self._in("hub", "link", "set", side, "down")
        try:
            yield
        finally:
            self._in("hub", "link", "set", side, "up")
            self._in("hub", "route", "add", f"{self.address(side)}/32", "dev", side)

    def close(self) -> None:
        """Take it away."""
        for side in _SIDES:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{self._name}{side}")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network for the time of the block; skips where there can be none."""
    made = Network()
    try:
        try:
            made.open()
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"") or b""
            pytest.skip(f"needs network namespaces: {error} {said.decode().strip()}")
        yield made
    finally:
        made.close()
