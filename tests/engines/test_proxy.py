"""The proxy of the prefill and decode example in front of two of vLLM's own servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.metrics.loggers")  # what its imports warn of is not ours to mend

from aiohttp import ClientSession

from tests.engines import node
from tests.engines.asking import Answer, Ask, prompt
from tests.engines.conftest import Reference
from tests.engines.process import BLOCK, ENVIRONMENT, REPOSITORY, end_group, tail
from tests.engines.test_disaggregation import core
from tests.running import DaemonProcess

START = 240.0
WAIT = 60.0
TOKENS = 8
ASKS = [Ask(prompt(400 + each, (10 + each) * BLOCK + 3), TOKENS) for each in range(4)]


@dataclass
class Server:
    """A process that serves HTTP."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait_ready(self, path: str) -> None:
        deadline = time.monotonic() + START
        while True:
            try:
                with urllib.request.urlopen(self.url + path, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, tail(self.log)
                assert time.monotonic() < deadline, tail(self.log)
                time.sleep(0.2)

    def count(self, name: str) -> float:
        """One of its metrics."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


@dataclass
class Disaggregated:
    prefill: Server
    decode: Server
    proxy: Server


@contextmanager
def _server(log: Path, port: int, command: Sequence[str], number: int = 0) -> Iterator[Server]:
    env = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | core(number)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port)],
            cwd=REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", log, process)
    finally:
        end_group(process)


def _engine(model: Path, daemon: DaemonProcess, role: str) -> list[str]:
    return [
        *("vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "2048"),
        *("--model", str(model), "--served-model-name", "llama"),
        *("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(64 << 20)),
        *("--kv-transfer-config", json.dumps(node.connector(daemon, role))),
    ]


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, llama: Path, shared_daemon: DaemonProcess
) -> Iterator[Disaggregated]:
    logs, daemon = tmp_path_factory.mktemp("servers"), shared_daemon
    ports = [node.free_port() for _ in range(3)]
    with (
        _server(
            logs / "prefill.log", ports[0], _engine(llama, daemon, "kv_producer"), 0
        ) as prefill,
        _server(logs / "decode.log", ports[1], _engine(llama, daemon, "kv_consumer"), 1) as decode,
        _server(
            logs / "proxy.log",
            ports[2],
            [
                *("examples.prefill_decode.proxy", "--wait", str(WAIT)),
                *("--prefill", prefill.url, "--decode", decode.url),
            ],
        ) as proxy,
    ):
        for engine in (prefill, decode):
            engine.wait_ready("/health")
        proxy.wait_ready("/v1/models")
        yield Disaggregated(prefill, decode, proxy)


def _body(ask: Ask, **more: Any) -> dict[str, Any]:
    return {
        "model": "llama",
        "prompt": list(ask.prompt),
        "max_tokens": ask.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


async def _complete(url: str, ask: Ask) -> tuple[int, ...]:
    async with (
        ClientSession() as session,
        session.post(url + "/v1/completions", json=_body(ask)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return tuple((await answer.json())["choices"][0]["token_ids"])


async def _stream(url: str, ask: Ask) -> list[tuple[int, ...]]:
    """The tokens of each part."""
    parts = []
    async with (
        ClientSession() as session,
        session.post(url + "/v1/completions", json=_body(ask, stream=True)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            text = line.decode().removeprefix("data: ").strip()
            if text and text != "[DONE]":
                parts.append(tuple(json.loads(text)["choices"][0]["token_ids"]))
    return parts


def _tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [each.tokens for each in answers]


async def test_prompts_are_computed_on_one_server_and_answered_by_the_other(
    servers: Disaggregated, reference: Reference
) -> None:
    asked = (_complete(servers.proxy.url, ask) for ask in ASKS)
    assert await asyncio.gather(*asked) == _tokens(reference(ASKS))
    blocks = sum(len(ask.prompt) // BLOCK for ask in ASKS)
    assert servers.prefill.count("vllm:kvstore_stored_blocks_total") == blocks
    assert servers.decode.count("vllm:kvstore_loaded_blocks_total") == blocks
    assert servers.decode.count("vllm:kvstore_failed_load_blocks_total") == 0


async def test_an_answer_is_streamed(servers: Disaggregated, reference: Reference) -> None:
    ask = Ask(prompt(410, 10 * BLOCK + 3), TOKENS)
    parts = await _stream(servers.proxy.url, ask)
    assert len(parts) > 1
    assert [sum(parts, ())] == _tokens(reference([ask]))


async def test_the_decode_server_answers_alone_when_the_other_is_killed(
    servers: Disaggregated, reference: Reference
) -> None:
    end_group(servers.prefill.process)
    ask = Ask(prompt(420, 10 * BLOCK + 3), TOKENS)
    began = time.monotonic()
    assert [await _complete(servers.proxy.url, ask)] == _tokens(reference([ask]))
    # An answer of the reference is in it, but no wait.
    assert time.monotonic() - began < WAIT / 2
