"""``status``, ``namespaces``, ``tenants`` and ``top``: how the node does as a whole."""

from collections.abc import Mapping
from typing import Annotated, Final

import typer

from kvstore.cli.options import (
    AsJson,
    ConfigFile,
    Control,
    NodeName,
    Remote,
    Timeout,
    WholePool,
    ask,
)
from kvstore.cli.output import console, print_json, short, state, table, tier_table

REVISION_DIGITS: Final = 12
"""Of a revision in tables, as of a commit; ``--json`` has all of it."""


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(status)
    app.command()(namespaces)
    app.command()(tenants)
    app.command()(top)


def status(
    pool: WholePool = False,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Show who the node is, what it holds and how full its tiers are."""
    from kvstore.units import format_duration

    remote = Remote(control, config, timeout, node)
    if pool:
        from kvstore.cli import pool_totals

        pool_totals.status(remote, as_json=as_json)
        return
    found = ask(remote, lambda client: client.status())
    if as_json:
        print_json(found)
        return
    facts = [
        ("state", state(found.state, good=found.state == "serving")),
        ("incarnation", found.incarnation),
        ("version", found.version),
        ("process", found.pid),
        ("up", format_duration(found.uptime)),
        ("listens", ", ".join(found.listens)),
        ("sessions", sessions(found.sessions, found.transports)),
        ("rdma", found.rdma),
        ("namespaces", found.namespaces),
        ("blocks", found.blocks),
        ("pins", found.pins),
        ("reservations", found.reservations),
    ]
    screen = console()
    screen.print(table(("NODE", found.name), facts))
    screen.print(tier_table(found.tiers))


def sessions(count: int, transports: Mapping[str, int]) -> str:
    """``3 (shm 2, tcp 1)``."""
    used = ", ".join(f"{name} {number}" for name, number in transports.items() if number)
    return f"{count} ({used})" if used else str(count)


def namespaces(
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """List the namespaces that the node knows, those with most bytes first."""
    from kvstore.units import format_size

    found = ask(Remote(control, config, timeout, node), lambda client: client.namespaces())
    if as_json:
        print_json(found)
        return
    rows = [
        (
            short(one.fingerprint),
            one.description.get("model", "?"),
            str(one.description.get("revision", "?"))[:REVISION_DIGITS],
            one.description.get("dtype", "?"),
            one.description.get("block_tokens", "?"),
            f"{one.description.get('tp_size', '?')}x{one.description.get('pp_size', '?')}",
            one.description.get("tenant", "?"),
            one.blocks,
            format_size(one.bytes),
            one.sessions,
        )
        for one in found
    ]
    columns = (
        "NAMESPACE", "MODEL", "REVISION", "DTYPE", ">BLOCK TOKENS", "TPxPP", "TENANT", ">BLOCKS",
        ">SIZE", ">SESSIONS",
    )  # fmt: skip
    spare = ("REVISION", "TPxPP", "SESSIONS", "DTYPE", "TENANT", "BLOCK TOKENS")
    console().print(table(columns, rows, spare=spare))


def tenants(
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Show what each tenant with a section holds of its quotas; * is all others together."""
    from kvstore.units import format_size

    found = ask(Remote(control, config, timeout, node), lambda client: client.status()).tenants
    if as_json:
        print_json(found)
        return

    def quota(size: int | None) -> str:
        return "-" if size is None else format_size(size)

    rows = [
        (
            one.name,
            format_size(one.dram),
            quota(one.dram_quota),
            format_size(one.ssd),
            quota(one.ssd_quota),
            one.sessions,
        )
        for one in found
    ]
    columns = ("TENANT", ">DRAM", ">QUOTA", ">SSD", ">QUOTA", ">SESSIONS")
    console().print(table(columns, rows))


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one interval and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, max=3600, help="Seconds between samples.")
    ] = 1.0,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Watch hit rate, traffic, latencies and tiers; rates are those of the last interval.

    The hit rate is the share of the blocks that clients asked for with match and that were held.
    Gets ask only for what match found, so nearly all of theirs are found.

    With --json, prints one object a line. Ends with Ctrl-C, or after one interval with --once or
    where the output is no terminal.
    """
    from kvstore.cli.watch import watch

    ask(
        Remote(control, config, timeout, node),
        lambda client: watch(client, interval=interval, once=once, as_json=as_json),
    )
