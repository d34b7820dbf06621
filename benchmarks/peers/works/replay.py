"""The requests of a real trace, as an engine would serve them.

Of each it asks how far it is held, gets that and puts the rest. Bytes are made and compared outside
the times.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.peers.payload import POSITIONS
from benchmarks.peers.subject import Outcome, Subject
from benchmarks.peers.works.checks import wrong

CALL_BYTES = 8 << 20
"""Most bytes in one call."""
_clock = time.perf_counter


def replay(subject: Subject, parameters: Mapping[str, Any]) -> Outcome:
    """Serve the first ``requests`` of the trace at ``path``, under names that nobody has put.

    A store that evicts may be full of what an earlier turn put.

    A sample is the time of one request, ``seconds`` that of all of them. ``hits`` says
    how many blocks the store had when they were wanted, in per cent. With ``views`` blocks are seen
    where they lie instead of copied.

    Raises:
        OSError: there is no such trace.
    """
    subject.adapter.remove_all()
    run, salt = _Replay(subject, views=bool(parameters.get("views"))), os.urandom(16)
    for ids in islice(_requests(Path(parameters["path"])), int(parameters["requests"])):
        run.serve([_key(salt, number, position) for position, number in enumerate(ids)])
    outcome = run.outcome
    outcome.seconds = outcome.figures["seconds"] = sum(outcome.samples)
    outcome.figures["hits"] = 100 * run.held / outcome.items
    return outcome


def _requests(path: Path) -> Iterator[Sequence[int]]:
    """The block ids of each request."""
    with path.open() as file:
        for line in file:
            ids: Sequence[int] = json.loads(line)["hash_ids"]
            if ids:
                yield ids


def _key(salt: bytes, number: int, position: int) -> bytes:
    """An id means the same tokens and the same prefix wherever it appears, so the same position."""
    return hashlib.sha256(b"%b %d" % (salt, number)).digest()[:-1] + bytes([position % POSITIONS])


class _Replay:
    """The calls of one replay, timed.

    Attributes:
        outcome: so far.
        held: blocks that came.
    """

    def __init__(self, subject: Subject, *, views: bool) -> None:
        self.outcome = Outcome()
        self.held = 0
        self._subject = subject
        self._views = views
        self._most = max(CALL_BYTES // subject.size // POSITIONS, 1) * POSITIONS

    def serve(self, keys: Sequence[bytes]) -> None:
        """One request."""
        self.outcome.samples.append(0.0)
        self.outcome.items += len(keys)
        began = _clock()
        reach = self._subject.adapter.exists(keys)
        self._took(began)
        came = self._fetch(keys[:reach])
        self.held += came
        self._put(keys, came)

    def _took(self, began: float) -> None:
        self.outcome.samples[-1] += _clock() - began

    def _fetch(self, keys: Sequence[bytes]) -> int:
        fetch = self._view if self._views else self._get
        came = 0
        for start in range(0, len(keys), self._most):
            part = keys[start : start + self._most]
            found = fetch(part)
            came += found
            if found < len(part):
                break
        self.outcome.bytes += came * self._subject.size
        return came

    def _get(self, keys: Sequence[bytes]) -> int:
        subject = self._subject
        into = subject.destinations(len(keys))
        subject.payload.wipe(into)
        began = _clock()
        came = subject.adapter.get(keys, into)
        self._took(began)
        self.outcome.wrong += wrong(subject.payload, keys, into, came)
        return came

    def _view(self, keys: Sequence[bytes]) -> int:
        subject = self._subject
        began = _clock()
        with subject.adapter.view(keys, subject.size) as views:
            self._took(began)
            for key, block in zip(keys, views, strict=True):
                self.outcome.wrong += block is not None and not subject.payload.equal(key, block)
            came = sum(block is not None for block in views)
            began = _clock()
        self._took(began)
        return came

    def _put(self, keys: Sequence[bytes], held: int) -> None:
        """Store what follows the first ``held`` blocks, until the store takes no more."""
        subject = self._subject
        for start in range(held, len(keys), self._most):
            part = keys[start : start + self._most]
            offset = start % POSITIONS
            blocks = subject.sources(offset + len(part))[offset:]
            subject.payload.stamp(part, blocks)
            began = _clock()
            stored = subject.adapter.put_after(keys[:start], part, blocks)
            self._took(began)
            self.outcome.bytes += len(part) * subject.size
            if stored < len(part):
                break
