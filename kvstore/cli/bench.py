"""``bench``: how fast a running node is, for one client on this machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.bench_run import MODEL, Cleaning, Interruption, Run
from kvstore.cli.options import AsJson, ConfigFile, Control, Remote, Timeout, ask
from kvstore.cli.output import console, print_json, table
from kvstore.cli.sessions import Deadline, Tenant, Transport, destinations
from kvstore.cli.traces import parse_block_size

if TYPE_CHECKING:
    from rich.table import Table

    from kvstore.bench import Load, Measured
    from kvstore.control.interface import Snapshot

Sizes = Annotated[
    list[str] | None,
    typer.Option("--block-size", help="Bytes of a block.", show_default="64KiB,256KiB,1MiB,4MiB"),
]
Batches = Annotated[
    list[str] | None, typer.Option("--batch", help="Blocks of one call.", show_default="1,32")
]
Memory = Annotated[
    str,
    typer.Option(
        "--memory", help="What the node holds of the benchmark at most; it takes as much itself."
    ),
]
Seconds = Annotated[
    float, typer.Option("--seconds", min=0.1, max=3600, help="For each block size and batch.")
]
MakeRoom = Annotated[
    bool,
    typer.Option("--make-room", help="Go on where the node has to drop blocks of others for it."),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="KVSTORE_URL",
        help="The node at --control, as unix:///path or tcp://host:port.",
        show_default="the Unix socket of the configuration",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(bench)


def bench(
    block_size: Sizes = None,
    batch: Batches = None,
    memory: Memory = "256MiB",
    seconds: Seconds = 2.0,
    make_room: MakeRoom = False,
    url: Url = None,
    transport: Transport = "auto",
    deadline: Deadline = 10.0,
    tenant: Tenant = "default",
    as_json: AsJson = False,
    control: Control = None,
    config: ConfigFile = None,
    timeout: Timeout = 60.0,
) -> None:
    """Measure a running node: put, get, view, match and exists, beside memcpy of as many bytes.

    --block-size and --batch may be repeated, or given as a list with commas; every combination is
    measured. All blocks go to namespaces of the benchmark's own and are removed after each round,
    for which it needs the control plane. Exit status 1 if a byte was wrong or blocks were left
    behind.
    """
    from kvstore.bench_room import check_most, check_own, check_room
    from kvstore.doctor import memory as machine
    from kvstore.errors import Unavailable

    most = parse_block_size(memory, "--memory", at_most=1 << 40)
    loads = _loads(block_size or ["64KiB,256KiB,1MiB,4MiB"], batch or ["1,32"], most)
    remote = Remote(control, config, timeout)
    status = ask(remote, lambda node: node.status())
    if status.state != "serving":
        raise Unavailable(f"{status.name} is {status.state}, and takes no blocks now")
    (check_most if make_room else check_room)(status, tenant, most)
    check_own(machine.available(), most, max(load.bytes for load in loads))
    [url], token = destinations([url] if url else None, config)
    options = {"transport": transport, "deadline": deadline, "token": token}
    cleaning = Cleaning(remote)
    before = ask(remote, lambda node: node.snapshot())
    with Interruption() as interruption:
        run = Run(url, tenant, options, status, cleaning, interruption)
        try:
            measured = run.measure(loads, most, seconds)
        finally:
            left = cleaning.finish()
    evicted = _evicted(ask(remote, lambda node: node.snapshot())) - _evicted(before)
    document = {
        "url": url,
        "node": status.name,
        "incarnation": status.incarnation,
        "transport": run.transport,
        "memory": most,
        "seconds": seconds,
        "loads": [one.summary() for one in measured],
        "evicted": evicted,
        "left": left,
    }
    if as_json:
        print_json(document)
    else:
        _print(document, measured)
    if left or any(one.wrong for one in measured):
        raise typer.Exit(1)


def _loads(sizes: Sequence[str], batches: Sequence[str], memory: int) -> "list[Load]":
    """Every combination that was asked for, small blocks first.

    Raises:
        typer.BadParameter: one of the values is none, or a call would be for more than the memory.
    """
    from kvstore.bench import Load

    loads = []
    for size in sorted({parse_block_size(text) for text in _split(sizes)}):
        for batch in sorted({_number(text) for text in _split(batches)}):
            loads.append(Load(size, batch))
            if loads[-1].bytes > memory:
                raise typer.BadParameter(_too_large(loads[-1], memory), param_hint="--memory")
    return loads


def _too_large(load: "Load", memory: int) -> str:
    from kvstore.units import format_size

    size, one = format_size(load.block_bytes), load.batch == 1
    return (
        f"{'1 block' if one else f'{load.batch} blocks'} of {size} {'is' if one else 'are'} more "
        f"than {format_size(memory)}: take more --memory, or a smaller --block-size"
        f"{'' if one else ' or --batch'}"
    )


def _split(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65536:
        raise typer.BadParameter(f"from 1 to 65536 blocks, not {text!r}", param_hint="--batch")
    return int(text)


def _evicted(snapshot: "Snapshot") -> int:
    """Blocks that have left the node, but for those that operators, this one too, had removed."""
    counts = snapshot.evictions.items()
    return sum(count for why, count in counts if not why.endswith(" admin"))


def _print(document: dict[str, Any], measured: "Sequence[Measured]") -> None:
    from kvstore.units import format_size

    screen = console()
    screen.print(
        f"{document['node']} at {document['url']} over {document['transport']}, "
        f"up to {format_size(document['memory'])} in it at once"
    )
    screen.print(_table(measured))
    for note in _notes(document):
        screen.print(note)


def _table(measured: "Sequence[Measured]") -> "Table":
    from kvstore.units import format_duration, format_size

    rows = []
    for one in measured:
        found: Any = one.summary()
        for call, timing in found["calls"].items():
            moving = "bytes_per_second" in timing
            rows.append(
                (
                    format_size(one.load.block_bytes),
                    one.load.batch,
                    call,
                    f"{timing['calls']:,}",
                    format_duration(timing["p50"]),
                    format_duration(timing["p99"]),
                    f"{timing['blocks_per_second']:,.0f}",
                    f"{timing['bytes_per_second'] / 1e9:.2f}" if moving else "-",
                    f"{timing['of_memcpy']:.2f}" if moving else "-",
                )
            )
    columns = (
        "BLOCK", ">BATCH", "CALL", ">CALLS", ">P50", ">P99", ">BLOCKS/S", ">GB/S", ">OF MEMCPY",
    )  # fmt: skip
    return table(columns, rows, spare=("CALLS", "OF MEMCPY"))


def _notes(document: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting the figures."""
    wrong, lost = (sum(load[key] for load in document["loads"]) for key in ("wrong", "lost"))
    said = (
        (wrong, "{} blocks came back with WRONG BYTES."),
        (lost, "{} blocks had gone when they were asked for; calls for them are not counted."),
        (document["evicted"], "{} blocks were evicted from the node meanwhile."),
        (
            document["left"],
            "{} blocks could not be removed: they are pinned. kvstore namespaces shows them as "
            f"{MODEL}.",
        ),
    )
    return [text.format(f"{count:,}") for count, text in said if count]
