"""Which node each request of a trace goes to, where that doesn't hang on what nodes hold. Pure.

A simulation and a replay with the same seed send each request to the same node.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from random import Random
from typing import Final

from kvstore.errors import ConfigError

ROUTINGS: Final = ("random", "round-robin")
"""Any node; each in turn."""


def homes(routing: str, nodes: int, seed: int = 0) -> Iterator[int]:
    """The home of one request after the other, without end.

    Args:
        routing: one of `ROUTINGS`.
        nodes: how many there are, at least 1.
        seed: of what is random.

    Raises:
        ConfigError: there is no such routing.
    """
    if routing not in ROUTINGS:
        raise ConfigError(f"no routing is called {routing!r}; there are {', '.join(ROUTINGS)}")
    return cycle(range(nodes)) if routing == "round-robin" else _at_random(nodes, Random(seed))


def _at_random(nodes: int, random: Random) -> Iterator[int]:
    while True:
        yield random.randrange(nodes)
