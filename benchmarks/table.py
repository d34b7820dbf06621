"""Rows as people and as programs read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.measure import Row


def table(rows: Sequence[Row]) -> Table:
    """One line a row: both medians, the ratio with its spread, the goal, and whether it is met."""
    made = Table(title="kvstore speed, as ratios in the same run", title_justify="left")
    made.add_column("what", overflow="fold")
    made.add_column("median", justify="right", no_wrap=True)
    made.add_column("against", overflow="fold")
    made.add_column("median", justify="right", no_wrap=True)
    made.add_column("ratio (min - max)", justify="right", no_wrap=True)
    made.add_column("goal", justify="right", no_wrap=True)
    made.add_column("met", no_wrap=True)
    for row in rows:
        made.add_row(*_cells(row))
    return made


def _cells(row: Row) -> tuple[str, ...]:
    goal = "-" if row.goal is None else f"{row.sense} {row.goal:g}"
    if row.skipped:
        return row.subject, "-", row.limit, "-", row.skipped, goal, "[yellow]no figure[/]"
    subject, limit = (quantity(value, row.unit) for value in row.medians)
    ratios = row.ratios
    spread = f"{row.ratio:.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
    met = "[green]met[/]" if row.met else "[red]missed[/]"
    met = "-" if row.goal is None else met
    return row.subject, subject, row.limit, limit, spread, goal, met


def markdown(rows: Sequence[Row]) -> str:
    """The same for a document."""
    heads = ("row", "subject", "median", "limit", "median", "ratio", "goal")
    lines = [heads, ("---",) * len(heads)]
    for row in rows:
        subject, median, limit, other, spread, goal, _ = _cells(row)
        lines.append((f"`{row.key}`", subject, median, limit, other, spread, goal))
    notes = [f"- `{row.key}`: {row.note}." for row in rows if row.note]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*table, *([""] if notes else []), *notes])


def quantity(value: float, unit: str) -> str:
    """A figure with a readable unit."""
    if unit == "B/s":
        return f"{value / 1e9:.2f} GB/s"
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value * 1e6:.1f} µs" if value < 1e-3 else f"{value * 1e3:.2f} ms"


def as_json(rows: Sequence[Row], machine: Mapping[str, object]) -> dict[str, object]:
    """All that the table says and every turn behind it."""
    return {"machine": dict(machine), "rows": [_object(row) for row in rows]}


def _object(row: Row) -> dict[str, object]:
    found: dict[str, object] = {
        "key": row.key,
        "subject": row.subject,
        "limit": row.limit,
        "unit": row.unit,
        "sense": row.sense,
        "goal": row.goal,
        "note": row.note,
    }
    if row.skipped:
        return found | {"skipped": row.skipped, "met": None}
    subject, limit = row.medians
    return found | {
        "subject_median": subject,
        "limit_median": limit,
        "ratio": row.ratio,
        "ratio_min": min(row.ratios),
        "ratio_max": max(row.ratios),
        "met": row.met,
        "rounds": [list(turn) for turn in row.rounds],
    }
