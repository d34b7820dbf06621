"""``pin``, ``unpin``, ``evict``, ``flush`` and ``verify``: what changes the cache."""

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.options import (
    AsJson,
    ConfigFile,
    Control,
    Namespace,
    NodeName,
    Remote,
    Tier,
    Timeout,
    WholePool,
    ask,
    offered,
)
from kvstore.cli.output import console, counted, print_json, short, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvstore.control.client import ControlClient
    from kvstore.control.interface import PinReport, Removal, VerifyProgress

Block = Annotated[
    str, typer.Argument(metavar="HASH", help="Hash of the last block of the prefix, in hex.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(pin)
    app.command()(pins)
    app.command()(unpin)
    app.command()(evict)
    app.command()(flush)
    app.command()(verify)


def pin(
    block: Block,
    ttl: Annotated[
        str | None, typer.Option("--ttl", help="Lifetime, such as 1h; without, until unpinned.")
    ] = None,
    namespace: Namespace = None,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Keep a prefix: the block and all before it, on every shard."""
    from kvstore.cli.naming import find_block
    from kvstore.units import parse_duration

    seconds = None
    if ttl is not None:
        try:
            seconds = parse_duration(ttl)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--ttl") from error

    async def question(node: "ControlClient") -> "PinReport":
        name = await find_block(node, block, namespace)
        return await node.pin(name.namespace, name.hash, seconds)

    report = ask(Remote(control, config, timeout, node), question)
    if as_json:
        print_json(report)
    else:
        console().print(_pin_table([report]))


def pins(
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """List the prefixes that operators have pinned."""
    found = ask(Remote(control, config, timeout, node), lambda client: client.pins())
    if as_json:
        print_json(found)
    else:
        console().print(_pin_table(found))


def _pin_table(found: "Sequence[PinReport]") -> "Table":
    from kvstore.units import format_duration, format_size

    rows = [
        (
            short(one.namespace)[:8],
            short(one.hash),
            one.blocks,
            format_size(one.bytes),
            "never" if one.expires is None else f"in {format_duration(one.expires)}",
        )
        for one in found
    ]
    return table(("NAMESPACE", "LAST HASH", ">BLOCKS", ">SIZE", "EXPIRES"), rows)


def unpin(
    block: Block,
    namespace: Namespace = None,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """End a pin, named by the same block.

    Exit status 1 if there is none.
    """
    from kvstore.cli.naming import find_block

    async def question(node: "ControlClient") -> "Removal":
        name = await find_block(node, block, namespace)
        return await node.unpin(name.namespace, name.hash)

    removal = ask(Remote(control, config, timeout, node), question)
    if as_json:
        print_json(removal)
    else:
        console().print(f"Unpinned {counted(removal.blocks, 'block')}.")
    if not removal.blocks:
        raise typer.Exit(1)


def evict(
    block: Annotated[
        str | None,
        typer.Argument(metavar="HASH", help="Hash of the first block to go, in hex."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The whole namespace, instead of a block.")
    ] = False,
    namespace: Namespace = None,
    pool: WholePool = False,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 60.0,
) -> None:
    """Drop a block and all that follow it, from every tier and shard.

    Exit status 1 if some stayed because they are pinned or in use.
    """
    from kvstore.cli.naming import find_block, find_namespace

    if (block is None) != everything:
        raise typer.BadParameter("give the hash of a block, or --all, and not both")
    remote = Remote(control, config, timeout, node)
    if pool:
        from kvstore.cli import pool_totals

        pool_totals.evict(remote, block, namespace, as_json=as_json)
        return

    async def question(node: "ControlClient") -> "Removal":
        if block is None:
            return await node.evict((await find_namespace(node, namespace)).fingerprint, None)
        name = await find_block(node, block, namespace)
        return await node.evict(name.namespace, name.hash)

    _conclude("Dropped", ask(remote, question), as_json=as_json)


def flush(
    tier: Annotated[
        str,
        typer.Argument(
            metavar="TIER",
            help="hbm, dram or ssd.",
            autocompletion=offered("hbm", "dram", "ssd"),
        ),
    ],
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 600.0,
) -> None:
    """Empty a tier: what only it holds moves to the tier below, or is dropped where none has room.

    Exit status 1 if some stayed because they are pinned or in use.
    """
    screen = console(errors=True)
    with screen.status(f"emptying {tier}") if screen.is_terminal else nullcontext():
        removal = ask(Remote(control, config, timeout, node), lambda client: client.flush(tier))
    _conclude(f"Emptied {tier} of", removal, as_json=as_json)


def _conclude(done: str, removal: "Removal", *, as_json: bool) -> None:
    from kvstore.units import format_size

    if as_json:
        print_json(removal)
    else:
        text = f"{done} {counted(removal.blocks, 'block')} ({format_size(removal.bytes)})"
        text += f", having copied {removal.moved:,} to the tier below" if removal.moved else ""
        text += f"; {removal.kept:,} stayed: pinned or in use" if removal.kept else ""
        console().print(text + ".")
    if removal.kept:
        raise typer.Exit(1)


def verify(
    namespace: Namespace = None,
    tier: Tier = None,
    pool: WholePool = False,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 60.0,
) -> None:
    """Compare all blocks with their checksums; corrupt ones are dropped.

    Exit status 1 if any was corrupt or could not be read.
    """
    from kvstore.control.interface import MAX_CORRUPT

    remote = Remote(control, config, timeout, node)
    if pool:
        from kvstore.cli import pool_totals

        pool_totals.verify(remote, namespace, tier, as_json=as_json)
        return

    async def question(node: "ControlClient") -> "VerifyProgress | None":
        return await _follow(node, namespace, tier, names)

    names: list[str] = []
    last = ask(remote, question)
    failed = last is None or not last.finished or bool(last.corrupt or last.unreadable)
    counts = {
        "checked": last.checked if last else 0,
        "bytes": last.bytes if last else 0,
        "corrupt": last.corrupt if last else 0,
        "unreadable": last.unreadable if last else 0,
        "finished": bool(last and last.finished),
    }
    if as_json:
        print_json({**counts, "names": names[:MAX_CORRUPT]})
    else:
        screen = console()
        for name in names[:MAX_CORRUPT]:
            screen.print(f"corrupt: {name}", soft_wrap=True)
        screen.print(
            f"Checked {counted(counts['checked'], 'block')}: {counts['corrupt']} corrupt, "
            f"{counts['unreadable']} unreadable."
        )
    if failed:
        raise typer.Exit(1)


async def _follow(
    node: "ControlClient", namespace: str | None, tier: str | None, names: list[str]
) -> "VerifyProgress | None":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from kvstore.cli.naming import find_namespace

    chosen = (await find_namespace(node, namespace)).fingerprint if namespace else None
    columns = ("verify", BarColumn(), MofNCompleteColumn(), "blocks", TimeRemainingColumn())
    step = None
    with Progress(
        *columns, console=console(errors=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("verify", total=None)
        async for step in node.verify(chosen, tier):
            progress.update(task, total=step.total, completed=step.checked)
            names.extend(one.hash.hex() for one in step.names)
    return step
