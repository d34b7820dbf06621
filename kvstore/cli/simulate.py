"""``simulate``: what a trace would hit at several capacities, with several policies."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from kvstore.cli.options import AsJson, offered
from kvstore.cli.output import console, print_json, share, table
from kvstore.cli.simulate_pool import format_blocks, pool_fields, pool_table
from kvstore.cli.traces import (
    BlockSize,
    BlockTokens,
    FirstRequests,
    TraceFile,
    parse_block_size,
    progress_bar,
)

if TYPE_CHECKING:
    from rich.table import Table

    from kvstore.simulate import Configuration, Outcome, Workload
    from kvstore.simulate_pool import PoolConfiguration

DEFAULT_DRAM: Final = "1%,2%,5%,10%,25%,50%,infinite"
DEFAULT_POOL_DRAM: Final = "10%"
_CAPACITY: Final = "% of the trace's unique blocks (5%), blocks (4096), bytes (8GiB) or infinite"

Dram = Annotated[
    list[str] | None,
    typer.Option(
        "--dram",
        help=f"DRAM capacities: {_CAPACITY}.",
        show_default=f"{DEFAULT_DRAM}; {DEFAULT_POOL_DRAM} with --nodes",
    ),
]
Ssd = Annotated[
    list[str] | None,
    typer.Option("--ssd", help="SSD capacities, likewise; 0 is no SSD.", show_default="0"),
]
PolicyNames = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="lru, arc or fifo.",
        show_default="lru",
        autocompletion=offered("lru", "arc", "fifo"),
    ),
]
Orphans = Annotated[
    bool,
    typer.Option(
        "--orphans",
        help="Let blocks outlive the block before them, as a plain cache would and no node does.",
    ),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--nodes",
        help="Numbers of nodes that share the capacities evenly: one pool against isolated nodes.",
    ),
]
Routing = Annotated[
    str,
    typer.Option(
        "--routing",
        help="How a request gets its node, with --nodes: random, round-robin or prefix (the node "
        "with most of its prefix).",
        autocompletion=offered("random", "round-robin", "prefix"),
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of what is random, with --nodes.")]
OwnLast = Annotated[
    bool,
    typer.Option(
        "--own-last",
        help="Let a node learn, with --nodes, that it holds the last copy, and keep it as its own.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw hit rate against capacity, or nodes: a .png or .svg file."),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(simulate)


def simulate(
    trace: TraceFile,
    dram: Dram = None,
    ssd: Ssd = None,
    policy: PolicyNames = None,
    block_size: BlockSize = "1MiB",
    block_tokens: BlockTokens = 512,
    requests: FirstRequests = None,
    orphans: Orphans = False,
    nodes: Nodes = None,
    routing: Routing = "random",
    seed: Seed = 0,
    own_last: OwnLast = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Plan capacity: run a trace through a node's index and policies, with no bytes moved.

    Options that take several values may be repeated, or given as a list with commas. Every
    combination is one row. The hit rate is that of the longest contiguous prefix held when a
    request arrives, over all its blocks.

    With --nodes, capacities are those of all nodes together. What one node doesn't have it pulls
    from another; the gain is what that hits for each hit of nodes that don't.
    """
    from kvstore.capacity import Capacity
    from kvstore.plot import check_plot
    from kvstore.simulate import configurations
    from kvstore.simulate_pool import pool_configurations

    if plot is not None:
        check_plot(plot)
    usual = DEFAULT_DRAM if nodes is None else DEFAULT_POOL_DRAM
    upper = [Capacity.parse(text) for text in _split(dram or [usual])]
    lower = [Capacity.parse(text) for text in _split(ssd or ["0"])]
    block_bytes = parse_block_size(block_size)
    workload = _load(trace, block_tokens, requests)
    chosen = configurations(
        workload,
        policies=[name.lower() for name in _split(policy or ["lru"])],
        dram=upper,
        ssd=lower,
        block_bytes=block_bytes,
        whole_prefixes=not orphans,
    )
    if nodes is None:
        answer = _one_node(workload, chosen, block_bytes)
    else:
        pools = pool_configurations(
            chosen, _numbers(nodes), routing=routing, seed=seed, own_last=own_last
        )
        answer = _pools(workload, pools, block_bytes)
    if as_json:
        print_json({**_document(trace, workload, block_bytes), "outcomes": answer.fields})
    else:
        _print(trace, workload, answer.table, block_bytes)
    if plot is not None:
        answer.plot(plot, title=f"Prefix hit rate of {trace.name}", block_bytes=block_bytes)
        if not as_json:
            console().print(f"Plot written to {plot}")


class _Answer(NamedTuple):
    """What was found, ready to be shown in each way."""

    fields: list[dict[str, object]]
    table: "Table"
    plot: Callable[..., None]


def _one_node(workload: "Workload", chosen: "Sequence[Configuration]", block_bytes: int) -> _Answer:
    from kvstore.plot import plot_hit_rate
    from kvstore.simulate import simulate as run

    outcomes = []
    with progress_bar(len(chosen) * workload.accesses, "simulating") as advance:
        for one in chosen:
            outcomes.append(run(workload, one, advance))
    return _Answer(
        [_fields(outcome) for outcome in outcomes],
        _table(outcomes, block_bytes),
        partial(plot_hit_rate, outcomes),
    )


def _pools(
    workload: "Workload", chosen: "Sequence[PoolConfiguration]", block_bytes: int
) -> _Answer:
    from kvstore.plot_pool import plot_pool_hit_rate
    from kvstore.simulate_pool import simulate_pool as run

    outcomes = []
    with progress_bar(2 * len(chosen) * workload.accesses, "simulating") as advance:
        for one in chosen:
            outcomes.append(run(workload, one, advance))
    return _Answer(
        [pool_fields(outcome) for outcome in outcomes],
        pool_table(outcomes, block_bytes),
        partial(plot_pool_hit_rate, outcomes),
    )


def _numbers(values: Sequence[str]) -> list[int]:
    try:
        return [int(text) for text in _split(values)]
    except ValueError as error:
        raise typer.BadParameter("expected numbers such as 1,2,4", param_hint="--nodes") from error


def _split(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _load(path: Path, block_tokens: int, requests: int | None) -> "Workload":
    from itertools import islice

    from kvstore.simulate import Workload
    from kvstore.trace import Trace

    return Workload(islice(Trace(path, block_tokens=block_tokens), requests), block_tokens)


def _document(trace: Path, workload: "Workload", block_bytes: int) -> dict[str, object]:
    return {
        "trace": str(trace),
        "requests": len(workload.chains),
        "accesses": workload.accesses,
        "unique_blocks": workload.unique,
        "tokens": workload.tokens,
        "seconds": workload.seconds,
        "block_bytes": block_bytes,
    }


def _fields(outcome: "Outcome") -> dict[str, object]:
    return {
        "policy": outcome.policy,
        "whole_prefixes": outcome.whole_prefixes,
        "dram_blocks": outcome.dram_blocks,
        "ssd_blocks": outcome.ssd_blocks,
        "hit_rate": outcome.hit_rate,
        "token_hit_rate": outcome.token_hit_rate,
        "hit_blocks": outcome.hit_blocks,
        "hit_tokens": outcome.hit_tokens,
        "evicted": outcome.evicted,
        "reclaimed": outcome.reclaimed,
        "refused": outcome.refused,
        "written": outcome.written,
    }


def _print(trace: Path, workload: "Workload", rows: "Table", block_bytes: int) -> None:
    from kvstore.units import format_size

    reuse = share(workload.accesses - workload.unique, workload.accesses)
    screen = console()
    screen.print(
        f"{trace.name}: {len(workload.chains):,} requests, {workload.accesses:,} block accesses, "
        f"{workload.unique:,} unique blocks, {reuse} of accesses could hit; "
        f"blocks of {format_size(block_bytes)}"
    )
    screen.print(rows)


def _table(outcomes: "Sequence[Outcome]", block_bytes: int) -> "Table":
    from kvstore.units import format_size

    with_ssd = any(outcome.ssd_blocks != 0 for outcome in outcomes)
    columns = ["POLICY", ">DRAM", ">BLOCKS"]
    columns += [">SSD", ">IN DRAM", ">IN SSD", ">WRITTEN"] if with_ssd else []
    rows = []
    for outcome in outcomes:
        row = [
            _policy(outcome),
            format_blocks(outcome.dram_blocks, block_bytes),
            _count(outcome.dram_blocks),
        ]
        if with_ssd:
            row += [
                format_blocks(outcome.ssd_blocks, block_bytes),
                share(outcome.hit_blocks["dram"], outcome.accesses),
                share(outcome.hit_blocks["ssd"], outcome.accesses),
                format_size(outcome.written * block_bytes),
            ]
        rows.append([*row, f"{outcome.hit_rate:.1%}", f"{outcome.token_hit_rate:.1%}"])
    return table([*columns, ">HIT RATE", ">OF TOKENS"], rows, spare=("BLOCKS", "WRITTEN"))


def _policy(outcome: "Outcome") -> str:
    if outcome.dram_blocks is None:
        return "any"
    return outcome.policy if outcome.whole_prefixes else f"{outcome.policy}, orphans"


def _count(blocks: int | None) -> str:
    return "infinite" if blocks is None else f"{blocks:,}"
