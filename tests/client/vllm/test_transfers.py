"""Loads and saves against a store that fails, stalls, loses blocks and is written by others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from client.results import BUSY, FAILED, HELD, REFUSED, STORED, GetResult, PutResult
from client.vllm.counts import Counts
from client.vllm.jobs import LoadJob, SaveJob
from client.vllm.loads import LONGEST_POLL, POLL, Loads, Running
from client.vllm.progress import Finished, Progress
from client.vllm.saves import Saves
from kvstore.errors import ParentAbsent
from kvstore.identity import ROOT_PARENT

SIZE = 8
WAIT = 10.0


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def names(*numbers: int) -> tuple[bytes, ...]:
    return tuple(map(name, numbers))


class Views:
    """What a view of some blocks shows."""

    def __init__(
        self, blocks: list[bytes | None], valid: bool = True, failure: str | None = None
    ) -> None:
        self._blocks = [None if block is None else memoryview(block) for block in blocks]
        self.codes = bytes(0 if block is None else 2 for block in blocks)
        self.failure = failure
        self.valid = valid

    @property
    def prefix(self) -> int:
        return next((i for i, block in enumerate(self._blocks) if block is None), len(self._blocks))

    def __getitem__(self, index: slice) -> list[memoryview | None]:
        return self._blocks[index]


class Store:
    """A store in memory; what it does next can be scripted.

    Attributes:
        blocks: what it holds.
        puts: what to do at each put to come, before what it does by itself.
        asked: the hashes of each call.
        devices: for each view, whether blocks were wanted where they lie on a GPU.
        looks: how often it was asked what is there.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.asked: list[tuple[bytes, ...]] = []
        self.devices: list[bool] = []
        self.puts: list[Callable[[], PutResult | None]] = []
        self.looks = 0
        self.missed = 0
        self.valid = True
        self.gone = False
        self.fails: Exception | None = None
        self.called = threading.Condition()

    def has(self, *numbers: int) -> None:
        for number in numbers:
            self.blocks[name(number)] = bytes([number]) * SIZE

    def exists(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        with self.called:
            self.looks += 1
            self.called.notify_all()
        if self.gone:
            return GetResult(bytes(len(hashes)), "unavailable")
        return GetResult(bytes(2 if each in self.blocks else 0 for each in hashes))

    @contextmanager
    def view(
        self, hashes: Sequence[bytes], *, device: bool, deadline: float | None = None
    ) -> Iterator[Any]:
        with self.called:
            self.asked.append(tuple(hashes))
            self.devices.append(device)
            self.called.notify_all()
        if self.fails is not None:
            raise self.fails
        if self.gone:
            yield Views([None] * len(hashes), failure="unavailable")
            return
        shown = [self.blocks.get(each) for each in hashes]
        self.missed += shown.count(None)
        yield Views(shown, self.valid)

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: Any,
        *,
        parent: bytes,
        deadline: float | None = None,
    ) -> PutResult:
        self.asked.append(tuple(hashes))
        if self.gone:
            return PutResult(bytes([FAILED]) * len(hashes), "deadline_exceeded")
        if self.puts and (result := self.puts.pop(0)()) is not None:
            return result
        if parent != ROOT_PARENT and parent not in self.blocks:
            raise ParentAbsent("gone")
        codes = bytearray()
        for position, each in enumerate(hashes):
            if each in self.blocks:
                codes.append(HELD)
                continue
            target = bytearray(SIZE)
            blocks.write([position], [memoryview(target)])
            self.blocks[each] = bytes(target)
            codes.append(STORED)
        return PutResult(bytes(codes))


class Memory:
    """The engine's memory: one byte string for each block."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.marks: list[object] = []
        self.fails = False
        self.gpu: int | None = None

    def scatter(
        self, blocks: Sequence[memoryview], block_ids: Sequence[int], *, after: Any = None
    ) -> None:
        if self.fails:
            raise RuntimeError("no such memory")
        self.marks.append(after)
        for number, block in zip(block_ids, blocks, strict=True):
            self.blocks[number] = bytes(block)

    def gather(
        self, block_ids: Sequence[int], into: Sequence[memoryview], *, after: Any = None
    ) -> None:
        if self.fails:
            raise RuntimeError("no such memory")
        self.marks.append(after)
        for number, target in zip(block_ids, into, strict=True):
            target[:] = self.blocks[number]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Both threads over one store and one memory."""

    def __init__(self, gpu: int | None = None) -> None:
        self.store, self.memory, self.counts = Store(), Memory(), Counts()
        self.memory.gpu = gpu
        self.progress, self.clock = Progress(), Clock()
        self.losses: list[None] = []
        common: Any = {
            "block_bytes": SIZE,
            "deadline": 1.0,
            "counts": self.counts,
            "progress": self.progress,
            "lost": lambda: self.losses.append(None),
            "clock": self.clock,
        }
        self.loads = Loads(self.store, self.memory, **common)
        self.saves = Saves(self.store, self.memory, **common)

    def until_loaded(self) -> Finished:
        return self._until(self.progress.take_loads, lambda finished: bool(finished.loaded))

    def until_saved(self) -> Finished:
        return self._until(self.progress.take_saves, lambda finished: bool(finished.saved))

    def _until(self, take: Callable[[], Finished], enough: Callable[[Finished], bool]) -> Finished:
        self.progress.wait(WAIT)
        finished = take()
        assert enough(finished), "nothing ended"
        return finished

    def looks(self, times: int) -> None:
        """Lets time pass until the store was asked again so many times."""
        for _ in range(times):
            with self.store.called:
                now = self.store.looks
                self.clock.now += POLL
                assert self.store.called.wait_for(lambda now=now: self.store.looks > now, WAIT)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.loads.open()
    bench.saves.open()
    yield bench
    bench.loads.close()
    bench.saves.close()


# --- loads ---------------------------------------------------------------------------------------


def test_a_load_fills_the_engines_blocks(bench: Bench) -> None:
    bench.store.has(1, 2, 3)
    mark = object()
    bench.loads.submit(LoadJob("r", names(1, 2, 3), (7, 5, 6)), mark)
    finished = bench.until_loaded()
    assert (finished.loaded, finished.failed_blocks) == ({"r"}, set())
    assert bench.memory.blocks == {7: b"\1" * SIZE, 5: b"\2" * SIZE, 6: b"\3" * SIZE}
    assert set(bench.memory.marks) == {mark}
    counted = bench.counts.take()
    assert (counted["loaded_blocks"], counted["loaded_bytes"]) == (3, 3 * SIZE)
    assert "failed_load_blocks" not in counted


@pytest.mark.parametrize("gpu", [None, 0])
def test_blocks_are_wanted_on_a_gpu_where_one_takes_them(gpu: int | None) -> None:
    bench = Bench(gpu)
    bench.store.has(1, 2)
    bench.loads.open()
    try:
        bench.loads.submit(LoadJob("r", names(1, 2), (7, 5)))
        assert bench.until_loaded().failed_blocks == set()
    finally:
        bench.loads.close()
    assert bench.store.devices == [gpu is not None]


def test_what_is_missing_fails_and_all_behind_it(bench: Bench) -> None:
    bench.store.has(1, 3)
    bench.loads.submit(LoadJob("r", names(1, 2, 3), (7, 5, 6)))
    finished = bench.until_loaded()
    assert (finished.loaded, finished.failed_blocks) == ({"r"}, {5, 6})
    assert bench.counts.take()["failed_load_blocks"] == 2


def test_blocks_whose_session_ended_under_the_copy_are_not_trusted(bench: Bench) -> None:
    bench.store.has(1, 2)
    bench.store.valid = False
    bench.loads.submit(LoadJob("r", names(1, 2), (7, 5)))
    assert bench.until_loaded().failed_blocks == {7, 5}


@pytest.mark.parametrize("where", ["store", "memory"])
def test_an_error_fails_the_load_and_the_thread_goes_on(bench: Bench, where: str) -> None:
    bench.store.has(1)
    bench.store.fails = RuntimeError("broken") if where == "store" else None
    bench.memory.fails = where == "memory"
    bench.loads.submit(LoadJob("bad", names(1), (7,)))
    assert bench.until_loaded().failed_blocks == {7}
    assert bench.counts.take()["guarded_errors"] == 1
    bench.store.fails, bench.memory.fails = None, False
    bench.loads.submit(LoadJob("good", names(1), (7,)))
    assert bench.until_loaded() == Finished(loaded={"good"})


def test_a_load_that_names_no_hash_fails_all_its_blocks(bench: Bench) -> None:
    bench.loads.submit(LoadJob("r", (), (7, 5)))
    assert bench.until_loaded() == Finished(loaded={"r"}, failed_blocks={7, 5})


def test_a_load_waits_for_blocks_and_takes_each_as_it_comes(bench: Bench) -> None:
    bench.loads.submit(LoadJob("r", names(1, 2), (7, 5), wait=5.0))
    bench.looks(2)
    bench.store.has(1)
    bench.looks(2)
    assert bench.memory.blocks == {7: b"\1" * SIZE}
    assert bench.counts.take()["loaded_blocks"] == 1
    assert not bench.progress.take_loads().loaded
    bench.store.has(2)
    bench.clock.now += POLL
    assert bench.until_loaded() == Finished(loaded={"r"})
    assert bench.store.asked == [names(1), names(2)]


def test_looking_for_blocks_to_come_is_no_miss_of_the_store(bench: Bench) -> None:
    bench.store.has(1)
    bench.loads.submit(LoadJob("r", names(1, 2, 3), (7, 5, 6), wait=5.0))
    bench.looks(5)
    bench.clock.now = 5.0
    assert bench.until_loaded().failed_blocks == {5, 6}
    assert bench.store.missed == 0


def test_the_longer_nothing_comes_the_rarer_it_is_looked_for() -> None:
    bench = Bench()
    load = Running(LoadJob("r", names(1), (7,), wait=5.0), None, began=0.0)
    pauses = []
    while load.due < load.end:
        now = load.due
        load.put_off(now)
        pauses.append(load.due - now)
    assert pauses[0] == POLL
    assert max(pauses) == pytest.approx(LONGEST_POLL)
    assert len(pauses) < 200
    assert load.due == bench.clock.now + 5.0


def test_a_load_waits_no_longer_than_its_time(bench: Bench) -> None:
    bench.store.has(1)
    bench.loads.submit(LoadJob("r", names(1, 2), (7, 5), wait=5.0))
    bench.looks(3)
    bench.clock.now = 5.0
    assert bench.until_loaded() == Finished(loaded={"r"}, failed_blocks={5})


@pytest.mark.parametrize("comes", [True, False])
def test_a_wait_in_vain_is_told_of(
    bench: Bench, caplog: pytest.LogCaptureFixture, comes: bool
) -> None:
    if comes:
        bench.store.has(1)
    bench.loads.submit(LoadJob("r", names(1, 2), (7, 5), wait=5.0))
    bench.looks(1)
    bench.clock.now = 5.0
    bench.until_loaded()
    bench.loads.submit(LoadJob("s", names(3), (7,)))
    bench.until_loaded()
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if comes else ["waited 5.0 s for blocks of a request, and none came"])


def test_a_load_that_waits_holds_up_no_other(bench: Bench) -> None:
    bench.store.has(3)
    bench.loads.submit(LoadJob("waits", names(1), (7,), wait=5.0))
    bench.loads.submit(LoadJob("goes", names(3), (5,)))
    assert bench.until_loaded().loaded == {"goes"}
    bench.store.has(1)
    bench.clock.now += POLL
    assert bench.until_loaded().loaded == {"waits"}


def test_nobody_waits_for_a_node_that_does_not_answer(bench: Bench) -> None:
    bench.store.has(1)
    for request in ("r", "s", "t"):
        bench.loads.submit(LoadJob(request, names(1, 2), (7, 5), wait=5.0))
    bench.looks(3)
    bench.store.gone = True
    looks = bench.store.looks
    bench.clock.now += 1.0
    ended: set[str] = set()
    while len(ended) < 3:
        ended |= bench.until_loaded().loaded
    assert bench.store.looks == looks + 1
    assert len(bench.losses) == 1


def test_that_the_node_is_lost_is_told_to_who_keeps_it_connected(bench: Bench) -> None:
    bench.loads.submit(LoadJob("r", names(1), (7,)))
    bench.until_loaded()
    bench.saves.submit(save(1, 7))
    bench.until_saved()
    assert not bench.losses
    bench.store.gone = True
    bench.loads.submit(LoadJob("r", names(1), (7,)))
    bench.until_loaded()
    assert len(bench.losses) == 1
    bench.saves.submit(save(2, 8))
    bench.until_saved()
    assert len(bench.losses) == 2


def waiting_load(bench: Bench) -> None:
    """Asks for two blocks of which one comes later, and returns when that is waited for."""
    bench.store.has(1)
    bench.loads.submit(LoadJob("r", names(1, 2), (7, 5), wait=5.0))
    bench.loads.submit(LoadJob("s", (), (9,)))
    assert bench.until_loaded().loaded == {"s"}
    assert bench.counts.take()["load_jobs"] == 1


def test_time_spent_waiting_is_no_time_spent_loading(bench: Bench) -> None:
    waiting_load(bench)
    bench.store.has(2)
    bench.clock.now += 3.0
    bench.until_loaded()
    counted = bench.counts.take()
    assert counted["wait_seconds"] == 3.0
    assert "load_seconds" not in counted


def test_a_wait_that_is_called_off_counts_as_waiting(bench: Bench) -> None:
    waiting_load(bench)
    bench.clock.now += POLL / 2
    bench.loads.cancel("r")
    assert bench.until_loaded().failed_blocks == {5}
    counted = bench.counts.take()
    assert counted["wait_seconds"] == POLL / 2
    assert "load_seconds" not in counted


def test_a_request_that_is_given_up_stops_waiting_and_no_other_does(bench: Bench) -> None:
    bench.loads.submit(LoadJob("r", names(1, 2), (7, 5), wait=5.0))
    bench.loads.submit(LoadJob("s", names(1, 2), (8, 6), wait=5.0))
    bench.loads.cancel("r")
    bench.loads.cancel("never heard of")
    assert bench.until_loaded() == Finished(loaded={"r"}, failed_blocks={7, 5})
    bench.store.has(1, 2)
    bench.clock.now += POLL
    assert bench.until_loaded() == Finished(loaded={"s"})


def test_closing_fails_the_loads_that_wait() -> None:
    bench = Bench()
    bench.loads.submit(LoadJob("r", names(1), (7,), wait=5.0))
    bench.loads.open()
    with bench.store.called:
        assert bench.store.called.wait_for(lambda: bench.store.looks > 0, WAIT)
    bench.loads.close()
    assert bench.progress.take_loads() == Finished(loaded={"r"}, failed_blocks={7})


# --- saves ---------------------------------------------------------------------------------------


def save(number: int, *blocks: int, parent: bytes = ROOT_PARENT) -> SaveJob:
    return SaveJob(number, "r", parent, names(*blocks), blocks)


def test_a_node_that_does_not_answer_is_only_asked_whether_it_is_back(bench: Bench) -> None:
    bench.memory.blocks = {5: b"a" * SIZE, 6: b"b" * SIZE}
    bench.store.gone = True
    for number in range(1, 4):
        bench.saves.submit(SaveJob(number, "r", ROOT_PARENT, names(1, 2), (5, 6)))
        assert bench.until_saved().saved == {number: 0}
    # The first waited for the whole of its deadline, the others did not.
    assert bench.store.asked == [names(1, 2)]
    assert bench.store.looks == 2
    assert bench.counts.take()["failed_save_blocks"] == 6
    bench.store.gone = False
    for number in (4, 5):
        bench.saves.submit(SaveJob(number, "r", ROOT_PARENT, names(1, 2), (5, 6)))
        assert bench.until_saved().saved == {number: 2}
    assert bench.store.looks == 3


def test_a_save_stores_what_is_missing_and_copies_nothing_else(bench: Bench) -> None:
    bench.store.has(1)
    bench.memory.blocks = {2: b"\2" * SIZE, 3: b"\3" * SIZE}
    mark = object()
    bench.saves.submit(save(1, 1, 2, 3), mark)
    assert bench.until_saved() == Finished(saved={1: 3})
    assert bench.store.blocks[name(3)] == b"\3" * SIZE
    assert bench.memory.marks == [mark, mark]
    counted = bench.counts.take()
    assert (counted["stored_blocks"], counted["held_blocks"]) == (2, 1)
    assert counted["saved_bytes"] == 2 * SIZE


def test_a_save_below_what_the_store_lost_says_so(bench: Bench) -> None:
    bench.saves.submit(save(4, 2, parent=name(1)))
    assert bench.until_saved() == Finished(saved={4: 0}, orphaned={"r"})
    assert bench.counts.take()["failed_save_blocks"] == 1


def test_blocks_that_another_writes_are_looked_at_again(bench: Bench) -> None:
    bench.memory.blocks = {number: bytes([number]) * SIZE for number in (1, 2, 3)}

    def busy() -> PutResult:
        bench.store.has(1, 2)
        bench.clock.now += 0.1
        return PutResult(bytes([STORED, BUSY, BUSY]))

    bench.store.puts = [busy]
    bench.saves.submit(save(1, 1, 2, 3))
    waiting = threading.Event()
    while not waiting.wait(0.001) and len(bench.store.asked) < 2:
        bench.clock.now += 0.001
    assert bench.until_saved() == Finished(saved={1: 3})
    assert bench.store.asked == [names(1, 2, 3), names(2, 3)]


def test_another_writer_is_waited_for_no_longer_than_the_deadline(bench: Bench) -> None:
    def busy() -> PutResult:
        bench.clock.now = 2.0
        return PutResult(bytes([BUSY]))

    bench.store.puts = [busy]
    bench.saves.submit(save(1, 1))
    assert bench.until_saved() == Finished(saved={1: 0})
    assert bench.counts.take()["busy_blocks"] == 1


@pytest.mark.parametrize(
    ("code", "count"), [(REFUSED, "refused_blocks"), (FAILED, "failed_save_blocks")]
)
def test_what_the_store_does_not_take_is_counted(bench: Bench, code: int, count: str) -> None:
    bench.store.puts = [lambda: PutResult(bytes([HELD, code, code]))]
    bench.saves.submit(save(1, 1, 2, 3))
    assert bench.until_saved() == Finished(saved={1: 1})
    assert bench.counts.take()[count] == 2


def test_an_error_ends_a_save_and_the_thread_goes_on(bench: Bench) -> None:
    bench.memory.fails = True
    bench.saves.submit(save(1, 1))
    assert bench.until_saved() == Finished(saved={1: 0})
    assert bench.counts.take()["guarded_errors"] == 1
    bench.memory.fails = False
    bench.memory.blocks = {1: b"\1" * SIZE}
    bench.saves.submit(save(2, 1))
    assert bench.until_saved() == Finished(saved={2: 1})


def test_closing_finishes_the_saves_asked_for() -> None:
    bench = Bench()
    bench.memory.blocks = {number: bytes([number]) * SIZE for number in range(20)}
    for number in range(20):
        bench.saves.submit(save(number, number))
    bench.saves.open()
    bench.saves.close()
    assert len(bench.store.blocks) == 20
    assert len(bench.progress.take_saves().saved) == 20


# --- progress ------------------------------------------------------------------------------------


def test_waiting_returns_at_once_where_nothing_is_under_way() -> None:
    Progress().wait(WAIT)


def test_waiting_returns_at_once_where_something_is_over() -> None:
    progress = Progress()
    progress.begin()
    progress.begin()
    progress.loaded("r", [])
    progress.wait(WAIT)
    assert progress.take_loads().loaded == {"r"}
    progress.saved(1, 0)
    assert progress.take_saves().saved == {1: 0}
    progress.wait(WAIT)


def test_waiting_takes_a_pause_where_that_is_asked_for() -> None:
    began = time.monotonic()
    Progress().wait(0.01, pause=True)
    assert time.monotonic() - began >= 0.01
