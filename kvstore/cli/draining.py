"""``drain``: takes a node out of its pool, and what it holds to the others."""

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kvstore.cli.options import AsJson, ConfigFile, Control, Remote, Timeout, destination, locate
from kvstore.cli.output import console, counted, print_json

if TYPE_CHECKING:
    from kvstore.control.drain import DrainOrder, DrainProgress
    from kvstore.control.drain_client import DrainClient


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(drain)


def drain(
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE",
            help="Name, number or control address of the node, in the pool of the one at "
            "--control; without, that one itself.",
            show_default=False,
        ),
    ] = None,
    deadline: Annotated[
        str, typer.Option("--deadline", help="What has not been moved by then is left.")
    ] = "10m",
    drop: Annotated[
        bool, typer.Option("--drop", help="Move nothing: the node leaves the pool at once.")
    ] = False,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Bytes a second to move at most, as 500MiB/s.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the daemon when it is done.")] = False,
    cancel: Annotated[
        bool,
        typer.Option(
            "--cancel",
            help="Bring a node back that is being drained; or, at its own --control and without "
            "NODE, one that has left.",
        ),
    ] = False,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Take a node out of its pool: the others take what it holds, the blocks of most worth first.

    From then on it accepts no puts, and serves its own clients until it is stopped. Ctrl-C brings
    it back. Exit status 1 if blocks were left that no other node took.
    """
    order = _order(deadline, rate, drop=drop, stop=stop)
    remote = Remote(control, config, timeout)
    last = _resume(remote, node) if cancel else _drain(remote, node, order)
    if as_json:
        print_json(last)
    else:
        ended = "" if cancel or last.state != "serving" else "The drain was cancelled. "
        console().print(ended + sentence(last, drop=drop), soft_wrap=True)
    if not cancel and (last.state != "drained" or (last.left and not drop)):
        raise typer.Exit(1)


def _order(deadline: str, rate: str | None, *, drop: bool, stop: bool) -> "DrainOrder":
    from kvstore.control.drain import MAX_SECONDS, DrainOrder
    from kvstore.units import parse_duration, parse_rate

    try:
        seconds = parse_duration(deadline)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--deadline") from error
    if seconds > MAX_SECONDS:
        raise typer.BadParameter("a day at most", param_hint="--deadline")
    try:
        speed = None if rate is None else float(parse_rate(rate))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate") from error
    if speed is not None and speed <= 0:
        raise typer.BadParameter("must be above 0", param_hint="--rate")
    return DrainOrder(seconds, drop, speed, stop)


def sentence(last: "DrainProgress", *, drop: bool = False) -> str:
    """What came of it, for people."""
    from kvstore.units import format_size

    if last.state == "serving":
        return "The node is a member of its pool, and accepts puts."
    if last.state == "draining":
        return "The node is still being drained."
    if drop:
        return f"Drained: the node has left the pool, with {counted(last.total, 'block')}."
    text = f"Drained: others took {counted(last.moved, 'block')} ({format_size(last.bytes)})"
    text += f", and had {last.held:,} before" if last.held else ""
    text += f"; {last.left:,} were left" if last.left else ""
    return text + "."


def _resume(remote: Remote, node: str | None) -> "DrainProgress":
    async def question(client: "DrainClient") -> "DrainProgress":
        return await client.resume()

    try:
        return _ask(remote, node, question)
    except typer.BadParameter as error:
        raise typer.BadParameter(
            f"{error.message}\nOne that has left comes back at its own control address: "
            "kvstore drain --cancel --control HOST:PORT",
            param_hint=error.param_hint,
        ) from error


def _drain(remote: Remote, node: str | None, order: "DrainOrder") -> "DrainProgress":
    async def question(client: "DrainClient") -> "DrainProgress":
        return await _follow(client.drain(order))

    return _ask(remote, node, question)


def _ask(remote: Remote, node: str | None, question: Any) -> "DrainProgress":
    import asyncio

    from kvstore.control.drain_client import DrainClient

    address, way = destination(remote)

    async def asking() -> "DrainProgress":
        where = await locate(address, way, node, "NODE")
        async with way.open(where, DrainClient) as client:
            return cast("DrainProgress", await question(client))

    return asyncio.run(asking())


async def _follow(steps: AsyncIterator["DrainProgress"]) -> "DrainProgress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from kvstore.control.drain import DrainProgress

    columns = ("drain", BarColumn(), MofNCompleteColumn(), "blocks", TimeRemainingColumn())
    step = DrainProgress("serving")
    with Progress(
        *columns, console=console(errors=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("drain", total=None)
        async with aclosing(cast(Any, steps)) as following:
            async for step in following:
                progress.update(
                    task, total=step.total, completed=step.held + step.moved + step.left
                )
    return step
