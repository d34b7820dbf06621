"""That an engine is as it was, after something was done to it or to its node."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.engines.asking import Ask, prompt
from tests.engines.process import BLOCK, EngineProcess
from tests.running import wait_for

LOADED = "vllm:kvstore_loaded_blocks_total"
NOT_LOADED = "vllm:kvstore_failed_load_blocks_total"
STORED = "vllm:kvstore_stored_blocks_total"

_seeds = itertools.count(1 << 20)


def fresh(*lengths: int) -> list[tuple[int, ...]]:
    """Prompts that nobody has asked yet."""
    return [prompt(next(_seeds), length) for length in lengths]


def growth(engine: EngineProcess) -> Callable[[str], float]:
    """By how much a metric of the engine has grown since this call."""
    before = engine.metrics()
    return lambda name: engine.metrics().get(name, 0.0) - before.get(name, 0.0)


def picks_up(engine: EngineProcess, seconds: float = 30.0) -> None:
    """Returns when the engine, by itself, has reused from its node what it stored there.

    It has nothing to do then, and nothing in its own prefix cache.
    """
    ask = Ask(fresh(3 * BLOCK + 5)[0])

    def reused() -> bool:
        engine.wait_idle()
        engine.forget()
        return engine.generate([ask])[0].cached == 3 * BLOCK

    wait_for(reused, seconds)
    engine.wait_idle()
    engine.forget()


def assert_unharmed(engine: EngineProcess, seconds: float) -> None:
    """Within some seconds there is nothing left to do, and all blocks are free; no error."""
    state = engine.wait_idle(seconds)
    assert state["requests"] == 0
    assert state["free_blocks"] == state["blocks"] - 1  # one is never used
    assert engine.metrics().get("vllm:kvstore_guarded_errors_total", 0) == 0
    for word in ("Traceback", "Exception", " ERROR "):
        assert word not in engine.log_text()
