"""Addresses of nodes: which there are, and what is said to those that are none."""

from __future__ import annotations

import pytest

from client.endpoint import Endpoint
from kvstore.config import ListenSection
from kvstore.errors import ConfigError


def test_addresses_of_both_kinds() -> None:
    unix, tcp = Endpoint.parse("unix:///run/a.sock"), Endpoint.parse("tcp://[::1]:9402")
    assert (unix.scheme, unix.path) == ("unix", "/run/a.sock")
    assert (tcp.scheme, tcp.host, tcp.port) == ("tcp", "::1", 9402)
    assert unix.advice == tcp.advice == "start one with: kvstore serve"


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("unix:kvstore.sock", "; the path of a socket begins with /"),
        ("unix://kvstore.sock", "; the path of a socket begins with /"),
        ("unix://var/a.sock", "; did you mean unix:///var/a.sock?"),
        ("/var/a.sock", "; did you mean unix:///var/a.sock?"),
        ("file:///var/a.sock", "; did you mean unix:///var/a.sock?"),
        ("node7:9402", "; did you mean tcp://node7:9402?"),
        ("http://node7:9402/", "; did you mean tcp://node7:9402?"),
        ("nowhere", ""),
        ("tcp://node7", ""),
        ("tcp://node7:99999", None),
    ],
)
def test_what_is_no_address_is_refused(url: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as refusal:
        Endpoint.parse(url)
    told = str(refusal.value)
    assert told.startswith(f"{url!r} is no address of a node: ")
    if hint is not None:
        assert told.endswith(f"unix:///path, tcp://host:port or tls://host:port{hint}")


@pytest.mark.parametrize("kind", ["control", "metrics"])
def test_ports_that_take_no_sessions_are_told_of(kind: str) -> None:
    address = getattr(ListenSection(), kind)
    with pytest.raises(ConfigError, match=f"{address.port} is the {kind} address"):
        Endpoint.parse(f"http://{address}")
    assert f"{address.port} is the {kind} address" in Endpoint.parse(f"tcp://{address}").advice
