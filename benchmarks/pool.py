"""Blocks of another node: what a client gets through its home, beside what it would get by itself.

The client talks to its home over ``shm``, as an engine does; the home pulls from the owner over
``tcp``. Every get is of a chain that the home does not hold at that time.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.chains import chain, session, store
from benchmarks.measure import Row, Sample, Settings, alternate, median_time, median_time_of
from benchmarks.memory import Blocks, blocks
from benchmarks.pool_load import BATCHES_PER_SECOND, load
from benchmarks.pool_nodes import Pool, pool, wait_until_known
from benchmarks.redis_round_trip import round_trips
from benchmarks.sockets import raw_stream
from benchmarks.usage import per_gib

if TYPE_CHECKING:
    from client.blocking import Client

BATCH: Final = 32
LONG: Final = 256
MIB: Final = 1 << 20
TOTAL: Final = BATCH * MIB
CHAINS: Final = 48
"""More than the home has room for, so that no chain is still there when it comes round again."""
SECONDS: Final = 2.0
"""Of one turn of local hits: as long as several batches that others pull."""
OWNER: Final = "4GiB"
"""Room for ``CHAINS``, and for the new chains of all turns, of which few fit in each."""
HOME: Final = "1GiB"
WHAT: Final = f"1 MiB blocks, {BATCH} a call"


def measure(settings: Settings) -> Iterator[Row]:
    """The rows of a pool of two nodes."""
    memory = blocks(BATCH, MIB)
    with (
        tempfile.TemporaryDirectory(prefix="kvb-") as name,
        pool(Path(name), OWNER, HOME) as nodes,
        session(nodes.owner.tcp, MIB, "tcp") as owner,
        session(nodes.home.unix, MIB, "shm") as home,
    ):
        remote = _Remote(owner, home, memory)
        yield from _gets(settings, nodes, remote)
        yield from _matches(settings, nodes, remote)
        yield _first(settings, remote)
        yield from _beside_pulls(settings, nodes, memory)


class _Remote:
    """Chains that the owner holds, got one after the other through the home or straight from it."""

    def __init__(self, owner: Client, home: Client, memory: Blocks) -> None:
        self.owner = owner
        self.home = home
        self.memory = memory
        self._stored = [chain(BATCH) for _ in range(CHAINS)]
        # Each in its own round: skipping chains would bring back those that the home still holds.
        self._onward, self._straight = itertools.cycle(self._stored), itertools.cycle(self._stored)
        for names in self._stored:
            store(owner, names, memory)
        for _ in self._stored:
            self.get(self.next_remote())

    def next_remote(self) -> list[bytes]:
        """A chain that the home knows to be elsewhere."""
        names = next(self._onward)
        wait_until_known(self.home, names)
        if set(self.home.match(names).tiers) != {"remote"}:
            raise RuntimeError("the home still holds what it is to bring")
        return names

    def new(self) -> list[bytes]:
        """One that nobody has asked for before."""
        names = chain(BATCH)
        store(self.owner, names, self.memory)
        wait_until_known(self.home, names)
        return names

    def get(self, names: Sequence[bytes]) -> None:
        """Through the home."""
        _get(self.home, names, self.memory)

    def one_hop(self) -> None:
        """Straight from the owner, the next chain."""
        _get(self.owner, next(self._straight), self.memory)

    def several(self, calls: int) -> int:
        """Bytes of so many gets."""
        for _ in range(calls):
            self.get(self.next_remote())
        return calls * TOTAL


def _get(client: Client, names: Sequence[bytes], memory: Blocks) -> None:
    if client.get(names, memory).found != len(names):
        raise RuntimeError("a block that the owner holds did not come")


def _gets(settings: Settings, nodes: Pool, remote: _Remote) -> Iterator[Row]:
    calls = settings.calls(30)

    def known() -> float:
        return TOTAL / median_time_of(remote.next_remote, remote.get, calls)

    def new() -> float:
        return TOTAL / median_time_of(remote.new, remote.get, settings.calls(5))

    def one_hop() -> float:
        return TOTAL / median_time(remote.one_hop, calls)

    limit = "tcp get straight from the owner"
    turns = alternate(settings, known, one_hop)
    # Afterwards: at first the nodes still touch their memory.
    pids = {"home": nodes.home.pid, "owner": nodes.owner.pid}
    used = per_gib(lambda: remote.several(calls), pids)
    note = "processor seconds a GiB, matches included: " + ", ".join(
        f"{who} {seconds:.2f}" for who, seconds in used.items()
    )
    yield Row("pool-get", f"remote get, {WHAT}", limit, "B/s", "at least", 0.7, turns, note)
    with raw_stream(remote.memory, calls) as (receive, _):
        turns = alternate(settings, known, receive)
        yield Row(
            "pool-get-raw",
            f"remote get, {WHAT}",
            "raw blocking sockets, two processes",
            "B/s",
            "at least",
            None,
            turns,
        )
    turns = alternate(settings, new, one_hop)
    yield Row(
        "pool-get-new",
        f"remote get, {WHAT}, nobody has asked the owner for them before",
        limit,
        "B/s",
        "at least",
        None,
        turns,
        "the owner takes their checksums first",
    )


def _matches(settings: Settings, nodes: Pool, remote: _Remote) -> Iterator[Row]:
    calls = settings.calls(400)
    names = [name for _ in range(LONG // BATCH) for name in chain(BATCH)]
    store(remote.owner, names, list(remote.memory) * (LONG // BATCH))
    wait_until_known(remote.home, names)

    def once() -> None:
        if remote.home.match(names).blocks != LONG:
            raise RuntimeError("a block that the owner holds is not known")

    what = f"match of {LONG} hashes, all remote, p50"
    with round_trips(nodes.redis, LONG, calls) as (asked, raw):
        sample = lambda: median_time(once, calls)  # noqa: E731 - taken twice below
        turns = alternate(settings, sample, asked)
        limit = "GET of as many bytes, redis-py on uvloop, p50"
        yield Row("pool-match-256", what, limit, "s", "under", 3.0, turns)
        turns = alternate(settings, sample, raw)
        limit = "the same GET, plain blocking socket, p50"
        yield Row("pool-match-256-raw", what, limit, "s", "under", None, turns)


def _first(settings: Settings, remote: _Remote) -> Row:
    """When the first of many blocks is there, by when all are."""
    memory = list(remote.memory) * (LONG // BATCH)
    calls = max(3, settings.calls(3))

    def new() -> list[bytes]:
        names = chain(LONG)
        store(remote.owner, names, memory)
        wait_until_known(remote.home, names)
        return names

    def first(names: list[bytes]) -> None:
        remote.home.match(names, prefetch=True)
        _get(remote.home, names[:1], memory[:1])

    def all_of_them(names: list[bytes]) -> None:
        remote.home.match(names, prefetch=True)
        _get(remote.home, names, memory)

    turns = alternate(
        settings,
        lambda: median_time_of(new, first, calls),
        lambda: median_time_of(new, all_of_them, calls),
    )
    return Row(
        "pool-first",
        f"match with prefetch and get of the first of {LONG} remote blocks of 1 MiB",
        f"match with prefetch and get of all {LONG}",
        "s",
        "under",
        None,
        turns,
        "all prefetched blocks but the first still come in the first case",
    )


def _beside_pulls(settings: Settings, nodes: Pool, memory: Blocks) -> Iterator[Row]:
    """Local hits while blocks are pulled from the same node, and while it pulls."""
    pace = f"{BATCHES_PER_SECOND * BATCH} MiB/s"
    with load("pool", nodes.home.unix, nodes.owner.tcp) as pulls, load("raw") as plain:
        for key, whose, node in (
            ("owner", "another node pulls from this one", nodes.owner),
            ("home", "this node pulls from another", nodes.home),
        ):
            with session(node.unix, MIB, "shm") as client:
                names = chain(BATCH)
                store(client, names, memory)
                hits = _hits(client, names, memory, SECONDS * settings.scale)
                what = f"local shm get, {WHAT}, mean, while {whose} at {pace}"
                for suffix, goal, limit, other in (
                    ("", 1.05, "the same with nothing else going on", nullcontext),
                    ("-raw", None, f"the same beside a plain socket that moves {pace}", plain),
                ):
                    turns = alternate(settings, _within(pulls, hits), _within(other, hits))
                    yield Row(f"pool-local-{key}{suffix}", what, limit, "s", "under", goal, turns)


def _hits(client: Client, names: list[bytes], memory: Blocks, seconds: float) -> Sample:
    """Mean seconds of a call, since a median would pass over those that were held up."""

    def sample() -> float:
        began, calls = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds:
            _get(client, names, memory)
            calls += 1
        return took / calls

    return sample


def _within(begin: Callable[[], AbstractContextManager[None]], sample: Sample) -> Sample:
    def measured() -> float:
        with begin():
            return sample()

    return measured
