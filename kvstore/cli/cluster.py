"""``cluster``: the nodes of a pool, what they hold and do, and who pulls from whom."""

import asyncio
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.cli.options import AsJson, ConfigFile, Control, Remote, Timeout

if TYPE_CHECKING:
    from rich.console import Group

    from kvstore.cli.pool import PoolCaller
    from kvstore.control.pool import DirectoryReport

_SPARE: Final = ("HOST", "ADDRESS", "NUMBER", "UP", "GET/S", "SESSIONS", "PULLED", "BLOCKS")
_HOST_DIGITS: Final = 8
_MOST_SHOWN: Final = 40
"""Pairs of nodes in the table of pulls; ``--json`` has all."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(cluster)


def cluster(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on, until Ctrl-C; one line each with --json.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, max=3600, help="Seconds between looks.")
    ] = 2.0,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 5.0,
) -> None:
    """Show the nodes of the pool: tiers, heat, and who pulls from whom.

    The node at --control names the members, and each is asked itself; of one that does not answer
    the last that it told the directory is shown. Rates fade over a minute. The hit rate is the
    share of the blocks asked for with match that any node holds; REMOTE is the share of the blocks
    found by get that other nodes brought.

    Exit status 4 if some nodes did not answer.
    """
    from kvstore.cli.output import print_json
    from kvstore.cli.pool import ask_pool, end

    remote = Remote(control, config, timeout)

    async def look(pool: "PoolCaller") -> "PoolCaller":
        return pool

    if watch and sys.stdout.isatty() and not as_json:
        _watch(remote, interval)
        return
    while True:
        pool = ask_pool(remote, look)
        if as_json:
            print_json(facts(pool), compact=watch)
        else:
            _show(pool)
        if not watch:
            end(pool.failed, as_json=as_json)
            return
        _pause(interval)


def _watch(remote: Remote, interval: float) -> None:
    from rich.live import Live

    from kvstore.cli.options import destination
    from kvstore.cli.output import console
    from kvstore.cli.pool import PoolCaller
    from kvstore.errors import KVStoreError

    address, way = destination(remote)

    async def looking() -> None:
        with Live(console=console(), screen=True, auto_refresh=False) as live:
            while True:
                try:
                    async with PoolCaller(address, way) as pool:
                        live.update(view(pool), refresh=True)
                except KVStoreError as error:
                    live.update(f" {error}", refresh=True)
                await asyncio.sleep(interval)

    asyncio.run(looking())


def _pause(seconds: float) -> None:
    import time

    time.sleep(seconds)


def _show(pool: "PoolCaller") -> None:
    from kvstore.cli.output import console

    console().print(view(pool))


def facts(pool: "PoolCaller") -> dict[str, Any]:
    """What ``cluster --json`` prints."""
    loads = {one.member.number: one.value for one in pool.loads}
    members = []
    for member in pool.report.members:
        load = loads.get(member.number)
        members.append(
            {
                "number": member.number,
                "node": member.node,
                "incarnation": member.incarnation,
                "host": member.host,
                "data": member.data,
                "control": member.control,
                "asked": member.asked,
                "answered": load is not None,
                "figures": dict(member.summary if load is None else load.figures),
            }
        )
    pulls = [
        {
            "node": one.member.node,
            "number": one.member.number,
            "from": pull.node,
            "blocks": pull.blocks,
            "bytes": pull.bytes,
        }
        for one in pool.loads
        for pull in one.value.pulls
    ]
    pulls.sort(key=lambda pull: int(str(pull["bytes"])), reverse=True)
    return {
        "pool": pool.report.pool,
        "directory": pool.report.directory,
        "members": members,
        "pulls": pulls,
        "gone": pool.report.gone,
        "failed": pool.failed,
    }


def view(pool: "PoolCaller") -> "Group":
    """The same for people."""
    from rich.console import Group
    from rich.text import Text

    from kvstore.cli.output import counted, table
    from kvstore.units import format_duration, format_size

    found = facts(pool)
    members, pulls = found["members"], found["pulls"]
    asked = next((one["node"] for one in members if one["asked"]), "?")
    parts: list[Any] = [
        Text(f" pool {found['pool']}: {counted(len(members), 'node')}, as {asked} sees it"),
        Text(f" {directory_line(pool.report.directory)}"),
    ]
    parts += [
        Text(f" gone: {one.node} (number {one.number}), {format_duration(one.ago)} ago")
        for one in pool.report.gone[:5]
    ]
    columns = (
        "NODE", ">NUMBER", "STATE", "HOST", "ADDRESS", ">UP", ">BLOCKS", "DRAM", "SSD", ">MATCH/S",
        ">GET/S", ">HIT RATE", ">REMOTE", ">PULLED", ">SESSIONS",
    )  # fmt: skip
    parts.append(table(columns, [_row(one) for one in members], spare=_SPARE))
    if pulls:
        rows = [
            (one["node"], one["from"], one["blocks"], format_size(one["bytes"]))
            for one in pulls[:_MOST_SHOWN]
        ]
        parts.append(table(("NODE", "PULLED FROM", ">BLOCKS", ">SIZE"), rows))
        if len(pulls) > _MOST_SHOWN:
            parts.append(Text(f" and {len(pulls) - _MOST_SHOWN} more pairs; --json has all"))
    return Group(*parts)


def _row(member: Mapping[str, Any]) -> tuple[object, ...]:
    from kvstore.cli.output import state
    from kvstore.units import format_duration, format_size

    seen = member["figures"]
    word = "draining" if seen.get("draining") else "serving"
    return (
        member["node"],
        member["number"] or "none",
        state(word, good=True) if member["answered"] else state("no answer", good=False),
        member["host"][:_HOST_DIGITS],
        member["data"],
        format_duration(seen["uptime"]) if "uptime" in seen else "-",
        _count(seen, "blocks"),
        _tier(seen, "dram"),
        _tier(seen, "ssd"),
        _rate(seen, "asked_per_second"),
        _rate(seen, "lookups_per_second"),
        _share(seen, "hit_rate"),
        _share(seen, "remote_share"),
        format_size(round(seen["pulled_bytes"])) if "pulled_bytes" in seen else "-",
        _count(seen, "sessions"),
    )


def _tier(seen: Mapping[str, float], tier: str) -> str:
    from kvstore.units import format_size

    if f"{tier}_capacity" not in seen:
        return "-"
    used, capacity = seen.get(f"{tier}_used", 0.0), seen[f"{tier}_capacity"]
    return f"{format_size(round(used))} of {format_size(round(capacity))}"


def _count(seen: Mapping[str, float], name: str) -> str:
    return f"{seen[name]:.0f}" if name in seen else "-"


def _rate(seen: Mapping[str, float], name: str) -> str:
    return f"{seen[name]:.1f}" if name in seen else "-"


def _share(seen: Mapping[str, float], name: str) -> str:
    return f"{seen[name]:.1%}" if name in seen else "-"


def directory_line(found: "DirectoryReport") -> str:
    """How the directory does, in one line."""
    from kvstore.units import format_duration

    if found.reachable:
        heard = f", last {format_duration(found.heard)} ago" if found.heard is not None else ""
        text = f"directory ({found.kind}): answers{heard}"
    else:
        since = f" for {format_duration(found.failing)}" if found.failing is not None else ""
        text = f"directory ({found.kind}): has not answered{since}"
    counts = {**found.failures, **({"lookups not tried": found.refused} if found.refused else {})}
    failures = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
    return f"{text}; failures since the start: {failures}" if failures else text
