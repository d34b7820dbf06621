"""``simulate``: what a trace would hit at several capacities, with several policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.cli.options import AsJson, offered
from kvstore.cli.output import console, print_json, share, table
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

DEFAULT_DRAM: Final = "1%,2%,5%,10%,25%,50%,infinite"
_CAPACITY: Final = "% of the trace's unique blocks (5%), blocks (4096), bytes (8GiB) or infinite"

Dram = Annotated[
    list[str] | None,
    typer.Option("--dram", help=f"DRAM capacities: {_CAPACITY}.", show_default=DEFAULT_DRAM),
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
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw hit rate against capacity: a .png or .svg file.")
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
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Plan capacity: run a trace through a node's index and policies, with no bytes moved.

    Options that take several values may be repeated, or given as a list with commas. Every
    combination is one row. The hit rate is that of the longest contiguous prefix held when a
    request arrives, over all its blocks.
    """
    from kvstore.capacity import Capacity
    from kvstore.plot import check_plot, plot_hit_rate
    from kvstore.simulate import configurations

    if plot is not None:
        check_plot(plot)
    upper = [Capacity.parse(text) for text in _split(dram or [DEFAULT_DRAM])]
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
    outcomes = _run(workload, chosen)
    if as_json:
        print_json(_document(trace, workload, outcomes, block_bytes))
    else:
        _print(trace, workload, outcomes, block_bytes)
    if plot is not None:
        plot_hit_rate(
            outcomes, plot, title=f"Prefix hit rate of {trace.name}", block_bytes=block_bytes
        )
        if not as_json:
            console().print(f"Plot written to {plot}")


def _split(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _load(path: Path, block_tokens: int, requests: int | None) -> "Workload":
    from itertools import islice

    from kvstore.simulate import Workload
    from kvstore.trace import Trace

    return Workload(islice(Trace(path, block_tokens=block_tokens), requests), block_tokens)


def _run(workload: "Workload", chosen: "Sequence[Configuration]") -> "list[Outcome]":
    from kvstore.simulate import simulate as run

    outcomes = []
    with progress_bar(len(chosen) * workload.accesses, "simulating") as advance:
        for one in chosen:
            outcomes.append(run(workload, one, advance))
    return outcomes


def _document(
    trace: Path, workload: "Workload", outcomes: "Sequence[Outcome]", block_bytes: int
) -> dict[str, object]:
    return {
        "trace": str(trace),
        "requests": len(workload.chains),
        "accesses": workload.accesses,
        "unique_blocks": workload.unique,
        "tokens": workload.tokens,
        "block_bytes": block_bytes,
        "outcomes": [_fields(outcome) for outcome in outcomes],
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


def _print(
    trace: Path, workload: "Workload", outcomes: "Sequence[Outcome]", block_bytes: int
) -> None:
    from kvstore.units import format_size

    reuse = share(workload.accesses - workload.unique, workload.accesses)
    screen = console()
    screen.print(
        f"{trace.name}: {len(workload.chains):,} requests, {workload.accesses:,} block accesses, "
        f"{workload.unique:,} unique blocks, {reuse} of accesses could hit; "
        f"blocks of {format_size(block_bytes)}"
    )
    screen.print(_table(outcomes, block_bytes))


def _table(outcomes: "Sequence[Outcome]", block_bytes: int) -> "Table":
    from kvstore.units import format_size

    with_ssd = any(outcome.ssd_blocks != 0 for outcome in outcomes)
    columns = ["POLICY", ">DRAM", ">BLOCKS"]
    columns += [">SSD", ">IN DRAM", ">IN SSD", ">WRITTEN"] if with_ssd else []
    rows = []
    for outcome in outcomes:
        row = [
            _policy(outcome),
            _size(outcome.dram_blocks, block_bytes),
            _count(outcome.dram_blocks),
        ]
        if with_ssd:
            row += [
                _size(outcome.ssd_blocks, block_bytes),
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


def _size(blocks: int | None, block_bytes: int) -> str:
    from kvstore.units import format_size

    if not blocks:
        return "infinite" if blocks is None else "-"
    return format_size(blocks * block_bytes)


def _count(blocks: int | None) -> str:
    return "infinite" if blocks is None else f"{blocks:,}"
