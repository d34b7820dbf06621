"""More blocks than memory holds: how fast they are stored for good, and read once they are cold."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.payload import named_chain
from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works.checks import wrong

_CACHES = Path("/proc/sys/vm/drop_caches")
_clock = time.perf_counter


def store(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put ``bytes`` of new blocks under ``name``, ``count`` a call, as fast as they are taken.

    What is refused or dropped because the disk can't keep up is no failure here: `fetch` says how
    much comes back.
    """
    outcome = Outcome()
    subject.adapter.remove_all()
    for keys in _chains(subject, parameters):
        blocks = subject.sources(len(keys))
        subject.payload.stamp(keys, blocks)
        began = _clock()
        subject.adapter.put(keys, blocks)
        outcome.samples.append(_clock() - began)
        outcome.bytes += len(keys) * subject.size
        outcome.items += len(keys)
    return outcome


def fetch(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Get all of it once, in the order in which it was put.

    So what is in memory has always been pushed out again by the time its turn comes. ``settle``
    seconds pass first, and with ``cold`` the kernel's page cache is emptied where we may. ``hits``
    says how many blocks came, in per cent: to lose some is no failure here, but what the row tells.
    """
    outcome, found = Outcome(), 0
    time.sleep(float(parameters["settle"]))
    if parameters["cold"]:
        _empty_page_cache()
    for keys in _chains(subject, parameters):
        into = subject.destinations(len(keys))
        subject.payload.wipe(into)
        began = _clock()
        came = subject.adapter.get(keys, into)
        outcome.samples.append(_clock() - began)
        outcome.bytes += came * subject.size
        outcome.items += len(keys)
        found += came
        outcome.wrong += wrong(subject.payload, keys, into, came)
    outcome.figures["hits"] = 100 * found / outcome.items
    return outcome


def _chains(subject: Subject, parameters: Mapping[str, Any]) -> Iterator[Sequence[bytes]]:
    count, name = int(parameters["count"]), str(parameters["name"])
    calls = max(1, int(parameters["bytes"]) // (count * subject.size))
    return (named_chain(f"{name} {number}", count) for number in range(calls))


def _empty_page_cache() -> None:
    """So that what went through the kernel's cache is read from the disk; only root may."""
    os.sync()
    with suppress(OSError):
        _CACHES.write_text("1")
