"""Put, get, view and look-up by one client, at every size, single and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from benchmarks.peers.contender import GIB, Scene
from benchmarks.peers.player import Player
from benchmarks.peers.row import Goal, Row
from benchmarks.peers.run import Options, able, all_open, on_stage, take_turns

KIB: Final = 1 << 10
MIB: Final = 1 << 20
SIZES: Final = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
COUNTS: Final = (1, 32)
LOOKED_UP: Final = (256, 2048)
CAPACITY: Final = GIB
"""Of each store: a dozen of them are up at once."""
KEPT: Final = 256 * MIB
"""Bytes that gets go through before they come back."""
TURN: Final = 0.15
"""Seconds of timed calls in one turn."""
QUICK: Final = 0.5
"""Below this scale memory is not met once before the turns that count."""


def local(options: Options) -> Iterator[Row]:
    """Copying, and looking up, on one host, by whatever is fastest there."""
    return _copying(options, Scene.LOCAL)


def tcp(options: Options) -> Iterator[Row]:
    """Copying, and looking up, over TCP between processes."""
    return _copying(options, Scene.TCP)


def views(options: Options) -> Iterator[Row]:
    """Blocks seen where they lie."""
    with on_stage(options, options.among(Scene.VIEWS), "views", CAPACITY) as playing:
        for size in SIZES:
            with all_open(playing, size):
                _keep(options, playing, size)
                for count in COUNTS:
                    times = 2.0 if (size, count) == (MIB, 32) else 1.0
                    goals = [Goal("p50", times), Goal("p50", times, "shared"), Goal("p99")]
                    row = _row("views", "view", size, count, goals)
                    yield take_turns(options, playing, row, "view", _turn(options, count))


def _copying(options: Options, scene: Scene) -> Iterator[Row]:
    with on_stage(options, options.among(scene), str(scene), CAPACITY) as playing:
        for size in SIZES:
            with all_open(playing, size):
                if options.scale > QUICK:
                    for each in playing:
                        each.prepare("fill", {"bytes": CAPACITY})
                for count in COUNTS:
                    row = _row(scene, "put", size, count, _goals(scene, size, count))
                    yield take_turns(options, playing, row, "put", _turn(options, count))
                _keep(options, playing, size)
                for count in COUNTS:
                    row = _row(scene, "get", size, count, _goals(scene, size, count))
                    yield take_turns(options, playing, row, "get", _turn(options, count))
                if size == SIZES[0]:
                    yield from _looking_up(options, playing, scene)


def _looking_up(options: Options, playing: Sequence[Player], scene: Scene) -> Iterator[Row]:
    for count in LOOKED_UP:
        times = 3.0 if count == 256 else 1.0
        row = Row(
            "exists",
            f"exists/{scene}/{count}",
            f"existence of {count} keys in one call, {scene}",
            [Goal("p50", times), Goal("p99", times)],
            labels={"work": "exists", "count": count},
        )
        yield take_turns(options, able(playing, "exists"), row, "exists", _turn(options, count))


def _goals(scene: Scene, size: int, count: int) -> Sequence[Goal]:
    latency = [Goal("p50"), Goal("p99")]
    if scene is Scene.TCP:
        return [Goal("rate", 1.5 if size == MIB else 1.0), *latency]
    times = 2.0 if size < MIB and count == 1 else 1.0
    # A dictionary within the client's process is a peer, too; but it is no store for engines.
    rates = [Goal("rate", times), Goal("rate", times, "shared")]
    limit = [Goal("rate", 0.9, "memcpy-2")] if size >= MIB and count > 1 else []
    return [*rates, *limit, *latency]


def _row(group: str, work: str, size: int, count: int, goals: Sequence[Goal]) -> Row:
    how = f"{count} a call" if count > 1 else "single"
    return Row(
        str(group),
        f"{group}/{work}/{named(size)}/{count}",
        f"{work} of {named(size)} blocks, {how}, {group}",
        goals,
        labels={"work": work, "scene": str(group), "block_bytes": size, "count": count},
    )


def named(size: int) -> str:
    """A size of blocks as keys of rows have it."""
    return f"{size >> 20}M" if size >= MIB else f"{size >> 10}K"


def _turn(options: Options, count: int) -> dict[str, Any]:
    return {"count": count, "seconds": options.scaled(TURN), "bytes": CAPACITY // 2}


def _keep(options: Options, playing: Sequence[Player], size: int) -> None:
    amount = max(round(options.scaled(KEPT)), max(LOOKED_UP) * SIZES[0], max(COUNTS) * size)
    for each in playing:
        each.prepare("keep", {"bytes": amount, "name": f"kept {size}"})
