"""The live view of ``top``: two snapshots of the node's counters, and what happened between."""

import asyncio
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.cli.output import console, counted, print_json, share, table, tier_table
from kvstore.control.interface import ControlTarget, Snapshot
from kvstore.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

N = TypeVar("N", int, float)


async def watch(node: ControlTarget, *, interval: float, once: bool, as_json: bool) -> None:
    """Print what happens on the node, every ``interval`` seconds, or once."""
    before = await node.snapshot()
    if as_json or once or not sys.stdout.isatty():
        while True:
            await asyncio.sleep(interval)
            after = await node.snapshot()
            if as_json:
                print_json(changes(before, after), compact=True)
            else:
                console().print(view(before, after))
            if once or not as_json:
                return
            before = after
    from rich.live import Live

    with Live(view(before, before), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            after = await node.snapshot()
            live.update(view(before, after), refresh=True)
            before = after


def changes(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """What ``top --json`` prints: rates per second between two snapshots, and the state after.

    ``hit_rate`` is the share of the blocks that match asked for and that were held, here or by
    another node of the pool; ``hit_share`` that of the blocks that get asked for and found. None
    where none was asked for.
    """
    seconds = after.clock - before.clock
    hits, misses = (
        _rates(before.hits, after.hits, seconds),
        _rates(before.misses, after.misses, seconds),
    )
    lookups = sum(hits.values()) + sum(misses.values())
    matched = _rates(before.matched, after.matched, seconds)
    asked = sum(matched.values())
    return {
        "seconds": seconds,
        "matched_per_second": matched,
        "hit_rate": _held(matched) / asked if asked else None,
        "lookups_per_second": lookups,
        "hit_share": sum(hits.values()) / lookups if lookups else None,
        "hits_per_second": hits,
        "misses_per_second": misses,
        "puts_per_second": _rates(before.puts, after.puts, seconds),
        "bytes_per_second": _rates(before.moved_bytes, after.moved_bytes, seconds),
        "evictions_per_second": _rates(before.evictions, after.evictions, seconds),
        "demotions_per_second": _rate(before.demotions, after.demotions, seconds),
        "promotions_per_second": _rate(before.promotions, after.promotions, seconds),
        "sessions": after.sessions,
        "pins": after.pins,
        "reservations": after.reservations,
        "latencies": after.latencies,
        "tiers": after.tiers,
    }


def _held(matched: Mapping[str, N]) -> N | int:
    return matched.get("held", 0) + matched.get("remote", 0)


def _rate(before: int, after: int, seconds: float) -> float:
    return max(after - before, 0) / seconds if seconds > 0 else 0.0


def _rates(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> dict[str, float]:
    return {name: _rate(before.get(name, 0), count, seconds) for name, count in after.items()}


def view(before: Snapshot, after: Snapshot) -> "Group":
    """The same for people, in two columns where the terminal has room for them."""
    from rich.console import Group
    from rich.table import Table

    changed = changes(before, after)
    screen = console()
    left, right = _block_table(changed, after), Group(_moved_table(changed, after), _timings(after))
    widths = [screen.measure(part).maximum for part in (left, *right.renderables)]
    body: RenderableType = Group(left, right)
    if screen.is_terminal and widths[0] + max(widths[1:]) <= screen.width:
        grid = Table.grid()
        grid.add_row(left, right)
        body = grid
    return Group(
        f" {counted(after.sessions, 'session')}, {counted(after.pins, 'pin')}, "
        f"{counted(after.reservations, 'reservation')}; "
        f"rates of {changed['seconds']:.1f} s, totals since the start",
        tier_table(after.tiers, details=False),
        body,
    )


def _block_table(changed: dict[str, Any], after: Snapshot) -> "Table":
    return table(("BLOCKS", ">PER SECOND", ">TOTAL"), _block_rows(changed, after))


def _moved_table(changed: dict[str, Any], after: Snapshot) -> "Table":
    rows = [
        (way, f"{format_size(round(rate))}/s", format_size(after.moved_bytes[way]))
        for way, rate in sorted(changed["bytes_per_second"].items())
    ]
    return table(("MOVED", ">PER SECOND", ">TOTAL"), rows)


def _timings(after: Snapshot) -> "Table":
    """Latencies since the start: those of requests first, then those of media (``ssd_read``)."""
    seen = sorted(after.latencies.items(), key=lambda item: ("_" in item[0], item[0]))
    rows = [
        (name.replace("_", " "), one.count, format_duration(one.p50), format_duration(one.p99))
        for name, one in seen
        if one.count
    ]
    return table(("LATENCY", ">COUNT", ">P50", ">P99"), rows)


def _block_rows(changed: dict[str, Any], after: Snapshot) -> list[tuple[object, ...]]:
    rates = (
        ("hit", changed["hits_per_second"], after.hits),
        ("miss", changed["misses_per_second"], after.misses),
        ("put", changed["puts_per_second"], after.puts),
        ("evicted", changed["evictions_per_second"], after.evictions),
    )
    asked = sum(after.matched.values())
    return [
        ("hit rate", _percent(changed["hit_rate"]), share(_held(after.matched), asked)),
        (
            "found by get",
            _percent(changed["hit_share"]),
            share(sum(after.hits.values()), after.lookups),
        ),
        *(
            (f"{label}, {name}", f"{rate:.1f}", totals[name])
            for label, by_name, totals in rates
            for name, rate in sorted(by_name.items())
            if totals[name]
        ),
        ("demoted", f"{changed['demotions_per_second']:.1f}", after.demotions),
        ("promoted", f"{changed['promotions_per_second']:.1f}", after.promotions),
    ]


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"
