"""A daemon in this process that is looked at from inside, and must end with nothing left over."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore.control.interface import ControlTarget, Explanation, VerifyProgress
from kvstore.identity import Namespace
from kvstore.inspection import Inspection
from kvstore.metrics import Metrics
from tests.kvstore.peer import NAMESPACE, Peer
from tests.running import DaemonThread, wait_for


def name(*path: object) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def chain(*path: object, length: int) -> list[bytes]:
    return [name(*path, depth) for depth in range(length)]


class Watched(DaemonThread):
    """A daemon that must have nothing left, and have met no fault, when its clients are gone."""

    def __enter__(self) -> Watched:
        super().__enter__()
        self.faults: list[dict[str, Any]] = []
        self.loop.call_soon_threadsafe(
            self.loop.set_exception_handler, lambda _, context: self.faults.append(context)
        )
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.check()
        finally:
            super().__exit__(*error)

    def check(self) -> None:
        """Wait for the clients to be gone; fail if anything of theirs is left."""
        metrics = self.metrics
        wait_for(lambda: metrics.sessions == 0)
        wait_for(lambda: (metrics.pins, metrics.reservations) == (0, 0))
        assert all(shard.feed is None for shard in self.daemon.node.index.shards)
        assert self.used == self.held
        assert metrics.hits.total() + metrics.misses.total() == metrics.lookups
        assert metrics.internal_errors == 0
        assert self.faults == []

    @property
    def path(self) -> Path:
        assert self.config.listen.unix is not None
        return self.config.listen.unix

    @property
    def metrics(self) -> Metrics:
        return self.daemon.metrics

    @property
    def used(self) -> int:
        return self.daemon.node.dram.used

    @property
    def held(self) -> int:
        """Bytes of the blocks that can be served from DRAM."""
        return sum(shard.dram_bytes for shard in self.daemon.node.index.shards)

    @property
    def waiting(self) -> int:
        return sum(len(one._waiting) for one in list(self.daemon.server.connections))

    def pass_time(self, seconds: float) -> None:
        """Move the node's clock on, and let it look for what has expired."""
        node, server = self.daemon.node, self.daemon.server
        clock = node.clock

        def expire() -> None:
            node.clock = lambda: clock() + seconds
            for session in server.sessions():
                session.expire(node.clock())

        self.call(expire)

    def inspection(self) -> Inspection:
        """What operators see of the node."""
        daemon = self.daemon
        return Inspection(
            daemon.node, daemon.movement, daemon.server, daemon.verbs, self.config, "x"
        )

    def explain(self, hashes: Sequence[bytes], namespace: Namespace = NAMESPACE) -> Explanation:
        """Why a prefix ends."""
        explanation: Explanation = self.call(
            self.inspection().explain, namespace.fingerprint, hashes
        )
        return explanation


@contextlib.contextmanager
def connected(daemon: Watched, namespace: Namespace = NAMESPACE, shard: int = 0) -> Iterator[Peer]:
    """A session over the ``tcp`` transport."""
    with Peer(daemon.path) as peer:
        peer.hello(namespace, shard=shard)
        yield peer


class Operator:
    """Calls a node's ControlTarget from the test's thread."""

    def __init__(self, daemon: Watched) -> None:
        self._daemon = daemon
        self.target: ControlTarget = daemon.inspection()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return self._daemon.call(lambda: getattr(self.target, method)(*arguments, **options))

        return call

    def verify(
        self, namespace: bytes | None = None, tier: str | None = None
    ) -> list[VerifyProgress]:
        async def collect() -> list[VerifyProgress]:
            return [progress async for progress in self.target.verify(namespace, tier)]

        found: list[VerifyProgress] = self._daemon.call(collect)
        return found
