"""Where clients come in: the listening sockets, and the sessions that they open."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Final

import structlog

from kvstore.admission import Admission
from kvstore.config import Config
from kvstore.connection import Connection
from kvstore.errors import (
    ConfigError,
    InvalidRequest,
    KVStoreError,
    ProtocolError,
    Unavailable,
)
from kvstore.gpu_session import GpuSession, GpuSessions
from kvstore.handshakes import Handshakes
from kvstore.identity import Namespace
from kvstore.movement import Movement
from kvstore.node import Node
from kvstore.protocol.messages import PROTOCOL_VERSION, GpuOffer, Hello, Welcome
from kvstore.remote import Remote
from kvstore.replication import Replication
from kvstore.session import Session
from kvstore.taking import Taking
from kvstore.tls import for_sessions
from kvstore.transports import choose
from kvstore.units import Address
from kvstore.verbs import VerbsDevice
from rdma.shm import ShmNodeTransport
from rdma.transport import NodeTransport

_log = structlog.get_logger(__name__)

_BACKLOG: Final = 128
_POLL_SECONDS: Final = 0.01
_EXPIRY_SECONDS: Final = 5.0
_ACCEPT_PAUSE_SECONDS: Final = 0.5


class Server:
    """The data path of a node.

    Args:
        node: where the blocks are.
        movement: brings blocks up from SSD; None where there is no SSD.
        config: addresses and limits.
        incarnation: names this start of the node.
        verbs: the node's RDMA device, or why it has none.
    """

    def __init__(
        self,
        node: Node,
        movement: Movement | None,
        config: Config,
        incarnation: str,
        verbs: VerbsDevice,
    ) -> None:
        self.node = node
        self.longest_deadline = config.limits.request_deadline_max
        self.max_payload = config.limits.max_payload
        self.connections: set[Connection] = set()
        self.urls: list[str] = []
        """Where clients may connect to."""
        self.tcp: Address | None = None
        """Where it listens on TCP."""
        self.remote: Remote | None = None
        """The rest of the pool, for sessions opened from then on; None where the node is alone."""
        self.replication: Replication | None = None
        """What copies blocks to it; likewise."""
        self.taking: Taking | None = None
        """What takes blocks from it; likewise."""
        self.gpus: GpuSessions | None = None
        """What sessions have of the node's GPUs; None where it has none."""
        self.stopping = False
        self._movement = movement
        self._verbs = verbs
        self._config = config
        self._incarnation = incarnation
        self._admission = Admission(config.session_token, config.tenant_token_files)
        self._handshakes: Handshakes | None = None
        self._listeners: list[socket.socket] = []
        self._unix_path: Path | None = None
        self._expiry: asyncio.TimerHandle | None = None

    # --- listening -----------------------------------------------------------------------------

    def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: an address cannot be had, a certificate not be used, or a tenant's token
                file not be read.
        """
        self._admission.check_files()
        if self.node.gpus is not None:
            self.gpus = GpuSessions(self.node.gpus)
        listen = self._config.listen
        certificates = for_sessions(self._config.tls)
        if certificates is not None:
            self._handshakes = Handshakes(certificates, self._admit, self._count)
        if listen.unix is not None:
            self._listen_unix(listen.unix)
        if listen.tcp is not None:
            self._listen_tcp(listen.tcp)
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.add_reader(listener.fileno(), self._accept, listener)
        self._expiry = loop.call_later(_EXPIRY_SECONDS, self._expire)

    def _listen_unix(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_socket() and not _is_answered(path):
                path.unlink()
            previous = os.umask(0o077)
            try:
                listener.bind(str(path))
            finally:
                os.umask(previous)
        except OSError as error:
            listener.close()
            raise ConfigError(f"listen.unix {path}: {error.strerror}") from error
        self._unix_path = path
        self._add(listener, f"unix://{path}")

    def _listen_tcp(self, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
        except OSError as error:
            listener.close()
            raise ConfigError(f"listen.tcp {address}: {error.strerror or error}") from error
        self.tcp = Address(address.host, listener.getsockname()[1])
        scheme = "tcp" if self._handshakes is None else "tls"
        self._add(listener, f"{scheme}://{self.tcp}")

    def _add(self, listener: socket.socket, url: str) -> None:
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listeners.append(listener)
        self.urls.append(url)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors, most likely. The listener stays ready, and would fill the loop.
            _log.error("accept failed", error=str(error), again_in_seconds=_ACCEPT_PAUSE_SECONDS)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._accept_again, listener)
            return
        if self._handshakes is None or listener.family == socket.AF_UNIX:
            self._admit(sock)
        else:
            self._handshakes.begin(sock)

    def _admit(self, sock: socket.socket) -> None:
        connection = Connection(self, sock)
        self.connections.add(connection)
        connection.start()

    def _count(self, error: KVStoreError) -> None:
        self.node.metrics.errors[error.code] += 1

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            loop = asyncio.get_running_loop()
            loop.add_reader(listener.fileno(), self._accept, listener)

    # --- admission -----------------------------------------------------------------------------

    def welcome(self, hello: Hello, sock: socket.socket) -> tuple[Session, Welcome]:
        """Open a session for a client.

        Args:
            hello: what the client says of itself.
            sock: its connection.

        Raises:
            ProtocolError: it speaks another version.
            AccessDenied: its token is not the one that opens its tenant.
            InvalidRequest: its namespace makes no sense, or no transport is in common.
            Unavailable: there are too many sessions.
        """
        limits, metrics = self._config.limits, self.node.metrics
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"protocol version {hello.version}; this node speaks {PROTOCOL_VERSION}"
            )
        self._admission.admit(hello.tenant, hello.token)
        if metrics.sessions >= limits.sessions:
            raise Unavailable(f"{limits.sessions} sessions are open; that is the limit")
        namespace = Namespace.parse(hello.namespace)
        if namespace.tenant != hello.tenant:
            raise InvalidRequest("the tenant of the session is not that of the namespace")
        local = sock.family == socket.AF_UNIX
        chosen = choose(self.node, self._verbs, hello.transports, hello.offers, local=local)
        gpu = None
        try:
            gpu, why_not = self._gpu_session(chosen.transport, hello, sock)
            session = Session(
                self.node,
                self._movement,
                namespace,
                hello.shard,
                transport=chosen.transport,
                most_bytes=int(limits.session_pinned * self.node.dram.capacity),
                verify=self._config.policy.integrity == "always",
                remote=self.remote,
                replication=self.replication,
                taking=self.taking,
                gpu=gpu,
            )
        except BaseException:
            chosen.transport.close()
            if gpu is not None:
                gpu.close()
            raise
        metrics.sessions += 1
        metrics.transports[chosen.transport.name] += 1
        metrics.sessions_opened += 1
        why = "; ".join(filter(None, (chosen.why, why_not)))
        if why:
            _log.debug("transports passed over", client=hello.client, reason=why)
        return session, self._answer(session, why)

    def _gpu_session(
        self, transport: NodeTransport, hello: Hello, sock: socket.socket
    ) -> tuple[GpuSession | None, str]:
        """A new session's part of the node's GPUs; or None, and why where it wanted one."""
        offer = GpuOffer.parse(hello.offers.get("shm"))
        if offer is None or not isinstance(transport, ShmNodeTransport):
            return None, ""
        if self.gpus is None:
            return None, "gpu: the node keeps no blocks on GPUs"
        opened = self.gpus.open(offer, hello.tenant, sock)
        if isinstance(opened, str):
            return None, f"gpu: {opened}"
        transport.gpus = self.gpus.names()
        return opened, ""

    def _answer(self, session: Session, why: str) -> Welcome:
        limits = self._config.limits
        return Welcome(
            self._config.node.name,
            self._incarnation,
            session.transport.name,
            session.namespace.block_bytes,
            {"max_payload": limits.max_payload, "max_hashes": limits.max_hashes},
            {**session.transport.welcome(), "why": why},
        )

    def farewell(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        if connection in self.connections:
            self.connections.discard(connection)
            if connection.session is not None:
                self.node.metrics.sessions -= 1
                self.node.metrics.transports[connection.session.transport.name] -= 1

    def sessions(self) -> list[Session]:
        """The sessions open now."""
        return [one.session for one in self.connections if one.session is not None]

    def _expire(self) -> None:
        now = self.node.clock()
        for session in self.sessions():
            session.expire(now)
        self._expiry = asyncio.get_running_loop().call_later(_EXPIRY_SECONDS, self._expire)

    # --- stopping ------------------------------------------------------------------------------

    async def close(self, grace: float) -> None:
        """Stop accepting, let what is under way finish within ``grace`` seconds, and close."""
        loop = asyncio.get_running_loop()
        self.stopping = True
        if self._expiry is not None:
            self._expiry.cancel()
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)
        if self._handshakes is not None:
            await self._handshakes.close()
        for connection in self.connections:
            connection.refuse()
        deadline = loop.time() + grace
        while loop.time() < deadline and any(one.busy for one in self.connections):
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.connections):
            connection.close()
        if self.gpus is not None:
            self.gpus.close()


def _is_answered(path: Path) -> bool:
    """Whether a process listens on a Unix socket."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(str(path))
    except OSError:
        return False
    finally:
        probe.close()
    return True
