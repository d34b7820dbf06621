"""Several workers and several engines: who stores what, and who may use it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.connect import connect
from kvstore.identity import ROOT_PARENT, Namespace, prefix_hashes
from tests.engines import node
from tests.engines.asking import Ask, assert_same, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.models import make_llama, make_mla
from tests.engines.process import BLOCK, EngineProcess
from tests.running import DaemonProcess

LOADED = "vllm:kvstore_loaded_blocks_total"
STORED = "vllm:kvstore_stored_blocks_total"
BUSY = "vllm:kvstore_busy_blocks_total"
REUSED = "vllm:external_prefix_cache_hits_total"
ERRORS = "vllm:kvstore_guarded_errors_total"
PUT = "kvstore_put_blocks_total{outcome=stored}"

PATIENCE = 0.5
"""Seconds for a lookup: what is stored is to be found on a busy machine too."""

TWO_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}
"""Both on the same cores as everything else; without it vLLM looks for a NUMA node for each."""

TWO_STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    # vLLM for CPUs makes room for what passes between stages only where it means to compile.
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
    "env": TWO_RANKS["env"] | {"TORCH_COMPILE_DISABLE": "0", "TORCHDYNAMO_DISABLE": "1"},
}

LONG = Ask(prompt(1, 200))
EXACT = Ask(prompt(2, 8 * BLOCK))
OTHER = Ask(prompt(3, 5 * BLOCK + 3))


@dataclass(frozen=True)
class Engines:
    """On one node, all of one model.

    Attributes:
        first: two ranks that have computed LONG and EXACT.
        second: two more ranks.
        alone: two engines of one rank each.
    """

    first: EngineProcess
    second: EngineProcess
    alone: tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def engines(start_shared_engine: StartEngine, shared_daemon: DaemonProcess) -> Iterator[Engines]:
    # A block that another is writing is waited for as long as a test takes.
    transfer = node.connector(shared_daemon, save_deadline=60, lookup_deadline=PATIENCE)
    first, second, one, other = (
        start_shared_engine(ready=False, kv_transfer_config=transfer, **options)
        for options in (TWO_RANKS, TWO_RANKS, {}, {})
    )
    first.wait_ready()
    first.generate([LONG, EXACT])
    first.wait_idle()
    for each in (second, one, other):
        each.wait_ready()
    yield Engines(first, second, (one, other))
    # vLLM waits five seconds for ranks to end; seeing it once is enough.
    second.kill()


def _namespaces(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [each["description"] for each in node.command(daemon, "namespaces")]


def _of_ranks(daemon: DaemonProcess, ranks: int) -> dict[str, Any]:
    [found] = [each for each in _namespaces(daemon) if each["tp_size"] == ranks]
    return found


def _store_nonsense(
    daemon: DaemonProcess, described: dict[str, Any], ask: Ask, first: int, shard: int = 0
) -> None:
    """For one shard, in the place of all full blocks of a prompt from ``first`` on."""
    namespace = Namespace.parse(described)
    hashes = prefix_hashes(ask.prompt, BLOCK)
    nonsense = [np.full(namespace.block_bytes, 0x3F, np.uint8).data] * (len(hashes) - first)
    with contextlib.closing(connect(daemon.url, namespace, shard=shard)) as client:
        put = client.put(hashes[first:], nonsense, parent=hashes[first - 1])
    assert put.stored == len(nonsense)


def test_each_rank_stores_its_part(engines: Engines, shared_daemon: DaemonProcess) -> None:
    assert engines.first.metrics()[STORED] == 2 * (6 + 8)
    assert node.metrics(shared_daemon)[PUT] == 2 * (6 + 8)


def test_each_rank_loads_its_part(engines: Engines, reference: Reference) -> None:
    asks = [LONG, EXACT]
    answers = engines.second.generate(asks)
    assert_same(answers, reference(asks))
    metrics = engines.second.metrics()
    assert metrics[REUSED] == (6 + 8) * BLOCK
    assert metrics[LOADED] == 2 * (6 + 8)
    assert metrics.get(STORED, 0) == metrics.get(ERRORS, 0) == 0


@pytest.mark.parametrize("shard", [0, 1])
def test_what_one_rank_lacks_is_a_miss(
    engines: Engines, shared_daemon: DaemonProcess, reference: Reference, shard: int
) -> None:
    """Three blocks are there for both ranks; of the next three, one rank would find nonsense."""
    ask = Ask(LONG.prompt[: 3 * BLOCK] + prompt(10 + shard, 3 * BLOCK + 5))
    _store_nonsense(shared_daemon, _of_ranks(shared_daemon, 2), ask, 3, shard)
    engines.second.wait_idle()
    engines.second.forget()
    before = engines.second.metrics().get(REUSED, 0)
    assert_same(engines.second.generate([ask]), reference([ask]))
    assert engines.second.metrics()[REUSED] - before == 3 * BLOCK


def test_engines_of_other_sizes_do_not_share(engines: Engines, reference: Reference) -> None:
    alone = engines.alone[0]
    before = alone.metrics().get(STORED, 0)
    answers = alone.generate([LONG])
    assert_same(answers, reference([LONG]))
    assert answers[0].cached == 0
    alone.wait_idle()
    assert alone.metrics()[STORED] - before == 6


def test_engines_at_the_same_time(
    engines: Engines, shared_daemon: DaemonProcess, reference: Reference
) -> None:
    """As ranks of data parallelism do: each with its own scheduler, on one node."""
    alone = engines.alone
    stored = sum(each.metrics().get(STORED, 0) for each in alone)
    put = node.metrics(shared_daemon)[PUT]
    shared = prompt(20, 3 * BLOCK)
    asks = [Ask(shared + prompt(30 + each, (2 + each % 3) * BLOCK), tokens=40) for each in range(9)]
    # In opposite orders, so that each computes what the other stores and the other way round.
    running = [alone[0].submit(asks), alone[1].submit(asks[::-1])]
    assert_same(alone[0].collect(running[0]), reference(asks))
    assert_same(alone[1].collect(running[1]), reference(asks[::-1]))
    for each in alone:
        each.wait_idle()
    blocks = 3 + sum((2 + each % 3) + 1 for each in range(9))
    assert sum(each.metrics().get(STORED, 0) for each in alone) - stored == blocks
    assert node.metrics(shared_daemon)[PUT] - put == blocks
    assert all(each.metrics().get(ERRORS, 0) == 0 for each in alone)
    # All of it is right: each reuses what the other has stored.
    for each in alone:
        each.forget()
        answers = each.generate(asks)
        assert_same(answers, reference(asks))
        assert all(
            answer.cached == len(ask.prompt) for answer, ask in zip(answers, asks, strict=True)
        )


class _GivesUp:
    """One block of an engine that begins to write it and then does not."""

    def __init__(self) -> None:
        self.began, self.over = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 1

    def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
        self.began.set()
        assert self.over.wait(60)
        raise InterruptedError


def test_a_block_that_another_is_writing_is_waited_for(
    engines: Engines, shared_daemon: DaemonProcess, reference: Reference
) -> None:
    engine, block = engines.alone[0], _GivesUp()
    namespace = Namespace.parse(_of_ranks(shared_daemon, 1))
    engine.wait_idle()
    before = engine.metrics().get(STORED, 0)
    with (
        contextlib.closing(connect(shared_daemon.url, namespace)) as client,
        ThreadPoolExecutor() as threads,
    ):
        first = prefix_hashes(OTHER.prompt, BLOCK)[:1]
        writing = threads.submit(client.put, first, block, parent=ROOT_PARENT, deadline=60)
        assert block.began.wait(10)
        assert_same(engine.generate([OTHER]), reference([OTHER]))
        assert engine.state()["work"]
        assert engine.metrics().get(STORED, 0) - before < 5
        block.over.set()
        with pytest.raises(InterruptedError):
            writing.result(10)
    engine.wait_idle()
    assert engine.metrics()[STORED] - before == 5
    assert engine.metrics().get(BUSY, 0) == 0


def _one_head(directory: Path) -> Path:
    return make_llama(directory, kv_heads=1)


MLA: dict[str, Any] = {"dtype": "bfloat16"}
"""vLLM's MLA for CPUs without AMX takes no prefix; with it, weights have to be of this type."""


@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(_one_head, {}, id="one KV head"),
        pytest.param(
            make_mla,
            MLA,
            id="MLA",
            marks=pytest.mark.skipif(
                "amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="needs a CPU with AMX"
            ),
        ),
    ],
)
def test_ranks_that_hold_the_same_store_it_once(
    start_engine: StartEngine,
    daemon: DaemonProcess,
    tmp_path: Path,
    make: Callable[[Path], Path],
    options: dict[str, Any],
) -> None:
    model = make(tmp_path / "model")
    options = options | {"kv_transfer_config": node.connector(daemon, lookup_deadline=PATIENCE)}
    alone = start_engine(model, ready=False, **options)
    ranks = start_engine(model, ready=False, **options, **TWO_RANKS)
    for each in (alone, ranks):
        each.wait_ready()
    computed = alone.generate([LONG]) + ranks.generate([OTHER])
    assert [each.cached for each in computed] == [0, 0]
    for each in (alone, ranks):
        each.wait_idle()
    assert node.metrics(daemon)[PUT] == 6 + 5
    assert [each["tp_size"] for each in _namespaces(daemon)] == [1]
    # As from the engine's own memory: the same bytes are behind the same tokens.
    own = alone.generate([LONG]) + ranks.generate([OTHER])
    for each in (alone, ranks):
        each.forget()
    assert_same(alone.generate([LONG]) + ranks.generate([OTHER]), own)
    assert [alone.metrics()[LOADED], ranks.metrics()[LOADED]] == [6, 2 * 5]
    # Both ways: one process has what two stored, and both ranks have what one stored.
    loaded = ranks.generate([LONG]) + alone.generate([OTHER])
    assert [each.cached for each in loaded] == [6 * BLOCK, 5 * BLOCK]
    assert [alone.metrics()[LOADED], ranks.metrics()[LOADED]] == [6 + 5, 2 * (5 + 6)]
    assert node.metrics(daemon)[PUT] == 6 + 5
    ranks.kill()
    if options.get("dtype") != "bfloat16":
        # Two processes round otherwise than one, which shows in an answer where 8 bits are left.
        assert_same(loaded, computed)


def test_each_stage_has_a_namespace(
    start_engine: StartEngine, daemon: DaemonProcess, reference: Reference
) -> None:
    staged = start_engine(
        kv_transfer_config=node.connector(daemon, lookup_deadline=PATIENCE), **TWO_STAGES
    )
    asks = [LONG, EXACT]
    assert_same(staged.generate(asks), reference(asks))
    staged.wait_idle()
    assert node.metrics(daemon)[PUT] == 2 * (6 + 8)
    salts = sorted(each["salt"] for each in _namespaces(daemon))
    assert [each[:14] for each in salts] == ["stage 1 of 2, ", "stage 2 of 2, "]
    staged.forget()
    answers = staged.generate(asks)
    assert_same(answers, reference(asks))
    assert staged.metrics()[LOADED] == 2 * (6 + 8)
    # What one stage lacks is a miss, though the other would find something.
    ask = Ask(LONG.prompt[: 2 * BLOCK] + prompt(15, 3 * BLOCK + 5))
    _store_nonsense(daemon, _namespaces(daemon)[0], ask, 2)
    staged.forget()
    before = staged.metrics()[REUSED]
    assert_same(staged.generate([ask]), reference([ask]))
    assert staged.metrics()[REUSED] - before == 2 * BLOCK
    staged.kill()
