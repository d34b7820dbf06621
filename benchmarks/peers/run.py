"""Taking turns: A B A B, the first round not counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.contender import Contender, PeerFailed, Scene
from benchmarks.peers.player import Player, players
from benchmarks.peers.row import Entry, Row, Turn

SHOWN = 120
"""Characters of a failure that are shown while others are measured; the report has all."""
TRACE = Path(__file__).parents[3] / "shared/traces/conversation.jsonl"
"""Beside the checkout."""
LACKING = 0.01
"""Share of blocks that may be refused or missing in a turn whose figures count."""


@dataclass(frozen=True, slots=True)
class Options:
    """How long to measure, whom, and where.

    Attributes:
        contenders: who takes part where their scenes ask for them.
        directory: scratch, on the disk to be measured, with a short path.
        environments: see `Place`.
        rounds: turns of each contender that count.
        scale: factor on the length of turns and on amounts; below 1 for a quick look.
        say: tells of progress.
        trace: requests of a real service, for the rows that replay them.
    """

    contenders: Sequence[Contender]
    directory: Path
    environments: Path
    rounds: int = 5
    scale: float = 1.0
    say: Callable[[str], None] = lambda _: None
    trace: Path = TRACE

    def scaled(self, usual: float) -> float:
        """An amount, or seconds, of a turn where the full run has ``usual``."""
        return usual * self.scale

    def among(self, *scenes: Scene, work: str = "") -> list[Contender]:
        """Who stands in one of these scenes; with ``work``, the stores that can do it."""
        found = [each for each in self.contenders if each.scenes & set(scenes)]
        return [each for each in found if not work or _can(each, work)]


Measure = Callable[[Options], Iterator[Row]]
"""A group of rows: measures them one after the other and yields each when it is complete."""


@contextmanager
def on_stage(
    options: Options, contenders: Sequence[Contender], name: str, capacity: int, disk: int = 0
) -> Iterator[list[Player]]:
    """Start contenders for one group of rows, each with a directory of its own under ``name``."""
    options.say(f"{name}: starting {', '.join(each.key for each in contenders)}")
    directory = options.directory / name
    with players(contenders, directory, options.environments, capacity, disk) as started:
        for each in started:
            if each.failure:
                options.say(f"{name}: {each.contender.key} can't start: {each.failure}")
        yield started


@contextmanager
def all_open(playing: Sequence[Player], block_bytes: int) -> Iterator[None]:
    """Have all stores open for blocks of one size; those that fail say so meanwhile."""
    with ExitStack() as stack:
        for each in playing:
            stack.enter_context(each.opened(block_bytes))
        yield


def able(playing: Sequence[Player], work: str) -> list[Player]:
    """Who can do a work: no limit of the machine, and no store that lacks it."""
    return [each for each in playing if _can(each.contender, work)]


def _can(contender: Contender, work: str) -> bool:
    return contender.kind != "limit" and work not in contender.lacks


def take_turns(
    options: Options, playing: Sequence[Player], row: Row, work: str, parameters: Mapping[str, Any]
) -> Row:
    """Let every player do the work in every round, each round beginning with the next one.

    Args:
        options: how many rounds.
        playing: who.
        row: gets an entry of each.
        work: name in `benchmarks.peers.works.WORKS`.
        parameters: of the work.
    """
    taking = [each for each in playing if work not in each.contender.lacks]
    entries = {each.contender.key: Entry(each.contender) for each in taking}
    row.entries = list(entries.values())
    began = time.monotonic()
    for turn in range(options.rounds + 1):
        first = turn % len(taking) if taking else 0
        for player in taking[first:] + taking[:first]:
            _turn(player, entries[player.contender.key], work, parameters, counts=turn > 0)
    options.say(f"{row.key}: {time.monotonic() - began:.0f} s; {_standing(options, row, work)}")
    return row


def figures_of(outcome: Mapping[str, Any]) -> Turn:
    """The figures of a turn from its outcome.

    Raises:
        PeerFailed: bytes came back wrong, or too many blocks were refused or missing.
    """
    samples, items = outcome["samples"], outcome["items"]
    if outcome["wrong"]:
        raise PeerFailed(f"{outcome['wrong']} blocks came back with wrong bytes")
    if outcome["lacking"] > LACKING * items:
        why = "; ".join(outcome["errors"]) or "refused, evicted or lost"
        raise PeerFailed(f"{outcome['lacking']} of {items} blocks: {why}")
    found = dict(outcome["figures"])
    if not samples:
        return found
    seconds = outcome["seconds"] or sum(samples)
    p50, p99 = np.percentile(samples, (50, 99))
    found |= {"p50": float(p50), "p99": float(p99), "keys": items / seconds}
    return found | ({"rate": outcome["bytes"] / seconds} if outcome["bytes"] else {})


def _turn(
    player: Player, entry: Entry, work: str, parameters: Mapping[str, Any], *, counts: bool
) -> None:
    if entry.failure:
        return
    try:
        outcome = player.run(work, parameters)
        figures = figures_of(outcome)
    except PeerFailed as error:
        entry.failure = str(error)
        return
    if outcome["lacking"]:
        entry.note = f"{outcome['lacking']} of {outcome['items']} blocks lacked in a turn"
    if counts:
        entry.turns.append(figures)


def _standing(options: Options, row: Row, work: str) -> str:
    if not row.goals:
        return ""
    verdict = row.verdict(row.goals[0])
    if verdict.ours is None:
        return "no figure of ours: " + "; ".join(
            each.failure for each in row.entries if each.contender.kind == "ours"
        )
    if verdict.ratio is None or verdict.other is None:
        return "nobody to compare with: " + "; ".join(_reasons(options, row, work))
    return f"{verdict.ratio:.2f} times as good as {verdict.other.contender.key}"


def _reasons(options: Options, row: Row, work: str) -> list[str]:
    """Why no peer has a figure, each reason once."""
    peers = [each.family for each in options.contenders if each.kind == "peer"]
    entries = [each for each in row.entries if each.contender.kind != "ours"]
    taking = {each.contender.family for each in entries}
    failures = [_short(each.failure) for each in entries if each.failure]
    absent = [f"{peer} does no {work} here" for peer in peers if peer not in taking]
    found = list(dict.fromkeys((*failures, *absent)))
    return found or ["its peers have no such figure" if peers else "no peer was chosen"]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
