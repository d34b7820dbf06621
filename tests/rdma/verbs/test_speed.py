"""A daemon and its client keep pace with perftest, as far as an emulated machine can tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from client.blocking import Client
from kvstore.identity import Namespace
from tests.kvstore.watched import Watched, chain
from tests.rdma.guest.perftest import measure
from tests.running import make_config

MIB = 1 << 20
BATCH = 32
LEAST = 0.5
"""Of perftest. ``make bench-rdma`` has the figures and the goal; this catches what is broken."""
TURNS = 4
"""One good turn is enough: the spread is large, and nothing makes a turn too good by accident."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    sections = {
        "listen": {"tcp": "127.0.0.1:0", "insecure": True},
        "dram": {"capacity": "192MiB", "segment": "96MiB"},
        "rdma": {"mode": "require", "device": "rxe0"},
    }
    where = Namespace("m", "float32", "speed", 16, MIB)
    with (
        Watched(make_config(tmp_path, **sections)) as node,
        kvstore.connect(node.tcp_url, where, transport="rdma", deadline=60.0) as client,
    ):
        yield client


def best_ratio(call: Callable[[], int], tool: str) -> float:
    """Of the call's bytes a second to perftest's, turn about."""
    assert call() == BATCH
    best = 0.0
    for _ in range(TURNS):
        began = time.monotonic()
        assert call() == BATCH
        rate = BATCH * MIB / (time.monotonic() - began)
        best = max(best, rate / (measure(tool, MIB, BATCH) * 1e6))
        print(f"{rate / 1e6:.0f} MB/s, {best:.2f} x {tool} at best")
        if best >= LEAST:
            break
    return best


def test_gets_and_puts_keep_pace_with_perftest(client: Client) -> None:
    pool = np.random.default_rng(1).integers(0, 256, (BATCH, MIB), np.uint8)
    names = chain("speed", length=BATCH)
    with client.register(pool):
        assert client.put(names, pool).stored == BATCH
        got = best_ratio(lambda: client.get(names, pool).found, "ib_write_bw")
        put = best_ratio(
            lambda: client.put(chain(time.monotonic(), length=BATCH), pool).stored, "ib_read_bw"
        )
    assert got >= LEAST
    assert put >= LEAST
