"""``ls``, ``inspect``, ``match`` and ``explain``: which blocks are held, and why others are not."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.block_views import block_facts, block_table, runs, sentence
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
)
from kvstore.cli.output import console, counted, print_json, short, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.control.client import ControlClient
    from kvstore.control.interface import BlockPage, BlockReport, Explanation, MatchReport

Hashes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="HASH",
        help="Hashes, root first (64 hex digits, or 8 or more that are unique), or @FILE of them.",
        show_default=False,
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens", "-t", help="Token ids (not text) instead: 1,2,3, or @FILE, or - for stdin."
    ),
]
Lora = Annotated[
    str | None, typer.Option("--lora", help="LoRA adapter that the tokens ran through.")
]
Salt = Annotated[str | None, typer.Option("--cache-salt", help="Cache salt of the requests.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(ls)
    app.command()(inspect)
    app.command()(match)
    app.command()(explain)


def ls(
    namespace: Namespace = None,
    tier: Tier = None,
    shard: Annotated[int | None, typer.Option("--shard", min=0, help="Only this shard.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-l", min=1, max=1000, help="Blocks in one page.")
    ] = 100,
    cursor: Annotated[str, typer.Option("--cursor", help="Go on where a page ended.")] = "",
    everything: Annotated[bool, typer.Option("--all", "-a", help="All pages.")] = False,
    pool: WholePool = False,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """List blocks, page by page.

    With --json, prints one object a page.
    """
    from kvstore.cli.naming import find_namespace
    from kvstore.control.interface import BlockQuery

    try:
        position = bytes.fromhex(cursor)
    except ValueError as error:
        raise typer.BadParameter(f"{cursor!r} is no cursor", param_hint="--cursor") from error
    remote = Remote(control, config, timeout, node)
    if pool:
        from kvstore.cli import pool_blocks

        pool_blocks.ls(
            remote, namespace, tier, shard, limit, position, everything=everything, as_json=as_json
        )
        return

    async def pages(node: "ControlClient") -> None:
        chosen = (await find_namespace(node, namespace)).fingerprint if namespace else None
        at = position
        while True:
            page = await node.list_blocks(BlockQuery(chosen, shard, tier, at, limit))
            _print_page(page, as_json=as_json, last=not everything)
            at = page.cursor
            if not (everything and at):
                return

    ask(remote, pages)


def _print_page(page: "BlockPage", *, as_json: bool, last: bool) -> None:
    if as_json:
        print_json(page)
        return
    console().print(block_table(page.blocks))
    if page.cursor and last:
        console(errors=True).print(f"More blocks: --all, or --cursor {page.cursor.hex()}")


def inspect(
    block: Annotated[str, typer.Argument(metavar="HASH", help="The block's hash, in hex.")],
    prefix: Annotated[
        bool, typer.Option("--prefix", "-p", help="Also the blocks before it, root first.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-l", min=1, max=1000, help="Blocks at most, the last ones.")
    ] = 1000,
    namespace: Namespace = None,
    pool: WholePool = False,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Show a block: its tiers, size, parent, children, age, last use, pins and checksum.

    Exit status 1 if the node does not hold it.
    """
    from kvstore.cli.naming import find_block

    remote = Remote(control, config, timeout, node)
    if pool:
        from kvstore.cli import pool_blocks

        pool_blocks.inspect(remote, block, namespace, limit, prefix=prefix, as_json=as_json)
        return

    async def question(node: "ControlClient") -> "Sequence[BlockReport]":
        name = await find_block(node, block, namespace)
        return await node.inspect(name.namespace, name.hash, prefix=prefix, limit=limit)

    found = ask(remote, question)
    if as_json:
        print_json(found)
    elif len(found) == 1:
        console().print(block_facts(found[0]))
    elif found:
        console().print(block_table(found))
    else:
        console(errors=True).print("The node does not hold this block; `kvstore explain` says why.")
    if not found:
        raise typer.Exit(1)


def match(
    hashes: Hashes = None,
    tokens: Tokens = None,
    lora: Lora = None,
    salt: Salt = None,
    namespace: Namespace = None,
    pool: WholePool = False,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Show how far a prefix reaches, and in which tier each of its blocks is.

    Tier remote stands for other nodes of the pool. Exit status 1 unless all of it is held.
    """
    from kvstore.cli.naming import Prefix

    prefix = Prefix(hashes or [], tokens, lora, salt)
    remote = Remote(control, config, timeout, node)
    if pool:
        from kvstore.cli import pool_blocks

        pool_blocks.match(remote, prefix, namespace, as_json=as_json)
        return

    async def question(node: "ControlClient") -> "tuple[MatchReport, list[bytes], int]":
        where, wanted, block_tokens = await prefix.find(node, namespace)
        return await node.match(where.fingerprint, wanted), wanted, block_tokens

    report, wanted, block_tokens = ask(remote, question)
    if as_json:
        held = [
            {"hash": one, "tier": tier} for one, tier in zip(wanted, report.tiers, strict=False)
        ]
        print_json(
            {
                "asked": report.asked,
                "blocks": report.blocks,
                "tokens": report.blocks * block_tokens,
                "held": held,
            }
        )
    else:
        screen = console()
        rows = [(start, end, tier, short(wanted[end])) for start, end, tier in runs(report.tiers)]
        if rows:
            screen.print(table((">FROM", ">TO", "TIER", "LAST HASH"), rows))
        text = f"{report.blocks} of {counted(report.asked, 'block')} held"
        tokens_held = counted(report.blocks * block_tokens, "token")
        screen.print(f"{text} ({tokens_held})." if block_tokens else f"{text}.")
    if report.blocks < report.asked:
        raise typer.Exit(1)


def explain(
    hashes: Hashes = None,
    tokens: Tokens = None,
    lora: Lora = None,
    salt: Salt = None,
    namespace: Namespace = None,
    pool: WholePool = False,
    node: NodeName = None,
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 10.0,
) -> None:
    """Say why a prefix ends where it does.

    Never stored, evicted (when, from which tier, why), corrupt, still being written, or held only
    in a namespace that differs in some field. Of a node in a pool it also says how much more of the
    prefix other nodes hold. Exit status 1 unless all of it is held.
    """
    from kvstore.cli.naming import Prefix

    prefix = Prefix(hashes or [], tokens, lora, salt)
    remote = Remote(control, config, timeout, node)
    if pool:
        from kvstore.cli import pool_blocks

        pool_blocks.explain(remote, prefix, namespace, as_json=as_json)
        return

    async def question(node: "ControlClient") -> "Explanation":
        where, wanted, _ = await prefix.find(node, namespace)
        return await node.explain(where.fingerprint, wanted)

    found = ask(remote, question)
    if as_json:
        print_json(found)
    else:
        screen = console()
        screen.print(f"{found.blocks} of {counted(found.asked, 'block')} held.", soft_wrap=True)
        if found.remote:
            more = counted(found.remote, "more block")
            screen.print(f"The pool's directory says that other nodes hold {more}.", soft_wrap=True)
        screen.print(sentence(found), soft_wrap=True)
        if found.hash:
            screen.print(f"The first block that is not held is {found.hash.hex()}.", soft_wrap=True)
    if found.blocks + found.remote < found.asked:
        raise typer.Exit(1)
