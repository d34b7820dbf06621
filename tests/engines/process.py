"""An engine in a process of its own, that is gone when the test is, whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests.engines.asking import Answer, Ask
from tests.running import wait_for

REPOSITORY = Path(__file__).parents[2]
START = 180.0
"""Seconds that an engine may take to start; 15 on an idle machine."""
ANSWER = 120.0
"""Seconds that an answer may take."""
BLOCK = 32
"""Tokens of a block, the smallest that vLLM's attention for CPUs takes."""

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
}
"""Of every engine, unless the test says otherwise."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_COLOR": "0",
    # Threads that spin for each other cost a busy machine forty times what they save it.
    "OMP_NUM_THREADS": "1",
    # vLLM counts ranks of tokens in a compiled function, which would need a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    # Prefix hashes are to be the same in all processes without it.
    "PYTHONHASHSEED": "random",
}


class EngineFailed(AssertionError):
    """An engine died, did not start or did not answer; the message has the end of its log."""


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started, and waits until they are gone."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def tail(log: Path, lines: int = 60) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class EngineProcess:
    """A real vLLM engine; see `tests.engines.child` for the other end."""

    def __init__(
        self, model: Path, log: Path, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """Starts it, without waiting.

        Args:
            model: its directory.
            log: file for what it prints.
            env: environment variables, over `ENVIRONMENT`.
            options: vLLM's `EngineArgs`, over `OPTIONS`.
        """
        self.log = log
        self._numbers = itertools.count()
        self._answers: dict[str, Answer] = {}
        self._replies: list[Any] = []
        self._unread = b""
        self._ready = False
        source, self._commands = os.pipe()
        self._events, sink = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.child", str(source), str(sink)],
                cwd=REPOSITORY,
                env=os.environ | ENVIRONMENT | dict(env or {}),
                pass_fds=(source, sink),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        os.close(source)
        os.close(sink)
        self._send(OPTIONS | {"model": str(model)} | options)

    @property
    def pid(self) -> int:
        """Of the process with the scheduler."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it was stopped or killed."""
        return self._commands < 0

    def wait_ready(self, seconds: float = START) -> None:
        """Returns when it has started.

        Raises:
            EngineFailed: it has not.
        """
        self._take_until(lambda: self._ready, seconds)

    def submit(self, asks: Sequence[Ask]) -> list[str]:
        """Hands over requests, all before the engine's next step; their ids."""
        requests = {f"r{next(self._numbers)}": asdict(ask) for ask in asks}
        self._send({"do": "submit", "asks": requests})
        return list(requests)

    def abort(self, requests: Sequence[str]) -> None:
        """Aborts what is still running of them."""
        self._send({"do": "abort", "requests": list(requests)})

    def collect(self, requests: Sequence[str], seconds: float = ANSWER) -> list[Answer]:
        """The answers to requests, in the order of their ids.

        Raises:
            EngineFailed: the engine failed, or took longer.
        """
        self._take_until(lambda: all(each in self._answers for each in requests), seconds)
        return [self._answers.pop(each) for each in requests]

    def generate(self, asks: Sequence[Ask], seconds: float = ANSWER) -> list[Answer]:
        """Submits and collects."""
        return self.collect(self.submit(asks), seconds)

    def metrics(self) -> dict[str, float]:
        """What it exposes to Prometheus: `name{label=value}` to value."""
        found: dict[str, float] = self._ask("metrics")
        return found

    def state(self) -> dict[str, Any]:
        """Of the scheduler: `requests`, `work`, `free_blocks`, `blocks`."""
        found: dict[str, Any] = self._ask("state")
        return found

    def wait_idle(self, seconds: float = 30.0) -> dict[str, Any]:
        """Waits until there is nothing more to do, saving included; the state then."""
        wait_for(lambda: not self.state()["work"], seconds)
        return self.state()

    def forget(self) -> None:
        """Empties its own prefix cache, once it has nothing to do."""
        wait_for(lambda: self._ask("forget"), 30.0)

    def reset(self) -> bool:
        """As vLLM's `reset_prefix_cache(reset_connector=True)`."""
        return bool(self._ask("reset"))

    def log_text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """Lets it shut down as vLLM does; its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._send({"do": "stop"})
        try:
            return self._process.wait(30)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it and everything it started, at once."""
        end_group(self._process)
        for end in (self._commands, self._events):
            if end >= 0:
                os.close(end)
        self._commands = self._events = -1

    def _ask(self, name: str) -> Any:
        self._send({"do": name})
        self._take_until(lambda: bool(self._replies), ANSWER)
        return self._replies.pop(0)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._commands, data) :]

    def _take_until(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._events], [], [], left)[0]:
                raise EngineFailed(f"nothing within {seconds} s\n{tail(self.log)}")
            read = os.read(self._events, 1 << 20)
            if not read:
                raise EngineFailed(f"the engine is gone\n{tail(self.log)}")
            *lines, self._unread = (self._unread + read).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "answer":
            request = message.pop("request")
            message["tokens"] = tuple(message["tokens"])
            message["scores"] = tuple(message["scores"])
            self._answers[request] = Answer(**message)
        elif kind == "reply":
            self._replies.append(message["value"])
        elif kind == "ready":
            self._ready = True
        else:
            raise EngineFailed(f"{message['traceback']}\n{tail(self.log)}")


@contextlib.contextmanager
def engine(
    model: Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    ready: bool = True,
    **options: Any,
) -> Iterator[EngineProcess]:
    """A started engine for the time of the block, or one that is still starting."""
    process = EngineProcess(model, log, env, **options)
    try:
        if ready:
            process.wait_ready()
        yield process
        assert process.ended or process.stop() == 0, f"it did not end well\n{tail(log)}"
    finally:
        process.kill()
