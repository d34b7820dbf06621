"""Putting, getting, viewing and looking up, one call after the other from one client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

from benchmarks.peers.payload import POSITIONS, named_chain, new_chain
from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works.checks import wrong

AT_LEAST = 3
"""Calls that a turn makes, however long they take."""
_clock = time.perf_counter


def fill(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put ``bytes`` of blocks once, so that later turns meet no memory for the first time."""
    outcome = Outcome()
    wanted = int(parameters["bytes"])
    while outcome.items * subject.size < wanted:
        _put(subject, POSITIONS, outcome)
    outcome.lacking = 0  # whether all of it stayed is not what this is about
    subject.adapter.remove_all()
    return outcome


def keep(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put ``bytes`` of blocks under ``name``, for the gets, views and look-ups of later turns."""
    outcome = Outcome()
    subject.adapter.remove_all()
    count = max(POSITIONS, int(parameters["bytes"]) // subject.size)
    keys = named_chain(str(parameters["name"]), count // POSITIONS * POSITIONS)
    chains = [keys[start : start + POSITIONS] for start in range(0, len(keys), POSITIONS)]
    for chain in chains:
        _put(subject, POSITIONS, outcome, chain)
    subject.kept["chains"] = chains
    return outcome


def put(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put new blocks, ``count`` a call, for ``seconds`` or until ``bytes`` are put."""
    outcome = Outcome()
    subject.adapter.remove_all()
    count, most = int(parameters["count"]), int(parameters["bytes"])
    for _ in _turn(outcome, float(parameters["seconds"])):
        if outcome.items * subject.size >= most:
            break
        _put(subject, count, outcome)
    return outcome


def get(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Copy kept blocks into the same buffers again and again, ``count`` a call."""
    count = int(parameters["count"])
    into = subject.destinations(count)
    outcome = Outcome()

    def once(keys: Sequence[bytes]) -> int:
        return subject.adapter.get(keys, into)

    for keys in _kept(subject, count, outcome, float(parameters["seconds"])):
        subject.payload.wipe(into)
        came = _time(outcome, once, keys, subject.size)
        outcome.wrong += wrong(subject.payload, keys, into, came, whole=False)
    keys = _kept_chain(subject, count)
    for block in into:
        block[:] = bytes(len(block))
    outcome.wrong += wrong(subject.payload, keys, into, once(keys))
    return outcome


def view(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """See kept blocks where they lie, ``count`` a call, and give them back; both are timed."""
    count = int(parameters["count"])
    outcome = Outcome()

    def once(keys: Sequence[bytes]) -> int:
        with subject.adapter.view(keys, subject.size) as views:
            return sum(each is not None for each in views)

    for keys in _kept(subject, count, outcome, float(parameters["seconds"])):
        _time(outcome, once, keys, subject.size)
    keys = _kept_chain(subject, count)
    with subject.adapter.view(keys, subject.size) as views:
        for key, block in zip(keys, views, strict=True):
            outcome.wrong += block is None or not subject.payload.equal(key, block)
    return outcome


def exists(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Ask for ``count`` kept keys at once."""
    count = int(parameters["count"])
    outcome = Outcome()
    for keys in _kept(subject, count, outcome, float(parameters["seconds"])):
        _time(outcome, subject.adapter.exists, keys, 0)
    return outcome


def _put(
    subject: Subject, count: int, outcome: Outcome, chain: Sequence[bytes] | None = None
) -> None:
    keys = new_chain(count) if chain is None else chain
    blocks = subject.sources(max(count, POSITIONS))[: len(keys)]
    subject.payload.stamp(keys, blocks)
    began = _clock()
    stored = subject.adapter.put(keys, blocks)
    outcome.samples.append(_clock() - began)
    outcome.bytes += stored * subject.size
    outcome.items += len(keys)
    outcome.lacking += len(keys) - stored


def _time(
    outcome: Outcome, once: Callable[[Sequence[bytes]], int], keys: Sequence[bytes], size: int
) -> int:
    began = _clock()
    found = once(keys)
    outcome.samples.append(_clock() - began)
    outcome.bytes += found * size
    outcome.items += len(keys)
    outcome.lacking += len(keys) - found
    return found


def _turn(outcome: Outcome, seconds: float) -> Iterator[None]:
    """Again, until the timed calls of this turn add up to ``seconds``."""
    total, seen = 0.0, 0
    while seen < AT_LEAST or total < seconds:
        yield
        total += sum(outcome.samples[seen:])
        seen = max(seen + 1, len(outcome.samples))


def _kept(
    subject: Subject, count: int, outcome: Outcome, seconds: float
) -> Iterator[Sequence[bytes]]:
    groups = cycle(_groups(subject, count))
    for _ in _turn(outcome, seconds):
        yield next(groups)


def _kept_chain(subject: Subject, count: int) -> Sequence[bytes]:
    return _groups(subject, count)[-1]


def _groups(subject: Subject, count: int) -> list[Sequence[bytes]]:
    """The kept keys, so many a call: a part of a chain, or several chains."""
    name = f"groups of {count}"
    found: list[Sequence[bytes]] | None = subject.kept.get(name)
    if found is None:
        keys = [key for chain in subject.kept["chains"] for key in chain]
        if len(keys) < count:
            raise ValueError(f"{len(keys)} keys are kept, too few for {count} a call")
        found = [keys[start : start + count] for start in range(0, len(keys) - count + 1, count)]
        subject.kept[name] = found
    return found
