"""What a cache-aware router hears of the store, in vLLM's own events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.engines import node
from tests.engines.asking import Ask, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.process import BLOCK, EngineProcess
from tests.running import DaemonProcess, wait_for


class Router:
    """Believes what the events say.

    Attributes:
        holds: block hashes by medium.
        tokens: of each block.
        parents: of each block.
    """

    def __init__(self, endpoint: str) -> None:
        import zmq

        self._again = zmq.Again
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RCVTIMEO, 10)
        self._socket.connect(endpoint)
        self.holds: dict[str, set[int]] = {"GPU": set(), "STORAGE": set()}
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}

    def listen(self) -> set[int]:
        """Applies what has come; what the store holds then."""
        with contextlib.suppress(self._again):
            while True:
                _, _, payload = self._socket.recv_multipart()
                for event in msgpack.unpackb(payload)[1]:
                    self._apply(event)
        return self.holds["STORAGE"]

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.holds = {medium: set() for medium in self.holds}
            return
        held = self.holds[event["medium"]]
        if event["type"] == "BlockRemoved":
            held.difference_update(event["block_hashes"])
            return
        parent = event["parent_block_hash"]
        for number, block in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][number * BLOCK : (number + 1) * BLOCK]
            assert self.tokens.setdefault(block, tuple(tokens)) == tuple(tokens)
            assert self.parents.setdefault(block, parent) == parent
            held.add(block)
            parent = block

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    router = Router(endpoint)
    yield router
    router.close()


@pytest.fixture
def publisher(start_engine: StartEngine, daemon: DaemonProcess, endpoint: str) -> EngineProcess:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return start_engine(kv_transfer_config=node.connector(daemon), kv_events_config=events)


def heard(router: Router, publisher: EngineProcess, blocks: int) -> None:
    """Waits until the router believes in so many blocks; an idle engine publishes nothing."""

    def told() -> bool:
        if len(router.listen()) == blocks:
            return True
        publisher.generate([Ask(prompt(99, 3), tokens=1)])
        return False

    wait_for(told, 60)


def test_routers_hear_of_what_is_stored_and_of_what_is_gone(
    publisher: EngineProcess, router: Router, daemon: DaemonProcess, reference: Reference
) -> None:
    ask = Ask(prompt(1, 5 * BLOCK + 3), tokens=4)
    assert publisher.generate([ask])[0].tokens == reference([ask])[0].tokens
    heard(router, publisher, 5)
    stored = set(router.holds["STORAGE"])
    assert stored <= router.holds["GPU"]
    chain: list[int] = []
    for _ in range(5):
        chain += [each for each in stored if router.parents[each] == (chain or [None])[-1]]
    told = [token for block in chain for token in router.tokens[block]]
    assert tuple(told) == ask.prompt[: 5 * BLOCK]

    node.command(daemon, "evict", "--all")
    heard(router, publisher, 0)
    publisher.forget()
    assert publisher.generate([ask])[0].tokens == reference([ask])[0].tokens
    heard(router, publisher, 5)
    assert router.holds["STORAGE"] == stored

    daemon.kill()
    daemon.start()
    heard(router, publisher, 0)


def test_routers_hear_of_what_another_engine_has_stored_when_it_is_found(
    publisher: EngineProcess, router: Router, daemon: DaemonProcess, start_engine: StartEngine
) -> None:
    ask = Ask(prompt(2, 3 * BLOCK + 3), tokens=1)
    other = start_engine(kv_transfer_config=node.connector(daemon))
    other.generate([ask])
    other.wait_idle()
    assert publisher.generate([ask])[0].cached == 3 * BLOCK
    heard(router, publisher, 3)
