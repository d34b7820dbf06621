"""The memory that a dying process may still be writing to is nobody else's before it is dead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.identity import Namespace, prefix_hashes
from kvstore.process_watch import ProcessWatch
from tests.running import DaemonThread, make_config, wait_for

BLOCK = 64 << 10
RESERVED = 48
SPACE = Namespace("living", "uint8", "raw", 1, BLOCK)
NAMES = prefix_hashes(range(1000, 1128), 1)
DATA = np.random.default_rng(0).integers(0, 256, (len(NAMES), BLOCK), np.uint8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DaemonThread]:
    """Room for 128 blocks."""
    with DaemonThread(make_config(tmp_path)) as running:
        yield running


@pytest.fixture
def dying(store: DaemonThread) -> Iterator[subprocess.Popen[str]]:
    """A process whose socket is closed, and that has not finished to write."""
    words = [store.url, str(BLOCK), str(RESERVED)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.kvstore.dying_writer", *words],
        cwd=Path(__file__).parent.parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "closed\n"
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def test_what_it_still_writes_hits_nobody(
    store: DaemonThread, dying: subprocess.Popen[str]
) -> None:
    assert dying.stdout is not None
    into = np.zeros_like(DATA)
    with kvstore.connect(store.url, SPACE, deadline=20.0) as client:
        for at in range(len(NAMES)):  # as many as there would be room for without it
            client.put([NAMES[at]], DATA[at : at + 1])  # each the first of a prompt
        tell(dying)
        assert dying.stdout.readline() == "written\n"
        found = client.get(NAMES, into)
        assert found.found >= len(NAMES) - RESERVED - 16
        for at in range(len(NAMES)):
            if found.codes[at]:
                assert np.array_equal(into[at], DATA[at])
        assert store.daemon.node.metrics.sessions == 2
        tell(dying)
        wait_for(lambda: store.daemon.node.metrics.sessions == 1, 20.0)
        assert store.daemon.node.metrics.reservations == 0


def test_a_node_stops_without_it(tmp_path: Path) -> None:
    with DaemonThread(make_config(tmp_path, node={"grace": 0.1})) as store:
        words = [store.url, str(BLOCK), str(RESERVED)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvstore.dying_writer", *words],
            cwd=Path(__file__).parent.parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"closed\n"
    process.kill()
    process.communicate()


def test_who_lives_or_is_gone_is_not_dying() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert ProcessWatch.of_dying(process.pid) is None
        process.kill()
        process.wait()
        assert ProcessWatch.of_dying(process.pid) is None
    assert ProcessWatch.of_dying(0) is None
