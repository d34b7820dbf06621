"""Copies and drains between real daemons that share a real Redis, and the command that drains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import kvstore
from kvstore.config import Config
from kvstore.control.pool_client import PoolClient
from tests.kvstore.directory.servers import RedisServer, free_port, require_redis
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.watched import chain
from tests.running import DaemonProcess, daemon_process, make_config, wait_for

CHAINS = [chain("rolling", at, length=8) for at in range(12)]
PATIENCE = 30.0


def config(directory: Path, redis: RedisServer) -> Config:
    return make_config(
        directory,
        node={"name": directory.name},
        listen={
            "tcp": f"127.0.0.1:{free_port()}",
            "control": f"127.0.0.1:{free_port()}",
            "metrics": "off",
        },
        dram={"capacity": "32MiB"},
        # Other tests run beside these: patience, so that they see what they are about.
        cluster={
            "directory": redis.url,
            "lookup_deadline": "500ms",
            "heartbeat": "300ms",
            "host": directory.name,
        },
    )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[DaemonProcess]]:
    require_redis()
    redis = RedisServer(tmp_path / "redis")
    redis.start()
    with ExitStack() as stack:
        stack.callback(redis.kill)
        yield [
            stack.enter_context(daemon_process(config(tmp_path / name, redis)))
            for name in ("one", "two", "three")
        ]


@contextmanager
def client_of(node: DaemonProcess) -> Iterator[kvstore.Client]:
    with kvstore.connect(node.url, NAMESPACE, deadline=5.0) as client:
        yield client


def put(node: DaemonProcess, hashes: Sequence[bytes], replicas: int | None = None) -> None:
    with client_of(node) as client:
        blocks = [content(block) for block in hashes]
        assert client.put(hashes, blocks, replicas=replicas).stored == len(hashes)


def reach(client: kvstore.Client, hashes: Sequence[bytes]) -> int:
    return client.match(hashes).blocks


def reads(client: kvstore.Client, hashes: Sequence[bytes]) -> bool:
    """Whether a client gets all of a chain, and rightly."""
    if reach(client, hashes) < len(hashes):
        return False
    into = [bytearray(BLOCK) for _ in hashes]
    got = client.get(hashes, into)
    for block, tier, found in zip(hashes, got.tiers, into, strict=True):
        assert tier == "absent" or found == content(block), "a wrong byte"
    return got.found == len(hashes)


def command(node: DaemonProcess, *arguments: str) -> subprocess.Popen[str]:
    """Begin a ``kvstore`` command that speaks to a node."""
    address = str(node.config.listen.control)
    return subprocess.Popen(
        [sys.executable, "-m", "kvstore", *arguments, "--json", "--control", address],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def drained(
    node: DaemonProcess, *arguments: str, by: DaemonProcess | None = None
) -> dict[str, object]:
    """Drain a node, and say what the command did."""
    running = command(by or node, "drain", *arguments)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    said: dict[str, object] = json.loads(out)
    assert said["state"] == "drained"
    return said


def members(node: DaemonProcess) -> set[str]:
    """The pool as a node sees it, itself among them."""

    async def ask() -> set[str]:
        assert node.config.listen.control is not None
        async with PoolClient(node.config.listen.control) as client:
            return {member.node for member in (await client.pool()).members}

    return asyncio.run(ask())


def joined(node: DaemonProcess, names: set[str]) -> None:
    wait_for(lambda: members(node) == names, PATIENCE)


class Reader:
    """A client of one node that goes on reading, and counts what it hit."""

    def __init__(self, node: DaemonProcess) -> None:
        self.rounds = 0
        self.without_hits = 0
        self.failure: BaseException | None = None
        self._node = node
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader")

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            with client_of(self._node) as client:
                while not self._stop.is_set():
                    hits = sum(reads(client, hashes) for hashes in CHAINS)
                    self.without_hits += hits == 0
                    self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.failure = error


def test_copies_outlive_the_node_that_was_put_to(nodes: list[DaemonProcess]) -> None:
    one, two, three = nodes
    joined(one, {"one", "two", "three"})
    for hashes in CHAINS:
        put(one, hashes, 2)
    with client_of(two) as second, client_of(three) as third:

        def copied() -> bool:
            return all(
                set(second.exists(hashes).tiers) == {"dram"}
                or set(third.exists(hashes).tiers) == {"dram"}
                for hashes in CHAINS
            )

        wait_for(copied, PATIENCE)
        one.kill()
        for client in (second, third):
            wait_for(lambda: all(reads(client, hashes) for hashes in CHAINS), PATIENCE)  # noqa: B023


def test_a_drain_while_clients_read_loses_nothing(nodes: list[DaemonProcess]) -> None:
    one, two, three = nodes
    joined(one, {"one", "two", "three"})
    for hashes in CHAINS:
        put(one, hashes)
    with client_of(two) as second:
        wait_for(lambda: all(reach(second, hashes) == 8 for hashes in CHAINS), PATIENCE)
        with Reader(one) as near, Reader(three) as far:
            wait_for(lambda: near.rounds and far.rounds, PATIENCE)
            said = drained(one, "one", by=two)
            rounds = far.rounds
            wait_for(lambda: far.rounds > rounds + 1, PATIENCE)
        assert said["left"] == 0
        assert near.without_hits == far.without_hits == 0
        joined(two, {"two", "three"})
        one.kill()
        assert all(reads(second, hashes) for hashes in CHAINS)


def test_a_rolling_upgrade_keeps_all_blocks(nodes: list[DaemonProcess]) -> None:
    everyone = {"one", "two", "three"}
    joined(nodes[0], everyone)
    for at, hashes in enumerate(CHAINS):
        put(nodes[at % 3], hashes)
    for at, node in enumerate(nodes):
        other = nodes[at - 1]
        with Reader(other) as reader:
            wait_for(lambda: reader.rounds, PATIENCE)
            drained(node, "--stop")
            wait_for(lambda: ended(node), PATIENCE)  # noqa: B023
            node.kill()  # it is gone; this gathers its end
            node.start()
            joined(other, everyone)
            rounds = reader.rounds
            wait_for(lambda: reader.rounds > rounds + 1, PATIENCE)  # noqa: B023
        assert reader.without_hits == 0
        with client_of(node) as client:
            wait_for(lambda: all(reads(client, hashes) for hashes in CHAINS), PATIENCE)


def ended(node: DaemonProcess) -> bool:
    assert node._process is not None
    return node._process.poll() == 0


def test_interrupting_the_command_brings_the_node_back(nodes: list[DaemonProcess]) -> None:
    one, two, _ = nodes
    joined(one, {"one", "two", "three"})
    for hashes in CHAINS:
        put(one, hashes)
    slow = command(one, "drain", "--rate", "1")
    with client_of(one) as client:
        at = iter(range(1_000_000))

        def refused() -> bool:
            block = chain("probe", next(at), length=1)
            return client.put(block, [content(block[0])]).refused == 1

        wait_for(refused, PATIENCE)
        slow.send_signal(signal.SIGINT)
        slow.communicate(timeout=60)
        assert slow.returncode == 130
        wait_for(lambda: not refused(), PATIENCE)
    joined(two, {"one", "two", "three"})
    said = drained(one)
    assert said["left"] == 0
    lost = command(two, "drain", "--cancel", "one")
    _, err = lost.communicate(timeout=60)
    assert lost.returncode == 2
    assert "its own control" in err
    back = command(one, "drain", "--cancel")
    out, err = back.communicate(timeout=60)
    assert back.returncode == 0, err
    assert json.loads(out)["state"] == "serving"
    joined(two, {"one", "two", "three"})


def test_a_target_that_is_killed_in_the_middle_is_replaced(nodes: list[DaemonProcess]) -> None:
    one, two, three = nodes
    joined(one, {"one", "two", "three"})
    for hashes in CHAINS:
        put(one, hashes)
    running = command(one, "drain", "--rate", str(40 * BLOCK))
    with client_of(two) as second:
        wait_for(lambda: any(second.exists(hashes).found for hashes in CHAINS), PATIENCE)
        two.kill()
    out, err = running.communicate(timeout=120)
    said = json.loads(out)
    assert said["state"] == "drained", err
    # What the killed node had taken by then is gone; the other has all that came after.
    with client_of(three) as third:
        wait_for(lambda: sum(reads(third, hashes) for hashes in CHAINS) >= 4, PATIENCE)
