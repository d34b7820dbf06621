"""Turns as ratios: a table for people, an object for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.vllm import overhead, ttft
from benchmarks.vllm.contenders import RECOMPUTE
from benchmarks.vllm.fleet import Running

OVERHEAD_GOAL = 0.98
OWN_CACHE = "no connector, prefix in the engine's own cache"


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of several turns.

    Attributes:
        values: one for each turn.
        void: why they are none; empty where they are.
    """

    values: tuple[float, ...] = ()
    void: str = ""

    @property
    def median(self) -> float:
        """Their median."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        if self.void or not self.values:
            return self.void or "-"
        return f"{self.median:.2f} ({min(self.values):.2f} - {max(self.values):.2f})"

    def as_json(self) -> dict[str, Any]:
        """What the cell says and every turn behind it."""
        if self.void or not self.values:
            return {"void": self.void or "not measured"}
        return {"median": self.median, "ratios": list(self.values)}


def ttft_ratios(turns: Sequence[ttft.Turn], key: str, length: int) -> Ratios:
    """Seconds to the first token by those of recompute in the same turn."""
    limit = {
        each.turn: each.seconds
        for each in turns
        if each.key == RECOMPUTE.key and each.length == length
    }
    own = [each for each in turns if each.key == key and each.length == length]
    if not all(each.equal for each in own):
        return Ratios(void="void: other tokens")
    return Ratios(tuple(each.seconds / limit[each.turn] for each in own))


def overhead_ratios(turns: Sequence[overhead.Turn], key: str) -> Ratios:
    """Throughput by that without a connector in the same turn."""
    limit = {each.turn: each.seconds for each in turns if each.key == RECOMPUTE.key}
    own = [each for each in turns if each.key == key]
    if not all(each.equal for each in own):
        return Ratios(void="void: other tokens")
    return Ratios(tuple(limit[each.turn] / each.seconds for each in own))


def ttft_table(running: Sequence[Running], turns: Sequence[ttft.Turn]) -> Table:
    """One line a contender, one column a length."""
    lengths = sorted({each.length for each in turns})
    made = Table(
        title="time to the first token, 90 % of the prompt in the store, by that of recompute",
        title_justify="left",
    )
    made.add_column("connector", overflow="fold")
    for length in lengths:
        made.add_column(f"{length} tokens", justify="right", no_wrap=True)
    made.add_column("reused", justify="right", no_wrap=True)
    made.add_column("note", overflow="fold")
    for key, title, note in _lines(running):
        cells = [str(ttft_ratios(turns, key, length)) for length in lengths]
        made.add_row(title, *cells, _reused(turns, key), note)
    return made


def overhead_table(running: Sequence[Running], turns: Sequence[overhead.Turn]) -> Table:
    """One line a contender."""
    made = Table(
        title="throughput without any reuse, by that without a connector", title_justify="left"
    )
    for column in ("connector", "ratio (min - max)", "middle half", "goal", "met", "note"):
        made.add_column(column, overflow="fold")
    for each in running[1:]:
        ratios = overhead_ratios(turns, each.contender.key)
        figures = bool(ratios.values) and not ratios.void
        half = _middle_half(ratios.values) if len(ratios.values) > 1 else "-"
        met = figures and ratios.median >= OVERHEAD_GOAL
        made.add_row(
            each.contender.title,
            f"{ratios.median:.3f} ({min(ratios.values):.3f} - {max(ratios.values):.3f})"
            if figures
            else str(ratios),
            half,
            f"at least {OVERHEAD_GOAL:g}",
            "[green]met[/]" if met else "[red]missed[/]" if figures else "[yellow]no figure[/]",
            each.failure or each.contender.note,
        )
    return made


def as_json(
    ttft_running: Sequence[Running],
    ttft_turns: Sequence[ttft.Turn],
    overhead_running: Sequence[Running],
    overhead_turns: Sequence[overhead.Turn],
) -> dict[str, Any]:
    """All that the tables say and every turn behind it."""
    lengths = sorted({each.length for each in ttft_turns})
    return {
        "ttft": [
            {
                "key": key,
                "connector": title,
                "note": note,
                "ratios": {
                    str(length): ttft_ratios(ttft_turns, key, length).as_json()
                    for length in lengths
                },
                "turns": [
                    [each.length, each.turn, each.seconds, each.cached, each.equal]
                    for each in ttft_turns
                    if each.key == key
                ],
            }
            for key, title, note in _lines(ttft_running)
        ],
        "overhead": [
            {
                "key": each.contender.key,
                "connector": each.contender.title,
                "note": each.failure or each.contender.note,
                "goal": OVERHEAD_GOAL,
                "ratios": overhead_ratios(overhead_turns, each.contender.key).as_json(),
                "turns": [
                    [turn.turn, turn.seconds, turn.equal]
                    for turn in overhead_turns
                    if turn.key == each.contender.key
                ],
            }
            for each in overhead_running
        ],
    }


def _lines(running: Sequence[Running]) -> list[tuple[str, str, str]]:
    """Key, title and note of each line; what recompute is measured by is one."""
    lines = [
        (each.contender.key, each.contender.title, each.failure or each.contender.note)
        for each in running
        if each.contender.key != RECOMPUTE.key
    ]
    return [*lines, (ttft.LOCAL, OWN_CACHE, "nothing is loaded: the least there can be")]


def _reused(turns: Sequence[ttft.Turn], key: str) -> str:
    """Share of the prompts' tokens that were not computed, over all turns."""
    own = [each for each in turns if each.key == key]
    if not own:
        return "-"
    return f"{sum(each.cached for each in own) / sum(each.length for each in own):.0%}"


def _middle_half(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.3f} - {high:.3f}"
