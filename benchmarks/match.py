"""How far a prefix reaches: the call against a ping-pong, and against lookups in a plain dict."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.chains import chain, session, store
from benchmarks.measure import Row, Sample, Settings, alternate, median_time, median_time_of
from benchmarks.memory import blocks
from benchmarks.node import node
from benchmarks.pingpong import ping_pong

if TYPE_CHECKING:
    from client.blocking import Client

BLOCK: Final = 4096
LONG: Final = 2048
SHORT: Final = 256


def measure(settings: Settings) -> Iterator[Row]:
    """The rows of match."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        directory = Path(name)
        with (
            node(directory, dram__capacity="256MiB") as daemon,
            session(daemon.unix, BLOCK, "shm") as client,
            ping_pong(settings, directory) as ping,
        ):
            names = chain(LONG)
            store(client, names, blocks(1, BLOCK) * LONG)
            short = _match(client, names[:SHORT], settings.calls(1000))
            yield Row(
                "match-256",
                f"match of {SHORT} hashes, Unix socket, p50",
                "64-byte ping-pong, Unix socket, p50",
                "s",
                "under",
                10.0,
                alternate(settings, short, ping),
            )
            long = _match(client, names, settings.calls(200))
            yield Row(
                "match-2048",
                f"match of {LONG} hashes, Unix socket, p50",
                f"{LONG} lookups in a plain dict",
                "s",
                "under",
                4.0,
                alternate(settings, long, _lookups(names, settings.calls(200))),
                "the dict is asked for hashes split from one blob, as they arrive",
            )


def _match(client: Client, names: list[bytes], calls: int) -> Sample:
    def once() -> None:
        if client.match(names).blocks != len(names):
            raise RuntimeError("a block that was stored is not there")

    return lambda: median_time(once, calls)


def _lookups(names: list[bytes], calls: int) -> Sample:
    table = {name: object() for name in names}
    blob = b"".join(names)
    split = struct.Struct("32s" * len(names))

    def once(asked: Sequence[bytes]) -> None:
        for name in asked:
            table[name]

    return lambda: median_time_of(lambda: split.unpack(blob), once, calls)
