"""What a node says of its pool, and of what others hold of a prefix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.control.interface import Ending, Explanation, MatchReport
from kvstore.control.pool_client import PoolClient
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.units import parse_address
from tests.kvstore.peer import BLOCK, NAMESPACE
from tests.kvstore.pooled import Pool, PooledNode, pool
from tests.kvstore.watched import chain
from tests.running import DaemonThread, make_config

HASHES = chain("seen", length=12)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Pool]:
    with pool(tmp_path, 3) as running:
        yield running


def ask(node: DaemonThread, method: str, *arguments: Any) -> Any:
    """Call a node over its control plane."""
    address = parse_address(str(node.daemon.control_url).removeprefix("http://"))

    async def call() -> Any:
        async with PoolClient(address) as client:
            return await getattr(client, method)(*arguments)

    return node.call(call)


def explain(node: PooledNode, hashes: list[bytes]) -> Explanation:
    found = ask(node, "explain", NAMESPACE.fingerprint, hashes)
    assert isinstance(found, Explanation)
    return found


def match(node: PooledNode, hashes: list[bytes]) -> MatchReport:
    found = ask(node, "match", NAMESPACE.fingerprint, hashes)
    assert isinstance(found, MatchReport)
    return found


def test_a_node_names_the_members_and_itself(three: Pool) -> None:
    node = three.nodes[1]
    report = ask(node, "pool")
    assert [one.node for one in report.members] == ["node0", "node1", "node2"]
    assert [one.asked for one in report.members] == [False, True, False]
    assert [one.number for one in report.members] == [one.number for one in three.nodes]
    assert report.members[1].incarnation == node.daemon.incarnation
    assert report.members[1].control == str(node.daemon.control_url).removeprefix("http://")
    assert report.members[0].summary["dram_capacity"] == 8 << 20
    assert (report.pool, report.gone) == ("kvstore", ())
    assert report.directory.kind == "memory"
    assert report.directory.reachable


def test_load_says_who_was_pulled_from(three: Pool) -> None:
    first, second, third = three.nodes
    first.put(HASHES)
    second.put(chain("other", length=3))
    third.match(HASHES)
    third.get(HASHES)
    third.match(chain("other", length=3))
    third.get(chain("other", length=3))
    load = ask(third, "load")
    assert [(one.node, one.blocks, one.bytes) for one in load.pulls] == [
        ("node0", 12, 12 * BLOCK),
        ("node1", 3, 3 * BLOCK),
    ]
    assert load.incarnation == third.daemon.incarnation
    assert load.figures["remote_hits"] == 15
    assert load.figures["pulled_bytes"] == 15 * BLOCK
    assert not ask(first, "load").pulls


def test_what_others_hold_is_remote(three: Pool) -> None:
    first, second, third = three.nodes
    first.put(HASHES)
    second.put(HASHES[:4])
    assert match(second, HASHES).tiers == ("dram",) * 4 + ("remote",) * 8
    assert match(first, HASHES).tiers == ("dram",) * 12
    # It knows nothing of the namespace, so not either of how many shards it has.
    assert match(third, HASHES).tiers == ()
    longer = [*HASHES, *chain("beyond", length=2)]
    found = explain(second, longer)
    assert (found.blocks, found.remote, found.ending) == (4, 8, Ending.NEVER_STORED)
    assert found.hash == HASHES[4]


def test_who_held_the_rest_and_left_is_named(three: Pool) -> None:
    first, second, _ = three.nodes
    first.put(HASHES)
    second.put(HASHES[:4])
    first.call(first.cluster.leave)
    found = explain(second, HASHES)
    assert (found.blocks, found.remote, found.ending) == (4, 0, Ending.NODE_GONE)
    assert found.gone == "node0"
    assert [one.node for one in ask(second, "pool").gone] == ["node0"]


def test_an_own_departure_says_more_than_a_node_that_left(three: Pool) -> None:
    first, second, _ = three.nodes
    first.put(HASHES)
    second.put(HASHES)
    second.drop(HASHES[6])
    first.call(first.cluster.leave)
    found = explain(second, HASHES)
    assert (found.blocks, found.ending, found.gone) == (6, Ending.DEPARTED, "node0")


def test_a_directory_that_fails_costs_only_what_others_hold(three: Pool) -> None:
    first, second, _ = three.nodes
    first.put(HASHES)
    second.put(HASHES[:4])
    three.memory.failure = Unavailable.code
    assert match(second, HASHES).tiers == ("dram",) * 4
    assert (explain(second, HASHES).blocks, explain(second, HASHES).remote) == (4, 0)
    three.memory.failure = None


def test_a_node_in_no_pool_says_so(tmp_path: Path) -> None:
    with DaemonThread(make_config(tmp_path)) as alone:
        for method in ("pool", "load"):
            with pytest.raises(InvalidRequest, match="in no pool"):
                ask(alone, method)
