"""``kvstore events`` against a real node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.cli import main
from tests.running import DaemonThread, make_config

BLOCK = 4096
NAMESPACE = kvstore.Namespace("acme/llama", "uint8", "raw", 4, BLOCK)
OTHER = kvstore.Namespace("acme/mistral", "uint8", "raw", 4, BLOCK)
HASHES = kvstore.prefix_hashes(list(range(40)), 4)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(make_config(tmp_path, node={"name": "node-1"})) as daemon:
        put(daemon, NAMESPACE, HASHES[:3])
        put(daemon, OTHER, HASHES[:1])
        yield daemon


def put(daemon: DaemonThread, namespace: kvstore.Namespace, hashes: list[bytes]) -> None:
    with kvstore.connect(daemon.url, namespace, deadline=10.0) as client:
        assert client.put(hashes, [bytes(BLOCK)] * len(hashes)).stored


def control(daemon: DaemonThread) -> str:
    return str(daemon.daemon.control_url).removeprefix("http://")


def test_once_prints_what_is_held(node: DaemonThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["events", "--once", "--control", control(node)]) == main.DONE
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("# node-1 (start ")
    assert head.endswith("): what it holds")
    assert len(lines) == 4
    name = NAMESPACE.fingerprint.hex()[:16]
    first, second = (one.hex()[:16] for one in HASHES[:2])
    told = [line.split() for line in lines if name in line]
    assert told[0] == ["stored", first, "parent", "none", "dram", "shard", "0", "of", name]
    assert told[1] == ["stored", second, "parent", first, "dram", "shard", "0", "of", name]


def test_once_in_json_for_one_namespace(
    node: DaemonThread, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["events", "--once", "--json", "-n", "mistral", "--control", control(node)]
    assert main.main(asked) == main.DONE
    batches = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [batch["word"] for batch in batches] == ["reset", "snapshot", "snapshot"]
    assert batches[0]["node"] == "node-1"
    (event,) = [event for batch in batches for event in batch["events"]]
    assert event == {
        "change": "stored",
        "namespace": OTHER.fingerprint.hex(),
        "shard": 0,
        "hash": HASHES[0].hex(),
        "parent": "00" * 32,
        "tiers": ["dram"],
    }


def test_a_namespace_that_is_not_there(
    node: DaemonThread, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["events", "-n", "gpt", "--control", control(node)]) == main.USAGE
    assert "names no namespace" in capsys.readouterr().err


def test_what_happens_is_printed_as_it_happens(node: DaemonThread) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "events", "--json", "--control", control(node)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    try:
        begun = json.loads(process.stdout.readline())
        assert (begun["word"], begun["events"]) == ("resumed", [])
        put(node, NAMESPACE, HASHES[:4])
        told = json.loads(process.stdout.readline())
        assert told["word"] == "events"
        assert [event["hash"] for event in told["events"]] == [HASHES[3].hex()]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (main.INTERRUPTED, b"")
    finally:
        process.kill()
        process.wait()


def test_the_end_of_the_node_is_the_end(tmp_path: Path) -> None:
    with DaemonThread(make_config(tmp_path)) as daemon:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", "events", "--control", control(daemon)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert b"from now on" in process.stdout.readline()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == main.NOT_THERE
    assert b"closed the connection" in errors
