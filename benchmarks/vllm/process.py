"""Engines and the peers' servers as processes that are gone when the run is."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.vllm.shape import BLOCK_TOKENS, LONGEST

REPOSITORY = Path(__file__).parents[2]
START = 300.0
"""Seconds that engines which start together may take."""
ANSWER = 180.0
STOP = 20.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}
CACHE_BYTES = 768 << 20
"""An engine's own KV cache, six times the longest request: nothing is preempted, and the share of
it that our connector pins for its saves holds a whole request."""
MESSAGE = 300
"""Characters of a log's last error that a row of the table has room for."""


class EngineFailed(Exception):
    """An engine didn't start, died, or didn't answer in time."""


class Engine:
    """The other end of `benchmarks.vllm.engine`."""

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        transfer: Mapping[str, Any] | None,
        environment: Mapping[str, str],
        paths: Sequence[Path] = (),
    ) -> None:
        """Start it and do not wait.

        Args:
            python: an interpreter that has vLLM.
            model: the model's directory.
            log: file for what it prints.
            transfer: vLLM's ``KVTransferConfig``, or no connector.
            environment: variables besides those that all engines get.
            paths: directories with packages to import besides the interpreter's.
        """
        self._log = log
        settings = {
            "model": str(model),
            "transfer": transfer,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": LONGEST,
            "block_size": BLOCK_TOKENS,
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": CACHE_BYTES,
        }
        search = os.pathsep.join(map(str, (REPOSITORY, *paths)))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.vllm.engine", json.dumps(settings)],
                cwd=REPOSITORY,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": search} | dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Return when it takes orders.

        Raises:
            EngineFailed: it ended, or took longer than `START`.
        """
        self._read(START)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        """See `benchmarks.vllm.engine.Engine.generate`."""
        return self._order(do="generate", prompts=prompts, tokens=tokens)

    def forget(self, external: bool) -> None:
        """See `benchmarks.vllm.engine.Engine.forget`.

        Raises:
            EngineFailed: it still holds its prefix cache.
        """
        if not self._order(do="forget", external=external)["forgotten"]:
            raise EngineFailed("its prefix cache cannot be emptied: the connector holds blocks")

    def end(self) -> None:
        """Kill it and all that it started."""
        end_group(self._process)

    def _order(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("died") from None
        return self._read(ANSWER)

    def _read(self, seconds: float) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        # One answer to one order: nothing is left in the reader's buffer that select cannot see.
        if not select.select([output], [], [], seconds)[0]:
            raise self._failure(f"no answer in {seconds:.0f} s")
        line = output.readline()
        if not line:
            raise self._failure("died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> EngineFailed:
        return EngineFailed(f"{what}: {last_error(self._log)}")


@contextmanager
def server(
    command: Sequence[str | Path],
    log: Path,
    address: tuple[str, int],
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run a peer's server until the end of the block.

    Raises:
        EngineFailed: it ended, or nothing listens at ``address`` after a while.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            env=os.environ | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait_for_listener(process, log, address)
        yield
    finally:
        end_group(process)


def free_port() -> int:
    """A TCP port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def end_group(process: subprocess.Popen[Any]) -> None:
    """Tell a process and all of its group to end; kill what has not after a while."""
    for number, patience in ((signal.SIGTERM, STOP), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            process.wait()
        except subprocess.TimeoutExpired:
            continue
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what a process that died didn't take
                pipe.close()


def last_error(log: Path) -> str:
    """The last line of a log that looks like an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception" in line]
    return (errors or lines or ["it printed nothing"])[-1][-MESSAGE:]


def _wait_for_listener(process: subprocess.Popen[Any], log: Path, address: tuple[str, int]) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if process.poll() is not None:
            raise EngineFailed(f"its server ended: {last_error(log)}")
        try:
            socket.create_connection(address, timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise EngineFailed(f"its server does not listen: {last_error(log)}")
