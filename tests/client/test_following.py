"""Following a shard of a real node, with both clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import InvalidRequest
from kvstore.identity import Namespace, prefix_hashes
from tests.client.sync_facade import CONNECT
from tests.running import DaemonThread, daemon_process, make_config, wait_for

BLOCK = 64 << 10
FITS = (8 << 20) // BLOCK
NUMBERS = count()


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def namespace() -> Namespace:
    return Namespace("m", "uint8", "raw", 4, BLOCK)


def names(blocks: int) -> list[bytes]:
    """A chain that no test has stored yet."""
    return prefix_hashes([next(NUMBERS), *range(1, 4 * blocks)], 4)


def content(blocks: int) -> Any:
    return np.zeros((blocks, BLOCK), np.uint8)


class Follower:
    """What an engine believes that its node holds of the blocks that it has heard of."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.position = 0
        self.believed: set[bytes] = set()
        self.begun = 0

    def catch_up(self, limit: int = 4096) -> list[kvstore.Change]:
        seen: list[kvstore.Change] = []
        while True:
            found = self.client.follow(self.position, limit=limit)
            assert found.failure is None
            assert len(found.changes) <= limit
            if not found.complete:
                self.begun += 1
                asked = list(self.believed)
                hits = self.client.exists(asked).hits
                self.believed = {block for block, hit in zip(asked, hits, strict=True) if hit}
            for block, stored in found.changes:
                (self.believed.add if stored else self.believed.discard)(block)
            seen += found.changes
            self.position = found.sequence
            if found.complete and not found.changes:
                return seen


def held(client: Any, blocks: list[bytes]) -> set[bytes]:
    hits = client.exists(blocks).hits
    return {block for block, hit in zip(blocks, hits, strict=True) if hit}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(make_config(tmp_path)) as running:
        yield running


@pytest.mark.parametrize("limit", [7, 65_536])
def test_a_follower_knows_what_a_node_under_pressure_holds(
    daemon: DaemonThread, kind: str, limit: int
) -> None:
    chains = [names(10) for _ in range(3 * FITS // 10)]
    with (
        kvstore.connect(daemon.url, namespace(), deadline=5.0) as writer,
        CONNECT[kind](daemon.url, namespace(), deadline=5.0) as client,
    ):
        follower = Follower(client)
        follower.catch_up()
        assert follower.begun == 1
        removed = 0
        for each in chains:
            assert writer.put(each, content(10)).stored == 10
            seen = follower.catch_up(limit)
            removed += sum(not change.stored for change in seen)
            assert [change.hash for change in seen if change.stored] == each
            assert set(each) <= follower.believed
        assert follower.believed == held(client, [block for each in chains for block in each])
        assert removed >= 2 * FITS - 10
        assert follower.begun == 1


def test_moves_between_tiers_are_no_changes(tmp_path: Path, kind: str) -> None:
    config = make_config(
        tmp_path, ssd={"capacity": "64MiB"}, policy={"low_watermark": 0.5, "high_watermark": 0.75}
    )
    blocks = [block for _ in range(3 * FITS // 8) for block in names(8)]
    with DaemonThread(config) as daemon, CONNECT[kind](daemon.url, namespace()) as client:
        follower = Follower(client)
        follower.catch_up()
        for first in range(0, len(blocks), 8):
            client.put(blocks[first : first + 8], content(8), deadline=10.0)
            wait_for(lambda: not daemon.daemon.node.dram.used > 6 << 20)
        follower.catch_up()
        assert follower.believed == set(blocks)
        on_ssd = [b for b, t in zip(blocks, client.exists(blocks).tiers, strict=True) if t == "ssd"]
        assert len(on_ssd) > FITS
        got = client.get(on_ssd[:8], content(8), deadline=10.0)
        assert got.found == 8
        assert follower.catch_up() == []


def test_a_restart_is_not_missed(tmp_path: Path, kind: str) -> None:
    config = make_config(tmp_path, ssd={"capacity": "64MiB"})
    kept, lost = names(4), names(4)
    with (
        daemon_process(config) as daemon,
        CONNECT[kind](daemon.url, namespace(), deadline=5.0) as client,
    ):
        follower = Follower(client)
        assert client.put(kept, content(4)).stored == 4
        follower.believed = set(kept)  # from its own put, before it follows
        follower.catch_up()
        daemon.stop()
        daemon.start()
        assert follower.catch_up() == []
        assert follower.begun == 2
        assert follower.believed == set(kept) == held(client, kept), "a stop writes all to SSD"

        assert client.put(lost, content(4)).stored == 4
        daemon.kill()
        unknown = client.follow(follower.position, deadline=0.5)
        assert unknown == kvstore.Changes(follower.position, True, (), "unavailable")
        daemon.start()
        until = time.monotonic() + 10
        while client.follow(follower.position).failure is not None:
            assert time.monotonic() < until
            time.sleep(0.02)
        follower.catch_up()
        assert follower.begun == 3
        assert follower.believed == held(client, kept)
        more = names(2)
        client.put(more, content(2))
        assert follower.catch_up() == [kvstore.Change(block, True) for block in more]


def test_a_node_that_nobody_answers_at_is_no_exception(tmp_path: Path, kind: str) -> None:
    url = f"unix://{tmp_path}/nobody.sock"
    with CONNECT[kind](url, namespace(), required=False, deadline=0.5) as client:
        for after in (0, 5):
            found = client.follow(after)
            assert (found.sequence, found.complete, list(found.changes)) == (after, True, [])
            assert found.failure == "unavailable"


@pytest.mark.parametrize(
    ("after", "limit"), [(-1, 10), (1 << 64, 10), (1, 0), (1, -1), (1, 65_537)]
)
def test_nonsense_is_the_callers_mistake(
    daemon: DaemonThread, kind: str, after: int, limit: int
) -> None:
    with (
        CONNECT[kind](daemon.url, namespace()) as client,
        pytest.raises(InvalidRequest, match="position|changes"),
    ):
        client.follow(after, limit=limit)


def test_the_nodes_own_limit_is_kept_to(tmp_path: Path, kind: str) -> None:
    config = make_config(tmp_path, limits={"max_hashes": 3})
    blocks = names(8)
    with DaemonThread(config) as daemon, CONNECT[kind](daemon.url, namespace()) as client:
        position = client.follow(0).sequence
        client.put(blocks, content(8))
        found = client.follow(position, limit=1000)
        assert [change.hash for change in found.changes] == blocks[:3]
        assert len(client.follow(found.sequence, limit=1000).changes) == 3
