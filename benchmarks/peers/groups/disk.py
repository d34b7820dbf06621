"""The rows of a working set of twice the memory, the other half of it on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from subprocess import CalledProcessError
from typing import Any, Final

from benchmarks.fio import Fio, FioMissing
from benchmarks.peers.contender import GIB, Contender, PeerFailed, Scene, Setup
from benchmarks.peers.player import Player
from benchmarks.peers.row import Entry, Goal, Row
from benchmarks.peers.run import Options, able, all_open, figures_of, on_stage

MIB: Final = 1 << 20
COUNT: Final = 32
SETTLE: Final = 5.0
"""Seconds between the last put and the first get: what a store still wants to write, and what it
loses, is then behind it."""
COLD: Final = True
"""Whether the page cache is emptied in between, that of the whole machine."""
MOST_ROUNDS: Final = 3
DEPTH: Final = 8
FIO: Final = Contender(
    "fio",
    "fio",
    "",
    "limit",
    frozenset({Scene.DISK}),
    lambda _: nullcontext(Setup()),
    f"direct, 1 MiB, {DEPTH} in flight, by io_uring or libaio",
)


def disk(options: Options) -> Iterator[Row]:
    """A working set of twice the memory: stored for good, and read back cold."""
    memory = int(options.scaled(GIB))
    rounds = min(options.rounds, MOST_ROUNDS)
    rows = _rows()
    # Room for all turns: to clear up in between is not what is measured.
    with (
        on_stage(
            options, options.among(Scene.DISK), "disk", memory, 3 * (rounds + 1) * memory
        ) as playing,
        all_open(playing, MIB),
    ):
        limit = _Limit(options, rows, 2 * memory)
        for turn in range(rounds + 1):
            for player in able(playing, "store_set"):
                _store_and_fetch(player, rows, 2 * memory, turn)
            limit.take_turn(counts=turn > 0)
            options.say(f"disk: round {turn} of {rounds}")
    yield from rows


def _rows() -> tuple[Row, Row]:
    goals = [Goal("rate", 2.0), Goal("rate", 0.8, FIO.key)]
    labels = {"block_bytes": MIB, "count": COUNT}
    put = Row(
        "disk",
        "disk/put",
        f"sustained put of twice the memory, {COUNT} × 1 MiB a call",
        goals,
        labels={"work": "disk put", **labels},
        note="the bytes that came back later, by the time of all puts",
    )
    get = Row(
        "disk",
        "disk/get",
        f"cold get of the same, {COUNT} × 1 MiB a call",
        goals,
        labels={"work": "disk get", **labels},
        note="every block once, in the order of the puts; the page cache was emptied before",
    )
    return put, get


def _store_and_fetch(player: Player, rows: Sequence[Row], size: int, turn: int) -> None:
    entries = [_entry(row, player) for row in rows]
    if any(entry.failure for entry in entries):
        return
    parameters: dict[str, Any] = {
        "name": f"set {turn}",
        "bytes": size,
        "count": COUNT,
        "settle": SETTLE,
        "cold": COLD,
    }
    try:
        stored = player.run("store_set", parameters)
        fetched = player.run("fetch_set", parameters)
        kept = figures_of(fetched)
    except PeerFailed as error:
        for entry in entries:
            entry.failure = str(error)
        return
    if turn:
        rate = fetched["bytes"] / sum(stored["samples"])
        entries[0].turns.append({**figures_of(stored), "rate": rate, "hits": kept["hits"]})
        entries[1].turns.append(kept)


def _entry(row: Row, player: Player) -> Entry:
    found = next((each for each in row.entries if each.contender is player.contender), None)
    if found is None:
        found = Entry(player.contender)
        row.entries.append(found)
    return found


class _Limit:
    """What fio makes of the same disk, as the last one in every round."""

    def __init__(self, options: Options, rows: Sequence[Row], size: int) -> None:
        self._entries = [Entry(FIO), Entry(FIO)]
        self._size = size
        for row, entry in zip(rows, self._entries, strict=True):
            row.entries.append(entry)
        try:
            self._fio = Fio(options.directory / "fio", size, DEPTH)
        except FioMissing as error:
            for entry in self._entries:
                entry.failure = str(error)

    def take_turn(self, *, counts: bool) -> None:
        """Write the file anew and read it."""
        if any(entry.failure for entry in self._entries):
            return
        for entry, move in zip(self._entries, (self._fio.write, self._fio.read), strict=True):
            try:
                figures = {"rate": move(self._size)}
            except CalledProcessError as error:
                entry.failure = f"it ended with {error.returncode}: {error.stderr.strip()[-200:]}"
                return
            if counts:
                entry.turns.append(figures)
