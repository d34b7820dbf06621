"""The command line over a pool of three daemons in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main
from kvstore.cli.cluster import directory_line
from kvstore.cli.pool import PARTIAL
from kvstore.control.pool import DirectoryReport
from tests.kvstore.peer import BLOCK, NAMESPACE
from tests.kvstore.pooled import Pool, PooledNode, pool
from tests.kvstore.pulling import LISTEN
from tests.kvstore.watched import chain
from tests.running import DaemonThread, make_config

HASHES = chain("shared", length=8)
TEXT = [block.hex() for block in HASHES]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Pool]:
    """The first holds eight blocks, the second three of them, the third what it pulled: four."""
    with pool(tmp_path, 3) as running:
        first, second, third = running.nodes
        first.put(HASHES)
        second.put(HASHES[:3])
        third.match(HASHES[:4])
        third.get(HASHES[:4])
        yield running


@pytest.fixture
def cli(three: Pool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("KVSTORE_CONTROL", control(three.nodes[1]))
    return runner(capsys)


def runner(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def control(node: DaemonThread) -> str:
    return str(node.daemon.control_url).removeprefix("http://")


def answer(cli: Cli, *arguments: str, status: int = 0) -> Any:
    found, out, err = cli(*arguments, "--json")
    assert found == status, err
    return json.loads(out)


def blocks_of(node: PooledNode) -> int:
    return len(node.daemon.node.index)


# --- one member by name ---------------------------------------------------------------------------


def test_a_member_is_asked_by_name_number_or_address(cli: Cli, three: Pool) -> None:
    third = three.nodes[2]
    for named in ("node2", str(third.number), control(third), third.daemon.incarnation):
        assert answer(cli, "status", "--node", named)["name"] == "node2"
    assert answer(cli, "status", "--node", "node1")["name"] == "node1"
    assert answer(cli, "status")["name"] == "node1"
    assert len(answer(cli, "ls", "--node", "node0")["blocks"]) == 8
    assert len(answer(cli, "inspect", TEXT[7], "--node", "node0")) == 1


def test_a_name_that_nobody_has_is_wrong_usage(cli: Cli) -> None:
    status, _, err = cli("status", "--node", "node9")
    assert status == main.USAGE
    assert "node0" in err
    assert "node2" in err
    assert cli("status", "--node", "node0", "--pool")[0] == main.USAGE


def test_what_a_member_evicts_others_keep(cli: Cli, three: Pool) -> None:
    assert answer(cli, "evict", TEXT[0], "--node", "node2")["blocks"] == 4
    assert [blocks_of(node) for node in three.nodes] == [8, 3, 0]


# --- all of them ----------------------------------------------------------------------------------


def test_status_of_the_pool_adds_up(cli: Cli) -> None:
    found = answer(cli, "status", "--pool")
    assert [one["node"] for one in found["nodes"]] == ["node0", "node1", "node2"]
    assert [one["answer"]["blocks"] for one in found["nodes"]] == [8, 3, 4]
    assert found["pool"]["blocks"] == 15
    assert found["pool"]["nodes"] == 3
    assert found["pool"]["tiers"]["dram"]["used"] == 15 * BLOCK
    assert found["failed"] == []
    assert "node2" in cli("status", "--pool")[1]


@pytest.mark.parametrize("limit", ["1", "4", "8", "1000"])
def test_pages_cover_the_pool_once(cli: Cli, limit: str) -> None:
    found: list[tuple[str, str]] = []
    arguments = ["ls", "--pool", "--limit", limit]
    while True:
        page = answer(cli, *arguments)
        assert len(page["blocks"]) <= int(limit)
        found += [(one["node"], one["hash"]) for one in page["blocks"]]
        if not page["cursor"]:
            break
        arguments[4:] = ["--cursor", page["cursor"]]
    held = {"node0": TEXT, "node1": TEXT[:3], "node2": TEXT[:4]}
    assert sorted(found) == sorted((node, one) for node, all_ in held.items() for one in all_)


def test_all_pages_at_once(cli: Cli) -> None:
    status, out, _ = cli("ls", "--pool", "--all", "--limit", "2")
    assert status == 0
    assert out.count("node0") == 8
    assert cli("ls", "--pool", "--cursor", "00")[0] == main.USAGE


def test_inspect_says_which_nodes_hold_a_block(cli: Cli) -> None:
    found = answer(cli, "inspect", TEXT[3][:12], "--pool")
    assert [(one["node"], one["tiers"]) for one in found["blocks"]] == [
        ("node0", ["dram"]),
        ("node2", ["dram"]),
    ]
    assert "node2" in cli("inspect", TEXT[3], "--pool")[1]
    assert answer(cli, "inspect", "0" * 64, "--pool", status=1)["blocks"] == []


def test_match_says_who_holds_how_much(cli: Cli) -> None:
    found = answer(cli, "match", *TEXT, "--pool")
    assert (found["pool"]["blocks"], found["pool"]["asked"]) == (8, 8)
    holders = [[one["node"] for one in block["nodes"]] for block in found["pool"]["held"]]
    assert holders == [["node0", "node1", "node2"]] * 3 + [["node0", "node2"]] + [["node0"]] * 4
    more = [*TEXT, "0" * 64]
    assert answer(cli, "match", *more, "--pool", status=1)["pool"]["blocks"] == 8
    assert "node0 dram, node2 dram" in cli("match", *TEXT, "--pool")[1]
    alone = answer(cli, "match", *TEXT)
    assert [one["tier"] for one in alone["held"]] == ["dram"] * 3 + ["remote"] * 5


def test_explain_concludes_from_who_knows_best(cli: Cli, three: Pool) -> None:
    assert answer(cli, "explain", *TEXT, "--pool")["pool"]["ending"] == "complete"
    three.nodes[0].drop(HASHES[5])
    found = answer(cli, "explain", *TEXT, "--pool", status=1)
    assert (found["pool"]["blocks"], found["pool"]["ending"]) == (5, "departed")
    assert (found["pool"]["reason"], found["pool"]["said_by"]) == ("admin", ["node0"])
    assert found["pool"]["hash"] == TEXT[5]
    assert [one["answer"]["blocks"] for one in found["nodes"]] == [5, 3, 4]
    assert [one["answer"]["remote"] for one in found["nodes"]] == [0, 2, 1]
    text = cli("explain", *TEXT, "--pool")[1]
    assert "So says node0" in text


def test_explain_names_the_node_that_left(cli: Cli, three: Pool) -> None:
    first = three.nodes[0]
    first.call(first.cluster.leave)
    found = answer(cli, "explain", *TEXT, "--pool", status=1)
    assert (found["pool"]["blocks"], found["pool"]["ending"]) == (4, "node_gone")
    assert found["pool"]["gone"] == "node0"
    assert "node0 held the next block" in cli("explain", *TEXT, "--pool")[1]


def test_evict_drops_from_every_node(cli: Cli, three: Pool) -> None:
    found = answer(cli, "evict", TEXT[2], "--pool")
    assert (found["pool"]["blocks"], found["pool"]["kept"]) == (6 + 1 + 2, 0)
    assert [blocks_of(node) for node in three.nodes] == [2, 2, 2]
    assert cli("evict", "--all", "--pool")[0] == 0
    assert [blocks_of(node) for node in three.nodes] == [0, 0, 0]


def test_evict_says_no_where_a_node_keeps_some(cli: Cli) -> None:
    assert answer(cli, "pin", TEXT[0])["blocks"] == 1
    found = answer(cli, "evict", "--all", "--pool", status=1)
    assert (found["pool"]["blocks"], found["pool"]["kept"]) == (14, 1)
    assert answer(cli, "unpin", TEXT[0])["blocks"] == 1


def test_verify_checks_every_node(cli: Cli) -> None:
    found = answer(cli, "verify", "--pool")
    assert (found["pool"]["checked"], found["pool"]["finished"]) == (15, True)
    assert [one["answer"]["checked"] for one in found["nodes"]] == [8, 3, 4]
    assert "Checked 15 blocks" in cli("verify", "--pool", "-n", NAMESPACE.model)[1]


def test_verify_of_a_tier_that_no_node_has_fails(cli: Cli) -> None:
    found = answer(cli, "verify", "--pool", "--tier", "dram")
    assert found["pool"]["checked"] == 15
    status, _, err = cli("verify", "--pool", "--tier", "ssd")
    assert status == main.FAILED
    assert "no node of this pool has a tier ssd" in err
    assert cli("verify", "--tier", "hbm")[0] == main.FAILED


def test_verify_of_a_tier_leaves_out_nodes_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [
        make_config(tmp_path / name, listen=LISTEN, node={"name": name}, **more)
        for name, more in (("with", {"ssd": {"capacity": "32MiB"}}), ("without", {}))
    ]
    running = Pool()
    try:
        running.open(configs)
        for node in running.nodes:
            node.put(HASHES)
        cli = runner(capsys)
        monkeypatch.setenv("KVSTORE_CONTROL", control(running.nodes[1]))
        answer(cli, "flush", "dram", "--node", "with")
        found = answer(cli, "verify", "--pool", "--tier", "ssd")
        assert [one["answer"]["checked"] for one in found["nodes"]] == [8, 0]
        assert (found["pool"]["checked"], found["failed"]) == (8, [])
        running.check()
    finally:
        running.close()


def test_cluster_shows_nodes_and_who_pulls_from_whom(cli: Cli, three: Pool) -> None:
    found = answer(cli, "cluster")
    assert [(one["node"], one["asked"]) for one in found["members"]] == [
        ("node0", False),
        ("node1", True),
        ("node2", False),
    ]
    assert all(one["answered"] for one in found["members"])
    assert found["members"][2]["figures"]["remote_hits"] == 4
    assert found["members"][0]["figures"]["blocks"] == 8
    assert found["pulls"] == [
        {
            "node": "node2",
            "number": three.nodes[2].number,
            "from": "node0",
            "blocks": 4,
            "bytes": 4 * BLOCK,
        }
    ]
    assert found["directory"]["reachable"]
    status, out, _ = cli("cluster")
    assert status == 0
    assert "PULLED FROM" in out
    assert "3 nodes, as node1 sees it" in out


def test_cluster_goes_on_until_it_is_interrupted(
    cli: Cli, three: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt
        three.nodes[2].drop(HASHES[0])

    monkeypatch.setattr("kvstore.cli.cluster._pause", pause)
    status, out, _ = cli("cluster", "--watch", "--interval", "7", "--json")
    assert status == main.INTERRUPTED
    assert looks == [7.0, 7.0]
    seen = [json.loads(line)["members"][2]["figures"]["blocks"] for line in out.splitlines()]
    assert seen == [4, 0]


def test_cluster_says_how_the_directory_does() -> None:
    assert directory_line(DirectoryReport("redis", True, heard=0.5)) == (
        "directory (redis): answers, last 500.0ms ago"
    )
    slow = DirectoryReport("redis", True, failures={"reach deadline_exceeded": 3}, refused=9)
    assert "lookups not tried 9, reach deadline_exceeded 3" in directory_line(slow)
    gone = DirectoryReport("redis", False, failing=90.0, failures={"beat unavailable": 2})
    assert "has not answered for 1m 30s" in directory_line(gone)


# --- those that do not answer ---------------------------------------------------------------------


def test_a_node_without_an_answer_is_named_and_the_rest_is_shown(cli: Cli, three: Pool) -> None:
    number = three.claim("127.0.0.1:9", [])
    found = answer(cli, "status", "--pool", status=PARTIAL)
    assert [one["number"] for one in found["failed"]] == [number]
    assert len(found["nodes"]) == 3
    status, out, err = cli("match", *TEXT, "--pool")
    assert status == PARTIAL
    assert "8 of 8 blocks held" in out
    assert f"number {number}" in err
    shown = answer(cli, "cluster", status=PARTIAL)
    assert [one["answered"] for one in shown["members"]] == [True, True, True, False]
    assert "no answer" in cli("cluster")[1]


def test_a_node_in_the_place_of_another_is_not_taken_for_it(cli: Cli, three: Pool) -> None:
    """As where control planes listen on loopback, and the members are on several machines."""
    first = three.nodes[0].cluster.directory.me
    assert first is not None
    moved = replace(first, control=control(three.nodes[1]))
    three.nodes[0].call(lambda: three.memory.members.update({first.number: moved}))
    found = answer(cli, "evict", "--all", "--pool", status=PARTIAL)
    assert [one["node"] for one in found["failed"]] == ["node0"]
    assert "node1 answers at" in found["failed"][0]["message"]
    assert [blocks_of(node) for node in three.nodes] == [8, 0, 0]
    assert cli("evict", "--all", "--node", "node0")[0] == main.NOT_THERE
    assert blocks_of(three.nodes[0]) == 8


def test_two_nodes_of_one_name_are_told_apart_by_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool(tmp_path, 2, node={"name": "same"}) as running:
        cli = runner(capsys)
        monkeypatch.setenv("KVSTORE_CONTROL", control(running.nodes[0]))
        status, _, err = cli("status", "--node", "same")
        assert status == main.USAGE
        assert "several nodes" in err
        for node in running.nodes:
            found = answer(cli, "status", "--node", str(node.number))
            assert found["incarnation"] == node.daemon.incarnation
            found = answer(cli, "status", "--node", control(node))
            assert found["incarnation"] == node.daemon.incarnation


def test_a_node_in_no_pool_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonThread(make_config(tmp_path)) as alone:
        cli = runner(capsys)
        monkeypatch.setenv("KVSTORE_CONTROL", control(alone))
        for arguments in (["cluster"], ["status", "--pool"], ["ls", "--node", "x"]):
            status, _, err = cli(*arguments)
            assert status == main.FAILED
            assert "in no pool" in err
