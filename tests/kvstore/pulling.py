"""A daemon that pulls from another one, driven from the test's thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvstore.identity import ROOT_PARENT
from kvstore.peer_session import Greeting
from kvstore.pull import Pulled, Puller
from kvstore.transports import to_pull
from rdma.tcp import TcpClientTransport
from rdma.transport import ClientTransport
from tests.client.scripted_node import Session
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.watched import Watched

LISTEN = {"tcp": "127.0.0.1:0"}
Script = Callable[[Session], None]


def port_of(daemon: Watched) -> int:
    return int(daemon.tcp_url.rpartition(":")[2])


def only_tcp() -> Mapping[str, ClientTransport]:
    return {"tcp": TcpClientTransport()}


class Home:
    """The daemon that pulls.

    Args:
        daemon: where the blocks are wanted.
        port: of the other node, on this machine.
        tcp: whether to offer no other transport.
        verify: whether to ask for checksums; few scripts answer them.
    """

    def __init__(
        self, daemon: Watched, port: int, *, tcp: bool = True, verify: bool = False
    ) -> None:
        self.daemon = daemon
        greeting = Greeting("127.0.0.1", port, NAMESPACE, 0, name="home")
        verbs = daemon.daemon.verbs
        self.puller: Puller = daemon.call(
            lambda: Puller(
                daemon.daemon.node,
                greeting,
                only_tcp if tcp else lambda: to_pull(verbs),
                most_bytes=4 << 20,
                verify=verify,
            )
        )

    async def pull(
        self,
        hashes: Sequence[bytes],
        seconds: float = 5.0,
        parent: bytes = ROOT_PARENT,
        checksums: Mapping[bytes, int] | None = None,
    ) -> Pulled:
        """To be run on the daemon's loop."""
        deadline = asyncio.get_running_loop().time() + seconds
        return await self.puller.pull(parent, hashes, deadline=deadline, checksums=checksums)

    def __call__(self, hashes: Sequence[bytes], seconds: float = 5.0, **more: Any) -> Pulled:
        """Pull, from the test's thread."""
        result: Pulled = self.daemon.call(lambda: self.pull(hashes, seconds, **more))
        return result

    def start(self, hashes: Sequence[bytes], seconds: float = 5.0) -> asyncio.Task[Pulled]:
        """Begin to pull."""
        task: asyncio.Task[Pulled] = self.daemon.call(
            lambda: asyncio.ensure_future(self.pull(hashes, seconds), loop=self.daemon.loop)
        )
        return task

    def result(self, task: asyncio.Task[Pulled]) -> Pulled:
        async def wait() -> Pulled:
            return await task

        result: Pulled = self.daemon.call(wait)
        return result

    def bytes_of(self, block: bytes) -> bytes | None:
        """What the daemon holds in DRAM under a hash."""

        def look() -> bytes | None:
            node = self.daemon.daemon.node
            (entry,) = node.index.find(block) or (None,)
            if entry is None or entry.dram is None:
                return None
            return bytes(node.dram.view(entry.dram, BLOCK))

        found: bytes | None = self.daemon.call(look)
        return found

    def has(self, hashes: Sequence[bytes]) -> bool:
        """Whether the daemon holds these blocks, with the right bytes."""
        return all(self.bytes_of(block) == content(block) for block in hashes)

    def close(self) -> None:
        self.daemon.call(self.puller.close)


@contextmanager
def pulling(
    daemon: Watched, port: int, *, tcp: bool = True, verify: bool = False
) -> Iterator[Home]:
    """A daemon's way of pulling from a port."""
    home = Home(daemon, port, tcp=tcp, verify=verify)
    try:
        yield home
    finally:
        home.close()


@contextmanager
def scripted_peer(*scripts: Script) -> Iterator[int]:
    """A stand-in for a node whose answers are scripts, one for each connection; yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    failures: list[BaseException] = []

    def serve() -> None:
        with suppress(OSError):
            for script in scripts:
                accepted, _ = listener.accept()
                with accepted:
                    try:
                        script(Session(accepted))
                    except (EOFError, ConnectionError):
                        continue
                    except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                        failures.append(error)

    thread = threading.Thread(target=serve, name="script")
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
    assert not thread.is_alive()
    if failures:
        raise failures[0]
