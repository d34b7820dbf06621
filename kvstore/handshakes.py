"""Connections on their way to TLS, before anything is known of who they are.

A handshake has a deadline, and one that hangs costs nobody else anything. Whoever does not speak
TLS is answered in plain words, in the protocol's own frame, that it has to.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final

import structlog

from kvstore.errors import AccessDenied, KVStoreError, ProtocolError, Unavailable
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import error_header
from kvstore.units import Address
from rdma.certificates import Certificates
from rdma.errors import TlsError
from rdma.stream import tune
from rdma.tls import TlsSocket, readable, shake_hands, wrap

_log = structlog.get_logger(__name__)

HANDSHAKE_SECONDS: Final = 10.0
"""How long a handshake may take."""
_MOST: Final = 1024
"""Handshakes at once; who comes beyond is hung up on."""
_LINGER_SECONDS: Final = 1.0
_HANDSHAKE_RECORD: Final = b"\x16"
"""What TLS begins with, and no frame."""


class Handshakes:
    """What stands between a listening socket and the sessions of those who speak TLS.

    Args:
        certificates: of the node.
        admit: takes a connection over, once TLS has begun on it.
        count: is told of every one that came to nothing, and why.
    """

    def __init__(
        self,
        certificates: Certificates,
        admit: Callable[[TlsSocket], object],
        count: Callable[[KVStoreError], object],
    ) -> None:
        self._certificates = certificates
        self._admit = admit
        self._count = count
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, sock: socket.socket) -> None:
        """Take over a connection that was accepted just now."""
        if len(self._tasks) >= _MOST:
            sock.close()
            self._count(Unavailable(f"{_MOST} connections are about to begin TLS"))
            return
        task = asyncio.get_running_loop().create_task(self._run(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all that are under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = ""
        with contextlib.ExitStack() as held:
            held.callback(sock.close)
            try:
                peer = str(Address(*sock.getpeername()[:2]))
                tune(sock)
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    await readable(sock)
                    first = sock.recv(1, socket.MSG_PEEK)
                    if not first:
                        return  # as who only tries whether somebody listens
                    if first != _HANDSHAKE_RECORD:
                        error = ProtocolError(
                            "this node speaks TLS here: its address begins with tls://"
                        )
                        sock.send(encode(error_header(0, error)))
                        raise TlsError("the client does not speak TLS")
                    made = sock = wrap(sock, self._certificates.context())
                    held.callback(made.close)
                    await shake_hands(made)
            except TimeoutError:
                self._failed(peer, ProtocolError(f"no TLS within {HANDSHAKE_SECONDS:.0f} s"))
            except OSError as error:
                self._failed(peer, _as_ours(error))
                await _linger(sock)
            else:
                held.pop_all()
                self._admit(made)

    def _failed(self, peer: str, error: KVStoreError) -> None:
        _log.info("no TLS with a client", peer=peer, error=str(error))
        self._count(error)


def _as_ours(error: OSError) -> KVStoreError:
    denied = isinstance(error, TlsError) and error.denied
    return AccessDenied(str(error)) if denied else ProtocolError(str(error))


async def _linger(sock: socket.socket) -> None:
    """Let the other end read why: what it has sent and nobody has read would cut that short."""
    with contextlib.suppress(OSError, TimeoutError):
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_LINGER_SECONDS):
            while True:
                await readable(sock)
                # Of the socket beneath TLS, which is of no use any more.
                if not socket.socket.recv(sock, 1 << 16):
                    return
