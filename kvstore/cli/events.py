"""``events``: what a node gains and loses, as it happens."""

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.cli.options import AsJson, ConfigFile, Control, NodeName, Remote, ask
from kvstore.cli.output import print_json, short

if TYPE_CHECKING:
    from kvstore.control.block_map import BlockEvent, EventBatch
    from kvstore.control.client import ControlClient

_ROOT: Final = "none"
"""What stands for the parent of the first block of a prompt."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(events)


def events(
    once: Annotated[
        bool, typer.Option("--once", help="Print what the node holds, and end.")
    ] = False,
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="Print what the node holds first.")
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Only this namespace: the beginning of its fingerprint, or (part of) its model's "
            "name.",
        ),
    ] = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    node: NodeName = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=5.0, help="Seconds without a word after which the node is given up."
        ),
    ] = 10.0,
) -> None:
    """Follow which blocks a node stores, moves between tiers and removes.

    One line for each block: what happened, its hash, its parent's, the tiers that hold it from then
    on, its shard and namespace. With --json, one object a line for each batch, as
    kvstore/control/events.proto has it. Without --namespace, the blocks of all namespaces.

    Where events were lost because they were not read fast enough, a line says so, and with
    --snapshot what the node holds is printed anew. Ends with Ctrl-C, or when the node stops.
    """
    ask(
        Remote(control, config, timeout, node),
        lambda asked: _follow(asked, namespace, once=once, held=snapshot or once, as_json=as_json),
    )


async def _follow(
    node: "ControlClient", selector: str | None, *, once: bool, held: bool, as_json: bool
) -> None:
    from contextlib import aclosing

    from kvstore.cli.naming import find_namespace
    from kvstore.control.event_client import follow

    told = False
    chosen = [] if selector is None else [(await find_namespace(node, selector)).fingerprint]
    async with aclosing(follow(node, namespaces=chosen, from_now=not held)) as batches:
        async for batch in batches:
            if as_json:
                _print_json(batch)
            else:
                _print(batch, again=told)
                told = True
            if once and batch.complete:
                return


def _print_json(batch: "EventBatch") -> None:
    if batch.word != "heartbeat":
        print_json(batch, compact=True)


def _print(batch: "EventBatch", *, again: bool) -> None:
    if batch.word in ("reset", "resumed"):
        why = "from now on"
        if batch.word == "reset":
            why = "events may have been lost" if again else "what it holds"
        sys.stdout.write(f"# {batch.node} (start {batch.incarnation}): {why}\n")
    for event in batch.events:
        sys.stdout.write(_line(event) + "\n")
    sys.stdout.flush()


def _line(event: "BlockEvent") -> str:
    parent = short(event.parent) if any(event.parent) else _ROOT
    return (
        f"{event.change:<8} {short(event.hash)}  parent {parent:<16}  "
        f"{','.join(event.tiers) or '-':<9} shard {event.shard} of {short(event.namespace)}"
    )
