"""vLLM's OpenAI server in processes of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.process import (
    BLOCK,
    ENVIRONMENT,
    REPOSITORY,
    START,
    EngineFailed,
    end_group,
    tail,
)
from tests.running import wait_for

NAME = "tiny"
"""Of the model, in requests."""


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    log: Path

    def complete(self, prompt: tuple[int, ...], tokens: int, **fields: Any) -> dict[str, Any]:
        """Posts a greedy completion of token ids; the answer, with the ids in its first choice."""
        body = {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | fields).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def metrics(self) -> str:
        """The page for Prometheus."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return str(answer.read().decode())


@contextlib.contextmanager
def server(
    model: Path, log: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server for the time of the block.

    Args:
        model: its directory.
        log: file for what it prints.
        arguments: more of the command line.
        env: environment variables, over those of every engine.
    """
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", NAME),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"),
        *("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(64 << 20)),
    ]
    variables = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=REPOSITORY,
            env=variables | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    started = Server(f"http://127.0.0.1:{port}", log)

    def is_up() -> bool:
        if process.poll() is not None:
            raise EngineFailed(f"the server is gone\n{tail(log)}")
        try:
            with urllib.request.urlopen(f"{started.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    try:
        wait_for(is_up, START)
        yield started
    except AssertionError as error:
        raise EngineFailed(f"{error}\n{tail(log)}") from error
    finally:
        end_group(process)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
