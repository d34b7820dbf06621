"""Whether lookups are tried: one that misses its deadline closes the way for those after it. Pure.

Nobody who asks pays for finding out whether the directory is back: that is done in the background,
by probes that must answer as fast as the lookup should have that failed. The first is due at once,
so that a single late answer closes the way for hardly longer than it takes to ask again; only
probes that fail make pauses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.protocol.breaker import Breaker, Decision

FAIR_SECONDS: Final = 0.002
"""A lookup that was given less time than this says nothing of the directory by being late."""

_MOST_ROUTES: Final = 1024


class Probe(NamedTuple):
    """What is to be tried.

    Attributes:
        route: of which server.
        tag: what to look up there.
        seconds: how long it may take.
    """

    route: str
    tag: bytes
    seconds: float


@dataclass(slots=True)
class _Way:
    tag: bytes
    seconds: float
    breaker: Breaker = field(default_factory=Breaker)


class Gate:
    """The ways to the servers of a directory; each is open until a lookup fails."""

    def __init__(self) -> None:
        self._closed: dict[str, _Way] = {}

    @property
    def closed(self) -> bool:
        """Whether any way is."""
        return bool(self._closed)

    def open(self, route: str) -> bool:
        """Whether a lookup shall be tried."""
        return route not in self._closed

    def failed(self, route: str, tag: bytes, seconds: float) -> None:
        """Take note that a lookup had no answer within its seconds."""
        if seconds < FAIR_SECONDS or route in self._closed:
            return
        if len(self._closed) >= _MOST_ROUTES:
            self._closed.clear()
        self._closed[route] = _Way(tag, seconds)

    def probe_failed(self, route: str, now: float) -> None:
        """Take note that a probe had no answer within its seconds."""
        way = self._closed.get(route)
        if way is not None:
            way.breaker.connect_failed(now)

    def answered(self, route: str) -> None:
        """Take note that a probe had an answer in time."""
        self._closed.pop(route, None)

    def probes(self, now: float) -> Iterator[Probe]:
        """What is to be tried now, to see whether ways are open again."""
        for route, way in list(self._closed.items()):
            if way.breaker.decide(now) is not Decision.REFUSE:
                yield Probe(route, way.tag, way.seconds)
