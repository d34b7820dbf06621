"""What a benchmark of a node asks of it, what it counts, and that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import numpy as np
import pytest

from client.operations import Seen
from client.results import ABSENT, DRAM, FAILED, REFUSED, STORED, GetResult, Match, PutResult
from client.views import BlockViews
from kvstore.bench import CALLS, Bench, Load, Measured
from kvstore.errors import OutOfSpace, ParentAbsent, Unavailable
from kvstore.identity import ROOT_PARENT

BLOCK = 64
MEMORY = 12 * BLOCK


class Double:
    """A node in memory that has room for `room` blocks."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.blocks: dict[bytes, bytearray] = {}
        self.parents: dict[bytes, bytes] = {}
        self.room = room
        self.most = 0
        self.removed: list[bytes] = []
        self.failing = ""
        self.replicas: set[int] = set()

    def _failure(self, call: str) -> str | None:
        return "unavailable" if call == self.failing else None

    def _codes(self, hashes: Sequence[bytes]) -> bytes:
        return bytes(DRAM if name in self.blocks else ABSENT for name in hashes)

    def put(
        self, hashes: Sequence[bytes], blocks: Sequence[Any], *, parent: bytes, replicas: int
    ) -> PutResult:
        if self._failure("put"):
            return PutResult(bytes([FAILED] * len(hashes)), "unavailable")
        if parent != ROOT_PARENT and parent not in self.blocks:
            raise ParentAbsent("no such parent")
        codes = bytearray()
        for name, block in zip(hashes, blocks, strict=True):
            full = len(self.blocks) == self.room
            codes.append(REFUSED if full else STORED)
            if not full:
                self.blocks[name], self.parents[name] = bytearray(block), parent
            parent = name
        self.replicas.add(replicas)
        self.most = max(self.most, sum(map(len, self.blocks.values())))
        return PutResult(bytes(codes))

    def get(self, hashes: Sequence[bytes], into: Sequence[Any]) -> GetResult:
        for name, buffer in zip(hashes, into, strict=True):
            if name in self.blocks:
                buffer[:] = np.frombuffer(self.blocks[name], np.uint8)
        return GetResult(self._codes(hashes), self._failure("get"))

    def view(self, hashes: Sequence[bytes]) -> BlockViews:
        views = [memoryview(self.blocks[one]) if one in self.blocks else None for one in hashes]
        return BlockViews(Seen(self._codes(hashes), views, []), None, None, self._failure("view"))

    def match(self, hashes: Sequence[bytes]) -> Match:
        return Match(self._codes(hashes).split(b"\0")[0], self._failure("match"))

    def exists(self, hashes: Sequence[bytes]) -> GetResult:
        return GetResult(self._codes(hashes), self._failure("exists"))

    def remove(self, root: bytes) -> None:
        self.removed.append(root)
        gone = {root} & self.blocks.keys()
        for name, parent in self.parents.items():
            if parent in gone:
                gone.add(name)
        for name in gone:
            self.blocks.pop(name, None)
            self.parents.pop(name, None)


def run(
    double: Double,
    batch: int = 3,
    *,
    check: Callable[[], object] = lambda: None,
    seconds: float = 1.0,
    seen: list[float] | None = None,
) -> Measured:
    """Measure with a clock that goes on by a second each time somebody looks at it."""
    bench = Bench(MEMORY, check, clock=cast(Any, count(0.0).__next__))
    progress = (seen if seen is not None else []).append
    return bench.measure(cast(Any, double), Load(BLOCK, batch), double.remove, seconds, progress)


@pytest.mark.parametrize("batch", [1, 3, 5, 12])
def test_every_call_is_made_for_every_batch_and_nothing_stays(batch: int) -> None:
    double, seen = Double(), []
    measured = run(double, batch, seen=seen)
    batches = MEMORY // BLOCK // batch
    assert {call: len(timed) for call, timed in measured.calls.items()} == dict.fromkeys(
        CALLS, batches
    )
    assert (measured.wrong, measured.lost, seen) == (0, 0, [1.0])
    assert (double.blocks, len(double.removed), double.replicas) == ({}, 2, {1})
    assert double.most == batches * batch * BLOCK <= MEMORY


def test_it_goes_on_until_the_time_is_over() -> None:
    double, seen = Double(), []
    measured = run(double, 12, seconds=30.0, seen=seen)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0 > seen[0] > 0
    assert len(double.removed) == len(seen) + 1
    assert len(measured.calls["put"]) == len(seen)
    assert len(set(double.removed)) == len(double.removed)


def test_rates_are_what_the_times_say() -> None:
    measured = run(Double(), 3)
    found: Any = measured.summary()
    assert (found["block_bytes"], found["batch"]) == (BLOCK, 3)
    put, view, match = (found["calls"][call] for call in ("put", "view", "match"))
    assert (put["calls"], put["p50"], put["p99"], put["seconds"]) == (4, 1.0, 1.0, 4.0)
    assert (put["blocks_per_second"], put["bytes_per_second"]) == (3.0, 3.0 * BLOCK)
    assert put["of_memcpy"] == 1.0
    # Both the call and giving the views back, but not what lies between.
    assert (view["p50"], view["of_memcpy"]) == (2.0, 0.5)
    assert match["blocks_per_second"] == 3.0
    assert "bytes_per_second" not in match


def test_wrong_bytes_are_seen_by_get_and_view() -> None:
    double = Double()
    store = double.put

    def put(hashes: Sequence[bytes], blocks: Sequence[Any], **options: Any) -> PutResult:
        done = store(hashes, blocks, **options)
        double.blocks[hashes[-1]][7] ^= 1
        return done

    double.put = put  # type: ignore[method-assign]
    # Two rounds of four batches, each with one block that is seen twice.
    assert run(double).wrong == 16


def test_blocks_that_went_are_lost_and_their_calls_not_counted() -> None:
    double = Double()
    get = double.get

    def lossy(hashes: Sequence[bytes], into: Sequence[Any]) -> GetResult:
        if len(double.blocks) == MEMORY // BLOCK:
            double.blocks.popitem()
        return get(hashes, into)

    double.get = lossy  # type: ignore[method-assign]
    measured = run(double)
    assert (measured.wrong, measured.lost) == (0, 6)
    counts = {call: len(timed) for call, timed in measured.calls.items()}
    assert counts == {"put": 4, "get": 3, "view": 3, "match": 3, "exists": 3, "memcpy": 4}


@pytest.mark.parametrize("room", [0, 4, 6])
def test_a_node_without_room_ends_it_and_keeps_nothing(room: int) -> None:
    double = Double(room)
    with pytest.raises(OutOfSpace, match="ran out of room"):
        run(double)
    assert double.blocks == {}
    assert len(double.removed) == 1


def test_a_parent_that_went_is_a_lack_of_room() -> None:
    double = Double()
    store = double.put

    def put(hashes: Sequence[bytes], blocks: Sequence[Any], **options: Any) -> PutResult:
        done = store(hashes, blocks, **options)
        double.blocks.popitem()
        return done

    double.put = put  # type: ignore[method-assign]
    with pytest.raises(OutOfSpace, match="ran out of room"):
        run(double)
    assert len(double.removed) == 1


@pytest.mark.parametrize("call", ["put", "get", "view", "match", "exists"])
def test_a_call_without_an_answer_ends_it_and_keeps_nothing(call: str) -> None:
    double = Double()
    double.failing = call
    with pytest.raises(Unavailable, match=f"a {call} of the benchmark: unavailable"):
        run(double)
    assert double.blocks == {}


@pytest.mark.parametrize("calls", [0, 1, 9, 23, 30])
def test_it_can_be_ended_between_any_two_calls(calls: int) -> None:
    double = Double()
    left = iter(range(calls))

    def check() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(double, check=check)
    assert double.blocks == {}
    assert double.removed
