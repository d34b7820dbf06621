"""One line of the comparison: what everyone's turns came to, and how we stand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from benchmarks.peers.contender import Contender

Turn = Mapping[str, float]
"""The figures of one turn, by name."""


class Figure(NamedTuple):
    """A figure that a turn yields: its unit, and whether more of it is better."""

    title: str
    unit: Literal["B/s", "s", "1/s", "B", "", "%"]
    more: bool


FIGURES: Mapping[str, Figure] = {
    "rate": Figure("rate", "B/s", True),
    "p50": Figure("p50", "s", False),
    "p99": Figure("p99", "s", False),
    "keys": Figure("keys a second", "1/s", True),
    "seconds": Figure("time", "s", False),
    "bytes": Figure("memory", "B", False),
    "hits": Figure("hit rate", "%", True),
}


@dataclass(frozen=True, slots=True)
class Goal:
    """How far ahead we are to be.

    Attributes:
        figure: name in `FIGURES`.
        times: so many times as good: 2 is twice the rate, or half the time.
        against: ``peer``, the best of them in this row; ``shared``, the best of those whose blocks
            other clients find; or the key of a limit.
    """

    figure: str
    times: float = 1.0
    against: str = "peer"


@dataclass(slots=True)
class Entry:
    """What one contender did in a row.

    Attributes:
        contender: who.
        turns: the figures of each turn that counts, in the order of the rounds.
        failure: why there are none; empty where there are.
        note: what a reader of its figures should know.
    """

    contender: Contender
    turns: list[Turn] = field(default_factory=list)
    failure: str = ""
    note: str = ""

    def values(self, figure: str) -> list[float]:
        """One figure, turn by turn; empty where it failed or has no such figure."""
        if self.failure or not self.turns or any(figure not in turn for turn in self.turns):
            return []
        return [turn[figure] for turn in self.turns]

    def median(self, figure: str) -> float | None:
        """The median of the turns."""
        values = self.values(figure)
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """How we stand to whom a goal names.

    Attributes:
        goal: which.
        ours: our entry; None where we have no figure.
        other: whom we are held against; None where nobody has a figure.
        ratios: how many times as good we were, round by round.
    """

    goal: Goal
    ours: Entry | None
    other: Entry | None
    ratios: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """The median of the ratios."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is nothing to compare."""
        return None if self.ratio is None else self.ratio >= self.goal.times


@dataclass(slots=True)
class Row:
    """One work with its parameters, by all contenders.

    Attributes:
        group: which part of the run measured it.
        key: unique, such as ``local/get/1048576/32``.
        title: what is done.
        goals: in the order of importance; the first one's figure sorts.
        entries: one for each contender that takes part.
        labels: what plots and tables sort by: ``work``, ``block_bytes``, ``count``.
        note: what a reader should know.
    """

    group: str
    key: str
    title: str
    goals: Sequence[Goal]
    entries: list[Entry] = field(default_factory=list)
    labels: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def best(self, kind: str, figure: str, *, shared: bool = False) -> Entry | None:
        """Who of a kind is best by the median of a figure; of those alone that are ``shared``."""
        found = [
            (median, number, entry)
            for number, entry in enumerate(self.entries)
            if entry.contender.kind == kind
            and (entry.contender.shared or not shared)
            and (median := entry.median(figure)) is not None
        ]
        if not found:
            return None
        return (max if FIGURES[figure].more else min)(found)[2]

    def verdict(self, goal: Goal) -> Verdict:
        """How we stand to the goal."""
        ours = self.best("ours", goal.figure)
        other = self._whom(goal)
        if ours is None or other is None or not other.values(goal.figure):
            return Verdict(goal, ours, None if other is None or other.failure else other)
        return Verdict(goal, ours, other, times_as_good(ours, other, goal.figure))

    def _whom(self, goal: Goal) -> Entry | None:
        if goal.against in ("peer", "shared"):
            return self.best("peer", goal.figure, shared=goal.against == "shared")
        limits = (each for each in self.entries if each.contender.key == goal.against)
        return next(limits, None)

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each goal."""
        return [self.verdict(goal) for goal in self.goals]


def times_as_good(ours: Entry, other: Entry, figure: str) -> tuple[float, ...]:
    """Round by round, more than 1 where ours is better."""
    pairs = zip(ours.values(figure), other.values(figure), strict=False)
    if FIGURES[figure].more:
        return tuple(mine / theirs for mine, theirs in pairs if theirs)
    return tuple(theirs / mine for mine, theirs in pairs if mine)
