"""The rows of what a store takes before it is of use: time to start, and memory for its keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from benchmarks.peers.contender import GIB, Contender, PeerFailed, Place, Scene
from benchmarks.peers.player import Player
from benchmarks.peers.row import Entry, Goal, Row, Turn
from benchmarks.peers.run import Options, able, all_open, figures_of, on_stage, take_turns

MIB: Final = 1 << 20
SMALL: Final = 256
"""Bytes of a block that is there for its key's sake."""
KEYS: Final = 200_000
MOST_ROUNDS: Final = 3


def start(options: Options) -> Iterator[Row]:
    """From nothing running to the first block that came back, servers and client."""
    row = Row(
        "start",
        "start",
        "from nothing running to the first hit of 1 MiB",
        (Goal("seconds"),),
        labels={"work": "start", "block_bytes": MIB},
        note="servers, a new Python process, its imports, connecting, one put and one get",
    )
    contenders = [each for each in options.among(Scene.LOCAL) if each.kind != "limit"]
    entries = [Entry(each) for each in contenders if "first" not in each.lacks]
    row.entries = entries
    for turn in range(min(options.rounds, MOST_ROUNDS) + 1):
        for number, entry in enumerate(entries):
            if not entry.failure:
                _start_once(options, entry, f"start-{turn}-{number}", counts=turn > 0)
    yield row


def _start_once(options: Options, entry: Entry, name: str, *, counts: bool) -> None:
    try:
        figures = _first_hit(options, entry.contender, name)
    except PeerFailed as error:
        entry.failure = str(error)
        return
    if counts:
        entry.turns.append(figures)


def _first_hit(options: Options, contender: Contender, name: str) -> Turn:
    player = Player(contender, Place(options.directory / name, GIB, 0, options.environments))
    began = time.perf_counter()
    with ExitStack() as stack:
        player.start(stack)
        with player.opened(MIB):
            outcome = player.run("first", {"seconds": 30.0})
            seconds = time.perf_counter() - began
    return {**figures_of(outcome), "seconds": seconds}


def keys(options: Options) -> Iterator[Row]:
    """What the names of blocks take in memory."""
    count = int(options.scaled(KEYS))
    few = replace(options, rounds=min(options.rounds, MOST_ROUNDS))
    with (
        on_stage(few, few.among(Scene.LOCAL, work="keys"), "keys", GIB) as playing,
        all_open(playing, SMALL),
    ):
        row = Row(
            "keys",
            "keys",
            "memory for a million keys",
            (Goal("bytes"),),
            labels={"work": "keys", "block_bytes": SMALL},
            note=f"growth by {count:,} blocks of {SMALL} bytes, less the blocks where a store "
            "keeps them in the same memory",
        )
        yield take_turns(few, able(playing, "keys"), row, "keys", {"count": count})
