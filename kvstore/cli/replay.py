"""``replay``: the requests of a trace, with bytes, against running daemons."""

from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.options import AsJson, ConfigFile, offered
from kvstore.cli.output import console, print_json, share, table
from kvstore.cli.sessions import Deadline, Tenant, Transport, destinations
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

    from kvstore.replay import Replay
    from kvstore.trace import Request, Trace

Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        envvar="KVSTORE_URL",
        help="A node, as unix:///path or tcp://host:port; may be repeated, each node once.",
        show_default="the Unix socket of the configuration",
    ),
]
Routing = Annotated[
    str,
    typer.Option(
        "--routing",
        help="How a request gets its node where there are several: random or round-robin.",
        autocompletion=offered("random", "round-robin"),
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", help="Of random nodes: the same as of `simulate --nodes`.")
]
BatchSize = Annotated[str, typer.Option("--batch", help="Most bytes in one get or put.")]
Salt = Annotated[
    str,
    typer.Option("--salt", help="A namespace of its own, so that nothing held before is hit."),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(replay)


def replay(
    trace: TraceFile,
    url: Urls = None,
    routing: Routing = "random",
    seed: Seed = 0,
    block_size: BlockSize = "1MiB",
    block_tokens: BlockTokens = 512,
    requests: FirstRequests = None,
    batch: BatchSize = "64MiB",
    transport: Transport = "auto",
    deadline: Deadline = 10.0,
    tenant: Tenant = "default",
    salt: Salt = "",
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Drive running nodes with a trace: match, get what is there, put the rest.

    Requests go one after another, as fast as nodes answer, each to one of them. Every block's bytes
    are made from its id and compared when it comes back. Exit status 1 if one was wrong.
    """
    import kvstore
    from kvstore.homes import homes
    from kvstore.identity import Namespace
    from kvstore.replay import Replay
    from kvstore.trace import Trace

    source = Trace(trace, block_tokens=block_tokens)
    block_bytes, batch_bytes = parse_block_size(block_size), parse_block_size(batch, "--batch")
    namespace = Namespace(
        "replay", "uint8", "replay", block_tokens, block_bytes, tenant=tenant, salt=salt
    )
    urls, token = destinations(url, config)
    order = homes(routing, len(urls), seed)
    options: dict[str, Any] = {"transport": transport, "deadline": deadline, "token": token}
    with ExitStack() as stack:
        clients = [stack.enter_context(kvstore.connect(one, namespace, **options)) for one in urls]
        run = Replay(
            clients,
            order,
            block_bytes=block_bytes,
            block_tokens=block_tokens,
            batch_bytes=batch_bytes,
        )
        _run(run, source, requests)
        used = ", ".join(sorted({str(client.stats().transport) for client in clients}))
    where = {"trace": str(trace), "urls": urls, "transport": used, "block_bytes": block_bytes}
    if as_json:
        print_json(where | run.report.summary())
    else:
        _print(where, run.report.summary())
    if run.report.wrong:
        raise typer.Exit(1)


def _run(run: "Replay", source: "Trace", first: int | None) -> None:
    """Send the requests; the bar counts them, or the bytes of the file where all are sent."""
    done = 0
    with progress_bar(source.size if first is None else first, "replaying") as advance:

        def progress(request: "Request") -> None:
            nonlocal done
            reached = done + 1 if first is not None else request.end
            advance(reached - done)
            done = reached

        run.run(islice(source, first), progress)


def _print(where: dict[str, Any], summary: dict[str, Any]) -> None:
    from kvstore.units import format_size

    screen = console()
    screen.print(
        f"{where['trace']}: {summary['requests']:,} requests to {', '.join(where['urls'])} over "
        f"{where['transport']}, blocks of {format_size(where['block_bytes'])}"
    )
    screen.print(_hit_table(summary))
    screen.print(_call_table(summary))
    for note in _notes(summary):
        screen.print(note)


def _hit_table(summary: dict[str, Any]) -> "Table":
    blocks, tokens = summary["blocks"], summary["tokens"]
    rows = [
        _hit_row(tier, blocks["hits_by_tier"][tier], tokens["hits_by_tier"][tier], summary)
        for tier in sorted(blocks["hits_by_tier"])
    ]
    rows.append(_hit_row("all tiers", blocks["hits"], tokens["hits"], summary))
    missed = blocks["total"] - blocks["hits"], tokens["total"] - tokens["hits"]
    rows.append(_hit_row("missed", *missed, summary))
    return table(("HITS", ">BLOCKS", ">RATE", ">TOKENS", ">RATE OF TOKENS"), rows)


def _hit_row(label: str, blocks: int, tokens: int, summary: dict[str, Any]) -> tuple[str, ...]:
    of_blocks = share(blocks, summary["blocks"]["total"])
    of_tokens = share(tokens, summary["tokens"]["total"])
    return label, f"{blocks:,}", of_blocks, f"{tokens:,}", of_tokens


def _call_table(summary: dict[str, Any]) -> "Table":
    from kvstore.units import format_duration

    rows = []
    for call in ("match", "get", "put"):
        timing = summary[call]
        rate = f"{timing['bytes_per_second'] / 1e9:.2f}" if "bytes" in timing else "-"
        p50, p99 = format_duration(timing["p50"]), format_duration(timing["p99"])
        rows.append((call, f"{timing['calls']:,}", p50, p99, rate))
    return table(("CALL", ">CALLS", ">P50", ">P99", ">GB/S"), rows)


def _notes(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting the figures."""
    said = {
        "wrong": "{} blocks came back with WRONG BYTES.",
        "warm": "{} of the hit blocks were there before this replay; --salt starts cold.",
        "lost": "{} matched blocks had gone when they were fetched.",
        "refused": "{} blocks found no room, or their parent had gone.",
        "failed": "{} blocks of puts were not confirmed.",
    }
    notes = [text.format(f"{summary[key]:,}") for key, text in said.items() if summary[key]]
    failures = ", ".join(f"{code} ({count:,})" for code, count in summary["failures"].items())
    return [*notes, f"Calls without an answer: {failures}."] if failures else notes
