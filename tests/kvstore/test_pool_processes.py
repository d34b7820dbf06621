"""Real daemons that share a real Redis, as engines' clients see them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvstore
from kvstore.config import Config
from tests.kvstore.directory.servers import RedisServer, free_port, require_redis
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.watched import chain
from tests.running import DaemonProcess, daemon_process, make_config, wait_for

HASHES = chain("processes", length=24)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    require_redis()
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


def config(directory: Path, redis: RedisServer) -> Config:
    return make_config(
        directory,
        node={"name": directory.name},
        listen={"tcp": f"127.0.0.1:{free_port()}"},
        dram={"capacity": "32MiB"},
        # Other tests run beside these: patience, so that they see what they are about.
        cluster={"directory": redis.url, "lookup_deadline": "500ms", "heartbeat": "500ms"},
    )


@pytest.fixture
def nodes(tmp_path: Path, redis: RedisServer) -> Iterator[list[DaemonProcess]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(daemon_process(config(tmp_path / node, redis)))
            for node in ("one", "other")
        ]


def reaches(client: kvstore.Client, blocks: int) -> bool:
    return client.match(HASHES).blocks == blocks


def test_a_prefix_of_one_node_is_a_hit_on_another(nodes: list[DaemonProcess]) -> None:
    one, other = nodes
    with (
        kvstore.connect(one.url, NAMESPACE, deadline=5.0) as first,
        kvstore.connect(other.url, NAMESPACE, deadline=5.0) as second,
    ):
        assert first.put(HASHES, [content(block) for block in HASHES]).stored == 24
        wait_for(lambda: reaches(second, 24))
        assert set(second.match(HASHES).tiers) == {"remote"}
        into = [bytearray(BLOCK) for _ in HASHES]
        got = second.get(HASHES, into)
        assert set(got.tiers) == {"remote"}
        assert into == [content(block) for block in HASHES]
        assert set(second.match(HASHES).tiers) == {"dram"}
        with second.view(HASHES) as views:
            assert [bytes(view or b"") for view in views] == into


def test_an_owner_that_is_killed_is_a_miss_and_is_forgotten(nodes: list[DaemonProcess]) -> None:
    one, other = nodes
    with (
        kvstore.connect(one.url, NAMESPACE, deadline=5.0) as first,
        kvstore.connect(other.url, NAMESPACE, deadline=5.0) as second,
    ):
        first.put(HASHES, [content(block) for block in HASHES])
        wait_for(lambda: reaches(second, 24))
        into = [bytearray(BLOCK) for _ in HASHES]
        assert second.get(HASHES[:4], into[:4]).found == 4
        one.kill()
        began = time.monotonic()
        assert second.get(HASHES, into).prefix == 4
        assert time.monotonic() - began < 4
        wait_for(lambda: reaches(second, 4))
        # Started anew it holds nothing, and another reads from it what is stored again.
        one.start()
        with kvstore.connect(one.url, NAMESPACE, deadline=5.0) as again:
            wait_for(lambda: again.match(HASHES).blocks == 4)
            again.put(HASHES[:4], [content(block) for block in HASHES[:4]])
            again.put(HASHES[4:], [content(b) for b in HASHES[4:]], parent=HASHES[3])
            # What the start before is said to hold is a miss, until its membership has lapsed.
            wait_for(lambda: reaches(second, 24) and second.get(HASHES, into).found == 24)
            assert into == [content(block) for block in HASHES]


def test_local_blocks_are_served_without_redis(
    nodes: list[DaemonProcess], redis: RedisServer
) -> None:
    one, other = nodes
    with kvstore.connect(one.url, NAMESPACE, deadline=5.0) as client:
        client.put(HASHES[:8], [content(block) for block in HASHES[:8]])
        redis.kill()
        began = time.monotonic()
        for _ in range(50):
            assert set(client.match(HASHES).tiers) == {"dram"}
        assert time.monotonic() - began < 4
        with client.view(HASHES[:8]) as views:
            assert [bytes(view or b"") for view in views] == [content(b) for b in HASHES[:8]]
    assert other.stop() == 0
