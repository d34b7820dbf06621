"""The node is gone, stopped, started anew, too small or wrong: the engine answers on.

All of it happens to the node of one engine, which was started before there was a node. Each test
ends with the engine reusing again what it stores, without anybody having told it to.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.identity import prefix_hashes
from tests.engines import node
from tests.engines.asking import Answer, Ask, assert_same, prompt
from tests.engines.conftest import Reference, StartEngine
from tests.engines.process import BLOCK, EngineProcess
from tests.engines.recovery import (
    LOADED,
    NOT_LOADED,
    STORED,
    assert_unharmed,
    fresh,
    picks_up,
)
from tests.engines.recovery import growth as growth_of
from tests.running import DaemonProcess, wait_for

CONNECT, LOOKUP, LOAD, SAVE = 1.0, 0.05, 1.0, 2.0
DEADLINES = {
    "connect_deadline": CONNECT,
    "lookup_deadline": LOOKUP,
    "load_deadline": LOAD,
    "save_deadline": SAVE,
    "max_wait": 600,
}
SLOW = 2.0
"""Seconds by which other work on the machine may put off a thread."""

LOADS = 2 * LOAD + SLOW
"""Seconds that a load may take: its own deadline, behind that of one before it."""

SAVES = 2 * SAVE + SLOW
"""Seconds until all saves are over: one that has just begun and one more, then the node is known
to be gone."""

BOUND = 40.0 + LOOKUP + LOADS
"""Seconds that requests may take: to be computed by a machine with other work, one lookup that
gets no answer, and a load."""

WAIT = 600.0
"""Seconds that some requests are ready to wait for blocks: far longer than they may take."""

REUSED = "vllm:external_prefix_cache_hits_total"
JOBS = "vllm:kvstore_load_jobs_total"
SECONDS = "vllm:kvstore_load_seconds_total"

ASKS = [Ask(prompt(100 + each, (each + 2) * BLOCK + 9 * each)) for each in range(6)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def shared(home: Path) -> Iterator[DaemonProcess]:
    """The node, not started yet."""
    daemon = DaemonProcess(node.config(home))
    yield daemon
    daemon.kill()


@pytest.fixture(scope="module")
def engine(start_shared_engine: StartEngine, shared: DaemonProcess) -> EngineProcess:
    return start_shared_engine(kv_transfer_config=node.connector(shared, **DEADLINES))


@pytest.fixture
def daemon(shared: DaemonProcess, engine: EngineProcess, home: Path) -> DaemonProcess:
    """The node, running; the engine uses it, and has nothing to do and nothing in its cache."""
    if shared.config != (config := node.config(home)):
        _restart(shared, config)
    picks_up(engine)
    return shared


@pytest.fixture(autouse=True)
def _unharmed(engine: EngineProcess) -> Iterator[None]:
    yield
    assert_unharmed(engine, SAVES)


def _restart(daemon: DaemonProcess, config: Any = None) -> None:
    daemon.kill()
    daemon.config = config or daemon.config
    daemon.start()


def _waiting(*sizes: int) -> list[Ask]:
    """Requests that are ready to wait for what nobody stores."""
    transfer = {"kvstore": {"wait": WAIT}}
    return [Ask(each, transfer=transfer) for each in fresh(*sizes)]


def _fresh(*sizes: int) -> list[Ask]:
    """Requests that nobody has asked yet."""
    return [Ask(each) for each in fresh(*sizes)]


def _collect(engine: EngineProcess, requests: Sequence[str]) -> list[Answer]:
    """The answers; neither they nor any load took longer than it may."""
    answers = engine.collect(requests, BOUND)
    found = engine.metrics()
    assert found.get(SECONDS, 0) <= found.get(JOBS, 0) * LOADS
    return answers


def _answers(engine: EngineProcess, asks: Sequence[Ask]) -> list[Answer]:
    return _collect(engine, engine.submit(asks))


def _store(engine: EngineProcess, asks: Sequence[Ask]) -> None:
    """Has the node hold the blocks of requests, and the engine none."""
    engine.forget()
    engine.generate(asks)
    engine.wait_idle()
    engine.forget()


def test_a_node_that_comes_later(
    engine: EngineProcess, shared: DaemonProcess, reference: Reference
) -> None:
    asks = ASKS + _waiting(4 * BLOCK)
    assert_same(_answers(engine, asks), reference(asks))
    engine.wait_idle(SAVES)
    assert engine.metrics().get(STORED, 0) == engine.metrics().get(LOADED, 0) == 0
    shared.start()
    picks_up(engine)


def test_a_node_that_is_killed_between_requests(
    daemon: DaemonProcess, engine: EngineProcess, reference: Reference
) -> None:
    _store(engine, ASKS)
    daemon.kill()
    growth = growth_of(engine)
    asks = ASKS + _waiting(4 * BLOCK, 7 * BLOCK)
    assert_same(_answers(engine, asks), reference(asks))
    assert growth(REUSED) == 0
    daemon.start()
    picks_up(engine)


@pytest.mark.parametrize("after", [0.0, 0.1, 0.4])
def test_a_node_that_is_killed_under_requests(
    daemon: DaemonProcess, engine: EngineProcess, reference: Reference, after: float
) -> None:
    _store(engine, ASKS)
    asks = ASKS + _waiting(4 * BLOCK, 7 * BLOCK + 3) + _fresh(5 * BLOCK, 200)
    requests = engine.submit(asks)
    time.sleep(after)
    _restart(daemon)
    assert_same(_collect(engine, requests), reference(asks))
    picks_up(engine)


@pytest.mark.parametrize("after", [0.05, 0.3])
def test_a_node_that_is_stopped_under_requests(
    daemon: DaemonProcess, engine: EngineProcess, reference: Reference, after: float
) -> None:
    _store(engine, ASKS)
    asks = ASKS + _waiting(4 * BLOCK, 7 * BLOCK + 3) + _fresh(5 * BLOCK, 200)
    requests = engine.submit(asks)
    time.sleep(after)
    daemon.signal(signal.SIGSTOP)
    try:
        assert_same(_collect(engine, requests), reference(asks))
    finally:
        daemon.signal(signal.SIGCONT)
    picks_up(engine)


def test_a_node_that_stays_stopped(
    daemon: DaemonProcess, engine: EngineProcess, reference: Reference
) -> None:
    asks = _fresh(5 * BLOCK, 200, 7 * BLOCK)
    daemon.signal(signal.SIGSTOP)
    try:
        assert_same(_answers(engine, asks), reference(asks))
        process = psutil.Process(engine.pid)
        began, before = time.monotonic(), process.cpu_times()
        engine.wait_idle(SAVES)
        took, after = time.monotonic() - began, process.cpu_times()
        used = after.user + after.system - before.user - before.system
        # The test's own questions are in it, a few hundred a second.
        assert used < max(0.5 * took, 0.5), "it waits by turning in circles"
        growth = growth_of(engine)
        asks = _fresh(2 * BLOCK, 3 * BLOCK)
        assert_same(_answers(engine, asks), reference(asks))
        assert growth("vllm:kvstore_lookup_timeouts_total") == 2
    finally:
        daemon.signal(signal.SIGCONT)
    picks_up(engine)


def test_a_node_that_comes_back_with_what_it_held(
    daemon: DaemonProcess, engine: EngineProcess, home: Path, reference: Reference
) -> None:
    _restart(daemon, node.config(home, ssd={"capacity": "64MiB"}))
    picks_up(engine)
    _store(engine, ASKS)
    node.command(daemon, "flush", "dram")
    _restart(daemon)

    def reused() -> bool:
        answers = _answers(engine, ASKS)
        assert_same(answers, reference(ASKS))
        engine.wait_idle()
        engine.forget()
        return all(each.cached for each in answers)

    wait_for(reused, 30.0)


def test_a_node_with_far_too_little_memory(
    daemon: DaemonProcess, engine: EngineProcess, home: Path, reference: Reference
) -> None:
    _restart(daemon, node.config(home, dram={"capacity": "4MiB", "segment": "4MiB"}))
    picks_up(engine)
    growth = growth_of(engine)
    known = [Ask(prompt(200 + each, 7 * BLOCK + each)) for each in range(4)]
    for number in range(20):
        _store(engine, known)
        # All are found, and while they are loaded the others drive them out.
        asks = [Ask(prompt(300 + 9 * number + each, 8 * BLOCK)) for each in range(9)] + known
        assert_same(_answers(engine, asks), reference(asks))
        if growth(LOADED) and growth(NOT_LOADED):
            break
    else:
        pytest.fail("no block was driven out between a lookup and the load")


def test_a_node_that_refuses_the_engine(
    daemon: DaemonProcess, engine: EngineProcess, home: Path, reference: Reference
) -> None:
    _store(engine, ASKS)
    growth = growth_of(engine)
    _restart(daemon, node.config(home, auth={"session_token": "another"}))
    asks = ASKS + _waiting(4 * BLOCK)
    assert_same(_answers(engine, asks), reference(asks))
    engine.wait_idle()
    assert growth(REUSED) == growth(STORED) == 0
    assert "session token" in engine.log_text()


# --- wrong bytes ---------------------------------------------------------------------------------


def _corrupt(regions: Path, block: bytes) -> int:
    """Changes the block's bytes wherever they lie in the node's file; in how many places."""
    data, found = regions.read_bytes(), 0
    with regions.open("r+b") as file:
        for page in range(0, len(data), 4096):
            header = data[page : page + 144]
            if header.startswith(b"kvs.rec") and block in (header[48:80], header[80:112]):
                file.seek(page + 4096 + 1000)
                file.write(bytes(byte ^ 0x40 for byte in data[page + 5096 : page + 5160]))
                found += 1
    return found


def test_a_corrupt_block_is_computed_again_and_not_passed_on(
    daemon: DaemonProcess,
    engine: EngineProcess,
    start_engine: StartEngine,
    home: Path,
    reference: Reference,
) -> None:
    other = start_engine(kv_transfer_config=node.connector(daemon, **DEADLINES))
    _restart(daemon, node.config(home, ssd={"capacity": "64MiB"}))
    picks_up(engine)
    whole, middle, first, last = (Ask(prompt(600 + each, 6 * BLOCK + 7)) for each in range(4))
    asks = [whole, middle, first, last]
    _store(engine, asks)
    node.command(daemon, "flush", "dram")
    for ask, block in ((middle, 3), (first, 0), (last, 5)):
        assert _corrupt(home / "ssd" / "regions", prefix_hashes(ask.prompt, BLOCK)[block]) == 1
    growth = growth_of(engine)
    assert_same(_answers(engine, asks), reference(asks))
    assert growth(LOADED) == 6 + 3 + 0 + 5
    assert growth(NOT_LOADED) == 0 + 3 + 6 + 1
    # What follows a block that was computed again is right in the store, as it came from it.
    engine.wait_idle()
    assert growth(STORED) >= 3
    answers = _answers(other, asks)
    assert_same(answers, reference(asks))
    assert [each.cached for each in answers] == [6 * BLOCK] * 4
    assert other.metrics().get(NOT_LOADED, 0) == 0
    # An engine may end while its saves get no answer.
    daemon.signal(signal.SIGSTOP)
    try:
        other.generate(_fresh(5 * BLOCK), BOUND)
        began = time.monotonic()
        assert other.stop() == 0
        assert time.monotonic() - began < SAVES + LOADS + 2 * CONNECT + SLOW
    finally:
        daemon.signal(signal.SIGCONT)
