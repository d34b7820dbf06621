"""The rows in which more is wanted than fits in memory: eviction, and a real trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from benchmarks.peers.contender import GIB, Scene
from benchmarks.peers.row import Goal, Row
from benchmarks.peers.run import Options, able, all_open, on_stage, take_turns
from kvstore.units import format_size

KIB: Final = 1 << 10
MOST_ROUNDS: Final = 3
"""Of rows whose turns take long."""


def eviction(options: Options) -> Iterator[Row]:
    """Reading and writing while three times what fits is asked for."""
    block, count = 256 * KIB, 16
    capacity = int(options.scaled(GIB))
    parameters = {"count": count, "factor": 3.0, "seconds": options.scaled(4.0)}
    few = replace(options, rounds=min(options.rounds, MOST_ROUNDS))
    with (
        on_stage(few, few.among(Scene.LOCAL, work="traffic"), "eviction", capacity) as playing,
        all_open(playing, block),
    ):
        taking = able(playing, "traffic")
        for player in taking:
            player.prepare("traffic_fill", parameters)
        row = Row(
            "eviction",
            "eviction",
            f"mixed gets and puts under eviction, {count} × 256 KiB a request",
            (Goal("rate"), Goal("p99")),
            labels={"work": "eviction", "block_bytes": block, "count": count},
            note="three times the capacity is asked for, by Zipf's law; p99 is that of a request",
        )
        yield take_turns(few, taking, row, "traffic", parameters)


def trace(options: Options) -> Iterator[Row]:
    """A thousand requests of a real trace, copied and seen where the blocks lie."""
    block, memory = 256 * KIB, int(options.scaled(GIB))
    parameters = {"path": str(options.trace), "requests": max(1, int(options.scaled(1000)))}
    few = replace(options, rounds=min(options.rounds, MOST_ROUNDS))
    for scene, how in ((Scene.LOCAL, "copied"), (Scene.VIEWS, "zero copy")):
        with (
            on_stage(few, few.among(scene, work="replay"), f"trace-{scene}", memory) as playing,
            all_open(playing, block),
        ):
            row = Row(
                "trace",
                f"trace/{scene}",
                f"{parameters['requests']:,} requests of a conversation trace, 256 KiB, {how}",
                (Goal("seconds", 2.0),),
                labels={"work": f"trace {how}", "block_bytes": block},
                note=f"{format_size(memory)} of memory each, less than the blocks asked for take",
            )
            chosen = parameters | {"views": scene is Scene.VIEWS}
            yield take_turns(few, able(playing, "replay"), row, "replay", chosen)
