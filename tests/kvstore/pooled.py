"""Several daemons on one event loop, members of a pool whose directory is in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.cluster import Cluster
from kvstore.config import Config
from kvstore.daemon import Daemon
from kvstore.departures import DepartureReason
from kvstore.directory.interface import NOBODY, Member, Place
from kvstore.directory.memory import MemoryDirectory, MemoryPool
from kvstore.identity import ROOT_PARENT
from kvstore.protocol.messages import Get, Match
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.pulling import LISTEN
from tests.kvstore.watched import Watched, connected
from tests.running import make_config

REMOTE = b"\4"
DRAM = b"\2"


class PooledNode(Watched):
    """One daemon of a pool; its calls run on the loop that all share."""

    def __init__(self, config: Config, pool: Pool) -> None:
        super().__init__(config)
        self._pool = pool
        self.loop = pool.loop
        self.faults: list[dict[str, Any]] = []

    def __enter__(self) -> PooledNode:
        self.daemon = Daemon(self.config, self._pool.view)
        self.call(self.daemon.open)
        return self

    def __exit__(self, *error: object) -> None:
        self.call(self.daemon.close)

    @property
    def cluster(self) -> Cluster:
        assert self.daemon.cluster is not None
        return self.daemon.cluster

    @property
    def number(self) -> int:
        """Of its membership."""
        me = self.cluster.directory.me
        assert me is not None
        return me.number

    def put(self, hashes: Sequence[bytes], parent: bytes = ROOT_PARENT) -> None:
        """Store a chain."""
        with connected(self) as peer:
            peer.put(hashes, parent)

    def match(self, hashes: Sequence[bytes], *, prefetch: bool = False) -> bytes:
        """The tiers that a client is told."""
        with connected(self) as peer:
            tiers: bytes = peer.ask(Match(hashes, prefetch))[0].tiers
            return tiers

    def get(self, hashes: Sequence[bytes], deadline_ms: int = 5000) -> bytes:
        """The tiers that blocks came from; their bytes are compared."""
        with connected(self) as peer:
            answer, payload = peer.ask(Get(hashes), deadline_ms=deadline_ms)
        found = [block for block, tier in zip(hashes, answer.tiers, strict=True) if tier]
        assert payload == b"".join(map(content, found))
        tiers: bytes = answer.tiers
        return tiers

    def drop(self, block: bytes, *, quietly: bool = False) -> None:
        """Lose a block and all after it; quietly: the directory is not told."""

        def lose() -> None:
            node = self.daemon.node
            observers = node.index.observers
            if quietly:
                node.index.observers = ()
            for entry in node.index.find(block):
                node.drop(entry, "dram", DepartureReason.ADMIN)
            node.index.observers = observers

        self.call(lose)

    def vanish(self) -> None:
        """Stop to answer, as a machine without power does, and stay a member."""

        def cut() -> None:
            server = self.daemon.server
            for listener in server._listeners:
                self.loop.remove_reader(listener.fileno())
                listener.close()
            server._listeners.clear()
            for connection in list(server.connections):
                connection.close()

        self.call(cut)

    def hang_up(self) -> None:
        """Close the ways to the others."""
        self.call(self.cluster.remote._owners.close)


class Pool:
    """The loop, the directory, and the daemons."""

    def __init__(self) -> None:
        self.memory = MemoryPool()
        self.loop = asyncio.new_event_loop()
        self.nodes: list[PooledNode] = []
        self.faults: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="pool")

    def view(self, member: Member) -> MemoryDirectory:
        """A daemon's view of the directory."""
        return MemoryDirectory(self.memory, member)

    def open(self, configs: Sequence[Config]) -> None:
        """Start the daemons."""
        self.loop.set_exception_handler(lambda _, context: self.faults.append(context))
        self._thread.start()
        for config in configs:
            self.nodes.append(PooledNode(config, self).__enter__())

    def close(self) -> None:
        """Stop everything."""
        for node in self.nodes:
            node.__exit__()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def check(self) -> None:
        """Fail if anything is left over of what was done."""
        for node in self.nodes:
            node.hang_up()
        for node in self.nodes:
            node.check()
        assert self.faults == []

    def claim(self, data: str, hashes: Sequence[bytes], incarnation: str = "1") -> int:
        """Have the directory say that somebody at an address holds a chain; its number."""

        async def claim() -> int:
            joined = self.memory.join(Member(NOBODY, data, incarnation, "elsewhere", data))
            for block in hashes:
                place = Place(NAMESPACE.fingerprint, 0, hashes[0], block)
                self.memory.add(place, joined.number)
            return joined.number

        return asyncio.run_coroutine_threadsafe(claim(), self.loop).result(10)

    def holders(self, block: bytes, shard: int = 0) -> list[int]:
        """Who is said to hold a block."""

        async def look() -> list[int]:
            return list(self.memory.owners.get((NAMESPACE.fingerprint, shard, block), ()))

        return asyncio.run_coroutine_threadsafe(look(), self.loop).result(10)


@contextmanager
def pool(directory: Path, number: int, **sections: dict[str, Any]) -> Iterator[Pool]:
    """A pool of daemons, each on a machine of its own, with 8 MiB of DRAM unless told otherwise."""
    configs = []
    for at in range(number):
        node = {"name": f"node{at}"} | sections.get("node", {})
        cluster = {"host": f"host{at}"} | sections.get("cluster", {})
        merged = {"listen": LISTEN} | sections | {"node": node, "cluster": cluster}
        configs.append(make_config(directory / f"node{at}", **merged))
    running = Pool()
    try:
        running.open(configs)
        yield running
        running.check()
    finally:
        running.close()


__all__ = ["BLOCK", "DRAM", "REMOTE", "Pool", "PooledNode", "pool"]
