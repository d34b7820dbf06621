"""Traces: what is read, and what a bad line says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.identity import ROOT_PARENT, prefix_hashes
from kvstore.trace import BlockNames, Trace, TraceError
from tests.kvstore.trace_files import EXCERPT, shared_trace

GOOD = {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [4, 9, 6]}


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "trace.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return path


def test_a_line_becomes_a_typed_request(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD | {"turn": 2, "timestamp": 1.5}))
    first, second = Trace(path)
    assert (first.timestamp, first.input_length, first.output_length) == (3000, 1030, 7)
    assert (first.hash_ids, first.line) == ((4, 9, 6), 1)
    assert (second.timestamp, second.line, second.end) == (1.5, 3, path.stat().st_size)


def test_reading_is_a_stream_and_can_be_repeated(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path, json.dumps(GOOD), "nonsense"))
    for _ in range(2):
        requests: Iterator[object] = iter(trace)
        next(requests)
        with pytest.raises(TraceError, match=r"trace\.jsonl:2: is not JSON"):
            next(requests)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        (b"\xff\xfe\xfa", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "is not JSON"),
        ("[1]", "is not a JSON object but a list"),
        ("null", "is not a JSON object but null"),
        (
            json.dumps({k: v for k, v in GOOD.items() if k != "hash_ids"}),
            "lacks the field hash_ids",
        ),
        (json.dumps(GOOD | {"timestamp": "0"}), "timestamp must be a number, not a string"),
        (json.dumps(GOOD | {"timestamp": True}), "timestamp must be a number, not a boolean"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "timestamp must be finite"),
        (json.dumps(GOOD | {"timestamp": float("inf")}), "timestamp must be finite"),
        (json.dumps(GOOD | {"timestamp": -1}), "timestamp must be finite and not negative"),
        (json.dumps(GOOD | {"input_length": 2.5}), "input_length must be an integer"),
        (json.dumps(GOOD | {"output_length": -1}), "output_length must be between"),
        (json.dumps(GOOD | {"output_length": {}}), "not an object"),
        (json.dumps(GOOD | {"hash_ids": "123"}), "hash_ids must be a list, not a string"),
        (json.dumps(GOOD | {"hash_ids": [1, 2, None]}), "hash_ids must hold integers, not null"),
        (json.dumps(GOOD | {"hash_ids": [1, 2, True]}), "hash_ids must hold integers"),
        (json.dumps(GOOD | {"hash_ids": [1, 2, 1 << 64]}), "ids between 0 and"),
        (json.dumps(GOOD | {"hash_ids": [1, 2, 1]}), "names a block twice"),
        (json.dumps(GOOD | {"hash_ids": [1, 2]}), "has 2 hash_ids, but input_length 1030"),
    ],
)
def test_a_bad_line_names_file_line_and_reason(
    tmp_path: Path, line: str | bytes, reason: str
) -> None:
    path = write(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(TraceError) as caught:
        list(Trace(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)
    assert (caught.value.path, caught.value.line, caught.value.retry) == (path, 2, False)


def test_a_line_that_never_ends_is_not_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD), "x" * 4096)
    with pytest.raises(TraceError, match=":2: longer than 1000 bytes"):
        list(Trace(path, max_line_bytes=1000))


def test_a_missing_file_and_impossible_block_tokens_are_trace_errors(tmp_path: Path) -> None:
    missing = Trace(tmp_path / "no")
    for use in (lambda: list(missing), lambda: missing.size):
        with pytest.raises(TraceError, match="no: cannot be read: No such file"):
            use()
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        list(Trace(tmp_path))
    with pytest.raises(TraceError, match="at least 1"):
        Trace(EXCERPT, block_tokens=0)


def test_names_are_prefix_hashes_of_the_chain() -> None:
    names = BlockNames()
    first = names.chain([7, 1 << 40, 3])
    assert first == prefix_hashes([7, 0, 0, 256, 3, 0], 2, parent=ROOT_PARENT)
    assert names.chain([7, 1 << 40, 5])[:2] == first[:2]
    assert names.chain([1 << 40])[0] != first[1]
    assert names.chain([7, 1 << 40, 3]) == first
    assert names.chain([]) == []


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=6), max_size=12))
def test_equal_names_mean_equal_chains(chains: list[list[int]]) -> None:
    names = BlockNames()
    seen: dict[bytes, tuple[int, ...]] = {}
    for ids in chains:
        for count, name in enumerate(names.chain(ids), 1):
            assert seen.setdefault(name, tuple(ids[:count])) == tuple(ids[:count])
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize(
    ("name", "requests", "accesses", "unique", "reuse"),
    [
        ("conversation.jsonl", 12_031, 288_500, 182_790, 36.6),
        ("synthetic.jsonl", 3_993, 121_877, 43_924, 64.0),
    ],
)
def test_the_shared_traces_read_as_their_readme_says(
    name: str, requests: int, accesses: int, unique: int, reuse: float
) -> None:
    names = BlockNames()
    lengths = [len(names.chain(request.hash_ids)) for request in Trace(shared_trace(name))]
    assert (len(lengths), sum(lengths), len(names)) == (requests, accesses, unique)
    assert round(100 * (1 - unique / accesses), 1) == reuse


def test_the_excerpt_reads() -> None:
    assert sum(len(request.hash_ids) for request in Trace(EXCERPT)) == 7539
