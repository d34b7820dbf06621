"""One engine prefills, another decodes: blocks go from one to the other through the store.

The decode engine is small, so that requests that wait for blocks get in each other's way.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.identity import prefix_hashes
from tests.engines import node
from tests.engines.asking import Ask, assert_same, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.process import BLOCK, EngineProcess
from tests.running import DaemonProcess, wait_for

REUSED = "vllm:external_prefix_cache_hits_total"
UNSPECIFIED = "vllm:prompt_tokens_cached_by_source_total{source=external_unspecified}"
LOADED = "vllm:kvstore_loaded_blocks_total"
FAILED = "vllm:kvstore_failed_load_blocks_total"
STORED = "vllm:kvstore_stored_blocks_total"
LOOKUPS = "vllm:kvstore_lookups_total"
GUARDED = "vllm:kvstore_guarded_errors_total"

MODEL_TOKENS = 2048
LONG = 60 * BLOCK
CHUNK = 2 * BLOCK
BLOCK_BYTES = 128 << 10
SMALL = (MODEL_TOKENS // BLOCK + 8) * BLOCK_BYTES
"""KV memory for one of the longest requests, and little more."""

GIVE_UP = 2.0
"""Seconds without an answer of the node after which nobody waits for it."""

ENOUGH = 60.0
"""Seconds within which a prefill is over."""

Growth = Callable[[str], float]


def core(number: int) -> dict[str, str]:
    """Has an engine compute on one core: two that compute on the same stand in each other's way."""
    return {"VLLM_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1))}


@pytest.fixture(scope="module")
def shared_prefill(start_shared_engine: StartEngine, shared_daemon: DaemonProcess) -> EngineProcess:
    """Computes two blocks in a step, so that a long prompt takes many."""
    return start_shared_engine(
        kv_transfer_config=node.connector(shared_daemon, "kv_producer"),
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        env=core(0),
    )


@pytest.fixture(scope="module")
def shared_decode(start_shared_engine: StartEngine, shared_daemon: DaemonProcess) -> EngineProcess:
    return start_shared_engine(
        kv_transfer_config=node.connector(
            shared_daemon, "kv_consumer", max_wait=ENOUGH, load_deadline=GIVE_UP
        ),
        kv_cache_memory_bytes=SMALL,
        env=core(1),
    )


@pytest.fixture
def prefill(shared_prefill: EngineProcess) -> Iterator[EngineProcess]:
    yield shared_prefill
    _is_all_free(shared_prefill)


@pytest.fixture
def decode(shared_decode: EngineProcess) -> Iterator[EngineProcess]:
    shared_decode.wait_idle()
    shared_decode.forget()
    yield shared_decode
    _is_all_free(shared_decode)
    assert "Connector attributed" not in shared_decode.log_text()
    metrics = shared_decode.metrics()
    assert metrics.get(STORED, 0.0) == metrics.get(GUARDED, 0.0) == 0


def _is_all_free(engine: EngineProcess) -> None:
    state = engine.wait_idle()
    assert (state["requests"], state["free_blocks"]) == (0, state["blocks"] - 1)


def _growth(engine: EngineProcess) -> Growth:
    before = engine.metrics()
    return lambda name: engine.metrics().get(name, 0.0) - before.get(name, 0.0)


def _prefill_of(ask: Ask) -> Ask:
    """What the proxy asks of the prefill engine."""
    return Ask(ask.prompt, tokens=1, transfer={})


def _waiting(tokens: tuple[int, ...], wait: float = ENOUGH) -> Ask:
    """What the proxy asks of the decode engine."""
    return Ask(tokens, transfer={"kvstore": {"wait": wait}})


def _seconds_of(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


# --- hand-over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10 * BLOCK + 7, 10 * BLOCK], ids=["rest", "exact"])
def test_decode_computes_no_full_block(
    prefill: EngineProcess, decode: EngineProcess, reference: Reference, length: int
) -> None:
    ask = _waiting(prompt(100 + length, length))
    growth = _growth(decode)
    waiting = decode.submit([ask])
    prefill.generate([_prefill_of(ask)])
    answers = decode.collect(waiting)
    assert_same(answers, reference([Ask(ask.prompt)]))
    assert answers[0].cached == growth(REUSED) == 10 * BLOCK
    assert growth(UNSPECIFIED) == 10 * BLOCK
    assert (growth(LOADED), growth(FAILED)) == (10, 0)


def test_blocks_are_handed_over_while_prefill_computes(
    prefill: EngineProcess, decode: EngineProcess, reference: Reference
) -> None:
    ask = _waiting(prompt(110, LONG + 5))
    growth, stored = _growth(decode), _growth(prefill)
    waiting = decode.submit([ask])
    computing = prefill.submit([_prefill_of(ask)])
    early = 0.0
    while not early:
        loaded = growth(LOADED)
        # Asked after that: what was loaded by then was loaded while the prompt was computed.
        assert prefill.state()["requests"] == 1, "nothing came before the prefill's end"
        early = loaded
    assert early < LONG / BLOCK
    prefill.collect(computing)
    answers = decode.collect(waiting)
    assert_same(answers, reference([Ask(ask.prompt)]))
    assert answers[0].cached == LONG
    assert (growth(LOADED), growth(FAILED)) == (LONG / BLOCK, 0)
    prefill.wait_idle()
    assert stored(STORED) == LONG / BLOCK


def test_waiting_is_no_miss_of_the_node(
    prefill: EngineProcess, decode: EngineProcess, shared_daemon: DaemonProcess
) -> None:
    before = node.metrics(shared_daemon)
    ask = _waiting(prompt(111, 20 * BLOCK + 1))
    waiting = decode.submit([ask])
    time.sleep(1.0)
    prefill.generate([_prefill_of(ask)])
    decode.collect(waiting)
    after = node.metrics(shared_daemon)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["kvstore_hits_total{tier=dram}"] == grown["kvstore_lookups_total"] == 20


def test_many_requests_at_once(
    prefill: EngineProcess, decode: EngineProcess, reference: Reference
) -> None:
    asks = [_waiting(prompt(120 + each, (6 + each) * BLOCK + each)) for each in range(12)]
    growth = _growth(decode)
    # More than the decode engine has room for, and in another order.
    waiting = decode.submit(asks)
    prefill.generate([_prefill_of(ask) for ask in reversed(asks)])
    answers = decode.collect(waiting)
    assert_same(answers, reference([Ask(ask.prompt) for ask in asks]))
    assert [each.cached for each in answers] == [(6 + each) * BLOCK for each in range(12)]
    assert growth(FAILED) == 0


# --- when blocks do not come ---------------------------------------------------------------------


def test_without_a_prefill_decode_computes_after_its_wait(
    decode: EngineProcess, reference: Reference
) -> None:
    ask = _waiting(prompt(140, 10 * BLOCK + 3), wait=1.0)
    growth = _growth(decode)
    began = time.monotonic()
    answers = decode.generate([ask])
    assert 1.0 <= time.monotonic() - began < 6.0
    assert_same(answers, reference([Ask(ask.prompt)]))
    assert (answers[0].cached, growth(FAILED), growth(LOADED)) == (0, 10, 0)


def test_requests_that_wait_in_vain_do_so_at_the_same_time(
    decode: EngineProcess, reference: Reference
) -> None:
    # Two of them fill the engine; one after the other they would wait for 12 seconds.
    asks = [_waiting(prompt(150 + each, 30 * BLOCK + each), wait=2.0) for each in range(12)]
    began = time.monotonic()
    answers = decode.generate(asks)
    assert 2.0 <= time.monotonic() - began < 10.0
    assert_same(answers, reference([Ask(ask.prompt) for ask in asks]))


def test_a_request_that_does_not_wait_overtakes_those_that_do(
    decode: EngineProcess, reference: Reference
) -> None:
    waiting = decode.submit([_waiting(prompt(160, 20 * BLOCK), wait=3.0)])
    ask = Ask(prompt(161, 20 * BLOCK))
    assert _seconds_of(lambda: assert_same(decode.generate([ask]), reference([ask]))) < 2.5
    assert decode.state()["requests"] == 1
    decode.collect(waiting)


def test_a_request_aborted_while_it_waits_gives_its_blocks_back(
    prefill: EngineProcess, decode: EngineProcess, reference: Reference
) -> None:
    gone, stays = _waiting(prompt(170, 20 * BLOCK)), _waiting(prompt(171, 20 * BLOCK + 1))
    (aborted, waiting) = decode.submit([gone, stays])
    wait_for(lambda: decode.state()["free_blocks"] <= SMALL // BLOCK_BYTES - 40)
    decode.abort([aborted])
    wait_for(lambda: decode.state()["requests"] == 1, 5.0)
    assert decode.state()["free_blocks"] >= SMALL // BLOCK_BYTES - 25
    prefill.generate([_prefill_of(stays)])
    answers = decode.collect([waiting])
    assert_same(answers, reference([Ask(stays.prompt)]))
    assert answers[0].cached == 20 * BLOCK


def test_blocks_evicted_before_they_are_read_are_computed(
    prefill: EngineProcess,
    decode: EngineProcess,
    shared_daemon: DaemonProcess,
    reference: Reference,
) -> None:
    ask = _waiting(prompt(180, 10 * BLOCK + 1), wait=1.0)
    prefill.generate([_prefill_of(ask)])
    prefill.wait_idle()
    node.command(shared_daemon, "evict", prefix_hashes(list(ask.prompt), BLOCK)[4].hex())
    growth = _growth(decode)
    assert_same(decode.generate([ask]), reference([Ask(ask.prompt)]))
    assert (growth(LOADED), growth(FAILED)) == (4, 6)


@pytest.fixture
def doomed_prefill(
    llama: Path, tmp_path: Path, shared_daemon: DaemonProcess
) -> Iterator[EngineProcess]:
    """One that need not end well."""
    options: dict[str, Any] = {
        "kv_transfer_config": node.connector(shared_daemon, "kv_producer"),
        "max_num_batched_tokens": CHUNK,
        "env": core(0),
    }
    engine = EngineProcess(llama, tmp_path / "doomed.log", **options)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.kill()


def test_a_prefill_engine_killed_midway(
    doomed_prefill: EngineProcess, decode: EngineProcess, reference: Reference
) -> None:
    ask = _waiting(prompt(190, LONG + 5), wait=4.0)
    growth = _growth(decode)
    began = time.monotonic()
    waiting = decode.submit([ask])
    doomed_prefill.submit([_prefill_of(ask)])
    wait_for(lambda: growth(LOADED) >= 4, 4.0)
    doomed_prefill.kill()
    answers = decode.collect(waiting)
    assert 4.0 <= time.monotonic() - began < 12.0
    assert_same(answers, reference([Ask(ask.prompt)]))
    loaded = growth(LOADED)
    assert 4 <= loaded < LONG / BLOCK
    assert growth(FAILED) == LONG / BLOCK - loaded


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "restarted"])
def test_nobody_waits_for_a_node_that_is_gone(
    prefill: EngineProcess,
    decode: EngineProcess,
    shared_daemon: DaemonProcess,
    reference: Reference,
    how: signal.Signals,
) -> None:
    asks = [_waiting(prompt(200 + how + each, 10 * BLOCK + 1)) for each in range(4)]
    waiting = decode.submit(asks)
    wait_for(lambda: decode.state()["free_blocks"] <= SMALL // BLOCK_BYTES - 40)
    if how == signal.SIGSTOP:
        shared_daemon.signal(how)
    else:
        shared_daemon.kill()
    try:
        answers = decode.collect(waiting, 20.0)
    finally:
        if how == signal.SIGSTOP:
            shared_daemon.signal(signal.SIGCONT)
        else:
            shared_daemon.start()
    assert_same(answers, reference([Ask(ask.prompt) for ask in asks]))
    assert all(each.cached == 0 for each in answers)
    # Both engines take the node up again by themselves.
    for attempt in range(20):
        ask = _waiting(prompt(300 + how * 20 + attempt, 4 * BLOCK + 1), wait=2.0)
        waiting = decode.submit([ask])
        prefill.generate([_prefill_of(ask)])
        (answer,) = decode.collect(waiting)
        if answer.cached == 4 * BLOCK:
            break
    else:
        pytest.fail("blocks were handed over no more")
