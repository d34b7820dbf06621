"""What the figures of `make bench-vllm` rest on, without engines."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.vllm import overhead, report, ttft
from benchmarks.vllm.contenders import RECOMPUTE, Contender, Setup
from benchmarks.vllm.fleet import Running, rotated
from benchmarks.vllm.prompts import Family, unrelated


class Answers:
    """Stands for an engine: always the same answer."""

    def __init__(self, outputs: list[list[int]], seconds: float) -> None:
        self._answer = {
            "outputs": outputs,
            "cached": [0],
            "first": [seconds],
            "seconds": seconds,
            "idle": seconds,
        }
        self.orders: list[str] = []

    def generate(self, prompts: Any, tokens: int) -> dict[str, Any]:
        self.orders.append("generate")
        return self._answer

    def forget(self, external: bool) -> None:
        self.orders.append("forget")


def running(key: str, outputs: list[list[int]] | None = None, seconds: float = 1.0) -> Running:
    contender = Contender(key, key, lambda place: nullcontext(Setup()))
    engine: Any = Answers(outputs or [[1]], seconds)
    return Running(contender, engine)


@pytest.mark.parametrize("length", [512, 1000, 8192])
def test_prompts_of_a_family_share_nine_tenths_and_no_more(length: int) -> None:
    family = Family(length)
    one, other = family.prompt("one"), family.prompt("other")
    assert len(one) == len(other) == length
    assert one[: family.shared] == other[: family.shared]
    assert one[family.shared :] != other[family.shared :]
    assert 0.89 < family.shared / length <= 0.9
    assert one == Family(length).prompt("one")


def test_unrelated_prompts_differ_from_their_first_block_on() -> None:
    prompts = unrelated("1", 4, 64) + unrelated("2", 4, 64)
    assert len({tuple(each[:32]) for each in prompts}) == 8


def test_everybody_who_is_up_begins_in_turn() -> None:
    three = [running("a"), running("b"), running("c")]
    three[1].failure = "gone"
    assert [rotated(three, turn)[0].contender.key for turn in range(3)] == ["a", "c", "a"]


def test_a_ratio_is_to_recompute_in_the_same_turn() -> None:
    turns = [
        ttft.Turn(RECOMPUTE.key, 512, 0, 4.0, 0, True),
        ttft.Turn("us", 512, 0, 1.0, 448, True),
        ttft.Turn(RECOMPUTE.key, 512, 1, 8.0, 0, True),
        ttft.Turn("us", 512, 1, 4.0, 448, True),
        ttft.Turn("us", 1024, 1, 9.0, 448, False),
    ]
    assert report.ttft_ratios(turns, "us", 512).values == (0.25, 0.5)
    more = [overhead.Turn(RECOMPUTE.key, 0, 1.0, True), overhead.Turn("us", 0, 2.0, True)]
    assert report.overhead_ratios(more, "us").values == (0.5,)


def test_one_other_token_voids_a_row() -> None:
    plain, wrong = running(RECOMPUTE.key), running("wrong", [[2]])
    turns = ttft.measure([plain, wrong], [512], 2, lambda what: None)
    assert "other tokens" in str(report.ttft_ratios(turns, "wrong", 512))
    batches = overhead.measure([plain, wrong], 2, lambda what: None)
    assert "other tokens" in str(report.overhead_ratios(batches, "wrong"))


def test_only_the_row_that_may_use_the_engines_own_cache_does() -> None:
    plain, us = running(RECOMPUTE.key), running("us")
    ttft.measure([plain, us], [512], 2, lambda what: None)
    own: Any = us.up
    assert own.orders == ["forget", "generate"] * 3
    limit: Any = plain.up
    assert limit.orders == ["forget", "generate"] + ["forget", "generate", "generate"] * 2


def test_the_tables_say_why_a_peer_has_no_figures() -> None:
    plain, peer = running(RECOMPUTE.key), running("peer")
    peer.engine, peer.failure = None, "its server ended"
    turns = ttft.measure([plain, peer], [512], 1, lambda what: None)
    made = report.as_json([plain, peer], turns, [], [])
    assert made["ttft"][0]["note"] == "its server ended"
    assert "void" in made["ttft"][0]["ratios"]["512"]
    assert "its server ended" in list(report.ttft_table([plain, peer], turns).columns[-1].cells)
