from __future__ import annotations

import threading

import numpy as np
import pytest

from client.vllm.counts import COUNT, COUNTS, Counts


def test_takes_what_was_added_and_starts_anew() -> None:
    counts = Counts()
    counts.add(lookups=1, matched_tokens=32)
    counts.add(matched_tokens=16, load_seconds=0.25)
    assert counts.take() == {"lookups": 1, "matched_tokens": 48, "load_seconds": 0.25}
    assert counts.take() == {}
    counts.add(lookups=2)
    assert counts.take() == {"lookups": 2}


def test_zeros_leave_no_trace() -> None:
    counts = Counts()
    counts.add(stored_blocks=0, save_seconds=0.0)
    assert counts.take() == {}


def test_what_was_taken_belongs_to_the_caller() -> None:
    counts = Counts()
    counts.add(lookups=1)
    taken = counts.take()
    counts.add(lookups=5)
    assert taken == {"lookups": 1}


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ({"lookups": 1, "look_ups": 1}, KeyError),
        ({"lookups": 1, "load_seconds": -0.5}, ValueError),
        ({"lookups": 1, "load_seconds": float("nan")}, ValueError),
        ({"lookups": 1, "load_seconds": float("inf")}, ValueError),
    ],
)
def test_refuses_whole_what_it_cannot_count(
    numbers: dict[str, float], error: type[Exception]
) -> None:
    counts = Counts()
    with pytest.raises(error):
        counts.add(**numbers)
    assert counts.take() == {}


def test_numbers_become_python_s_own() -> None:
    counts = Counts()
    counts.add(loaded_bytes=np.int64(4096), load_seconds=np.float64(0.5), lookups=1)
    kinds = {name: type(number) for name, number in counts.take().items()}
    assert kinds == {"loaded_bytes": float, "load_seconds": float, "lookups": int}


def test_threads_that_add_and_take_lose_nothing() -> None:
    counts = Counts()
    taken: list[dict[str, float]] = []
    done = threading.Event()

    def write() -> None:
        for _ in range(2_000):
            counts.add(loaded_blocks=1, loaded_bytes=3)

    def read() -> None:
        while not done.is_set():
            taken.append(counts.take())

    writers = [threading.Thread(target=write) for _ in range(3)]
    reader = threading.Thread(target=read)
    for thread in [reader, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    taken.append(counts.take())
    assert sum(each.get("loaded_blocks", 0) for each in taken) == 6_000
    assert sum(each.get("loaded_bytes", 0) for each in taken) == 18_000


def test_every_name_is_there_once_with_its_documentation() -> None:
    assert len(COUNT) == len(COUNTS)
    for count in COUNTS:
        assert count.name.isidentifier()
        assert count.unit
        assert count.help.endswith(".")
