"""The works beyond single calls: what they ask of a store, what they count, what they notice."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import adapter
from benchmarks.peers.payload import Payload, named_chain
from benchmarks.peers.run import figures_of
from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works import WORKS, crowd, replay, traffic, working_set
from benchmarks.peers.works.traffic import Popularity

BLOCK = 256
SETTINGS = {"block_bytes": str(BLOCK), "capacity": str(64 * BLOCK)}


class Store(adapter.Adapter):
    """Blocks in memory, room for so many; the one used longest ago goes first."""

    zero_copy = True
    blocks_apart = True

    def __init__(self, room: int = 64) -> None:
        self.blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self.room = room
        self.calls: list[tuple[str, int]] = []
        self.keys_take = 100
        self.before: list[int] = []

    def open(self, settings: Mapping[str, str]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        self.calls.append(("put", len(keys)))
        for key, block in zip(keys, blocks, strict=True):
            self.blocks[key] = bytes(block)
            self.blocks.move_to_end(key)
            if len(self.blocks) > self.room:
                self.blocks.popitem(last=False)
        return len(keys)

    def put_after(
        self, before: Sequence[bytes], keys: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> int:
        self.before.append(len(before))
        return self.put(keys, blocks)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        self.calls.append(("get", len(keys)))
        held = [key for key in keys if key in self.blocks]
        for key, block in zip(keys, into, strict=True):
            if key in self.blocks:
                block[:] = self.blocks[key]
                self.blocks.move_to_end(key)
        return len(held)

    @contextmanager
    def view(self, keys: Sequence[bytes], size: int) -> Iterator[Sequence[memoryview | None]]:
        self.calls.append(("view", len(keys)))
        yield [memoryview(self.blocks[key]) if key in self.blocks else None for key in keys]

    def exists(self, keys: Sequence[bytes]) -> int:
        return sum(key in self.blocks for key in keys)

    def remove_all(self) -> None:
        self.blocks.clear()

    def memory(self) -> int:
        return 5000 + self.keys_take * len(self.blocks) if self.keys_take else 0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever a work looks at its clock, however busy the machine is."""
    seconds = itertools.count(0.0)
    for module in (crowd, replay, traffic, working_set):
        monkeypatch.setattr(module, "_clock", lambda: next(seconds))


def subject(store: Store) -> Subject:
    return Subject(store, Payload(BLOCK), SETTINGS)


def spoil(store: Store, key: bytes) -> None:
    block = bytearray(store.blocks[key])
    block[BLOCK // 2] ^= 1
    store.blocks[key] = bytes(block)


def run(on: Subject, work: str, **parameters: Any) -> Outcome:
    return WORKS[work](on, parameters)


# --- under eviction ---------------------------------------------------------------------------


def test_traffic_puts_what_is_missing_and_sees_evictions() -> None:
    store = Store()
    on = subject(store)
    filled = run(on, "traffic_fill", count=4, factor=3.0)
    assert (filled.items, len(store.blocks)) == (0, 64)
    assert store.calls == [("put", 4)] * 48
    store.calls.clear()
    outcome = run(on, "traffic", count=4, factor=3.0, seconds=500.0)
    gets, puts = store.calls.count(("get", 4)), store.calls.count(("put", 4))
    assert gets == len(outcome.samples) == outcome.items // 4
    assert 0 < puts < gets
    assert outcome.figures["hits"] == pytest.approx(100 * (1 - puts / gets))
    assert outcome.bytes == gets * 4 * BLOCK
    assert (outcome.wrong, outcome.lacking) == (0, 0)


def test_traffic_sees_wrong_bytes() -> None:
    store = Store(room=1000)
    on = subject(store)
    run(on, "traffic_fill", count=4, factor=1.0)
    for key in list(store.blocks):
        spoil(store, key)
    outcome = run(on, "traffic", count=4, factor=1.0, seconds=50.0)
    assert outcome.wrong == outcome.items > 0


def test_popular_prefixes_are_asked_for_more_often_in_the_same_order_everywhere() -> None:
    drawn, again = Popularity(300), Popularity(300)
    numbers = [drawn.next() for _ in range(20_000)]
    assert numbers == [again.next() for _ in range(20_000)]
    assert {0, 299} <= set(numbers) <= set(range(300))
    assert sum(number < 30 for number in numbers) > 9_000
    assert numbers.count(0) > 3 * numbers.count(29)


# --- a working set of twice the memory ----------------------------------------------------------


def test_a_working_set_is_fetched_in_the_order_of_the_puts() -> None:
    store = Store(room=1000)
    on = subject(store)
    parameters = {"name": "set 1", "bytes": 128 * BLOCK, "count": 32}
    stored = run(on, "store_set", **parameters)
    assert (stored.items, stored.bytes, len(stored.samples)) == (128, 128 * BLOCK, 4)
    order = list(store.blocks)
    fetched = run(on, "fetch_set", settle=0.0, cold=False, **parameters)
    assert (fetched.items, fetched.bytes) == (128, 128 * BLOCK)
    assert (fetched.wrong, fetched.lacking, fetched.figures) == (0, 0, {"hits": 100.0})
    assert list(store.blocks) == order


def test_what_a_store_loses_is_told_and_is_no_failure() -> None:
    store = Store(room=96)
    on = subject(store)
    parameters = {"name": "set 1", "bytes": 128 * BLOCK, "count": 32}
    run(on, "store_set", **parameters)
    fetched = run(on, "fetch_set", settle=0.0, cold=False, **parameters)
    assert figures_of(fetched.as_json())["hits"] == 75.0
    assert fetched.bytes == 96 * BLOCK
    spoil(store, next(iter(store.blocks)))
    assert run(on, "fetch_set", settle=0.0, cold=False, **parameters).wrong == 1


# --- a trace ------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    chains = ([0, 1, 2], [0, 1, 3, 4], [], [0, 1, 2], [*range(100)])
    path.write_text("".join(json.dumps({"hash_ids": chain}) + "\n" for chain in chains))
    return str(path)


@pytest.mark.parametrize("views", [False, True])
def test_a_trace_is_replayed(trace: str, views: bool) -> None:
    store = Store(room=1000)
    on = subject(store)
    store.blocks[b"left"] = b""
    outcome = run(on, "replay", path=trace, requests=3, views=views)
    assert (outcome.items, len(outcome.samples), outcome.wrong) == (10, 3, 0)
    assert outcome.figures == {"hits": 50.0, "seconds": outcome.seconds}
    assert outcome.seconds == sum(outcome.samples) > 0
    fetch = "view" if views else "get"
    assert store.calls == [("put", 3), (fetch, 2), ("put", 2), (fetch, 3)]
    assert store.before == [0, 2]
    assert outcome.bytes == 10 * BLOCK
    assert len(store.blocks) == 5


@pytest.mark.parametrize("views", [False, True])
def test_a_wrong_byte_in_a_replay_is_seen(trace: str, views: bool) -> None:
    store = Store(room=1000)
    put = store.put

    def spoiled(keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        done = put(keys, blocks)
        spoil(store, keys[0])
        return done

    store.put = spoiled  # type: ignore[method-assign]
    outcome = run(subject(store), "replay", path=trace, requests=3, views=views)
    # The first block of the first request, which two more requests begin with.
    assert outcome.wrong == 2


def test_what_an_earlier_replay_put_is_no_hit(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(room=1000)
    monkeypatch.setattr(store, "remove_all", lambda: None)
    on = subject(store)
    hits = [run(on, "replay", path=trace, requests=3).figures["hits"] for _ in range(2)]
    assert hits == [50.0, 50.0]
    assert len(store.blocks) == 10


def test_long_requests_go_in_parts(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.works.replay.CALL_BYTES", 32 * BLOCK)
    store = Store(room=1000)
    outcome = run(subject(store), "replay", path=trace, requests=9)
    assert (outcome.items, outcome.wrong) == (110, 0)
    # Of the last request the first three blocks are held.
    assert store.calls[-5:] == [("get", 3), ("put", 32), ("put", 32), ("put", 32), ("put", 1)]
    assert store.before[-4:] == [3, 35, 67, 99]
    assert len(store.blocks) == 102


# --- many clients, the first hit, keys ----------------------------------------------------------


def test_clients_get_what_others_put_and_put_now_and_then() -> None:
    store = Store(room=10_000)
    ones, others = subject(store), subject(store)
    for number, each in enumerate((ones, others)):
        names = {"name": f"2 {number}", "wanted": f"2 {1 - number}"}
        settled = run(each, "settle", bytes=16 * BLOCK, count=8, **names)
        assert (settled.items, settled.lacking) == (16, 0)
    assert len(store.blocks) == 32
    store.calls.clear()
    outcome = run(ones, "mingle", count=8, puts=4, seconds=60.0)
    assert [name for name, _ in store.calls[:8]] == ["get", "get", "get", "put"] * 2
    assert (outcome.wrong, outcome.lacking) == (0, 0)
    # The last get is there to be compared, and is not timed.
    assert outcome.items == 8 * len(outcome.samples) == 8 * (len(store.calls) - 1)
    # Three looks at the clock for each call, two of them around it.
    assert (len(outcome.samples), sum(outcome.samples)) == (20, 20.0)
    assert outcome.seconds >= 60.0
    store.calls.clear()
    # What the first one put is what the second one gets.
    for key in [key for number in range(2) for key in named_chain(f"2 0 {number}", 8)]:
        spoil(store, key)
    outcome = run(others, "mingle", count=8, puts=0, seconds=60.0)
    assert {name for name, _ in store.calls} == {"get"}
    assert outcome.wrong == 8


def test_the_first_hit_is_asked_for_until_it_comes() -> None:
    store = Store()
    get, misses = store.get, [0, 0]
    store.get = lambda keys, into: misses.pop() if misses else get(keys, into)  # type: ignore[method-assign]
    outcome = run(subject(store), "first", seconds=30.0)
    assert (outcome.items, outcome.lacking, outcome.wrong) == (1, 0, 0)
    store.get = lambda keys, into: 0  # type: ignore[method-assign]
    assert run(subject(store), "first", seconds=0.01).lacking == 1


def test_keys_cost_what_the_store_has_grown_by() -> None:
    store = Store(room=10_000)
    on = subject(store)
    outcome = run(on, "keys", count=100)
    assert (outcome.items, len(store.blocks)) == (128, 128)
    assert outcome.figures == {"bytes": 100_000_000.0}
    store.blocks_apart, store.keys_take = False, 300
    on = subject(store)
    assert run(on, "keys", count=100).figures == {"bytes": 44_000_000.0}
    store.keys_take = 0
    with pytest.raises(RuntimeError, match="does not say"):
        run(on, "keys", count=100)
