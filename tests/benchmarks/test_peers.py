"""The comparison with our peers: on ourselves, Redis, and stores that go wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.contender import Contender, PeerFailed, Place, Scene, Setup
from benchmarks.peers.contenders import LIMITS, OURS, REDIS
from benchmarks.peers.groups import moves
from benchmarks.peers.payload import Payload, named_chain, new_chain
from benchmarks.peers.plots import draw
from benchmarks.peers.report import Report
from benchmarks.peers.row import Entry, Goal, Row
from benchmarks.peers.run import Options, all_open, figures_of, on_stage, take_turns
from tests.kvstore.directory.servers import require_redis

SIZE = 16 << 10
CAPACITY = 64 << 20
EVERYWHERE = frozenset(Scene)
TURN = {"count": 4, "seconds": 0.001, "bytes": 4 << 20}


def scripted(fault: str, **changes: Any) -> Contender:
    @contextmanager
    def start(_: Place) -> Iterator[Setup]:
        if fault == "absent":
            raise PeerFailed("it is not installed")
        yield Setup({"fault": fault})

    name, title = f"scripted-{fault or 'well'}", fault
    adapter = "tests.benchmarks.scripted_adapter"
    made = Contender(name, title, adapter, "peer", EVERYWHERE, start)
    return replace(made, **changes)


def options(tmp_path: Path, *contenders: Contender, rounds: int = 2) -> Options:
    return Options(
        contenders, tmp_path, environments=tmp_path / "environments", rounds=rounds, scale=0.01
    )


def rows_of(tmp_path: Path, *contenders: Contender) -> dict[str, Row]:
    """Put, get, view and exists of everyone, two rounds each."""
    chosen = options(tmp_path, *contenders)
    found = {}
    with on_stage(chosen, contenders, "s", CAPACITY) as playing, all_open(playing, SIZE):
        for work in ("put", "get", "view", "exists"):
            if work == "get":
                for each in playing:
                    each.prepare("keep", {"bytes": 64 * SIZE, "name": "kept"})
            row = Row("test", work, work, [Goal("p50")])
            found[work] = take_turns(chosen, playing, row, work, TURN)
    return found


def entry(row: Row, key: str) -> Entry:
    return next(each for each in row.entries if each.contender.key == key)


@pytest.mark.timeout(180)
def test_everyone_has_figures_of_every_work_they_can_do(tmp_path: Path) -> None:
    require_redis()
    everyone = (*OURS, *REDIS, *LIMITS)
    rows = rows_of(tmp_path, *(replace(each, lacks=frozenset({"view"})) for each in everyone))
    for work in ("put", "get", "exists"):
        row = rows[work]
        assert [each.contender.key for each in row.entries] == [each.key for each in everyone]
        assert {each.contender.key: each.failure for each in row.entries} == {
            each.key: "" for each in everyone
        }
        assert all(len(each.turns) == 2 for each in row.entries)
        figures = {"p50", "p99", "keys"} | (set() if work == "exists" else {"rate"})
        assert all(set(turn) == figures for each in row.entries for turn in each.turns)
    assert rows["view"].entries == []


@pytest.mark.timeout(120)
def test_our_views_are_checked_and_timed(tmp_path: Path) -> None:
    row = rows_of(tmp_path, OURS[0])["view"]
    assert [(each.failure, len(each.turns)) for each in row.entries] == [("", 2)]


@pytest.mark.timeout(120)
def test_a_store_that_goes_wrong_is_an_entry_that_says_how(tmp_path: Path) -> None:
    faults = ("", "absent", "shuts", "refuses", "spoils", "loses", "dies")
    rows = rows_of(tmp_path, *map(scripted, faults))

    def failure(work: str, fault: str) -> str:
        return entry(rows[work], f"scripted-{fault}").failure

    assert all(not failure(work, "well") for work in rows)
    assert all(failure(work, "absent") == "it is not installed" for work in rows)
    assert all(failure(work, "shuts") == "ConnectionError: nobody is at home" for work in rows)
    assert failure("put", "refuses") == "MemoryError: no room"
    assert failure("put", "spoils") == failure("put", "loses") == ""
    assert "wrong bytes" in failure("get", "spoils")
    assert "refused, evicted or lost" in failure("get", "loses")
    assert "its worker died" in failure("put", "dies")
    assert "its worker died" in failure("get", "dies")


def test_a_store_that_failed_for_one_size_is_asked_again_for_the_next(tmp_path: Path) -> None:
    chosen = options(tmp_path, scripted("refuses"))
    with on_stage(chosen, chosen.contenders, "s", CAPACITY) as (player,):
        with all_open([player], SIZE):
            player.prepare("keep", {"bytes": SIZE, "name": "kept"})
            assert player.failure == "MemoryError: no room"
        assert player.failure == ""
        with all_open([player], SIZE):
            assert player.failure == ""


def test_a_limit_is_no_peer_and_the_best_peer_is_whom_we_are_held_against() -> None:
    ours, slow, fast, limit = (
        Entry(scripted(name, kind=kind, key=name), [{"rate": rate, "p50": 1 / rate}] * 2)
        for name, kind, rate in (
            ("us", "ours", 6.0),
            ("slow", "peer", 1.0),
            ("fast", "peer", 3.0),
            ("memcpy", "limit", 8.0),
        )
    )
    gone = Entry(scripted("gone"), [{"rate": 99.0, "p50": 0.001}], failure="wrong bytes")
    goals = [
        Goal("rate", 2.5),
        Goal("p50", 2.0),
        Goal("rate", 0.9, "memcpy"),
        Goal("rate", 4.0, "shared"),
        Goal("p99"),
    ]
    fast.contender = replace(fast.contender, lacks=frozenset({"share"}))
    row = Row("test", "row", "row", goals, [gone, limit, slow, ours, fast])
    rate, p50, against_limit, against_shared, p99 = row.verdicts
    assert [each.other and each.other.contender.key for each in row.verdicts] == [
        "fast",
        "fast",
        "memcpy",
        "slow",
        None,
    ]
    assert (rate.ratio, rate.met) == (2.0, False)
    assert (p50.ratio, p50.met) == (2.0, True)
    assert (against_limit.ratio, against_limit.met) == (0.75, False)
    assert (against_shared.ratio, against_shared.met) == (6.0, True)
    assert (p99.ratio, p99.met) == (None, None)


def test_a_few_blocks_may_lack_and_no_byte_may_be_wrong() -> None:
    outcome: dict[str, Any] = {
        "samples": [1.0, 1.0],
        "bytes": 100,
        "items": 1000,
        "wrong": 0,
        "lacking": 10,
        "errors": [],
        "figures": {"hits": 50.0},
        "seconds": 0.0,
    }
    assert figures_of(outcome) == {"hits": 50.0, "p50": 1, "p99": 1, "keys": 500, "rate": 50}
    assert figures_of(outcome | {"seconds": 4.0})["rate"] == 25
    with pytest.raises(PeerFailed, match="11 of 1000 blocks: no room"):
        figures_of(outcome | {"lacking": 11, "errors": ["no room"]})
    with pytest.raises(PeerFailed, match="1 blocks came back with wrong bytes"):
        figures_of(outcome | {"wrong": 1})


def test_every_byte_of_a_block_is_checked_and_no_block_is_anothers() -> None:
    payload = Payload(SIZE)
    keys = new_chain(3)
    blocks = [memoryview(bytearray(SIZE)) for _ in keys]
    for position, block in enumerate(blocks):
        payload.fill(block, position)
    payload.stamp(keys, blocks)
    assert all(payload.equal(*pair) for pair in zip(keys, blocks, strict=True))
    assert not payload.equal(keys[0], blocks[1])
    for byte in (0, 40, SIZE // 2, SIZE - 1):
        blocks[0][byte] ^= 1
        assert not payload.equal(keys[0], blocks[0])
        blocks[0][byte] ^= 1
    payload.wipe(blocks)
    assert not any(payload.stamped(*pair) for pair in zip(keys, blocks, strict=True))
    assert named_chain("a", 40) == named_chain("a", 40) != named_chain("b", 40)


def test_pages_and_plots_say_what_the_turns_were(tmp_path: Path) -> None:
    report = Report(
        tmp_path / "out" / "peers",
        {"date": "today", "memory_bytes": 1 << 30, "peers": {"redis": "7"}},
    )
    ours, failed = scripted("us", kind="ours", key="us"), scripted("spoils")
    for size in moves.SIZES:
        turns = [{"rate": 2e9, "p50": 0.001}, {"rate": 4e9, "p50": 0.001}]
        labels = {"work": "get", "scene": "local", "block_bytes": size, "count": 1}
        entries = [Entry(ours, turns), Entry(failed, failure="wrong | bytes")]
        row = Row("local", f"local/get/{size}", "get", [Goal("rate", 2.0)], entries, labels)
        report.add(row)
        found = json.loads((tmp_path / "out" / "peers.json").read_text())
        assert found["rows"][-1]["contenders"][0]["turns"] == turns
    text = report.markdown.read_text()
    assert "| `local/get/1048576` | rate | 3.00 GB/s | no peer | - | - | 2 | - |" in text
    assert "scripted-spoils: no figure: wrong | bytes" in text
    assert "- memory bytes: 1 GiB\n- peers: redis 7\n" in text
    written = draw(report.rows, tmp_path / "out" / "peers")
    assert [path.name for path in written] == ["peers-local-rate.svg", "peers-local-p50.svg"]
    assert all(path.read_text().startswith("<?xml") for path in written)


def test_a_peer_that_there_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["peers", "--only", "trace", "--trace", str(tmp_path / "none"), "--peers", "redis"]
    monkeypatch.setattr(sys, "argv", [*words, "foo", "--output", str(tmp_path / "figures")])
    with pytest.raises(SystemExit) as refused:
        command.main()
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "'foo'" in said
    assert all(f"'{name}'" in said for name in ("redis", "redis-raw", "mooncake-tcp", "nixl"))


@pytest.mark.timeout(120)
def test_a_row_without_a_peer_says_why(tmp_path: Path) -> None:
    def said(*peers: Contender) -> str:
        heard: list[str] = []
        ours = scripted("", kind="ours", key="us")
        chosen = replace(options(tmp_path / str(len(peers)), ours, *peers), say=heard.append)
        with on_stage(chosen, chosen.contenders, "s", CAPACITY) as playing, all_open(playing, SIZE):
            row = Row("views", "views/put", "put", [Goal("p50")])
            take_turns(chosen, playing, row, "put", TURN)
        return heard[-1].partition("nobody to compare with")[2]

    absent = scripted("absent"), scripted("absent", key="scripted-more")
    unable = scripted("", key="redis-raw", lacks=frozenset({"put"}))
    assert said() == ": no peer was chosen"
    assert said(*absent) == ": it is not installed"
    assert said(*absent, unable) == ": it is not installed; redis does no put here"


@pytest.mark.timeout(300)
def test_the_command_writes_a_table_of_a_quick_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_redis()
    monkeypatch.setattr(moves, "CAPACITY", CAPACITY)
    monkeypatch.setattr(moves, "SIZES", (SIZE, 2 * SIZE))
    words = ["peers", "--quick", "--only", "views", "local", "--peers", "redis-raw-unix"]
    places = ["--output", str(tmp_path / "figures"), "--directory", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, *places])
    assert command.main() == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [row["group"] for row in found["rows"]] == [
        *["views"] * 4,
        *["local"] * 4,
        *["exists"] * 2,
        *["local"] * 4,
    ]
    everyone = {each["key"] for row in found["rows"] for each in row["contenders"]}
    assert everyone == {"ours-shm", "redis-raw-unix", "memcpy-1", "memcpy-2"}
    assert {e["failure"] for row in found["rows"] for e in row["contenders"]} == {""}
    held = {goal["held_against"] for row in found["rows"][4:] for goal in row["goals"]}
    assert held == {"redis-raw-unix"}
    assert "times as good" in capsys.readouterr().out
