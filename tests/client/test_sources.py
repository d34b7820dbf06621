"""Blocks that are written where they are wanted: both clients, each transport."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest

import kvstore
from client import putting
from client.operations import Begin, Finish, Move, Terms
from kvstore.errors import InvalidRequest, ParentAbsent, Unavailable
from kvstore.identity import Namespace, prefix_hashes
from kvstore.protocol import messages
from tests.client.sync_facade import CONNECT
from tests.running import DaemonThread, make_config, wait_for

BLOCK = 16 << 10
MODELS = count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonThread]:
    config = make_config(
        tmp_path_factory.mktemp("sources"),
        listen={"tcp": "127.0.0.1:0"},
        limits={"max_payload": "1MiB"},
    )
    with DaemonThread(config) as running:
        yield running


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(f"model {next(MODELS)}", "uint8", "raw", 4, BLOCK)


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shm", "tcp"])
def client(
    request: pytest.FixtureRequest, daemon: DaemonThread, namespace: Namespace, kind: str
) -> Iterator[Any]:
    with CONNECT[kind](daemon.url, namespace, transport=request.param, deadline=5.0) as made:
        yield made


def hashes(blocks: int) -> list[bytes]:
    return prefix_hashes(range(4 * blocks), 4)


class Source:
    """Rows of an array; notes what it is asked for, and fails at a position if told to.

    Attributes:
        calls: the positions asked for, call by call.
        memory: what the last call was to write to.
    """

    def __init__(self, blocks: int, fails_at: int = -1, error: Exception | None = None) -> None:
        self.data = np.random.default_rng(3).integers(0, 256, (blocks, BLOCK), np.uint8)
        self.calls: list[list[int]] = []
        self.memory: list[memoryview] = []
        self._fails_at = fails_at
        self._error = error

    def __len__(self) -> int:
        return len(self.data)

    def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
        self.calls.append(list(positions))
        self.memory = list(into)
        for position, block in zip(positions, into, strict=True):
            assert (block.nbytes, block.format, block.readonly) == (BLOCK, "B", False)
            if position == self._fails_at:
                assert self._error is not None
                raise self._error
            block[:] = self.data[position].data


def stored(client: Any, names: list[bytes]) -> Any:
    into = np.zeros((len(names), BLOCK), np.uint8)
    assert client.get(names, into).found == len(names)
    return into


def test_all_blocks_in_one_call(client: Any) -> None:
    source = Source(20)
    result = client.put(hashes(20), source)
    assert (result.stored, result.failure) == (20, None)
    assert source.calls == [list(range(20))]
    assert np.array_equal(stored(client, hashes(20)), source.data)


def test_what_is_held_is_not_asked_for(client: Any) -> None:
    names, source = hashes(8), Source(8)
    client.put(names[:5], source.data[:5])
    assert client.put(names, source).outcomes == ["held"] * 5 + ["stored"] * 3
    assert client.put(names, source).held == 8
    assert source.calls == [[5, 6, 7]]
    assert np.array_equal(stored(client, names), source.data)


def test_many_blocks_in_parts(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(putting, "RESERVE_BYTES", 13 * BLOCK)
    monkeypatch.setattr(putting, "WRITE_BYTES", 2 * BLOCK)
    source = Source(31)
    assert client.put(hashes(31), source).stored == 31
    assert [position for call in source.calls for position in call] == list(range(31))
    assert max(map(len, source.calls)) == 2
    assert np.array_equal(stored(client, hashes(31)), source.data)


def test_a_source_says_how_much_it_likes_at_once(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putting, "WRITE_BYTES", 2 * BLOCK)
    source = Source(31)
    source.write_bytes = 5 * BLOCK  # type: ignore[attr-defined]
    assert client.put(hashes(31), source).stored == 31
    in_place = client.stats().transport == "shm"
    assert max(map(len, source.calls)) == (5 if in_place else 2)
    assert np.array_equal(stored(client, hashes(31)), source.data)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("mine"), Unavailable("mine"), InvalidRequest("mine")]
)
def test_an_error_is_raised_as_it_is(
    client: Any, daemon: DaemonThread, namespace: Namespace, error: Exception
) -> None:
    names, source = hashes(4), Source(4, 2, error)
    client.put(names[:1], source.data[:1])
    with pytest.raises(type(error), match="mine") as raised:
        client.put(names, source)
    assert raised.value is error
    assert client.exists(names).hits == [True, False, False, False]
    with kvstore.connect(daemon.url, namespace, transport="tcp") as other:
        # Else it would be busy: what was reserved is free by the time of the error.
        assert other.put(names[:2], source.data[:2]).outcomes == ["held", "stored"]
    assert client.put(names, source.data).outcomes == ["held"] * 2 + ["stored"] * 2
    assert client.stats().connects == 1
    assert np.array_equal(stored(client, names), source.data)


def test_an_error_leaves_whole_blocks_only(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(putting, "RESERVE_BYTES", 6 * BLOCK)
    monkeypatch.setattr(putting, "WRITE_BYTES", 2 * BLOCK)
    source = Source(12, 9, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        client.put(hashes(12), source)
    assert source.calls[-1] == [8, 9]
    assert client.match(hashes(12)).blocks == 8
    assert np.array_equal(stored(client, hashes(8)), source.data[:8])


def test_an_error_is_not_kept(client: Any) -> None:
    source = Source(2, 1, ZeroDivisionError())
    gone = weakref.ref(source)
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            client.put(hashes(2), source)
        source._error = None
        del source
        wait_for(lambda: gone() is None)
    finally:
        gc.enable()


def test_mistakes_of_the_caller_raise(client: Any) -> None:
    source = Source(3)
    with pytest.raises(InvalidRequest, match="as many"):
        client.put(hashes(4), source)
    with pytest.raises(ParentAbsent):
        client.put(hashes(3), source, parent=bytes(range(32)))
    assert source.calls == []


def test_memory_of_the_node_is_gone_after_the_call(
    daemon: DaemonThread, namespace: Namespace, kind: str
) -> None:
    with CONNECT[kind](daemon.url, namespace, transport="shm", deadline=5.0) as client:
        source = Source(2)
        client.put(hashes(2), source)
        with pytest.raises(ValueError, match="released"):
            source.memory[0][0] = 1


class InlineTransport:
    """A transport that shares no memory and names it; notes what it was given back."""

    shares_memory = False

    def __init__(self) -> None:
        self.returned: list[Sequence[int]] = []

    def missing(self, locations: object) -> list[int]:
        return []

    def fill(self, places: object, offset: int, buffers: list[memoryview]) -> list[memoryview]:
        return buffers

    def sources(self, buffers: Sequence[memoryview]) -> Sequence[int]:
        return [id(buffers)]

    def done(self, named: Sequence[int]) -> None:
        self.returned.append(named)


def drive(operation: Any, seen: list[str]) -> Any:
    """Carry out a put against a node that takes everything; notes each step."""
    step = next(operation)
    while True:
        request = step.call.request if isinstance(step, Begin) else getattr(step, "request", None)
        seen.append(type(request if request is not None else step).__name__)
        answer: object = None
        if isinstance(request, messages.Reserve):
            answer = messages.ReserveAnswer(1, bytes([messages.FILL]) * len(request.hashes))
        elif isinstance(step, Begin):
            answer = step
        elif isinstance(step, Finish):
            answer = messages.WriteAnswer(bytes([1]) * len(step.handle.call.request.indexes))
        elif isinstance(step, Move):
            step.work()
        try:
            step = operation.send(answer)
        except StopIteration as done:
            return done.value


def put_inline(source: Source, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str], int]:
    monkeypatch.setattr(putting, "WRITE_BYTES", BLOCK)
    transport, seen = InlineTransport(), list[str]()
    namespace = Namespace("m", "uint8", "raw", 4, BLOCK)
    terms = Terms(namespace, transport, 1 << 20, 100)  # type: ignore[arg-type]
    filling = putting.filling_of(namespace, hashes(len(source)), source)
    result = drive(putting.put(terms, hashes(len(source)), filling, bytes(32)), seen)
    return result, seen, len(transport.returned)


def test_staging_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    result, seen, returned = put_inline(Source(9), monkeypatch)
    assert (result.stored, returned) == (9, 9)
    assert seen[0] == "Reserve"
    ahead = [seen[:end].count("Write") - seen[:end].count("Finish") for end in range(len(seen))]
    assert max(ahead) == putting.STAGED_AHEAD + 1


def test_what_is_under_way_is_settled_before_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    result, seen, returned = put_inline(Source(9, 2, ZeroDivisionError()), monkeypatch)
    assert (result.stored, returned) == (2, 2)
    assert seen[-4:] == ["Move", "Finish", "Finish", "Abort"]


def test_closing_waits_for_a_source(daemon: DaemonThread, namespace: Namespace) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Source):
        def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
            entered.set()
            assert go_on.wait(10)
            super().write(positions, into)

    client = kvstore.connect(daemon.url, namespace, transport="shm", deadline=5.0)
    results: list[Any] = []
    putter = threading.Thread(target=lambda: results.append(client.put(hashes(2), Slow(2))))
    putter.start()
    assert entered.wait(10)
    closer = threading.Thread(target=client.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go_on.set()
    closer.join(10)
    putter.join(10)
    assert not closer.is_alive()
    assert len(results) == 1
