"""``kvstore bench`` against real nodes: what it prints, refuses and leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.bench import CALLS
from kvstore.cli import bench_run, main
from kvstore.cli.bench_run import MODEL, Cleaning
from kvstore.cli.options import Remote
from kvstore.control.interface import Removal
from kvstore.doctor import memory
from tests.running import DaemonThread, make_config, wait_for

NAMESPACE = kvstore.Namespace("acme/llama", "bfloat16", "NHD", 16, 64 << 10)
HASHES = kvstore.prefix_hashes(list(range(16 * 10)), NAMESPACE.block_tokens)
SMALL = ("--memory", "2MiB", "--block-size", "64KiB,256KiB", "--batch", "1,4", "--seconds", "0.1")

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def of(daemon: DaemonThread, url: str | None = None) -> tuple[str, ...]:
    control = str(daemon.daemon.control_url).removeprefix("http://")
    return "--control", control, "--url", url or daemon.url


def held(cli: Cli, daemon: DaemonThread) -> dict[str, int]:
    """Blocks by model."""
    found: dict[str, int] = {}
    for one in json.loads(cli("namespaces", "--json", *of(daemon)[:2])[1]):
        model = one["description"]["model"]
        found[model] = found.get(model, 0) + one["blocks"]
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_node_is_measured_and_left_as_it_was(tmp_path: Path, cli: Cli, transport: str) -> None:
    with DaemonThread(make_config(tmp_path, listen={"tcp": "127.0.0.1:0"})) as daemon:
        with kvstore.connect(daemon.url, NAMESPACE) as client:
            client.put(HASHES, [bytes([index]) * (64 << 10) for index in range(len(HASHES))])
        where = of(daemon, daemon.tcp_url if transport == "tcp" else None)
        status, out, err = cli("bench", *SMALL, *where, "--json")
        assert (status, err) == (0, "")
        found = json.loads(out)
        assert held(cli, daemon) == {"acme/llama": len(HASHES), MODEL: 0}
    assert (found["transport"], found["evicted"], found["left"]) == (transport, 0, 0)
    loads = [(one["block_bytes"], one["batch"]) for one in found["loads"]]
    assert loads == [(64 << 10, 1), (64 << 10, 4), (256 << 10, 1), (256 << 10, 4)]
    for one in found["loads"]:
        assert (one["wrong"], one["lost"]) == (0, 0)
        assert one["calls"].keys() == set(CALLS)
        for call in one["calls"].values():
            assert call["calls"] > 0
            assert 0 < call["p50"] <= call["p99"] <= call["seconds"]


def test_a_table_has_a_row_for_each_call(tmp_path: Path, cli: Cli) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        status, out, err = cli("bench", *SMALL, *of(daemon))
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    # As "64 KiB 4 exists 16 21us ...".
    kinds = [row[3] for row in rows if row[1:2] == ["KiB"]]
    assert kinds == [*CALLS] * 4
    assert "over shm, up to 2 MiB in it at once" in out


def test_a_node_without_room_is_left_alone(tmp_path: Path, cli: Cli) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        status, _, err = cli("bench", "--memory", "8MiB", "--block-size", "1MiB", "--batch", "1",
                             *of(daemon))  # fmt: skip
        assert status == main.FAILED
        assert "7.2 MiB of DRAM that nobody else needs" in err
        assert "--memory 7MiB" in err
        assert held(cli, daemon) == {}


def test_room_is_made_where_that_was_asked_for(tmp_path: Path, cli: Cli) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        with kvstore.connect(daemon.url, NAMESPACE) as client:
            for number in range(16):
                names = kvstore.prefix_hashes([number] * 160, NAMESPACE.block_tokens)
                assert client.put(names, [bytes(64 << 10)] * 10).stored == 10
        assert cli("bench", *SMALL, *of(daemon))[0] == main.FAILED
        status, out, _ = cli("bench", *SMALL, *of(daemon), "--make-room", "--json")
        assert status == 0
        assert json.loads(out)["evicted"] > 0
        assert held(cli, daemon)[MODEL] == 0


@pytest.mark.parametrize("memory", ["900GiB", "16MiB"])
def test_nothing_is_dropped_for_more_than_the_node_holds(
    tmp_path: Path, cli: Cli, memory: str
) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        with kvstore.connect(daemon.url, NAMESPACE) as client:
            client.put(HASHES, [bytes(64 << 10)] * len(HASHES))
        status, _, err = cli("bench", *SMALL, "--memory", memory, *of(daemon), "--make-room")
        assert status == main.FAILED
        assert "7.2 MiB at most" in err
        assert held(cli, daemon) == {"acme/llama": len(HASHES)}


def test_more_than_this_process_can_have_is_refused(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: (3 << 20, ""))
    with DaemonThread(make_config(tmp_path)) as daemon:
        status, _, err = cli("bench", *SMALL, *of(daemon))
        assert status == main.USAGE
        assert "3 MiB available" in err
        assert held(cli, daemon) == {}


def test_what_is_put_must_be_removable(tmp_path: Path, cli: Cli) -> None:
    other = make_config(tmp_path / "other")
    with DaemonThread(make_config(tmp_path)) as daemon, DaemonThread(other) as elsewhere:
        status, _, err = cli("bench", *SMALL, *of(daemon, elsewhere.url))
        assert status == main.USAGE
        assert "another node" in err
        assert held(cli, elsewhere) == {MODEL: 0}
    status, _, err = cli("bench", *SMALL, *of(daemon))
    assert status == main.NOT_THERE
    assert "--url and --control" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", "0"), "from 1 to 65536 blocks"),
        (("--batch", "x"), "from 1 to 65536 blocks"),
        (("--block-size", "0"), "between 1 byte and 1 GiB"),
        (("--memory", "0"), "between 1 byte and 1 TiB"),
        (
            ("--memory", "1MiB", "--batch", "1,2", "--block-size", "1MiB"),
            "2 blocks of 1 MiB are more than 1 MiB: take more --memory, or a smaller "
            "--block-size or --batch",
        ),
        (
            ("--block-size", "512MiB", "--batch", "1"),
            "1 block of 512 MiB is more than 256 MiB: take more --memory, or a smaller "
            "--block-size",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(
    cli: Cli, arguments: tuple[str, ...], said: str
) -> None:
    status, _, err = cli("bench", *arguments)
    assert status == main.USAGE
    assert said in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_that_is_ended_leaves_nothing(
    tmp_path: Path, cli: Cli, number: signal.Signals
) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        command = [sys.executable, "-m", "kvstore", "bench", *SMALL, "--seconds", "3000"]
        root = Path(__file__).parents[2]
        with subprocess.Popen([*command, *of(daemon)], cwd=root, stdout=subprocess.PIPE) as process:
            wait_for(lambda: held(cli, daemon).get(MODEL, 0) > 0, 30)
            process.send_signal(number)
            process.communicate(timeout=30)
        assert process.returncode == main.INTERRUPTED
        assert held(cli, daemon) == {MODEL: 0}


class Node:
    """Answers evictions with what stays, one after the other."""

    def __init__(self, *kept: int) -> None:
        self.kept = list(kept)

    def ask(self, remote: Remote, question: Any) -> Removal:
        return Removal(1, 1, kept=self.kept.pop(0) if len(self.kept) > 1 else self.kept[0])


def test_what_is_pinned_is_removed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(3, 2, 0)
    monkeypatch.setattr(bench_run, "ask", node.ask)
    cleaning = Cleaning(Remote(None, None))
    assert cleaning.remove(b"namespace", b"root") == 3
    assert cleaning.finish() == 0
    assert node.kept == [0]


def test_what_stays_pinned_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "ask", Node(4).ask)
    monkeypatch.setattr(bench_run, "_CLEANING_SECONDS", 0.0)
    cleaning = Cleaning(Remote(None, None))
    cleaning.remove(b"namespace", b"root")
    assert cleaning.finish() == 4
