"""How fast one node is for one client: every call timed beside a copy of the same bytes in memory.

A round fills a part of the node with blocks that nobody else has, asks for them in every way there
is, copies as many bytes from one place in this process to another, and has them removed again. So
no more is ever held than one round needs, and the calls take turns on a machine that is faster at
one time than at another. Each block that comes back is compared with what was put; neither that nor
the removal is in the times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import OutOfSpace, ParentAbsent, Unavailable
from kvstore.identity import HASH_BYTES, ROOT_PARENT
from kvstore.latencies import Latencies

if TYPE_CHECKING:
    from kvstore import Client

CALLS: Final = ("put", "get", "view", "match", "exists", "memcpy")
"""What is timed, in this order; ``memcpy`` is numpy's copy, one thread, and asks no node."""

MOVING: Final = ("put", "get", "view", "memcpy")
"""Those of them that have to do with the bytes of blocks, not only with their names."""

MOST_CALLS: Final = 1000
"""Calls of one kind in a round at most: small blocks would take too long otherwise."""

Rows: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Load:
    """What each call is for.

    Attributes:
        block_bytes: bytes of a block.
        batch: blocks of one call.
    """

    block_bytes: int
    batch: int

    @property
    def bytes(self) -> int:
        """Bytes of one call."""
        return self.block_bytes * self.batch


@dataclass(slots=True)
class Measured:
    """What came of one load.

    Attributes:
        load: of each call.
        calls: how long they took, by kind; those that found all their blocks.
        wrong: blocks that came back with other bytes than were put: 0, or the node is broken.
        lost: blocks that had been stored and were not found any more.
    """

    load: Load
    calls: dict[str, Latencies] = field(
        default_factory=lambda: {call: Latencies() for call in CALLS}
    )
    wrong: int = 0
    lost: int = 0

    def rate(self, call: str) -> float:
        """Blocks a second, for as long as the calls of this kind lasted; 0 without any."""
        timed = self.calls[call]
        return len(timed) * self.load.batch / timed.total if timed.total else 0.0

    def summary(self) -> dict[str, object]:
        """All of it with plain values: seconds, bytes/s and blocks/s; shares of memcpy's rate."""
        return {
            "block_bytes": self.load.block_bytes,
            "batch": self.load.batch,
            "wrong": self.wrong,
            "lost": self.lost,
            "calls": {call: self._summary(call) for call in CALLS},
        }

    def _summary(self, call: str) -> dict[str, object]:
        timed, rate = self.calls[call], self.rate(call)
        found: dict[str, object] = {
            "calls": len(timed),
            "seconds": timed.total,
            "p50": timed.percentile(0.50),
            "p99": timed.percentile(0.99),
            "blocks_per_second": rate,
        }
        if call in MOVING:
            copied = self.rate("memcpy")
            found["bytes_per_second"] = rate * self.load.block_bytes
            found["of_memcpy"] = rate / copied if copied else 0.0
        return found


class Bench:
    """Measures one load after the other.

    Args:
        memory: bytes that a round puts into the node at most. This process takes as many, and those
            of one call more (over ``tcp``, of two).
        check: called between calls; what it raises ends the measurement.
        clock: seconds, only ever going forward.
    """

    def __init__(
        self,
        memory: int,
        check: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        words = np.random.default_rng().integers(0, 1 << 64, -(-memory // 8), np.uint64)
        self._pool: Rows = words.view(np.uint8)[:memory]
        self._check = check
        self._clock = clock

    def measure(
        self,
        client: Client,
        load: Load,
        remove: Callable[[bytes], object],
        seconds: float,
        progress: Callable[[float], object],
    ) -> Measured:
        """Measure one load: rounds until the time is over, after one that does not count.

        Args:
            client: of a namespace with blocks of this size.
            load: of each call, at most as many bytes as a round puts.
            remove: has a block and all that follow it removed from the node. It is called for
                everything that was put, whatever happens.
            seconds: how long.
            progress: told what share of the time has passed, after each round.

        Raises:
            OutOfSpace: the node took less than it was given.
            Unavailable: it gave no answer.
        """
        warm, measured = Measured(load), Measured(load)
        self._round(client, warm, remove)
        measured.wrong, measured.lost = warm.wrong, warm.lost
        began = self._clock()
        while True:
            self._round(client, measured, remove)
            passed = self._clock() - began
            progress(min(passed / seconds, 1.0))
            if passed >= seconds:
                return measured

    def _round(self, client: Client, measured: Measured, remove: Callable[[bytes], object]) -> None:
        load = measured.load
        count = min(len(self._pool) // load.bytes, MOST_CALLS)
        names = [os.urandom(HASH_BYTES) for _ in range(count * load.batch)]
        rows = self._pool[: count * load.bytes].reshape(-1, load.block_bytes)
        batches = [
            _Batch(names[at : at + load.batch], rows[at : at + load.batch], parent)
            for at, parent in _positions(names, load.batch)
        ]
        turn = _Turn(client, measured, self._clock)
        try:
            for step in (turn.put, turn.get, turn.view, turn.ask, turn.memcpy):
                for batch in batches:
                    self._check()
                    step(batch)
        finally:
            remove(names[0])


def _positions(names: Sequence[bytes], batch: int) -> Iterator[tuple[int, bytes]]:
    """Where each batch of a chain begins, and the block before it."""
    for at in range(0, len(names), batch):
        yield at, names[at - 1] if at else ROOT_PARENT


@dataclass(frozen=True, slots=True)
class _Batch:
    """The blocks of one call.

    Attributes:
        names: their hashes.
        rows: their bytes, a block a row.
        parent: the block before them.
    """

    names: Sequence[bytes]
    rows: Rows
    parent: bytes


class _Turn:
    """The calls of one round, timed."""

    def __init__(self, client: Client, measured: Measured, clock: Callable[[], float]) -> None:
        self._client = client
        self._measured = measured
        self._clock = clock
        self._into: Rows = np.ones((measured.load.batch, measured.load.block_bytes), np.uint8)

    def put(self, batch: _Batch) -> None:
        """Store new blocks, on this node alone."""
        began = self._clock()
        try:
            done = self._client.put(batch.names, list(batch.rows), parent=batch.parent, replicas=1)
        except ParentAbsent as error:
            raise OutOfSpace(_NO_ROOM) from error
        self._took("put", self._clock() - began)
        _check_answer("put", done.failure)
        if done.stored != len(batch.names):
            raise OutOfSpace(_NO_ROOM)

    def get(self, batch: _Batch) -> None:
        """Copy blocks out, and compare them."""
        into = list(self._into)
        began = self._clock()
        found = self._client.get(batch.names, into)
        seconds = self._clock() - began
        _check_answer("get", found.failure)
        self._count("get", seconds, found.hits)
        for hit, row, expected in zip(found.hits, into, batch.rows, strict=True):
            self._measured.wrong += hit and not np.array_equal(row, expected)

    def view(self, batch: _Batch) -> None:
        """Show blocks where they lie, compare them, and let them go again."""
        began = self._clock()
        views = self._client.view(batch.names)
        seconds = self._clock() - began
        _check_answer("view", views.failure)
        for one, expected in zip(views, batch.rows, strict=True):
            if one is not None:
                same = np.array_equal(np.frombuffer(one, np.uint8), expected)
                self._measured.wrong += not same
        hits = [one is not None for one in views]
        began = self._clock()
        views.release()
        self._count("view", seconds + self._clock() - began, hits)

    def ask(self, batch: _Batch) -> None:
        """Ask what is held, as a prefix and block by block."""
        began = self._clock()
        match = self._client.match(batch.names)
        matched = self._clock()
        found = self._client.exists(batch.names)
        seconds = self._clock() - matched
        _check_answer("match", match.failure)
        _check_answer("exists", found.failure)
        if match.blocks == len(batch.names):
            self._took("match", matched - began)
        self._count("exists", seconds, found.hits)

    def memcpy(self, batch: _Batch) -> None:
        """Copy as many bytes within this process."""
        began = self._clock()
        for row, source in zip(self._into, batch.rows, strict=True):
            np.copyto(row, source)
        self._took("memcpy", self._clock() - began)

    def _count(self, call: str, seconds: float, hits: Sequence[bool]) -> None:
        lost = len(hits) - sum(hits)
        self._measured.lost += lost
        if not lost:
            self._took(call, seconds)

    def _took(self, call: str, seconds: float) -> None:
        self._measured.calls[call].add(seconds)


_NO_ROOM: Final = "the node ran out of room for the blocks of the benchmark: others fill it, too"


def _check_answer(call: str, failure: str | None) -> None:
    if failure is not None:
        raise Unavailable(f"the node did not answer a {call} of the benchmark: {failure}")
