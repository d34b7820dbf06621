"""The command line over a pool of real daemons with a real Redis, some of which don't answer."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.cli import main
from kvstore.cli.pool import PARTIAL
from kvstore.config import Config
from tests.kvstore.directory.servers import RedisServer, free_port, require_redis
from tests.kvstore.peer import NAMESPACE, content
from tests.kvstore.watched import chain
from tests.running import DaemonProcess, daemon_process, make_config, wait_for

HASHES = chain("looked at", length=8)
TEXT = [block.hex() for block in HASHES]
NAMES = ("one", "other", "third")
PATIENCE = 30.0

Cli = Callable[..., tuple[int, Any]]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    require_redis()
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


def config(directory: Path, redis: RedisServer, heartbeat: str) -> Config:
    return make_config(
        directory,
        node={"name": directory.name},
        listen={
            "tcp": f"127.0.0.1:{free_port()}",
            "control": f"127.0.0.1:{free_port()}",
            "metrics": None,
        },
        cluster={"directory": redis.url, "lookup_deadline": "500ms", "heartbeat": heartbeat},
    )


@pytest.fixture
def nodes(
    request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer
) -> Iterator[list[DaemonProcess]]:
    """Three, started one after the other, so that the last knows of all from its start on."""
    heartbeat = getattr(request, "param", "500ms")
    with ExitStack() as stack:
        yield [
            stack.enter_context(daemon_process(config(tmp_path / name, redis, heartbeat)))
            for name in NAMES
        ]


@pytest.fixture
def cli(
    nodes: list[DaemonProcess], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    monkeypatch.setenv("KVSTORE_CONTROL", str(nodes[-1].config.listen.control))

    def run(*arguments: str) -> tuple[int, Any]:
        status = main.main([*arguments, "--json"])
        printed = capsys.readouterr()
        return status, json.loads(printed.out) if printed.out else printed.err

    return run


def put(node: DaemonProcess, hashes: list[bytes]) -> None:
    with kvstore.connect(node.url, NAMESPACE, deadline=10.0) as client:
        client.put(hashes, [content(block) for block in hashes])


def all_answer(cli: Cli) -> bool:
    status, found = cli("cluster")
    return status == 0 and len(found["members"]) == len(NAMES)


# A slow heart, so that who is stalled or dead is a member until the test is over.
@pytest.mark.parametrize("nodes", ["15s"], indirect=True)
def test_stalled_and_dead_nodes_are_named_in_time(nodes: list[DaemonProcess], cli: Cli) -> None:
    one, other, third = nodes
    put(one, HASHES)
    put(third, HASHES[:3])
    wait_for(lambda: all_answer(cli), PATIENCE)
    one.signal(signal.SIGSTOP)
    began = time.monotonic()
    status, found = cli("status", "--pool", "--timeout", "1")
    assert time.monotonic() - began < PATIENCE
    assert status == PARTIAL
    assert [part["node"] for part in found["nodes"]] == ["other", "third"]
    assert [(part["node"], part["error"]) for part in found["failed"]] == [
        ("one", "deadline_exceeded")
    ]
    other.kill()
    status, found = cli("match", *TEXT, "--pool", "--timeout", "1")
    assert status == PARTIAL
    assert {part["node"]: part["error"] for part in found["failed"]} == {
        "one": "deadline_exceeded",
        "other": "unavailable",
    }
    # What only the stalled node holds is still a hit to clients, as far as anybody knows.
    assert [[part["node"] for part in block["nodes"]] for block in found["pool"]["held"]] == [
        *[["third"]] * 3,
        *[[]] * 5,
    ]
    status, found = cli("cluster", "--timeout", "1")
    assert status == PARTIAL
    answered = {part["node"]: part["answered"] for part in found["members"]}
    assert answered == {"one": False, "other": False, "third": True}
    # Of those that don't answer it shows what they told the directory.
    assert all("dram_capacity" in part["figures"] for part in found["members"])
    assert cli("status", "--node", "one", "--timeout", "1")[0] == main.NOT_THERE
    one.signal(signal.SIGCONT)
    wait_for(lambda: len(cli("status", "--pool")[1]["nodes"]) == 2, PATIENCE)


def test_a_block_whose_node_died_is_explained(
    nodes: list[DaemonProcess], cli: Cli, redis: RedisServer
) -> None:
    one, _, third = nodes
    put(one, HASHES)
    put(third, HASHES[:3])
    wait_for(lambda: all_answer(cli), PATIENCE)
    wait_for(lambda: cli("match", *TEXT)[1]["blocks"] == len(HASHES), PATIENCE)
    one.kill()
    wait_for(lambda: [part["node"] for part in cli("cluster")[1]["gone"]] == ["one"], PATIENCE)
    # A directory that is late names nobody; the next time it does.
    wait_for(lambda: cli("explain", *TEXT, "--pool")[1]["pool"]["ending"] == "node_gone", PATIENCE)
    status, found = cli("explain", *TEXT, "--pool")
    assert status == main.FAILED
    assert found["pool"]["blocks"] == 3
    assert found["pool"]["gone"] in ("one", "")
    redis.kill()
    wait_for(lambda: not cli("cluster")[1]["directory"]["reachable"], PATIENCE)
    status, found = cli("cluster")
    assert status == 0
    assert "third" in [part["node"] for part in found["members"]]
    assert "one" not in [part["node"] for part in found["members"]]
    assert found["directory"]["failing"] >= 0
    assert any(what.startswith("beat ") for what in found["directory"]["failures"])
    # Nobody knows any more what others hold; what nodes hold themselves they say.
    status, found = cli("match", *TEXT, "--pool")
    assert (status, found["pool"]["blocks"]) == (main.FAILED, 3)
