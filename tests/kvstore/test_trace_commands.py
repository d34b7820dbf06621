"""``kvstore simulate`` and ``kvstore replay`` as a person or a script runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import main
from kvstore.errors import MissingExtra
from kvstore.replay import BlockBytes
from tests.kvstore.trace_files import EXCERPT
from tests.running import DaemonProcess, daemon_process, make_config

TRACE = str(EXCERPT)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One for all tests, each of which has a salt of its own."""
    dram = {"capacity": 512 * 4096, "segment": 512 * 4096}
    with daemon_process(make_config(tmp_path_factory.mktemp("state"), dram=dram)) as running:
        yield running


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    output = capsys.readouterr()
    assert output.err == ""
    document = json.loads(output.out)
    assert isinstance(document, dict)
    return document


def test_simulate_prints_one_row_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dram", "10%,512", "--dram", "infinite", "--policy", "lru,arc", "--ssd", "0,50%"]
    assert main(["simulate", TRACE, *arguments]) == 0
    text = capsys.readouterr().out
    rows = [line.split()[0] for line in text.splitlines() if line.endswith("% ")]
    assert rows == ["lru"] * 4 + ["any"] + ["arc"] * 4
    assert "200 requests, 7,539 block accesses, 5,882 unique blocks" in text
    assert "IN SSD" in text
    assert "22.0%" in text
    assert "\x1b" not in text


def test_simulate_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", TRACE, "--dram", "2MiB", "--block-size", "4KiB", "--json"]) == 0
    document = as_json(capsys)
    [outcome] = document["outcomes"]
    assert (document["accesses"], document["unique_blocks"]) == (7539, 5882)
    assert (outcome["policy"], outcome["dram_blocks"], outcome["ssd_blocks"]) == ("lru", 512, 0)
    assert outcome["hit_blocks"] == {"dram": 283, "ssd": 0}
    assert outcome["hit_rate"] == pytest.approx(283 / 7539)


def test_simulate_draws_and_takes_a_part_of_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "rates.svg"
    assert main(["simulate", TRACE, "--requests", "50", "--orphans", "--plot", str(plot)]) == 0
    assert f"Plot written to {plot}" in capsys.readouterr().out
    assert "synthetic-excerpt.jsonl" in plot.read_text()


def test_simulate_compares_a_pool_with_isolated_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "pools.svg"
    arguments = ["simulate", TRACE, "--dram", "20%", "--nodes", "1,4", "--routing", "round-robin"]
    assert main([*arguments, "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith(" lru")]
    assert [row[4] for row in rows] == ["1", "4"]
    for column in ("LOCAL", "REMOTE", "ISOLATED", "GAIN", "LOOKUPS", "PULLED", "COPIES"):
        assert column in text
    assert "nodes, which share" in plot.read_text()
    assert main([*arguments, "--seed", "3", "--own-last", "--json"]) == 0
    document = as_json(capsys)
    one, four = document["outcomes"]
    assert document["seconds"] > 0
    assert (one["nodes"], one["gain"], one["pulled"]) == (1, 1.0, 0)
    assert (four["nodes"], four["routing"], four["seed"]) == (4, "round-robin", 3)
    assert four["own_last"] is True
    assert four["pulled"] == four["pooled"]["remote_blocks"] > 0
    assert four["hit_rate"] * document["accesses"] == pytest.approx(
        four["pooled"]["local_blocks"] + four["pooled"]["remote_blocks"]
    )
    assert four["isolated"]["remote_blocks"] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--nodes", "some"], 2, "expected numbers such as 1,2,4"),
        (["--nodes", "0"], 2, "a pool has 1 to 4096 nodes"),
        (["--nodes", "2", "--routing", "best"], 2, "no routing is called 'best'"),
        (["--nodes", "2", "--orphans"], 2, "there are no orphans"),
        (["--dram", "lots"], 2, "expected a capacity such as 5%"),
        (["--dram", "0"], 2, "DRAM must have room for one block"),
        (["--policy", "mru"], 2, "no policy is called 'mru'"),
        (["--block-size", "0"], 2, "between 1 byte and 1 GiB"),
        (["--block-size", "big"], 2, "expected a size"),
        (["--block-tokens", "16"], 1, ":1: has"),
        (["--plot", "rates.pdf"], 2, "must end in .png or .svg"),
    ],
)
def test_simulate_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    assert main(["simulate", TRACE, *arguments]) == status
    output = capsys.readouterr()
    assert said in " ".join(output.err.replace("│", " ").split())
    assert output.out == ""


@pytest.mark.parametrize("command", ["simulate", "replay"])
def test_a_bad_trace_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], daemon: DaemonProcess, command: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(EXCERPT.read_text().splitlines()[0] + "\nnot JSON\n")
    arguments = ["--url", daemon.url] if command == "replay" else []
    assert main([command, str(bad), *arguments]) == 1
    assert f"{bad}:2: is not JSON" in capsys.readouterr().err
    assert main([command, str(tmp_path / "none"), *arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().err)
    assert error["error"] == "trace"
    assert "cannot be read" in error["message"]


def test_a_missing_extra_is_named_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: Path) -> None:
        raise MissingExtra.named("plot", "drawing a plot")

    monkeypatch.setattr("kvstore.plot.check_plot", missing)
    assert main(["simulate", str(tmp_path / "none"), "--plot", "a.png"]) == 1
    assert "plot" in capsys.readouterr().err


def test_replay_reports_hits_by_tier_and_speed(
    capsys: pytest.CaptureFixture[str], daemon: DaemonProcess
) -> None:
    arguments = ["replay", TRACE, "--url", daemon.url, "--block-size", "4KiB"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "200 requests to unix://" in text
    assert "over shm" in text
    for row in ("dram", "all tiers", "missed", "match", "get", "put"):
        assert any(line.split()[: len(row.split())] == row.split() for line in text.splitlines())
    assert "3.8%" in text
    assert "WRONG" not in text
    assert main([*arguments, "--json", "--salt", "again", "--requests", "50"]) == 0
    document = as_json(capsys)
    assert (document["requests"], document["wrong"], document["warm"]) == (50, 0, 0)
    assert document["match"]["calls"] == 50
    assert document["put"]["bytes"] == document["stored"] * 4096
    assert document["transport"] == "shm"


def test_replay_sends_requests_to_several_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], daemon: DaemonProcess
) -> None:
    arguments = ["replay", TRACE, "--block-size", "4KiB", "--requests", "60", "--json"]
    with daemon_process(make_config(tmp_path)) as other:
        urls = ["--url", daemon.url, "--url", other.url, "--salt", "several"]
        assert main([*arguments, *urls, "--routing", "round-robin"]) == 0
        document = as_json(capsys)
        assert document["urls"] == [daemon.url, other.url]
        # Half of what was stored is at the other node, and is no hit at this one.
        assert main([*arguments, "--url", other.url, "--salt", "several"]) == 0
        again = as_json(capsys)
    assert document["wrong"] == again["wrong"] == document["warm"] == 0
    assert 0 < again["warm"] < document["stored"]
    assert main([*arguments, "--url", daemon.url, "--routing", "prefix"]) == 2
    assert "'prefix'; there are random, round-robin" in capsys.readouterr().err


def test_replay_fails_where_a_byte_is_wrong(
    capsys: pytest.CaptureFixture[str], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockBytes, "matches", lambda self, block, found: False)
    arguments = ["replay", TRACE, "--url", daemon.url, "--block-size", "4KiB", "--salt", "wrong"]
    assert main(arguments) == 1
    assert "283 blocks came back with WRONG BYTES" in capsys.readouterr().out


def test_replay_finds_the_node_of_the_configuration(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_LISTEN__UNIX", str(daemon.config.listen.unix))
    arguments = ["replay", TRACE, "--block-size", "4KiB", "--salt", "found", "--requests", "3"]
    assert main(arguments) == 0
    assert "3 requests" in capsys.readouterr().out


def test_replay_without_a_daemon_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", TRACE, "--url", f"unix://{tmp_path}/no.sock"]) == 3
    assert "kvstore serve" in capsys.readouterr().err
