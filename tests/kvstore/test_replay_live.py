"""A replay against a running daemon hits what the simulation of the same trace says."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore.identity import Namespace
from kvstore.replay import Replay, ReplayReport
from kvstore.simulate import Configuration, Workload, simulate
from kvstore.trace import Trace
from tests.kvstore.trace_files import EXCERPT
from tests.running import DaemonThread, make_config

BLOCK = 4096
TOKENS = 512
NAMESPACE = Namespace("replay", "uint8", "replay", TOKENS, BLOCK)


def replay(url: str, batch: int) -> ReplayReport:
    with kvstore.connect(url, NAMESPACE, deadline=20.0) as client:
        run = Replay([client], block_bytes=BLOCK, block_tokens=TOKENS, batch_bytes=batch * BLOCK)
        run.run(Trace(EXCERPT), lambda request: None)
    return run.report


@pytest.mark.parametrize("policy", ["lru", "arc", "fifo"])
@pytest.mark.parametrize(("blocks", "batch"), [(512, 256), (2048, 50)])
def test_dram_alone_hits_exactly_what_simulate_says(
    tmp_path: Path, policy: str, blocks: int, batch: int
) -> None:
    size = blocks * BLOCK
    dram = {"capacity": size, "segment": min(size, 4 << 20)}
    limits = {"session_pinned": 1.0}
    config = make_config(tmp_path, dram=dram, policy={"dram": policy}, limits=limits)
    with DaemonThread(config) as daemon:
        report = replay(daemon.url, batch)
    expected = simulate(Workload(Trace(EXCERPT), TOKENS), Configuration(policy, blocks))
    assert report.hit_blocks.get("dram", 0) == expected.hit_blocks["dram"] > 0
    assert report.hit_tokens.get("dram", 0) == expected.hit_tokens["dram"]
    assert (report.accesses, report.wrong, report.lost) == (7539, 0, 0)
    assert (report.refused, report.failed, report.failures) == (0, 0, {})
    assert report.stored == report.accesses - report.hits


def test_a_second_tier_and_tcp_give_right_bytes_and_more_hits(tmp_path: Path) -> None:
    size = 1024 * BLOCK
    config = make_config(
        tmp_path,
        dram={"capacity": size, "segment": size},
        ssd={"capacity": 64 << 20, "region": 2 << 20},
        listen={"tcp": "127.0.0.1:0"},
    )
    with DaemonThread(config) as daemon:
        cold = replay(daemon.tcp_url, 64)
        warm = replay(daemon.url, 64)
    alone = simulate(Workload(Trace(EXCERPT), TOKENS), Configuration("lru", 1024))
    assert cold.wrong == warm.wrong == 0
    assert cold.hit_blocks["ssd"] > 0
    assert cold.hits > alone.hit_blocks["dram"]
    assert (cold.warm, warm.warm > 0) == (0, True)
