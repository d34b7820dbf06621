"""Payload on one TCP connection, against a raw blocking socket pair that moves the same bytes."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.chains import chain, session, store
from benchmarks.measure import Row, Settings, alternate, median_time, median_time_of
from benchmarks.memory import blocks
from benchmarks.node import node
from benchmarks.sockets import raw_stream

BATCH: Final = 32
MIB: Final = 1 << 20
TOTAL: Final = BATCH * MIB
LIMIT: Final = "raw blocking sockets, two processes"


def measure(settings: Settings) -> Iterator[Row]:
    """The rows of TCP."""
    sources, destinations = blocks(BATCH, MIB), blocks(BATCH, MIB)
    calls = settings.calls(40)
    with (
        tempfile.TemporaryDirectory(prefix="kvb-") as name,
        node(Path(name), dram__capacity="2GiB", listen__tcp=f"127.0.0.1:{free_port()}") as daemon,
        session(daemon.tcp, MIB, "tcp") as client,
        raw_stream(destinations, calls) as (raw_receive, raw_send),
    ):
        for _ in range(3 * (2 << 30) // TOTAL // 2):
            store(client, chain(BATCH), sources)
        names = chain(BATCH)
        store(client, names, sources)

        def get() -> None:
            if client.get(names, destinations).found != BATCH:
                raise RuntimeError("a block that was stored is not there")

        what = f"1 MiB blocks, {BATCH} a call, one connection"
        rounds = alternate(settings, lambda: TOTAL / median_time(get, calls), raw_receive)
        yield Row("tcp-get", f"tcp get, {what}", LIMIT, "B/s", "at least", 0.8, rounds)
        rounds = alternate(
            settings,
            lambda: (
                TOTAL
                / median_time_of(
                    lambda: chain(BATCH), lambda new: store(client, new, sources), calls
                )
            ),
            raw_send,
        )
        yield Row("tcp-put", f"tcp put, {what}", LIMIT, "B/s", "at least", 0.8, rounds)


def free_port() -> int:
    """A TCP port on loopback that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
