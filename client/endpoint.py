"""Where a node is, how to reach it, and which transports can be had there."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvstore.errors import ConfigError, DeadlineExceeded, ProtocolError, Unavailable
from kvstore.identity import Namespace
from kvstore.protocol.messages import PROTOCOL_VERSION, Hello, Welcome
from rdma.certificates import Certificates
from rdma.errors import TransportError
from rdma.gpu_reach import ComputeGpu
from rdma.shm import ShmClientTransport
from rdma.tcp import TcpClientTransport
from rdma.transport import ClientTransport
from rdma.verbs.client import VerbsClientTransport

TRANSPORTS: Final[dict[str, type[ClientTransport]]] = {
    "shm": ShmClientTransport,
    "rdma": VerbsClientTransport,
    "tcp": TcpClientTransport,
}
"""The transports of this version by name."""

_AUTO: Final = {"unix": ("shm", "tcp"), "tcp": ("rdma", "tcp"), "tls": ("rdma", "tcp")}
"""What ``auto`` offers over each kind of socket, the best first."""
_NAMED: Final = {
    "unix": ("shm", "rdma", "tcp"),
    "tcp": ("rdma", "tcp"),
    "tls": ("rdma", "tcp"),
}
"""What can be had over each kind of socket."""

FORMS: Final = "unix:///path, tcp://host:port or tls://host:port"
"""What the address of a node looks like, for messages."""

_OPERATORS: Final = {9400: "control", 9401: "metrics"}
"""Ports of a daemon that take no sessions, unless it was told otherwise."""
_HOST_AND_PORT: Final = re.compile(r"(?:\w+://)?([\w.-]+|\[[\w:.%]+\]):(\d{1,5})/?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a node.

    Attributes:
        url: as given.
        scheme: ``unix``, ``tcp``, or ``tls`` for TCP with TLS.
        path: of the Unix socket.
        host: name or address, but for a Unix socket.
        port: likewise.
    """

    url: str
    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read ``unix:///path``, ``tcp://host:port`` or ``tls://host:port``.

        Raises:
            ConfigError: it is none of these.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address of a node: {error}") from error
        if parts.scheme == "unix" and parts.path.startswith("/") and not parts.netloc:
            return cls(url, "unix", path=parts.path)
        network = parts.scheme in ("tcp", "tls")
        if network and parts.hostname and port and parts.path in ("", "/"):
            return cls(url, parts.scheme, host=parts.hostname, port=port)
        raise ConfigError(f"{url!r} is no address of a node: {FORMS}{hint(url)}")

    @property
    def advice(self) -> str:
        """What to do where nobody answers there."""
        if self.port in _OPERATORS:
            return _not_for_sessions(self.port)
        return "start one with: kvstore serve"

    def offers(self, transport: str) -> list[str]:
        """The transports to offer to the node, the best first.

        Args:
            transport: ``auto`` or the name of one.

        Raises:
            ConfigError: there is no such transport, or not over this kind of socket.
        """
        if transport == "auto":
            return list(_AUTO[self.scheme])
        if transport in _NAMED[self.scheme]:
            return [transport]
        known = ", ".join(("auto", *TRANSPORTS))
        if transport in TRANSPORTS:
            raise ConfigError(f"the transport {transport!r} cannot be had over {self.url}")
        raise ConfigError(f"there is no transport {transport!r}; it is one of {known}")

    def addresses(self) -> list[tuple[socket.AddressFamily, Any]]:
        """Socket families and addresses to try in turn; looks a host name up.

        Raises:
            Unavailable: the host name is not known.
        """
        if self.scheme == "unix":
            return [(socket.AF_UNIX, self.path)]
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"{self.host} is not known: {error}") from error
        return [(family, address) for family, _, _, _, address in found]


def hint(url: str) -> str:
    """What somebody may have meant by what is no address of a node, to follow a message."""
    if found := _HOST_AND_PORT.fullmatch(url):
        port = int(found[2])
        if port in _OPERATORS:
            return f"; {_not_for_sessions(port)}"
        return f"; did you mean tcp://{found[1]}:{port}?"
    scheme, separator, path = url.rpartition(":")
    if scheme in ("", "unix", "file"):
        if path.startswith("/") and ("/" in path.lstrip("/") or not path.startswith("//")):
            return f"; did you mean unix:///{path.lstrip('/')}?"
        if separator:
            return "; the path of a socket begins with /"
    return ""


def _not_for_sessions(port: int) -> str:
    return (
        f"{port} is the {_OPERATORS[port]} address of a daemon, which takes no sessions: use its "
        "Unix socket, or the address of kvstore serve --tcp"
    )


class Offered(NamedTuple):
    """What a client offers to a node.

    Attributes:
        halves: the client's halves of transports by name, the best first.
        why: why others that it wanted can't be had on this machine; empty where there is none.
    """

    halves: dict[str, ClientTransport]
    why: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What every session of a client asks for.

    Attributes:
        endpoint: where the node is.
        namespace: of the blocks.
        shard: the client's shard of each block.
        offers: names of the transports to offer, the best first.
        token: credential of the tenant, if the node wants one.
        name: what the node's logs call the client.
        certificates: for ``tls``; None otherwise.
        gpu: that the client computes on, where it is to be shown blocks on GPUs.
        pid: of the process that made it: no child of a fork can use its GPU.
    """

    endpoint: Endpoint
    namespace: Namespace
    shard: int
    offers: list[str]
    token: str | None = field(repr=False, default=None)
    name: str = ""
    certificates: Certificates | None = field(repr=False, default=None)
    gpu: ComputeGpu | None = None
    pid: int = field(default_factory=os.getpid)

    def hello(self, transports: Mapping[str, ClientTransport]) -> Hello:
        """The greeting that opens a session and offers these transports."""
        return Hello(
            PROTOCOL_VERSION,
            self.namespace.tenant,
            self.token,
            dict(self.namespace.describe()),
            self.shard,
            list(transports),
            self.name,
            {name: offer for name, each in transports.items() if (offer := each.offer())},
        )

    def transports(self) -> Offered:
        """The client's halves of the transports to offer, as far as this machine has them.

        Raises:
            ConfigError: it has none of them.
        """
        halves: dict[str, ClientTransport] = {}
        reasons = []
        for name in self.offers:
            try:
                halves[name] = self._half(name)
            except TransportError as error:
                reasons.append(f"{name}: {error}")
        if not halves:
            raise ConfigError("; ".join(reasons))
        return Offered(halves, "; ".join(reasons))

    def _half(self, name: str) -> ClientTransport:
        if name == "shm" and self.gpu is not None and self.pid == os.getpid():
            return ShmClientTransport(self.gpu)
        return TRANSPORTS[name]()


def choose(transports: Mapping[str, ClientTransport], welcome: Welcome) -> ClientTransport:
    """Take the transport that the node has chosen, and close the others.

    Raises:
        ProtocolError: the node chose another one, or the two halves can't be joined.
    """
    for name, each in transports.items():
        if name != welcome.transport:
            each.close()
    try:
        chosen = transports[welcome.transport]
        chosen.accept(welcome.details)
    except (KeyError, TransportError) as error:
        raise ProtocolError(f"the node chose {welcome.transport}: {error}") from error
    return chosen


def open_socket(family: socket.AddressFamily, address: Any, seconds: float) -> socket.socket:
    """Connect a blocking socket.

    Args:
        family: of the address.
        address: as ``socket.connect`` takes it.
        seconds: how long it may take.

    Raises:
        DeadlineExceeded: it took longer.
        Unavailable: nobody listens there.
    """
    if seconds <= 0:
        raise DeadlineExceeded("the deadline passed before the node was reached")
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.settimeout(seconds)
        opened.connect(address)
        opened.settimeout(None)
    except TimeoutError as error:
        opened.close()
        raise DeadlineExceeded(f"no connection to {address} in {seconds:.3f} s") from error
    except OSError as error:
        opened.close()
        raise Unavailable(f"no connection to {address}: {error.strerror or error}") from error
    return opened
