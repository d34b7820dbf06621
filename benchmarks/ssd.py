"""Cold blocks from the SSD tier, against what fio reads from the same disk at the same depth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.chains import chain, session
from benchmarks.fio import Fio, FioMissing
from benchmarks.measure import Row, Settings, alternate, median_time
from benchmarks.memory import blocks
from benchmarks.node import Node, node

if TYPE_CHECKING:
    from client.blocking import Client

MIB: Final = 1 << 20
BATCH: Final = 32
DEPTH: Final = 8
CALLS: Final = 3
PAUSE: Final = 0.15
"""Seconds between puts while filling, so that demotion keeps up and little is dropped."""

SUBJECT: Final = f"SSD get into a buffer, O_DIRECT, 1 MiB, cold, {BATCH} a call"
LIMIT: Final = f"fio, direct 1 MiB reads, depth {DEPTH}"


def measure(settings: Settings) -> Iterator[Row]:
    """The row of the SSD tier."""
    wanted = (settings.rounds + 1) * CALLS
    total = wanted * BATCH * MIB
    try:
        fio = Fio(settings.directory / "fio", total, DEPTH)
    except FioMissing as missing:
        yield _row(skipped=str(missing))
        return
    state = settings.directory / "node"
    state.mkdir()
    names = _fill(state, wanted, total)
    with (
        _node(state, dram=2 * total, ssd=3 * total) as daemon,
        session(daemon.unix, MIB, "shm") as client,
    ):
        _settle(daemon.pid)
        cold = [name for name in names if client.match(name).tiers == ["ssd"] * BATCH]
        if len(cold) < wanted:
            yield _row(skipped=f"only {len(cold)} of {len(names)} prefixes were found on SSD")
            return
        yield _row(rounds=_turns(settings, client, cold, fio))


def _row(rounds: tuple[tuple[float, float], ...] = (), skipped: str = "") -> Row:
    note = "after a restart of the daemon; every block is read once"
    return Row("ssd-get", SUBJECT, LIMIT, "B/s", "at least", 0.8, rounds, note, skipped)


def _node(state: Path, *, dram: int, ssd: int) -> AbstractContextManager[Node]:
    return node(
        state,
        dram__capacity=dram,
        ssd__capacity=ssd,
        ssd__directory=state / "ssd",
        ssd__queue_depth=DEPTH,
    )


def _fill(state: Path, prefixes: int, total: int) -> list[list[bytes]]:
    """Put twice what will be read, so that the first half has left DRAM before the node stops."""
    sources = blocks(BATCH, MIB)
    names = [chain(BATCH) for _ in range(2 * prefixes)]
    with (
        _node(state, dram=total // 2, ssd=3 * total) as daemon,
        session(daemon.unix, MIB, "shm") as client,
    ):
        for name in names:
            client.put(name, sources)
            time.sleep(PAUSE)
    return names


def _settle(pid: int) -> None:
    """Wait until the daemon has touched its memory, so that no get meets a page first."""
    statistics = Path(f"/proc/{pid}/statm")
    before, now = -1, 0
    while before != now:
        time.sleep(1.0)
        before, now = now, int(statistics.read_text().split()[1])


def _turns(
    settings: Settings, client: Client, cold: list[list[bytes]], fio: Fio
) -> tuple[tuple[float, float], ...]:
    unread = iter(cold)
    destinations = blocks(BATCH, MIB)

    def get() -> None:
        result = client.get(next(unread), destinations)
        if result.tiers != ["ssd"] * BATCH:
            raise RuntimeError(f"not from SSD: {result.tiers}")

    return alternate(
        settings,
        lambda: BATCH * MIB / median_time(get, CALLS),
        lambda: fio.read(CALLS * BATCH * MIB),
    )
