"""The comparison as Markdown for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.contender import Contender
from benchmarks.peers.row import FIGURES, Entry, Row, Verdict
from kvstore.units import format_size

SHOWN = {"ours": "**ours**", "peer": "", "limit": "limit"}


class Report:
    """Rows as they come; written after each, so that a run cut short keeps what it has."""

    def __init__(self, stem: Path, about: Mapping[str, Any]) -> None:
        """Begin an empty one.

        Args:
            stem: path of the files, less their endings.
            about: machine, versions and command, JSON-ready.
        """
        self._stem = stem
        self._about = about
        self.rows: list[Row] = []

    @property
    def markdown(self) -> Path:
        """The file for people."""
        return self._stem.with_suffix(".md")

    def add(self, row: Row) -> None:
        """Take in a complete row and write both files."""
        self.rows.append(row)
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        found = {"about": dict(self._about), "rows": [row_as_json(each) for each in self.rows]}
        self._stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        self.markdown.write_text(as_markdown(self.rows, self._about))


def as_markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = ["# Beside the peers", _about(about), "## Goals", goals_table(rows)]
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        parts.append(f"## {group}")
        for figure in _figures(own):
            info = FIGURES[figure]
            sense = "more" if info.more else "less"
            parts += [f"{info.title}, median of the rounds; {sense} is better:"]
            parts += [figure_table(own, figure)]
        parts += _remarks(own)
    parts += ["## Who takes part", _legend(rows)]
    return "\n\n".join(parts) + "\n"


def goals_table(rows: Sequence[Row]) -> str:
    """One line for each goal of each row."""
    heads = ("row", "figure", "ours", "against", "its", "times as good (min - max)", "goal", "met")
    lines = [(row, verdict) for row in rows for verdict in row.verdicts]
    return table(heads, [_goal_cells(row, verdict) for row, verdict in lines])


def figure_table(rows: Sequence[Row], figure: str) -> str:
    """One line for each row, one column for each contender."""
    keys = list(dict.fromkeys(e.contender.key for row in rows for e in row.entries))
    lines = []
    for row in rows:
        by_key = {each.contender.key: each for each in row.entries}
        cells = [_cell(by_key.get(key), figure) for key in keys]
        if any(cell != "-" for cell in cells):
            lines.append((f"`{row.key}`", *cells))
    return table(("row", *keys), lines)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    every = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in every)


def quantity(value: float, figure: str) -> str:
    """A figure with a readable unit."""
    unit = FIGURES[figure].unit
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "1/s":
        return f"{value / 1e3:,.0f} k/s"
    if unit == "s":
        return _seconds(value)
    if unit == "B":
        return f"{value:,.0f} B" if value < 1 << 20 else f"{value / (1 << 20):,.0f} MiB"
    return f"{value:.1f} {unit}".strip()


def row_as_json(row: Row) -> dict[str, Any]:
    """All that the tables say of a row and every turn behind it."""
    return {
        "key": row.key,
        "group": row.group,
        "title": row.title,
        "labels": dict(row.labels),
        "note": row.note,
        "goals": [_verdict_as_json(each) for each in row.verdicts],
        "contenders": [
            {
                "key": each.contender.key,
                "kind": each.contender.kind,
                "failure": each.failure,
                "note": each.note,
                "turns": [dict(turn) for turn in each.turns],
            }
            for each in row.entries
        ],
    }


def _verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    other = verdict.other.contender.key if verdict.other else None
    goal = verdict.goal
    return {
        "figure": goal.figure,
        "goal": goal.times,
        "against": goal.against,
        "held_against": other,
        "ratio": verdict.ratio,
        "ratios": list(verdict.ratios),
        "met": verdict.met,
    }


def _goal_cells(row: Row, verdict: Verdict) -> tuple[str, ...]:
    goal = verdict.goal
    ours, other = _cell(verdict.ours, goal.figure), _cell(verdict.other, goal.figure)
    name = verdict.other.contender.key if verdict.other else f"no {goal.against}"
    name += ", shared" if verdict.other and goal.against == "shared" else ""
    spread, met = "-", "-"
    if verdict.ratio is not None:
        low, high = min(verdict.ratios), max(verdict.ratios)
        spread = f"{verdict.ratio:.2f} ({low:.2f} - {high:.2f})"
        met = "yes" if verdict.met else "**no**"
    return f"`{row.key}`", goal.figure, ours, name, other, spread, f"{goal.times:g}", met


def _cell(entry: Entry | None, figure: str) -> str:
    median = entry.median(figure) if entry else None
    return "-" if median is None else quantity(median, figure)


def _figures(rows: Sequence[Row]) -> list[str]:
    turns = [turn for row in rows for each in row.entries for turn in each.turns]
    wanted = {goal.figure for row in rows for goal in row.goals} | {"hits"}
    return [name for name in FIGURES if name in wanted and any(name in turn for turn in turns)]


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Why there are no figures where there are none, and what else is to be known."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            said.setdefault(row.note, []).append(f"`{row.key}`")
        for each in row.entries:
            for text in (each.failure and f"no figure: {each.failure}", each.note):
                if text:
                    said.setdefault(f"{each.contender.key}: {text}", []).append(f"`{row.key}`")
    lines = [f"- {text} ({', '.join(where)})" for text, where in said.items()]
    return ["\n".join(lines)] if lines else []


def _legend(rows: Sequence[Row]) -> str:
    found = {e.contender.key: e.contender for row in rows for e in row.entries}
    lines = [
        (key, SHOWN[each.kind], _shared(each), each.title, each.note) for key, each in found.items()
    ]
    heads = ("name", "", "shared", "what it is", "its configuration")
    said = "Shared: whether other clients find what one has put."
    return f"{table(heads, lines)}\n\n{said}"


def _shared(contender: Contender) -> str:
    if contender.kind == "limit":
        return "-"
    return "yes" if contender.shared else "no"


def _about(about: Mapping[str, Any]) -> str:
    lines = []
    for name, value in about.items():
        text = value
        if isinstance(value, Mapping):
            text = ", ".join(f"{key} {each}" for key, each in value.items())
        elif name.endswith("_bytes"):
            text = format_size(value)
        lines.append(f"- {name.replace('_', ' ')}: {text}")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"
