"""What a trace hits in a pool of real daemons, and in as many that are each alone.

``python -m benchmarks.pool_replay TRACE`` starts a Redis and four daemons that share it, sends each
request of the trace to a random home and counts; then it does the same with four daemons that know
nothing of each other. Beside that it prints what ``simulate --nodes`` says of the same homes, and
for how many requests both agree. Blocks are small, so that a trace fits in the memory of one
machine: hit rates count blocks, so that their size does not matter. Each is filled and compared.

Nodes publish what they hold some milliseconds later, and what they no longer hold likewise. A
replay sends as fast as nodes answer, so that such delays count for more than they would at the pace
of the trace; ``--pause`` waits after each request.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import redis
from rich.console import Console
from rich.table import Table

import kvstore
from benchmarks.directory_memory import server
from benchmarks.node import node
from benchmarks.tcp import free_port
from kvstore.capacity import Capacity
from kvstore.config import ClusterSection
from kvstore.directory.names import pool_prefix
from kvstore.homes import ROUTINGS, homes
from kvstore.identity import Namespace
from kvstore.replay import Replay
from kvstore.simulate import Workload, configurations
from kvstore.simulate_pool import PoolConfiguration, PoolSimulation, pool_configurations
from kvstore.trace import BLOCK_TOKENS, Request, Trace
from kvstore.units import parse_size

DEADLINE: Final = 20.0
MEETING: Final = 30.0


@dataclass(slots=True)
class Seen:
    """What the requests of a trace hit.

    Attributes:
        hits: blocks of each request that were held and, where they were fetched, came.
        remote: how many of all of them were at another node.
        seconds: that it took.
        lost: blocks that were said to be there and did not come.
        failures: calls that nodes did not answer, by the code of the error.
        calls, used: scripts that Redis ran, and bytes of its memory at the end.
    """

    hits: list[int] = field(default_factory=list)
    remote: int = 0
    seconds: float = 0.0
    lost: int = 0
    wrong: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    used: int = 0


def simulated(workload: Workload, configuration: PoolConfiguration, *, pull: bool) -> Seen:
    """What a simulation hits."""
    began = time.monotonic()
    simulation, seen, before = PoolSimulation(workload, configuration, pull=pull), Seen(), 0
    for chain, length in zip(workload.chains, workload.input_lengths, strict=True):
        simulation.send(chain, length)
        so_far = simulation.hits().blocks
        seen.hits.append(so_far - before)
        before = so_far
    seen.remote = simulation.hits().remote_blocks
    seen.seconds = time.monotonic() - began
    return seen


def live(
    requests: Sequence[Request],
    configuration: PoolConfiguration,
    block_bytes: int,
    *,
    pooled: bool,
    pause: float,
) -> Seen:
    """What daemons hit, in one pool or each alone.

    Raises:
        RuntimeError: a process did not start, or didn't end when told to, or did not join.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-")))
        shared = stack.enter_context(server()) if pooled else None
        urls = stack.enter_context(_nodes(directory, configuration, block_bytes, shared))
        if shared is not None:
            _wait_until_met(shared, configuration.nodes)
        seen = _replay(requests, configuration, block_bytes, urls, pause)
        if shared is not None:
            facts: Any = shared.info("all")
            seen.used = facts["used_memory"]
            seen.calls = facts["cmdstat_evalsha"]["calls"]
    return seen


@contextmanager
def _nodes(
    directory: Path, configuration: PoolConfiguration, block_bytes: int, shared: redis.Redis | None
) -> Iterator[list[str]]:
    """The daemons, each with room for exactly the blocks that a simulated node has."""
    blocks = configuration.node.dram_blocks
    if blocks is None:
        raise RuntimeError("a daemon has no infinite DRAM")
    values: dict[str, object] = {
        "dram__capacity": blocks * block_bytes,
        "dram__segment": blocks * block_bytes,
        "limits__session_pinned": 1,
    }
    if shared is not None:
        values["cluster__directory"] = f"unix://{shared.get_connection_kwargs()['path']}"
        # A busy machine must not make misses of what is to be counted.
        values["cluster__lookup_deadline"] = "1s"
    with ExitStack() as stack:
        urls = []
        for number in range(configuration.nodes):
            state = directory / str(number)
            state.mkdir()
            own = {"node__name": str(number), "listen__tcp": f"127.0.0.1:{free_port()}"}
            urls.append(stack.enter_context(node(state, **values, **own)).unix)
        yield urls


def _wait_until_met(shared: redis.Redis, nodes: int) -> None:
    """Wait until all are members, and as long again as a member may take to hear of the last."""
    until = time.monotonic() + MEETING
    while shared.scard(pool_prefix(ClusterSection().pool) + b":members") != nodes:
        if time.monotonic() > until:
            raise RuntimeError(f"the daemons did not meet within {MEETING:.0f} s")
        time.sleep(0.05)
    time.sleep(2 * ClusterSection().heartbeat)


def _replay(
    requests: Sequence[Request],
    configuration: PoolConfiguration,
    block_bytes: int,
    urls: Sequence[str],
    pause: float,
) -> Seen:
    seen, before, began = Seen(), 0, time.monotonic()
    name = Namespace("replay", "uint8", "replay", BLOCK_TOKENS, block_bytes)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(kvstore.connect(url, name, deadline=DEADLINE)) for url in urls
        ]
        order = homes(configuration.routing, configuration.nodes, configuration.seed)
        run = Replay(clients, order, block_bytes=block_bytes, block_tokens=BLOCK_TOKENS)

        def count(_: Request) -> None:
            nonlocal before
            so_far = run.report.hits - run.report.lost
            seen.hits.append(so_far - before)
            before = so_far
            if pause:
                time.sleep(pause)

        run.run(requests, count)
    report = run.report
    seen.remote, seen.lost, seen.wrong = (
        report.hit_blocks.get("remote", 0),
        report.lost,
        report.wrong,
    )
    seen.failures, seen.seconds = report.failures, time.monotonic() - began
    return seen


def compare(live: Seen, simulated: Seen) -> dict[str, int]:
    """For how many requests the daemons hit as much as the simulation says, more, or less."""
    pairs = list(zip(live.hits, simulated.hits, strict=True))
    return {
        "same": sum(one == other for one, other in pairs),
        "more": sum(one > other for one, other in pairs),
        "less": sum(one < other for one, other in pairs),
    }


def main() -> int:
    """Print the table. Exit status 1 if a byte was wrong."""
    arguments = _parser().parse_args()
    requests = list(islice(Trace(arguments.trace), arguments.requests))
    workload = Workload(requests, BLOCK_TOKENS)
    block_bytes = parse_size(arguments.block_size)
    totals = configurations(
        workload, policies=["lru"], dram=[Capacity.parse(arguments.dram)], block_bytes=block_bytes
    )
    [configuration] = pool_configurations(
        totals, [arguments.nodes], routing=arguments.routing, seed=arguments.seed
    )
    rows: dict[tuple[str, str], Seen] = {}
    for pooled, kind in ((True, "pool"), (False, "isolated")):
        rows[kind, "daemons"] = live(
            requests, configuration, block_bytes, pooled=pooled, pause=arguments.pause
        )
        rows[kind, "simulated"] = simulated(workload, configuration, pull=pooled)
    _print(arguments, workload, configuration, rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(_document(workload, rows), indent=1) + "\n")
    return 1 if any(seen.wrong for seen in rows.values()) else 0


def _print(
    arguments: argparse.Namespace,
    workload: Workload,
    configuration: PoolConfiguration,
    rows: dict[tuple[str, str], Seen],
) -> None:
    screen = Console(width=120)
    screen.print(
        f"{arguments.trace.name}: {len(workload.chains):,} requests, {workload.accesses:,} block "
        f"accesses, {configuration.nodes} nodes of {configuration.node.dram_blocks:,} blocks, "
        f"{configuration.routing} homes, seed {configuration.seed}"
    )
    table = Table("nodes", "what", "hit rate", "remote", "lost", "unanswered", "seconds")
    for (kind, what), seen in rows.items():
        share = sum(seen.hits) / workload.accesses
        table.add_row(
            kind,
            what,
            f"{share:.2%}",
            f"{seen.remote / workload.accesses:.2%}",
            f"{seen.lost:,}",
            ", ".join(f"{code} {count}" for code, count in seen.failures.items()) or "0",
            f"{seen.seconds:.0f}",
        )
    screen.print(table)
    for what in ("daemons", "simulated"):
        gain = sum(rows["pool", what].hits) / max(sum(rows["isolated", what].hits), 1)
        screen.print(f"{what}: the pool hits {gain:.2f} times what isolated nodes hit")
    for kind in ("pool", "isolated"):
        found = compare(rows[kind, "daemons"], rows[kind, "simulated"])
        words = ", ".join(f"{count:,} {word}" for word, count in found.items())
        screen.print(f"{kind}: of the requests the daemons hit as the simulation says: {words}")
    pool = rows["pool", "daemons"]
    screen.print(
        f"Redis ran {pool.calls / max(len(workload.chains), 1):.2f} scripts a request (heartbeats "
        f"included) and used {pool.used / 1e6:.1f} MB at the end"
    )


def _document(workload: Workload, rows: dict[tuple[str, str], Seen]) -> dict[str, object]:
    return {
        f"{kind} {what}": {
            "hit_rate": sum(seen.hits) / workload.accesses,
            "remote": seen.remote / workload.accesses,
            "lost": seen.lost,
            "wrong": seen.wrong,
            "failures": seen.failures,
            "seconds": seen.seconds,
        }
        for (kind, what), seen in rows.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool_replay")
    parser.add_argument("trace", type=Path, help="a request trace: one JSON object a line")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--nodes", type=int, default=4, help="how many daemons")
    parser.add_argument("--dram", default="10%", help="of all nodes together, as of simulate")
    parser.add_argument("--block-size", default="4KiB", help="bytes of a block")
    parser.add_argument("--routing", default="random", choices=ROUTINGS, help="to a home")
    parser.add_argument("--seed", type=int, default=0, help="of random homes")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each request")
    parser.add_argument("--json", type=Path, help="where the figures are written, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
