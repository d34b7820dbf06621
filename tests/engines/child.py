"""A real vLLM engine that is told what to do over a pipe; `EngineProcess` is the other end.

One JSON object a line. The first line has the engine's options; what comes back is `ready`. Then,
in any order and number: `submit` gives one `answer` for each request, the other commands one
`reply`. The scheduler and the worker run in this process (tensor parallel workers in others), so
that a test can look into them.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from prometheus_client import REGISTRY
from vllm import EngineArgs, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig, PoolerConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engines.asking import Answer, Ask

_CONFIGS = {
    "kv_transfer_config": KVTransferConfig,
    "kv_events_config": KVEventsConfig,
    "pooler_config": PoolerConfig,
}
_IDLE = 0.001  # seconds, as vLLM's own loop lets other threads run while it only waits


@dataclass
class _Running:
    ask: Ask
    steps: int = 0
    tokens: int = 0

    def is_to_abort(self) -> bool:
        by_tokens, by_steps = self.ask.abort_tokens, self.ask.abort_steps
        return (by_tokens is not None and self.tokens >= by_tokens) or (
            by_steps is not None and self.steps >= by_steps
        )


class Child:
    """The engine and its loop."""

    def __init__(self, options: dict[str, Any], answers: TextIO) -> None:
        for name, config in _CONFIGS.items():
            if options.get(name) is not None:
                options[name] = config(**options[name])
        self._engine = LLMEngine.from_engine_args(EngineArgs(**options))
        self._core = self._engine.engine_core.engine_core
        self._answers = answers
        self._running: dict[str, _Running] = {}
        self._adapters: dict[str, int] = {}

    def run(self, commands: queue.Queue[dict[str, Any]]) -> None:
        """Steps the engine while it has work, and does what it is told between steps."""
        while True:
            try:
                command = commands.get(block=not self._has_work())
            except queue.Empty:
                self._step()
                continue
            if command["do"] == "stop":
                self._engine.engine_core.shutdown()
                return
            self._do(command)

    def tell(self, **message: Any) -> None:
        """One line to the other end."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def _has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests() or self._core.scheduler.has_requests())

    def _do(self, command: dict[str, Any]) -> None:
        name = command["do"]
        if name == "submit":
            for request, fields in command["asks"].items():
                self._submit(request, Ask(**fields))
        elif name == "abort":
            self._abort([each for each in command["requests"] if each in self._running])
        else:
            self.tell(kind="reply", value=getattr(self, f"_{name}")())

    def _submit(self, request: str, ask: Ask) -> None:
        extra = {"kv_transfer_params": ask.transfer} if ask.transfer is not None else None
        settings: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": ask.tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "extra_args": extra,
            "output_kind": RequestOutputKind.CUMULATIVE,
        }
        text: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
        if ask.salt is not None:
            text["cache_salt"] = ask.salt
        params = SamplingParams(**(settings | ask.sampling))
        adapter = self._adapter(ask.adapter) if ask.adapter is not None else None
        self._engine.add_request(request, text, params, lora_request=adapter, priority=ask.priority)
        self._running[request] = _Running(ask)
        self._abort_the_due()

    def _adapter(self, directory: str) -> LoRARequest:
        number = self._adapters.setdefault(directory, len(self._adapters) + 1)
        return LoRARequest(Path(directory).name, number, directory)

    def _step(self) -> None:
        before = self._steps()
        for output in self._engine.step():
            self._note(output)
        for each in self._running.values():
            each.steps += 1
        self._abort_the_due()
        if before == self._steps():
            time.sleep(_IDLE)

    def _steps(self) -> int:
        """Tokens that all running requests have: unchanged by a step that computed nothing."""
        return sum(each.num_computed_tokens for each in self._core.scheduler.requests.values())

    def _note(self, output: RequestOutput) -> None:
        made = output.outputs[0]
        self._running[output.request_id].tokens = len(made.token_ids)
        if not output.finished:
            return
        del self._running[output.request_id]
        scores = [
            step[token].logprob
            for token, step in zip(made.token_ids, made.logprobs or (), strict=False)
        ]
        answer = Answer(
            tokens=tuple(made.token_ids),
            scores=tuple(scores),
            cached=output.num_cached_tokens or 0,
            reason=made.finish_reason or "",
            transfer=output.kv_transfer_params,
        )
        self.tell(kind="answer", request=output.request_id, **asdict(answer))

    def _abort_the_due(self) -> None:
        self._abort([name for name, each in self._running.items() if each.is_to_abort()])

    def _abort(self, requests: list[str]) -> None:
        self._engine.abort_request(requests)
        for request in requests:
            del self._running[request]
            answer = Answer(tokens=(), scores=(), cached=0, reason="abort")
            self.tell(kind="answer", request=request, **asdict(answer))

    def _metrics(self) -> dict[str, float]:
        """Every sample of the process's registry, without vLLM's labels for model and engine."""
        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                labels = {
                    key: value
                    for key, value in sorted(sample.labels.items())
                    if key not in ("model_name", "engine")
                }
                inner = ",".join(f"{key}={value}" for key, value in labels.items())
                name = f"{sample.name}{{{inner}}}" if inner else sample.name
                found[name] = found.get(name, 0.0) + sample.value
        return found

    def _state(self) -> dict[str, Any]:
        """What the scheduler holds."""
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(scheduler.requests),
            "work": self._has_work(),
            "free_blocks": pool.get_num_free_blocks(),
            "blocks": pool.num_gpu_blocks,
        }

    def _forget(self) -> bool:
        """Empties the engine's own prefix cache, so that only the connector's is left."""
        return bool(self._engine.reset_prefix_cache())

    def _reset(self) -> bool:
        """Empties the engine's own prefix cache and asks the connector to empty its."""
        return bool(self._engine.reset_prefix_cache(reset_connector=True))


def _read(commands: queue.Queue[dict[str, Any]], source: TextIO) -> None:
    for line in source:
        commands.put(json.loads(line))
    # The test is gone: its engine must not outlive it, nor that engine's workers.
    os.killpg(0, signal.SIGKILL)


def main(source: int, sink: int) -> int:
    """Serves the pipe until it is told to stop; 1 if the engine failed."""
    for end in (source, sink):
        os.set_inheritable(end, False)
    # Neither is closed: that would wait for the thread that reads.
    lines, answers = open(source), open(sink, "w")  # noqa: SIM115
    try:
        child = Child(json.loads(lines.readline()), answers)
        child.tell(kind="ready")
        commands: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=_read, args=(commands, lines), daemon=True).start()
        child.run(commands)
    except Exception:  # noqa: BLE001 - handed to the test's process
        text = traceback.format_exc()
        answers.write(json.dumps({"kind": "failed", "traceback": text}) + "\n")
        answers.flush()
        return 1
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of vLLM's may still run
