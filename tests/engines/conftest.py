"""Engines and what they are compared with; skipped where there is no vLLM."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.engines import node
from tests.engines.asking import Answer, Ask
from tests.engines.models import make_llama
from tests.engines.process import EngineProcess, engine
from tests.running import DaemonProcess, daemon_process

StartEngine: TypeAlias = Callable[..., EngineProcess]
Reference: TypeAlias = Callable[[list[Ask]], list[Answer]]

_HERE = Path(__file__).parent
_INSTALLED = importlib.util.find_spec("vllm") is not None
_TIMEOUT = 300  # seconds; a test may start several engines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != _HERE:
            continue
        item.add_marker("vllm")
        item.add_marker(pytest.mark.timeout(_TIMEOUT))
        if not _INSTALLED:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that every test uses, unless it is about another."""
    return make_llama(tmp_path_factory.mktemp("llama"), seed=0)


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape, with other weights."""
    return make_llama(tmp_path_factory.mktemp("other-llama"), seed=1)


@contextlib.contextmanager
def _engines(directory: Path, model: Path) -> Iterator[StartEngine]:
    with contextlib.ExitStack() as stack:
        logs = (directory / f"engine{number}.log" for number in range(1000))

        def start(model: Path = model, **options: Any) -> EngineProcess:
            return stack.enter_context(engine(model, next(logs), **options))

        yield start


@pytest.fixture
def start_engine(tmp_path: Path, llama: Path) -> Iterator[StartEngine]:
    """Starts engines that end with the test."""
    with _engines(tmp_path, llama) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_engine(
    tmp_path_factory: pytest.TempPathFactory, llama: Path
) -> Iterator[StartEngine]:
    """Starts engines that end with the module."""
    with _engines(tmp_path_factory.mktemp("engines"), llama) as start:
        yield start


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[Reference]:
    """What an engine answers that has no connector and no prefix cache; asked only once each."""
    known: dict[str, Answer] = {}
    with _engines(tmp_path_factory.mktemp("reference"), llama) as start:
        running: list[EngineProcess] = []

        def answers(asks: list[Ask]) -> list[Answer]:
            new = {key: ask for ask in asks if (key := _key(ask)) not in known}
            if new:
                if not running:
                    running.append(start(enable_prefix_caching=False))
                known.update(zip(new, running[0].generate(list(new.values())), strict=True))
            return [known[_key(ask)] for ask in asks]

        yield answers


def _key(ask: Ask) -> str:
    return f"{ask.prompt} {ask.tokens} {ask.sampling}"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of the test's own."""
    with daemon_process(node.config(tmp_path)) as process:
        yield process


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon for the module."""
    with daemon_process(node.config(tmp_path_factory.mktemp("daemon"))) as process:
        yield process
