"""One vLLM engine that takes orders: JSON lines in, JSON lines out.

Run by the interpreter that has vLLM: ``python -m benchmarks.vllm.engine SETTINGS``. Engine and
worker live in this process and only move when told to, so that idle engines cost the one that is
measured nothing. Orders and answers are described at `Engine`'s methods.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
from llvmlite.binding import ffi
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

IDLE_SLEEP = 0.001
"""What vLLM's own loop sleeps after a step in which nothing could run."""
QUIET = 0.5
"""Seconds an engine is stepped at least while its connector works off what it put aside."""
PATIENCE = 20.0
TICK = [1] * 8
"""A prompt shorter than a block: it makes the engine step and leaves nothing in any cache."""


class Engine:
    """vLLM's engine, stepped by hand."""

    def __init__(self, settings: dict[str, Any]) -> None:
        transfer = settings.pop("transfer")
        if transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(**settings)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._requests = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Answer all ``prompts`` at once, greedily, with ``tokens`` tokens each.

        Returns:
            ``outputs`` (token ids), ``cached`` (prompt tokens not computed) and ``first`` (seconds
            to the first token), each by prompt; ``seconds`` until the last token, ``idle`` until
            the engine had nothing left to do.
        """
        began = time.perf_counter()
        names = self._submit(prompts, tokens)
        first: dict[str, float] = {}
        done: dict[str, Any] = {}
        while len(done) < len(names):
            for output in self._step():
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter() - began)
                if output.finished:
                    done[output.request_id] = output
        seconds = time.perf_counter() - began
        self._work_off(began + PATIENCE)
        return {
            "outputs": [list(done[name].outputs[0].token_ids) for name in names],
            "cached": [done[name].num_cached_tokens or 0 for name in names],
            "first": [first[name] for name in names],
            "seconds": seconds,
            "idle": time.perf_counter() - began,
        }

    def forget(self, external: bool = False) -> dict[str, Any]:
        """Let the connector finish its saves, then empty the engine's own prefix cache.

        Args:
            external: tell the connector to empty what it can, too.

        Returns:
            ``forgotten``: whether the engine did; it refuses while a connector holds blocks.
        """
        began = time.perf_counter()
        forgotten = False
        while not forgotten and time.perf_counter() < began + PATIENCE:
            until = time.perf_counter() + QUIET
            while time.perf_counter() < until:
                self.generate([TICK], 1)
                time.sleep(IDLE_SLEEP)
            forgotten = self._llm.reset_prefix_cache(reset_connector=external)
        return {"forgotten": forgotten}

    def _submit(self, prompts: list[list[int]], tokens: int) -> list[str]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        names = []
        for prompt in prompts:
            self._requests += 1
            names.append(f"{self._requests}")
            self._engine.add_request(names[-1], {"prompt_token_ids": prompt}, sampling)
        return names

    def _step(self) -> Iterable[Any]:
        outputs: list[Any] = self._engine.step()
        if not outputs:
            time.sleep(IDLE_SLEEP)
        return outputs

    def _work_off(self, until: float) -> None:
        while self._scheduler.has_requests() and time.perf_counter() < until:
            self._step()


def main() -> None:
    """Start the engine that the first argument describes and obey until standard input ends."""
    answers = _own_standard_output()
    _hide_numba_from_vllm()
    engine = Engine(json.loads(sys.argv[1]))
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        _answer(answers, getattr(engine, order.pop("do"))(**order))


def _hide_numba_from_vllm() -> None:
    """Let an engine start whose connector imports numba, as LMCache's does.

    vLLM looks for its kernels in the ``__dict__`` of everything that any module names. llvmlite's
    library has none, but invents a function of that name, over which vLLM falls.
    """
    invent = ffi._lib_wrapper.__getattr__

    def find(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return invent(library, name)

    ffi._lib_wrapper.__getattr__ = find


def _own_standard_output() -> TextIO:
    """Take standard output for the answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
