"""Replay: what it asks of the node, what it counts, and that no wrong byte escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.results import (
    ABSENT,
    DRAM,
    FAILED,
    HELD,
    REFUSED,
    SSD,
    STORED,
    GetResult,
    Match,
    PutResult,
)
from kvstore.errors import ConfigError, ParentAbsent, Unavailable
from kvstore.homes import ROUTINGS, homes
from kvstore.identity import ROOT_PARENT
from kvstore.latencies import Latencies
from kvstore.replay import PATIENCE, BlockBytes, Replay
from kvstore.simulate import Configuration
from kvstore.simulate_pool import PoolConfiguration, Router
from kvstore.simulated_directory import Locations
from kvstore.trace import BlockNames, Request, Trace
from tests.kvstore.trace_files import EXCERPT

BLOCK = 40
TOKENS = 512


class Double:
    """A node in memory with room for `room` blocks, of which the first `in_dram` lie in DRAM."""

    def __init__(self, room: int = 1 << 30, in_dram: int = 1 << 30) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes] = {}
        self.room = room
        self.in_dram = in_dram
        self.failure: str | None = None
        self.longest_call = 0

    def _code(self, name: bytes) -> int:
        if name not in self.blocks:
            return ABSENT
        return DRAM if list(self.blocks).index(name) < self.in_dram else SSD

    def match(self, hashes: Sequence[bytes]) -> Match:
        if self.failure:
            return Match(b"", self.failure)
        codes = bytes(self._code(name) for name in hashes)
        return Match(codes.split(b"\0")[0])

    def get(self, hashes: Sequence[bytes], into: Sequence[Any]) -> GetResult:
        self.longest_call = max(self.longest_call, len(hashes))
        for name, buffer in zip(hashes, into, strict=True):
            if name in self.blocks:
                buffer[:] = np.frombuffer(self.blocks[name], np.uint8)
        return GetResult(bytes(self._code(name) for name in hashes))

    def put(self, hashes: Sequence[bytes], blocks: Sequence[Any], parent: bytes) -> PutResult:
        self.longest_call = max(self.longest_call, len(hashes))
        if parent != ROOT_PARENT and parent not in self.blocks:
            raise ParentAbsent("no such parent")
        codes = bytearray()
        for name, block in zip(hashes, blocks, strict=True):
            code = (
                HELD if name in self.blocks else STORED if len(self.blocks) < self.room else REFUSED
            )
            if code == STORED:
                self.blocks[name] = bytes(block)
                self.parents[name] = parent
            parent = name
            codes.append(code)
        return PutResult(bytes(codes))


def make(double: Double, batch: int = 3) -> Replay:
    return Replay(
        [cast(Any, double)], block_bytes=BLOCK, block_tokens=TOKENS, batch_bytes=batch * BLOCK
    )


def request(*ids: int, partial: int = TOKENS) -> Request:
    return Request(0, (len(ids) - 1) * TOKENS + partial, 1, ids, 1, 1)


def test_a_chain_is_put_root_first_and_fetched_again() -> None:
    double = Double()
    replay = make(double)
    replay.send(request(1, 2, 3, 4, 5))
    names = BlockNames().chain([1, 2, 3, 4, 5])
    assert list(double.blocks) == names
    assert [double.parents[name] for name in names] == [ROOT_PARENT, *names[:-1]]
    replay.send(request(1, 2, 3, 4, 5, 6, 7))
    report = replay.report
    assert (report.accesses, report.hits, report.stored) == (12, 5, 7)
    assert (report.got_bytes, report.put_bytes, report.wrong) == (5 * BLOCK, 7 * BLOCK, 0)
    assert (len(report.match), len(report.get), len(report.put)) == (2, 2, 3)
    assert double.longest_call == 3


def test_blocks_of_an_earlier_replay_are_told_apart() -> None:
    double = Double()
    first = make(double)
    first.send(request(1, 2, 3))
    first.send(request(1, 2, 4))
    second = make(double)
    second.send(request(1, 2, 3))
    second.send(request(1, 2, 4))
    second.send(request(1, 2, 4, 5))
    assert (first.report.warm, second.report.warm) == (0, 4)


def test_tokens_count_the_partial_last_block_as_what_it_holds() -> None:
    replay = make(Double(in_dram=2))
    for _ in range(2):
        replay.send(request(1, 2, 3, partial=10))
    assert replay.report.hit_blocks == {"dram": 2, "ssd": 1}
    assert replay.report.hit_tokens == {"dram": 2 * TOKENS, "ssd": 10}
    assert replay.report.tokens == 2 * (2 * TOKENS + 10)


def test_a_wrong_byte_and_a_wrong_block_are_seen() -> None:
    double = Double()
    replay = make(double)
    replay.send(request(1, 2, 3, 4))
    first, second, third, _ = double.blocks
    flipped = bytearray(double.blocks[first])
    flipped[-1] ^= 1
    double.blocks[first] = bytes(flipped)
    double.blocks[second], double.blocks[third] = double.blocks[third], double.blocks[second]
    replay.send(request(1, 2, 3, 4))
    assert replay.report.wrong == 3


def test_a_block_that_goes_between_match_and_get_is_lost_not_wrong() -> None:
    double = Double()
    replay = make(double)
    replay.send(request(1, 2))
    held = double.match(BlockNames().chain([1, 2]))
    double.blocks.clear()
    double.match = lambda hashes: held  # type: ignore[method-assign]
    replay.send(request(1, 2, 3))
    report = replay.report
    assert (report.hits, report.lost, report.wrong, report.got_bytes) == (2, 2, 0, 0)
    assert (report.stored, report.refused) == (2, 1)


def test_nothing_is_put_after_a_block_that_found_no_room() -> None:
    double = Double(room=4)
    replay = make(double, batch=2)
    replay.send(request(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert (replay.report.stored, replay.report.refused, len(replay.report.put)) == (4, 5, 3)


def test_an_unanswered_put_is_counted_and_ends_the_request() -> None:
    double = Double()
    double.put = lambda hashes, blocks, parent: PutResult(  # type: ignore[method-assign]
        bytes([FAILED] * len(hashes)), "deadline_exceeded"
    )
    replay = make(double)
    replay.send(request(1, 2, 3, 4, 5))
    report = replay.report
    assert (report.failed, report.refused, report.failures) == (3, 2, {"deadline_exceeded": 1})


def test_a_node_that_stays_away_ends_the_replay_and_one_that_returns_does_not() -> None:
    double = Double()
    replay = make(double)
    for failure, count in (("unavailable", PATIENCE - 1), (None, 1), ("unavailable", PATIENCE - 1)):
        double.failure = failure
        for _ in range(count):
            replay.send(request(1))
    with pytest.raises(Unavailable, match="10 requests in a row have not been answered"):
        replay.send(request(1))
    assert replay.report.failures == {"unavailable": 2 * PATIENCE - 1}


def test_a_request_without_blocks_asks_nothing() -> None:
    replay = make(Double())
    replay.send(Request(0, 0, 5, (), 1, 1))
    assert (replay.report.requests, len(replay.report.match)) == (1, 0)


def test_an_unbounded_node_gives_the_hit_rate_that_the_trace_allows() -> None:
    requests = list(Trace(EXCERPT))
    seen: list[Request] = []
    double = Double()
    double._code = lambda name: SSD if name in double.blocks else ABSENT  # type: ignore[method-assign]
    replay = make(double, batch=64)
    replay.run(requests, seen.append)
    report = replay.report
    assert seen == requests
    assert (report.hits, report.accesses, report.wrong) == (7539 - 5882, 7539, 0)
    summary = cast(Any, report.summary())
    assert summary["blocks"]["hit_rate"] == pytest.approx(1657 / 7539)
    assert summary["tokens"]["hits_by_tier"].keys() == {"ssd"}
    assert summary["get"]["bytes"] == 1657 * BLOCK


@given(st.integers(1, 100), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_the_bytes_of_a_block_are_its_own(size: int, first: int, second: int) -> None:
    maker, again = BlockBytes(size), BlockBytes(size)
    row = np.zeros(size, np.uint8)
    maker.write(first, row)
    assert again.matches(first, row)
    if size >= 8 and first != second:
        assert not again.matches(second, row)


def test_requests_go_to_their_homes() -> None:
    doubles = [Double(), Double()]
    replay = Replay(
        [cast(Any, double) for double in doubles],
        homes("round-robin", 2),
        block_bytes=BLOCK,
        block_tokens=TOKENS,
    )
    for ids in ((1,), (2, 3), (), (4,), (2, 3)):
        replay.send(request(*ids) if ids else Request(0, 0, 5, (), 1, 1))
    names = BlockNames()
    assert list(doubles[0].blocks) == [*names.chain([1]), *names.chain([2, 3])]
    assert list(doubles[1].blocks) == [*names.chain([2, 3]), *names.chain([4])]
    assert replay.report.hits == 0


@pytest.mark.parametrize("routing", ROUTINGS)
def test_homes_are_the_same_in_a_replay_and_in_a_simulation(routing: str) -> None:
    configuration = PoolConfiguration(5, Configuration("lru", 5), routing, seed=3)
    router = Router(configuration, Locations())
    expected = homes(routing, 5, 3)
    assert [router.home([]) for _ in range(200)] == [next(expected) for _ in range(200)]
    assert len({next(expected) for _ in range(200)}) == 5


def test_a_home_needs_a_routing_that_there_is() -> None:
    with pytest.raises(ConfigError, match="'prefix'; there are random, round-robin"):
        homes("prefix", 2)


def test_percentiles_are_durations_that_occurred() -> None:
    latencies = Latencies()
    assert latencies.percentile(0.5) == 0.0
    for milliseconds in range(100, 0, -1):
        latencies.add(milliseconds / 1000)
    assert (latencies.percentile(0.5), latencies.percentile(0.99)) == (0.05, 0.099)
    assert (latencies.percentile(0), latencies.percentile(1)) == (0.001, 0.1)
    assert latencies.total == pytest.approx(5.05)
