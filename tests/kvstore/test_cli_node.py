"""The command line against a real node, filled by a real client."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.cli import main
from tests.running import DaemonThread, make_config, wait_for

BLOCK = 64 << 10
TOKENS = list(range(16 * 10))
NAMESPACE = kvstore.Namespace("acme/llama", "bfloat16", "NHD", 16, BLOCK)
TEXT = ",".join(map(str, TOKENS))
HASHES = kvstore.prefix_hashes(TOKENS, NAMESPACE.block_tokens)

Cli = Callable[..., tuple[int, str]]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(make_config(tmp_path, ssd={"capacity": "32MiB"})) as daemon:
        with kvstore.connect(daemon.url, NAMESPACE) as client:
            client.put(HASHES, [bytes([index]) * BLOCK for index in range(len(HASHES))])
        yield daemon


@pytest.fixture
def cli(
    node: DaemonThread, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    monkeypatch.setenv("KVSTORE_CONTROL", str(node.daemon.control_url).removeprefix("http://"))

    def run(*arguments: str) -> tuple[int, str]:
        status = main.main(arguments)
        printed = capsys.readouterr()
        assert "internal" not in printed.err
        return status, printed.out

    return run


def answer(cli: Cli, *arguments: str, status: int = 0) -> Any:
    found, out = cli(*arguments, "--json")
    assert found == status
    return json.loads(out)


def test_what_was_put_is_seen(cli: Cli) -> None:
    assert answer(cli, "status")["blocks"] == len(HASHES)
    assert answer(cli, "namespaces")[0]["description"] == NAMESPACE.describe()
    first = answer(cli, "ls", "--limit", "6")
    second = answer(cli, "ls", "--limit", "6", "--cursor", first["cursor"])
    listed = [one["hash"] for one in first["blocks"] + second["blocks"]]
    assert sorted(listed) == sorted(one.hex() for one in HASHES)
    chain = answer(cli, "inspect", "--prefix", HASHES[4].hex()[:12])
    assert [one["hash"] for one in chain] == [one.hex() for one in HASHES[:5]]
    assert [one["children"] for one in chain] == [1] * 5
    tokens = ",".join(map(str, [*TOKENS, *range(16)]))
    found = answer(cli, "match", "--tokens", tokens, status=1)
    assert (found["asked"], found["blocks"]) == (11, 10)
    assert answer(cli, "explain", "-t", tokens, status=1)["ending"] == "never_stored"


def test_namespaces_without_blocks_are_no_choice_beside_one_with_some(
    cli: Cli, node: DaemonThread
) -> None:
    empty = replace(NAMESPACE, model="kvstore-bench")
    with kvstore.connect(node.url, empty) as client:
        assert client.put(HASHES[:1], [bytes(BLOCK)]).stored == 1
        assert cli("match", "--tokens", TEXT)[0] == main.USAGE
        answer(cli, "evict", "--all", "-n", empty.model)
    assert len(answer(cli, "namespaces")) == 2
    assert answer(cli, "match", "--tokens", TEXT)["blocks"] == len(HASHES)
    assert answer(cli, "explain", "--tokens", TEXT)["blocks"] == len(HASHES)
    assert answer(cli, "evict", "--all")["blocks"] == len(HASHES)
    assert cli("match", "--tokens", TEXT)[0] == main.USAGE  # now neither has any


def test_a_pinned_prefix_outlives_an_eviction(cli: Cli) -> None:
    pinned = answer(cli, "pin", HASHES[3].hex(), "--ttl", "1h")
    assert pinned["blocks"] == 4
    left = answer(cli, "evict", "--all", status=1)
    assert (left["blocks"], left["kept"]) == (6, 4)
    found = answer(cli, "explain", *(one.hex() for one in HASHES), status=1)
    assert (found["blocks"], found["ending"], found["reason"]) == (4, "departed", "admin")
    assert answer(cli, "unpin", HASHES[3].hex())["blocks"] == 4
    assert answer(cli, "evict", HASHES[0].hex())["blocks"] == 4
    assert answer(cli, "status")["blocks"] == 0


def test_a_flushed_tier_is_empty_and_its_blocks_sound(cli: Cli) -> None:
    assert answer(cli, "flush", "dram")["moved"] == len(HASHES)
    tiers = {tier["name"]: tier["blocks"] for tier in answer(cli, "status")["tiers"]}
    assert tiers == {"dram": 0, "ssd": len(HASHES)}
    found = answer(cli, "verify")
    assert (found["checked"], found["corrupt"], found["finished"]) == (len(HASHES), 0, True)


def test_top_sees_a_client_at_work(cli: Cli, node: DaemonThread) -> None:
    with kvstore.connect(node.url, NAMESPACE) as client:
        client.get(HASHES, [bytearray(BLOCK) for _ in HASHES])
        assert "100.0%" in cli("top", "--once", "-i", "0.1")[1]


def serve(directory: Path) -> "subprocess.Popen[str]":
    flags = (
        *("--state-directory", str(directory), "--dram", "8MiB"),
        *("--control", "127.0.0.1:0", "--metrics", "off", "--log-format", "json"),
    )
    return subprocess.Popen(
        [sys.executable, "-m", "kvstore", "serve", *flags],
        env={"PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_serve_ends_in_order_and_guards_its_state(tmp_path: Path) -> None:
    with serve(tmp_path) as first:
        wait_for((tmp_path / "kvstore.sock").exists, 20)
        with serve(tmp_path) as second:
            _, said = second.communicate(timeout=20)
        assert second.returncode == main.FAILED
        assert f"in use by process {first.pid}" in said
        time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        _, logged = first.communicate(timeout=20)
    assert first.returncode == 0
    events = [json.loads(line)["event"] for line in logged.splitlines()]
    assert "serving" in events
    assert events[-1] == "stopped"
