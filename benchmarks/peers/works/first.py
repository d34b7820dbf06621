"""The first block of a store that has just been started."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.payload import new_chain
from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works.checks import wrong


def first(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put one block and get it back; again until the store has it, for ``seconds`` at most."""
    outcome, keys = Outcome(items=1, lacking=1), new_chain(1)
    blocks, into = subject.sources(1), subject.destinations(1)
    subject.payload.stamp(keys, blocks)
    subject.payload.wipe(into)
    until = time.monotonic() + float(parameters["seconds"])
    while outcome.lacking and time.monotonic() < until:
        subject.adapter.put(keys, blocks)
        came = subject.adapter.get(keys, into)
        outcome.lacking = 1 - came
        outcome.wrong += wrong(subject.payload, keys, into, came)
    return outcome
