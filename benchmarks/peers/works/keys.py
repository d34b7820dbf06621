"""What a key costs in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.peers.payload import POSITIONS, new_chain
from benchmarks.peers.subject import Outcome, Subject

MILLION: Final = 1_000_000


def keys(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Put ``count`` blocks as small as they get, and see how the store's memory has grown.

    The figure is ``bytes``, of a million keys without their blocks.

    Raises:
        RuntimeError: the store doesn't say what it takes.
    """
    outcome, count = Outcome(), int(parameters["count"])
    adapter, blocks = subject.adapter, subject.sources(POSITIONS)
    before = adapter.memory()
    if not before:
        raise RuntimeError("it does not say what its keys take")
    while outcome.items < count:
        chain = new_chain(POSITIONS)
        subject.payload.stamp(chain, blocks)
        outcome.lacking += POSITIONS - adapter.put(chain, blocks)
        outcome.items += POSITIONS
    stored = max(1, outcome.items - outcome.lacking)
    payload = 0 if adapter.blocks_apart else stored * subject.size
    outcome.figures["bytes"] = max(0, adapter.memory() - before - payload) * MILLION / stored
    return outcome
