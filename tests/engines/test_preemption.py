"""Requests that lose their blocks: preempted, and aborted at every stage of their way."""

from __future__ import annotations

import dataclasses
import itertools
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import node
from tests.engines.asking import Ask, assert_same, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.process import BLOCK, EngineProcess
from tests.engines.recovery import LOADED, NOT_LOADED, assert_unharmed, picks_up
from tests.engines.recovery import growth as growth_of
from tests.running import DaemonProcess, wait_for

WAIT = 600.0
"""Seconds that requests are ready to wait for blocks that never come."""

SAVE = 20.0
"""Seconds that a save may take: longer than a node is stopped here, so that none is given up."""

IDLE = 10.0
"""Seconds until the rest of a test's work is done."""

TINY: dict[str, Any] = {
    "kv_cache_memory_bytes": 6 << 20,
    "max_model_len": 512,
    "max_num_batched_tokens": 4 * BLOCK,
}
"""48 blocks, and prompts are computed in parts."""

KINDS: dict[str, dict[str, Any]] = {
    "own prefix cache": {"enable_prefix_caching": True},
    "by priority": {"enable_prefix_caching": False, "scheduling_policy": "priority"},
}

PREEMPTED = "vllm:num_preemptions_total"

_bases = itertools.count(1000, 100)


@pytest.fixture(scope="module", params=list(KINDS))
def engine(
    request: pytest.FixtureRequest, start_shared_engine: StartEngine, shared_daemon: DaemonProcess
) -> Iterator[EngineProcess]:
    connector = node.connector(shared_daemon, save_deadline=SAVE, max_wait=WAIT)
    process = start_shared_engine(**TINY, **KINDS[request.param], kv_transfer_config=connector)
    yield process
    assert process.stop() == 0


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: EngineProcess, shared_daemon: DaemonProcess) -> Iterator[None]:
    """All blocks of the engine are free afterwards, and nothing is pinned in the node."""
    engine.forget()
    yield
    assert_unharmed(engine, IDLE)
    wait_for(lambda: node.metrics(shared_daemon)["kvstore_pins"] == 0, 5.0)


@pytest.fixture
def base() -> int:
    """The first of a hundred seeds, whose prompts nobody has asked yet."""
    return next(_bases)


def test_preempted_requests_resume_from_the_store(
    engine: EngineProcess, base: int, reference: Reference
) -> None:
    asks = [
        Ask(prompt(base + each, 4 * BLOCK + 5 * each), tokens=4 * BLOCK, priority=each % 3)
        for each in range(10)
    ]
    growth = growth_of(engine)
    assert_same(engine.generate(asks), reference(asks))
    assert growth(PREEMPTED) > 0
    assert growth(LOADED) > 0


# --- aborted -------------------------------------------------------------------------------------


def _abort(engine: EngineProcess, reference: Reference, *aborted: Ask) -> None:
    """Aborted requests do no harm to others that share their prefixes, or to what is stored."""
    others = [Ask(each.prompt) for each in aborted]
    answers = engine.generate([*aborted, *others])
    assert [each.reason for each in answers[: len(aborted)]] == ["abort"] * len(aborted)
    assert_same(answers[len(aborted) :], reference(others))
    engine.wait_idle()
    engine.forget()
    assert_same(engine.generate(others), reference(others))


def test_while_queued(engine: EngineProcess, base: int, reference: Reference) -> None:
    running = [Ask(prompt(base + each, 4 * BLOCK), tokens=BLOCK) for each in range(9)]
    requests = engine.submit(running)
    _abort(
        engine,
        reference,
        *(Ask(prompt(base + 50 + n, 90), abort_steps=n, priority=9) for n in (0, 1)),
    )
    assert_same(engine.collect(requests), reference(running))


def test_while_looked_up(
    engine: EngineProcess, base: int, shared_daemon: DaemonProcess, reference: Reference
) -> None:
    """The first lookup gets no answer, which uses up the time that the others of a step have."""
    asks = [Ask(prompt(base + each, 3 * BLOCK), abort_steps=1) for each in range(5)]
    growth = growth_of(engine)
    shared_daemon.signal(signal.SIGSTOP)
    try:
        assert {each.reason for each in engine.generate(asks)} == {"abort"}
        assert growth("vllm:kvstore_lookups_deferred_total") > 0
    finally:
        shared_daemon.signal(signal.SIGCONT)
    picks_up(engine)
    others = [dataclasses.replace(each, abort_steps=None) for each in asks]
    assert_same(engine.generate(others), reference(others))


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_while_waiting_for_blocks(
    engine: EngineProcess, base: int, reference: Reference, steps: int
) -> None:
    waiting = {"kvstore": {"wait": WAIT}}
    asks = [Ask(prompt(base + n, 5 * BLOCK), transfer=waiting, abort_steps=steps) for n in range(3)]
    growth = growth_of(engine)
    assert {each.reason for each in engine.generate(asks)} == {"abort"}
    state = engine.wait_idle(IDLE)
    assert state["free_blocks"] == state["blocks"] - 1
    assert growth(NOT_LOADED) == 3 * 5
    others = [Ask(each.prompt) for each in asks]
    assert_same(engine.generate(others), reference(others))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_while_loading(engine: EngineProcess, base: int, reference: Reference, steps: int) -> None:
    asks = [Ask(prompt(base + each, 9 * BLOCK)) for each in range(4)]
    engine.generate(asks)
    engine.wait_idle()
    engine.forget()
    _abort(engine, reference, *(dataclasses.replace(each, abort_steps=steps) for each in asks))


@pytest.mark.parametrize("steps", [1, 3])
def test_in_prefill(engine: EngineProcess, base: int, reference: Reference, steps: int) -> None:
    _abort(engine, reference, Ask(prompt(base, 12 * BLOCK), abort_steps=steps))


def test_in_decode(engine: EngineProcess, base: int, reference: Reference) -> None:
    asks = [Ask(prompt(base + n, 70), tokens=90, abort_tokens=n) for n in (1, 26, 27, 58)]
    _abort(engine, reference, *asks)


def test_with_saves_pending(
    engine: EngineProcess, base: int, shared_daemon: DaemonProcess, reference: Reference
) -> None:
    asks = [Ask(prompt(base + each, 5 * BLOCK), tokens=BLOCK, abort_tokens=3) for each in range(4)]
    beside = [Ask(prompt(base + 9 + each, 7 * BLOCK + 9), tokens=1) for each in range(7)]
    shared_daemon.signal(signal.SIGSTOP)
    try:
        assert {each.reason for each in engine.generate(asks)} == {"abort"}
        state = engine.state()
        assert state["free_blocks"] < state["blocks"] - 1
        # All blocks that are free are written to, before those that are not are read.
        assert_same(engine.generate(beside), reference(beside))
    finally:
        shared_daemon.signal(signal.SIGCONT)
    picks_up(engine)
    growth = growth_of(engine)
    others = [dataclasses.replace(each, abort_tokens=None) for each in asks]
    assert_same(engine.generate(others), reference(others))
    assert growth(LOADED) > 0


def test_with_the_caches_reset_under_them(
    engine: EngineProcess, base: int, reference: Reference
) -> None:
    """As after an update of the weights: what had been begun before it is not reused after it."""
    asks = [Ask(prompt(base + each, 4 * BLOCK), tokens=BLOCK) for each in range(6)]
    waiting = {"kvstore": {"wait": 1.0}}
    asks += [Ask(prompt(base + 50 + each, 4 * BLOCK), transfer=waiting) for each in range(2)]
    requests = engine.submit(asks)
    engine.state()
    engine.reset()
    assert_same(engine.collect(requests), reference(asks))
    reused = []
    for _ in range(2):
        engine.wait_idle(IDLE)
        engine.forget()
        answers = engine.generate(asks)
        assert_same(answers, reference(asks))
        reused.append([each.cached > 0 for each in answers])
    assert not all(reused[0])
    assert all(reused[1])


def test_at_any_time(engine: EngineProcess, base: int, reference: Reference) -> None:
    """Many requests with common beginnings, of which half are aborted somewhere."""
    choice = random.Random(4)
    transfers = [None, None, None, {"kvstore": {"wait": 0.2}}]
    asks = []
    for _ in range(40):
        beginning = prompt(base + choice.randrange(3), BLOCK * choice.randrange(5))
        asks.append(
            Ask(
                beginning + prompt(base + 9 + choice.randrange(9), choice.randrange(1, 3 * BLOCK)),
                tokens=choice.choice([1, 5, BLOCK, 2 * BLOCK]),
                transfer=choice.choice(transfers),
                priority=choice.randrange(3),
                abort_steps=choice.choice([None, choice.randrange(40)]),
            )
        )
    answers = engine.generate(asks)
    left = [at for at, answer in enumerate(answers) if answer.reason == "length"]
    assert 10 < len(left) < 35
    finished = [dataclasses.replace(asks[at], abort_steps=None) for at in left]
    assert_same([answers[at] for at in left], reference(finished))
    engine.wait_idle()
    engine.forget()
    assert_same(engine.generate(finished), reference(finished))
