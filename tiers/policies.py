"""The policies there are, by name."""

from __future__ import annotations

from typing import Final

from tiers.arc import Arc
from tiers.fifo import Fifo
from tiers.lru import Lru
from tiers.policy import Policy

POLICIES: Final[dict[str, type[Policy]]] = {kind.name: kind for kind in (Lru, Arc, Fifo)}


def make_policy(name: str, capacity: int) -> Policy:
    """A new policy for a tier of `capacity` items.

    Raises:
        ValueError: there is no policy of that name, or the capacity is less than 1.
    """
    kind = POLICIES.get(name)
    if kind is None:
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")
    return kind(capacity)
