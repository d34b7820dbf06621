"""The rows beyond single calls, measured in small: on ourselves and on a store that goes wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.contender import Contender, Place, Scene, Setup
from benchmarks.peers.contenders import LIMITS, OURS
from benchmarks.peers.groups import churn, clients, disk, footprint
from benchmarks.peers.row import Row
from benchmarks.peers.run import Options

MIB = 1 << 20
SCALE = 0.01
EVERYWHERE = frozenset(Scene)
US = replace(OURS[0], scenes=EVERYWHERE)
LIMIT = replace(LIMITS[0], scenes=EVERYWHERE)

pytestmark = pytest.mark.timeout(240)


def scripted(fault: str) -> Contender:
    @contextmanager
    def start(_: Place) -> Iterator[Setup]:
        yield Setup({"fault": fault})

    name, adapter = fault or "well", "tests.benchmarks.scripted_adapter"
    return Contender(name, name, adapter, "peer", EVERYWHERE, start)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Everyone with some 64 MiB of memory, and a trace of three requests."""
    memory = round(64 * MIB / SCALE)
    for module in (churn, disk):
        monkeypatch.setattr(module, "GIB", memory)
    monkeypatch.setattr(footprint, "GIB", 64 * MIB)
    monkeypatch.setattr(clients, "CAPACITY", 64 * MIB)
    monkeypatch.setattr(clients, "KEPT", 8 * MIB)
    monkeypatch.setattr(disk, "SETTLE", 0.1)
    monkeypatch.setattr(disk, "COLD", False)
    trace = tmp_path / "trace.jsonl"
    chains = ([0, 1, 2], [0, 1, 3, 4], [0, 1, 2])
    trace.write_text("".join(json.dumps({"hash_ids": chain}) + "\n" for chain in chains))
    taking = (US, scripted(""), scripted("spoils"), LIMIT)
    return Options(taking, tmp_path / "s", tmp_path / "none", rounds=1, scale=SCALE, trace=trace)


def check(row: Row, *figures: str, spoilt: str = "wrong bytes") -> None:
    """We and the store that goes well have these figures, and the other one says what is wrong."""
    found = {each.contender.key: each for each in row.entries}
    assert {"ours-shm", "well", "spoils"} <= found.keys()
    assert LIMIT.key not in found
    assert (found["ours-shm"].failure, found["well"].failure) == ("", "")
    for key in ("ours-shm", "well"):
        assert len(found[key].turns) == 1
        assert set(figures) <= found[key].turns[0].keys()
        assert all(value >= 0 for value in found[key].turns[0].values())
    assert spoilt in found["spoils"].failure
    assert row.verdicts[0].ratio is not None


def test_many_clients(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLIENTS", (1, 3))
    alone, together = clients.clients(options)
    assert (alone.key, together.key) == ("clients/1", "clients/3")
    check(alone, "rate", "p50", "p99")
    found = {each.contender.key: each for each in together.entries}
    assert (found["ours-shm"].failure, len(found["ours-shm"].turns)) == ("", 1)
    # One that keeps blocks in the client's own process does not see what others put.
    assert "KeyError" in found["well"].failure


def test_who_can_share_nothing_has_one_client(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CLIENTS", (1, 2))
    private = replace(scripted(""), lacks=frozenset({"share"}))
    rows = clients.clients(replace(options, contenders=(private,)))
    assert [len(row.entries) for row in rows] == [1, 0]


def test_outcomes_of_clients_are_put_together() -> None:
    one = {"samples": [1.0], "errors": ["a"], "bytes": 5, "items": 1, "wrong": 0, "lacking": 1}
    other = one | {"samples": [2.0, 3.0], "bytes": 7, "wrong": 2, "seconds": 4.0}
    assert clients.together([one | {"seconds": 3.0}, other]) == {
        "samples": [1.0, 2.0, 3.0],
        "errors": ["a", "a"],
        "bytes": 12,
        "items": 2,
        "wrong": 2,
        "lacking": 2,
        "figures": {},
        "seconds": 4.0,
    }


def test_eviction(options: Options) -> None:
    (row,) = churn.eviction(options)
    check(row, "rate", "p99", "hits")
    hits = {each.contender.key: each.turns[0]["hits"] for each in row.entries if each.turns}
    # Only the other one surely holds all that is asked for.
    assert 0.0 <= hits["ours-shm"] <= hits["well"] == 100.0


def test_a_trace(options: Options) -> None:
    rows = list(churn.trace(options))
    assert [row.key for row in rows] == ["trace/local", "trace/views"]
    check(rows[0], "seconds", "hits", "rate")
    hits = {each.contender.key: each.turns[0]["hits"] for each in rows[1].entries if each.turns}
    assert hits["ours-shm"] == hits["well"] == 50.0


def test_a_working_set_of_twice_the_memory(options: Options) -> None:
    put, get = disk.disk(options)
    for row in (put, get):
        row.entries = [each for each in row.entries if each.contender is not disk.FIO]
        check(row, "rate", "hits")
    rates = {each.contender.key: each.turns[0] for each in put.entries if each.turns}
    assert rates["well"]["hits"] == 100.0
    assert rates["ours-shm"]["hits"] > 0


def test_without_fio_a_row_says_so(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    rows = list(disk.disk(replace(options, contenders=())))
    assert [each.failure for row in rows for each in row.entries] == [
        "no fio: install the package fio"
    ] * 2


def test_time_to_the_first_hit_and_memory_of_keys(options: Options) -> None:
    (start,) = footprint.start(options)
    check(start, "seconds")
    (keys,) = footprint.keys(replace(options, contenders=(US, scripted(""))))
    found = {each.contender.key: each for each in keys.entries}
    assert found["well"].failure == "RuntimeError: it does not say what its keys take"
    assert found["ours-shm"].failure == ""
    assert 0 <= found["ours-shm"].turns[0]["bytes"] < 5_000_000_000
