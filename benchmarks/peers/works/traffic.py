"""Reading and writing under eviction: prefixes of uneven popularity, more of them than fit.

Each request is for one prefix: what is held of it is fetched, and where something was missing all
of it is put, as an engine does that has computed it. A store keeps what its own policy makes it
keep.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers.payload import named_chain
from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works.checks import wrong

EXPONENT = 0.8
"""Of Zipf's law: with it the tenth of the prefixes that is asked for most gets about half of the
requests where there are some hundreds."""
_SEED = 7
_clock = time.perf_counter


class Popularity:
    """Which of so many prefixes is wanted next; the same order in every process.

    Args:
        prefixes: how many there are; 0 is the most popular one.
    """

    def __init__(self, prefixes: int) -> None:
        weights = np.arange(1, prefixes + 1) ** -EXPONENT
        self._bounds = np.cumsum(weights) / weights.sum()
        self._random = np.random.default_rng(_SEED)

    def next(self) -> int:
        """Number of a prefix."""
        drawn = int(np.searchsorted(self._bounds, self._random.random(), side="right"))
        return min(drawn, len(self._bounds) - 1)


def fill(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put every prefix once, the most popular one last: the state in which `requests` begins."""
    outcome, count = Outcome(), int(parameters["count"])
    subject.adapter.remove_all()
    for number in reversed(range(_prefixes(subject, parameters))):
        _put(subject, number, count, outcome)
    subject.kept["popularity"] = Popularity(_prefixes(subject, parameters))
    return outcome


def requests(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Serve requests until the calls for them add up to ``seconds``.

    Each prefix is ``count`` blocks, all of them together ``factor`` times the store's capacity. A
    sample is the time of one request. ``hits`` says how many blocks were held, in per cent.
    """
    outcome, count = Outcome(), int(parameters["count"])
    popularity: Popularity = subject.kept["popularity"]
    found, total = 0, 0.0
    while total < float(parameters["seconds"]):
        number = popularity.next()
        began = len(outcome.samples)
        came = _get(subject, number, count, outcome)
        found += came
        if came < count:
            _put(subject, number, count, outcome)
        outcome.samples[began:] = [sum(outcome.samples[began:])]
        total += outcome.samples[-1]
    outcome.figures["hits"] = 100 * found / (count * len(outcome.samples))
    return outcome


def _prefixes(subject: Subject, parameters: Mapping[str, Any]) -> int:
    together = float(parameters["factor"]) * int(subject.settings["capacity"])
    return max(1, round(together / (int(parameters["count"]) * subject.size)))


def _get(subject: Subject, number: int, count: int, outcome: Outcome) -> int:
    keys, into = named_chain(f"traffic {number}", count), subject.destinations(count)
    subject.payload.wipe(into)
    began = _clock()
    came = subject.adapter.get(keys, into)
    outcome.samples.append(_clock() - began)
    outcome.bytes += came * subject.size
    outcome.items += count
    outcome.wrong += wrong(subject.payload, keys, into, came)
    return came


def _put(subject: Subject, number: int, count: int, outcome: Outcome) -> None:
    keys, blocks = named_chain(f"traffic {number}", count), subject.sources(count)
    subject.payload.stamp(keys, blocks)
    began = _clock()
    subject.adapter.put(keys, blocks)
    outcome.samples.append(_clock() - began)
    outcome.bytes += count * subject.size
