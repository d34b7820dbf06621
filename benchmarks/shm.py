"""The same host's transport: pinned views against a ping-pong, copies against memcpy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.chains import chain, session, store
from benchmarks.measure import Row, Settings, alternate, median_time, median_time_of
from benchmarks.memory import Blocks, blocks, memcpy, memcpy_onward
from benchmarks.node import Node, node
from benchmarks.pingpong import ping_pong

if TYPE_CHECKING:
    from client.blocking import Client

BATCH: Final = 32
MIB: Final = 1 << 20
CAPACITY: Final = "4GiB"
POOL: Final = 1 << 30
"""Bytes of memory that the limit of a put goes through before it comes back."""


def measure(settings: Settings) -> Iterator[Row]:
    """The rows of shared memory."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        directory = Path(name)
        with node(directory, dram__capacity=CAPACITY) as daemon:
            yield _views(settings, directory, daemon)
            for size in (MIB, 4 * MIB):
                yield from _copies(settings, daemon, size)


def _views(settings: Settings, directory: Path, daemon: Node) -> Row:
    with session(daemon.unix, MIB, "shm") as client, ping_pong(settings, directory) as ping:
        names = chain(BATCH)
        store(client, names, blocks(BATCH, MIB))
        calls = settings.calls(1000)
        rounds = alternate(settings, lambda: median_time(lambda: _view(client, names), calls), ping)
    return Row(
        "shm-view",
        f"shm get as pinned views, {BATCH} x 1 MiB in one call, p50",
        "64-byte ping-pong, Unix socket, p50",
        "s",
        "under",
        10.0,
        rounds,
        "the call and giving the pins back",
    )


def _view(client: Client, names: list[bytes]) -> None:
    with client.view(names) as views:
        if len(views) != len(names) or views[-1] is None:
            raise RuntimeError("a block that was stored is not there")


def _copies(settings: Settings, daemon: Node, size: int) -> Iterator[Row]:
    total = BATCH * size
    sources, destinations = blocks(BATCH, size), blocks(BATCH, size)
    calls = settings.calls(40 * MIB // size)
    with session(daemon.unix, size, "shm") as client:
        _warm(client, sources, total)
        names = chain(BATCH)
        store(client, names, sources)
        what = f"{size // MIB} MiB blocks, {BATCH} a call"

        def get() -> float:
            def once() -> None:
                if client.get(names, destinations).found != BATCH:
                    raise RuntimeError("a block that was stored is not there")

            return total / median_time(once, calls)

        yield Row(
            f"shm-get-{size // MIB}M",
            f"shm get into a private buffer, {what}",
            "memcpy (numpy), one thread",
            "B/s",
            "at least",
            0.9,
            alternate(settings, get, memcpy(destinations, sources, calls)),
        )
        yield from _puts(settings, client, sources, destinations, calls)


def _puts(
    settings: Settings, client: Client, sources: Blocks, destinations: Blocks, calls: int
) -> Iterator[Row]:
    """Against memcpy to memory as cold as the node's, and against memcpy within the cache."""
    size = sources[0].nbytes
    total = BATCH * size

    def put() -> float:
        return total / median_time_of(
            lambda: chain(BATCH), lambda names: store(client, names, sources), calls
        )

    limits = (
        ("", "to new memory each time", memcpy_onward(sources, POOL, calls)),
        ("-hot", "to the same memory", memcpy(destinations, sources, calls)),
    )
    for key, where, limit in limits:
        yield Row(
            f"shm-put-{size // MIB}M{key}",
            f"shm put from a private buffer, {size // MIB} MiB blocks, {BATCH} a call",
            f"memcpy (numpy), one thread, {where}",
            "B/s",
            "at least",
            0.8,
            alternate(settings, put, limit),
            "into a full node: every put makes others leave",
        )


def _warm(client: Client, sources: Blocks, total: int) -> None:
    """Fill the node once, so that no later put meets a page for the first time."""
    for _ in range(2 * (4 << 30) // total):
        store(client, chain(BATCH), sources)
