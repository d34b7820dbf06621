"""A replay against a running daemon hits what the simulation of the same trace says."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import kvstore
from kvstore.homes import homes
from kvstore.identity import Namespace
from kvstore.replay import Replay, ReplayReport
from kvstore.simulate import Configuration, Workload, simulate
from kvstore.simulate_pool import PoolConfiguration, simulate_pool
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


def test_nodes_that_are_alone_hit_exactly_what_simulate_says(tmp_path: Path) -> None:
    blocks, size = 512, 512 * BLOCK
    work = Workload(Trace(EXCERPT), TOKENS)
    configuration = PoolConfiguration(3, Configuration("lru", 3 * blocks), seed=5)
    with ExitStack() as stack:
        clients = []
        for number in range(3):
            config = make_config(
                tmp_path / str(number),
                dram={"capacity": size, "segment": size},
                limits={"session_pinned": 1.0},
            )
            daemon = stack.enter_context(DaemonThread(config))
            client = kvstore.connect(daemon.url, NAMESPACE, deadline=20.0)
            clients.append(stack.enter_context(client))
        run = Replay(clients, homes("random", 3, 5), block_bytes=BLOCK, block_tokens=TOKENS)
        run.run(Trace(EXCERPT), lambda request: None)
    expected = simulate_pool(work, configuration).isolated
    assert run.report.hits == expected.blocks > 0
    assert sum(run.report.hit_tokens.values()) == expected.tokens
    assert (run.report.wrong, run.report.lost, run.report.failures) == (0, 0, {})


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
