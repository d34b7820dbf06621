"""One of many clients that use a store at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count as counting
from itertools import cycle
from typing import Any

from benchmarks.peers.payload import named_chain, new_chain
from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works.checks import wrong

_clock = time.perf_counter


def settle(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put ``bytes`` of blocks under ``name``, and get those under ``wanted`` in all later turns."""
    outcome, count = Outcome(), int(parameters["count"])
    calls = max(1, int(parameters["bytes"]) // (count * subject.size))

    def chains(name: str) -> list[Sequence[bytes]]:
        return [named_chain(f"{name} {number}", count) for number in range(calls)]

    for keys in chains(parameters["name"]):
        blocks = subject.sources(count)
        subject.payload.stamp(keys, blocks)
        outcome.lacking += count - subject.adapter.put(keys, blocks)
        outcome.items += count
    subject.destinations(count)
    subject.kept["wanted"] = cycle(chains(parameters["wanted"]))
    return outcome


def mingle(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Get wanted blocks, ``count`` a call, and put new ones at every ``puts``th call.

    It lasts for ``seconds`` on the wall: all clients begin and end together. ``puts`` 0 is never.
    """
    outcome, count, puts = Outcome(), int(parameters["count"]), int(parameters["puts"])
    end = _clock() + float(parameters["seconds"])
    began = _clock()
    for call in counting(1):
        if puts and call % puts == 0:
            _put(subject, count, outcome)
        else:
            _get(subject, outcome, whole=False)
        if _clock() >= end:
            break
    outcome.seconds = _clock() - began
    # Every byte of one call's blocks: among so many clients to compare all would show in the times.
    outcome.wrong += _get(subject, Outcome(), whole=True)
    return outcome


def _put(subject: Subject, count: int, outcome: Outcome) -> None:
    keys, blocks = new_chain(count), subject.sources(count)
    subject.payload.stamp(keys, blocks)
    began = _clock()
    stored = subject.adapter.put(keys, blocks)
    _note(subject, outcome, _clock() - began, count, stored)


def _get(subject: Subject, outcome: Outcome, *, whole: bool) -> int:
    """Get the next chain; return how many of its blocks were wrong."""
    keys: Sequence[bytes] = next(subject.kept["wanted"])
    into = subject.destinations(len(keys))
    subject.payload.wipe(into)
    began = _clock()
    came = subject.adapter.get(keys, into)
    _note(subject, outcome, _clock() - began, len(keys), came)
    found = wrong(subject.payload, keys, into, came, whole=whole)
    outcome.wrong += found
    return found


def _note(subject: Subject, outcome: Outcome, seconds: float, count: int, done: int) -> None:
    outcome.samples.append(seconds)
    outcome.bytes += done * subject.size
    outcome.items += count
    outcome.lacking += count - done
