"""Peers that die, stop, or never were what they said."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from rdma.errors import TransportError
from rdma.verbs.errors import PeerLost, QueueBroken, RemoteAccessError
from rdma.verbs.node import VerbsNodeTransport
from rdma.verbs.settings import QueueSettings
from tests.rdma.verbs.ends import LITTLE_AT_ONCE, Node, Session, Stopwatch, soon
from tests.rdma.verbs.peer import PATTERN, pack, unpack

SIZE = 12 << 20
BLOCK = 1 << 20
LOST_SECONDS = 1.5


@pytest.fixture
def settings() -> QueueSettings:
    return LITTLE_AT_ONCE


class Peer:
    """The process of ``peer.py``, and the node's end of its session."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rdma.verbs.peer", str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def join(self, node: Node) -> VerbsNodeTransport:
        offer, self.named = json.loads(self.ask())
        transport = VerbsNodeTransport(node.driver, node.arena, unpack(offer))
        assert self.ask(json.dumps(pack(transport.welcome()))) == "ready"
        return transport

    def ask(self, line: str = "") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def blocks(self) -> Sequence[int]:
        """Name its memory as blocks."""
        address, key, _ = self.named
        return [n for i in range(SIZE // BLOCK) for n in (address + i * BLOCK, key, BLOCK)]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


async def test_a_peer_that_is_killed_counts_as_lost(node: Node, peer: Peer) -> None:
    session, other = peer.join(node), node.session()
    places, _ = node.blocks(SIZE // BLOCK, BLOCK)
    await session.pull(places, BLOCK, peer.blocks(), soon(20))
    peer.process.kill()
    peer.process.wait()
    calls = [
        asyncio.create_task(session.pull(places, BLOCK, peer.blocks(), soon(20))) for _ in range(3)
    ]
    with Stopwatch() as watch:
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert watch.seconds < LOST_SECONDS + 1
    assert all(isinstance(one, TransportError) and one.retry for one in ended), ended
    assert isinstance(session.broken, PeerLost)
    await _serves(node, other)
    session.close()


async def test_pulls_from_a_peer_that_is_killed_meanwhile_end(node: Node, peer: Peer) -> None:
    session, other = peer.join(node), node.session()
    places, _ = node.blocks(SIZE // BLOCK, BLOCK)

    async def pull_on() -> None:
        # One pull alone may be over before the peer is killed.
        while True:
            await session.pull(places, BLOCK, peer.blocks(), soon(20))

    calls = [asyncio.create_task(pull_on()) for _ in range(3)]
    await asyncio.sleep(0.05)
    peer.process.kill()
    with Stopwatch() as watch:
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert watch.seconds < LOST_SECONDS + 1
    # Not only as lost: the kernel can give up a process's memory before its queue pair.
    assert all(isinstance(one, QueueBroken) for one in ended), ended
    assert isinstance(session.broken, PeerLost | RemoteAccessError)
    await _serves(node, other)
    session.close()


async def _serves(node: Node, other: Session) -> None:
    """Another session is served as ever."""
    small, buffers = node.blocks(2, 4096)
    await other.get(small, buffers)
    assert node.same(small, buffers)


async def test_a_peer_that_is_stopped_is_served_by_its_device(node: Node, peer: Peer) -> None:
    session = peer.join(node)
    places, _ = node.blocks(SIZE // BLOCK, BLOCK)
    os.kill(peer.process.pid, signal.SIGSTOP)
    await session.pull(places, BLOCK, peer.blocks(), soon(20))
    assert node.memory.view(places[0], 256) == PATTERN
    node.memory.view(places[0], 16)[:] = b"written past it!"
    await session.push(places, BLOCK, peer.blocks(), soon(20))
    os.kill(peer.process.pid, signal.SIGCONT)
    assert bytes.fromhex(peer.ask("bytes")) == b"written past it!"
    session.close()


LOCKED = """
import mmap, os, resource, sys
from rdma.errors import RegionError
from rdma.verbs.client import VerbsClientTransport
memory = memoryview(mmap.mmap(-1, 1 << 20))
client = VerbsClientTransport()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setresuid(65534, 65534, 65534)
try:
    client.destinations([memory])
except RegionError as error:
    print(error)
"""


FORKING = """
import os, sys
from rdma.verbs.client import VerbsClientTransport
client = VerbsClientTransport()
memory = memoryview(bytearray(1 << 16))
named = client.destinations([memory])
if not (child := os.fork()):
    client.close()
    del client
    own = VerbsClientTransport()
    own.done(own.destinations([memory]))
    sys.exit()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
client._pair._queue.query(1)
client.done(named)
"""


def test_the_child_of_a_fork_leaves_the_parents_device_alone_and_both_end_quietly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


async def test_memory_that_may_not_be_locked_is_a_typed_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOCKED], capture_output=True, text=True, timeout=50, check=False
    )
    assert "ulimit -l" in done.stdout, done.stderr
    assert "65536" in done.stdout
