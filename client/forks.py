"""Clients in the child of a fork: they begin anew.

Parent and child would otherwise talk on one socket, and one get the other's blocks for its own; a
copy would wait for a thread that only the parent has; and the node would hold a dead parent's pins
for as long as the child lives.
"""

from __future__ import annotations

import os
from typing import Final, Protocol
from weakref import WeakSet


class Forked(Protocol):
    """What must not go on in a child as if nothing had happened."""

    def begin_anew(self) -> None:
        """Forget all that is the parent's, without a word to the node."""


_watched: Final[WeakSet[Forked]] = WeakSet()


def watch(client: Forked) -> None:
    """Have ``client`` begin anew in every child that this process forks."""
    _watched.add(client)


def _begin_anew() -> None:
    for client in list(_watched):
        client.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)
