"""Pools of real daemons with a real Redis, and clients that check every call they make.

In every failure local hits go on, no call takes longer than its deadline, no byte is wrong, and in
the end the pool heals: the clients here fail a test by themselves where one of the first three
does not hold, and tests wait for the fourth.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import kvstore
from kvstore.config import Config
from kvstore.identity import ROOT_PARENT
from tests.kvstore.directory.servers import RedisServer, free_port, require_redis
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.watched import chain
from tests.running import DaemonProcess, make_config, wait_for

T = TypeVar("T")

HEARTBEAT: Final = 0.2
DEADLINE: Final = 2.0
MARGIN: Final = 3.0
"""Seconds that a call may be late by: other tests run beside these, on few cores."""
HEALS: Final = 30.0
"""Seconds within which a pool is to be whole again: many times what it takes."""
_PROGRESS: Final = 25
"""Local reads that must come through while something is broken."""


class Client:
    """A client whose every call is timed, and whose every byte is compared.

    Args:
        node: its home.
        deadline: seconds that a call may take.
    """

    def __init__(self, node: DaemonProcess, deadline: float = DEADLINE) -> None:
        self.slowest = 0.0
        self._deadline = deadline
        self._client = kvstore.connect(node.url, NAMESPACE, deadline=deadline)

    def close(self) -> None:
        self._client.close()

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.monotonic()
        result = call()
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        assert took < self._deadline + MARGIN, f"a call took {took} s, not {self._deadline} s"
        return result

    def put(self, hashes: Sequence[bytes], parent: bytes = ROOT_PARENT) -> None:
        """Store a chain; all of it is at home then."""
        blocks = [content(block) for block in hashes]
        self._timed(lambda: self._client.put(hashes, blocks, parent=parent))
        assert self.local(hashes) == len(hashes)

    def match(self, hashes: Sequence[bytes]) -> tuple[str, ...]:
        """Where a chain is, as far as it is anywhere."""
        return tuple(self._timed(lambda: self._client.match(hashes)).tiers)

    def local(self, hashes: Sequence[bytes]) -> int:
        """How much of a chain its home holds."""
        return sum(tier != "remote" for tier in self.match(hashes))

    def get(self, hashes: Sequence[bytes]) -> int:
        """Get a chain; how many leading blocks came."""
        into = [bytearray(BLOCK) for _ in hashes]
        got = self._timed(lambda: self._client.get(hashes, into))
        for block, tier, received in zip(hashes, got.tiers, into, strict=True):
            assert tier == "absent" or received == content(block), "wrong bytes"
        return got.prefix

    def read(self, hashes: Sequence[bytes]) -> int:
        """Match a chain, then get what was promised; how many leading blocks came."""
        promised = len(self.match(hashes))
        return self.get(hashes[:promised]) if promised else 0

    def reads(self, hashes: Sequence[bytes], blocks: int | None = None) -> None:
        """Wait until so many leading blocks of a chain can be read, all where left out."""
        wanted = len(hashes) if blocks is None else blocks
        wait_for(lambda: self.read(hashes) == wanted, HEALS)

    def is_promised(self, hashes: Sequence[bytes], blocks: int) -> None:
        """Wait until a match says so many blocks."""
        wait_for(lambda: len(self.match(hashes)) == blocks, HEALS)


class LocalHits(threading.Thread):
    """An engine that goes on with what its home holds, come what may to the rest of the pool."""

    def __init__(self, node: DaemonProcess, name: str) -> None:
        super().__init__(name=f"local hits at {name}")
        self._hashes = chain("local", name, length=8)
        self._client = Client(node)
        self._client.put(self._hashes)
        self._over = threading.Event()
        self._count = 0
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(0.002):
                assert self._client.local(self._hashes) == len(self._hashes)
                assert self._client.get(self._hashes) == len(self._hashes)
                self._count += 1
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self._failure = error

    def go_on(self) -> None:
        """Wait for local hits that began just now, or later."""
        before = self._count
        wait_for(lambda: self._failure or self._count > before + _PROGRESS, HEALS)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise AssertionError(f"{self.name} failed") from self._failure

    def end(self) -> None:
        self._over.set()
        self.join()
        self._client.close()

    @contextmanager
    def going_on(self) -> Iterator[LocalHits]:
        """For the time of a test."""
        self.start()
        try:
            yield self
        finally:
            self.end()
        self._check()


class Pool:
    """Daemons, and clients of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._clients: list[Client] = []
        self.nodes: list[DaemonProcess] = []

    def config(self, name: str, url: str, **sections: dict[str, Any]) -> Config:
        """Of a small node with a quick heartbeat."""
        cluster = {"directory": url, "lookup_deadline": "200ms", "heartbeat": f"{HEARTBEAT}s"}
        tree: dict[str, dict[str, Any]] = {
            "node": {"name": name},
            "listen": {"tcp": f"127.0.0.1:{free_port()}"},
            "dram": {"capacity": "32MiB"},
        } | {key: value for key, value in sections.items() if key != "cluster"}
        cluster |= sections.get("cluster", {})
        return make_config(self._directory / name, cluster=cluster, **tree)

    def start(
        self,
        *configs: Config,
        prefixes: Sequence[Sequence[str]] = (),
        environment: Mapping[str, str] | None = None,
    ) -> list[DaemonProcess]:
        """Start daemons, all at once."""
        words = prefixes or [()] * len(configs)
        nodes = [
            DaemonProcess(config, prefix, environment)
            for config, prefix in zip(configs, words, strict=True)
        ]
        self.nodes += nodes
        with ThreadPoolExecutor() as threads:
            list(threads.map(DaemonProcess.start, nodes))
        return nodes

    def client(self, node: DaemonProcess, deadline: float = DEADLINE) -> Client:
        """A client that is closed when the test ends."""
        client = Client(node, deadline)
        self._clients.append(client)
        return client

    @contextmanager
    def local_hits(self, node: DaemonProcess) -> Iterator[LocalHits]:
        """Local hits at a node that go on for the time of the block."""
        with LocalHits(node, node.config.node.name).going_on() as hits:
            yield hits

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for node in self.nodes:
            node.kill()


@contextmanager
def running_redis(directory: Path, **options: Any) -> Iterator[RedisServer]:
    """A Redis for the time of the block."""
    require_redis()
    server = RedisServer(directory / "redis", **options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
