"""The rows of many clients that use a store at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.peers.contender import PeerFailed, Scene
from benchmarks.peers.player import Player, Worker
from benchmarks.peers.row import Entry, Goal, Row
from benchmarks.peers.run import Options, able, figures_of, on_stage

CLIENTS: Final = (1, 4, 16)
BLOCK: Final = 256 << 10
COUNT: Final = 8
CAPACITY: Final = 1 << 30
KEPT: Final = 256 << 20
"""What all clients together get from, so that it stays in memory whatever else is put."""
MOST_ROUNDS: Final = 3
PUTS: Final = 8
"""One call in so many stores new blocks."""
SECONDS: Final = 3.0
HEAD_START: Final = 0.3
"""Between the order and the moment at which all begin."""


def clients(options: Options) -> Iterator[Row]:
    """Total rate, and the latency of each client's calls, by the number of clients."""
    contenders = options.among(Scene.LOCAL, work="mingle")
    with on_stage(options, contenders, "clients", CAPACITY) as playing:
        for number in CLIENTS:
            yield _row(options, playing, number)


def _row(options: Options, playing: Sequence[Player], clients: int) -> Row:
    row = Row(
        "clients",
        f"clients/{clients}",
        f"{clients} client{'s' if clients > 1 else ''} at once, {COUNT} × 256 KiB a call, "
        f"every {PUTS}th call a put",
        (Goal("rate"), Goal("p99")),
        labels={"work": "clients", "block_bytes": BLOCK, "count": clients},
        note="each gets what another one has put; rate is that of all together, p99 of one call",
    )
    with ExitStack() as stack:
        crowds = [
            stack.enter_context(_Crowd(each, clients))
            for each in able(playing, "mingle")
            if clients == 1 or "share" not in each.contender.lacks
        ]
        row.entries = [crowd.entry for crowd in crowds]
        for turn in range(min(options.rounds, MOST_ROUNDS) + 1):
            first = turn % len(crowds) if crowds else 0
            for crowd in crowds[first:] + crowds[:first]:
                crowd.take_turn(options.scaled(SECONDS), counts=turn > 0)
    options.say(f"{row.key}: measured")
    return row


@dataclass(slots=True)
class _Crowd:
    """So many clients of one store.

    Attributes:
        player: the store.
        clients: how many.
        entry: of the row.
    """

    player: Player
    clients: int
    entry: Entry = field(init=False)
    _workers: list[Worker] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> _Crowd:
        self.entry = Entry(self.player.contender)
        try:
            for _ in range(self.clients):
                self._workers.append(self.player.new_worker(self._stack))
                self._workers[-1].begin(do="open", settings=self._settings())
            self._finish()
            for number, worker in enumerate(self._workers):
                figures_of(worker.order(do="run", work="settle", parameters=self._part(number)))
        except PeerFailed as error:
            self.entry.failure = str(error)
        return self

    def __exit__(self, *error: object) -> None:
        # In order where that works, so that the store has forgotten them when the next ones come.
        with suppress(PeerFailed):
            if not self.entry.failure:
                for worker in self._workers:
                    worker.begin(do="close")
                self._finish()
        self._stack.close()

    def take_turn(self, seconds: float, *, counts: bool) -> None:
        """Have all clients work for so long at the same time."""
        if self.entry.failure:
            return
        parameters = {"count": COUNT, "puts": PUTS, "seconds": seconds}
        parameters["at"] = time.monotonic() + HEAD_START
        try:
            for worker in self._workers:
                worker.begin(do="run", work="mingle", parameters=parameters)
            figures = figures_of(together(self._finish()))
        except PeerFailed as error:
            self.entry.failure = str(error)
            return
        if counts:
            self.entry.turns.append(figures)

    def _part(self, number: int) -> dict[str, Any]:
        """What one client puts, and that it gets what its neighbour has put."""
        return {
            "name": f"{self.clients} {number}",
            "wanted": f"{self.clients} {(number + 1) % self.clients}",
            "count": COUNT,
            "bytes": KEPT // self.clients,
        }

    def _settings(self) -> dict[str, str]:
        """Each client's; one that holds blocks itself holds its part of them."""
        return self.player.settings(BLOCK) | {"capacity": str(CAPACITY // self.clients)}

    def _finish(self) -> list[dict[str, Any]]:
        return [worker.finish() for worker in self._workers]


def together(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What clients that worked at the same time came to, as one outcome."""
    whole: dict[str, Any] = {"figures": {}}
    for name in ("samples", "errors"):
        whole[name] = [one for outcome in outcomes for one in outcome[name]]
    for name in ("bytes", "items", "wrong", "lacking"):
        whole[name] = sum(outcome[name] for outcome in outcomes)
    whole["seconds"] = max(outcome["seconds"] for outcome in outcomes)
    return whole
