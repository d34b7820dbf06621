"""Rounds, medians and rows: how every figure of the benchmarks is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

Sample = Callable[[], float]
"""One turn: does the work a number of times and returns its figure (seconds, bytes/s or bytes)."""

Argument = TypeVar("Argument")
Sense = Literal["at least", "under"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure, and where.

    Attributes:
        rounds: turns that subject and limit each take.
        scale: factor on the number of calls in one turn; below 1 for a quick look.
        directory: where the SSD row keeps its files; must lie on the disk to be measured.
    """

    rounds: int
    scale: float
    directory: Path

    def calls(self, usual: int) -> int:
        """How many calls one turn makes where it usually makes ``usual``."""
        return max(3, round(usual * self.scale))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        key: short name for ``--only`` and the JSON.
        subject: what was measured.
        limit: what it is held against.
        unit: ``s``, ``B/s`` or ``B``; of both figures.
        sense: whether the ratio must be at least, or under, the goal.
        goal: the ratio to reach; None where the figure is for comparison only.
        rounds: (subject, limit) of every turn.
        note: what a reader of the figure should know.
        skipped: why there is no figure; empty where there is one.
    """

    key: str
    subject: str
    limit: str
    unit: Literal["s", "B/s", "B"]
    sense: Sense
    goal: float | None
    rounds: tuple[tuple[float, float], ...] = ()
    note: str = ""
    skipped: str = ""

    @property
    def ratios(self) -> list[float]:
        """Subject by limit, one for each turn."""
        return [subject / limit for subject, limit in self.rounds]

    @property
    def ratio(self) -> float:
        """The median of the turns' ratios."""
        return statistics.median(self.ratios)

    @property
    def medians(self) -> tuple[float, float]:
        """Median figure of the subject and of the limit."""
        subjects, limits = zip(*self.rounds, strict=True)
        return statistics.median(subjects), statistics.median(limits)

    @property
    def met(self) -> bool:
        """Whether the median ratio reaches the goal, if there is one."""
        if self.goal is None:
            return True
        if self.skipped:
            return False
        return self.ratio >= self.goal if self.sense == "at least" else self.ratio < self.goal


def alternate(
    settings: Settings, subject: Sample, limit: Sample
) -> tuple[tuple[float, float], ...]:
    """Let subject and limit take turns, after one turn each that does not count."""
    subject()
    limit()
    return tuple((subject(), limit()) for _ in range(settings.rounds))


def median_time(call: Callable[[], object], calls: int) -> float:
    """Median seconds that one call takes."""
    clock = time.perf_counter
    times = []
    for _ in range(calls):
        began = clock()
        call()
        times.append(clock() - began)
    return statistics.median(times)


def median_time_of(
    prepare: Callable[[], Argument], call: Callable[[Argument], object], calls: int
) -> float:
    """Median seconds of ``call(prepare())``, where preparing is not counted."""
    clock = time.perf_counter
    times = []
    for _ in range(calls):
        argument = prepare()
        began = clock()
        call(argument)
        times.append(clock() - began)
    return statistics.median(times)
