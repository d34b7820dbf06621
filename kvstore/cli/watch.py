"""The live view of ``top``: two snapshots of the node's counters, and what happened between."""

import asyncio
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvstore.cli.output import console, print_json, share, table, tier_table
from kvstore.control.interface import ControlTarget, Snapshot
from kvstore.units import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import Group


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

    ``hit_share`` is None where nothing was looked up.
    """
    seconds = after.clock - before.clock
    hits, misses = (
        _rates(before.hits, after.hits, seconds),
        _rates(before.misses, after.misses, seconds),
    )
    lookups = sum(hits.values()) + sum(misses.values())
    return {
        "seconds": seconds,
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


def _rate(before: int, after: int, seconds: float) -> float:
    return max(after - before, 0) / seconds if seconds > 0 else 0.0


def _rates(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> dict[str, float]:
    return {name: _rate(before.get(name, 0), count, seconds) for name, count in after.items()}


def view(before: Snapshot, after: Snapshot) -> "Group":
    """The same for people."""
    from rich.console import Group

    changed = changes(before, after)
    return Group(
        f"rates over the last {changed['seconds']:.1f} s, totals since the start",
        table(("BLOCKS", ">PER SECOND", ">TOTAL"), _lookup_rows(changed, after)),
        table(
            ("SESSIONS", "PINS", "RESERVATIONS"),
            [(after.sessions, after.pins, after.reservations)],
        ),
        table(
            ("MOVED", ">PER SECOND", ">TOTAL"),
            [
                (way, f"{format_size(round(rate))}/s", format_size(after.moved_bytes[way]))
                for way, rate in changed["bytes_per_second"].items()
            ],
        ),
        table(
            ("LATENCY", ">COUNT", ">P50", ">P99"),
            [
                (name, seen.count, format_duration(seen.p50), format_duration(seen.p99))
                for name, seen in after.latencies.items()
                if seen.count
            ],
        ),
        tier_table(after.tiers),
    )


def _lookup_rows(changed: dict[str, Any], after: Snapshot) -> list[tuple[object, ...]]:
    total_hits = sum(after.hits.values())
    rates = (
        ("hit", changed["hits_per_second"], after.hits),
        ("miss", changed["misses_per_second"], after.misses),
        ("put", changed["puts_per_second"], after.puts),
        ("evicted", changed["evictions_per_second"], after.evictions),
    )
    now = changed["hit_share"]
    return [
        ("hit share", "-" if now is None else f"{now:.1%}", share(total_hits, after.lookups)),
        *(
            (f"{label}, {name}", f"{rate:.1f}", totals[name])
            for label, by_name, totals in rates
            for name, rate in by_name.items()
            if totals[name]
        ),
        ("demoted", f"{changed['demotions_per_second']:.1f}", after.demotions),
        ("promoted", f"{changed['promotions_per_second']:.1f}", after.promotions),
    ]
