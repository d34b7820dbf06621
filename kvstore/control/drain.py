"""What is asked of a node that is to leave its pool, and what it says of its progress."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

DrainState = Literal["serving", "draining", "drained"]

MAX_SECONDS = 86_400.0
"""Longest time that a drain may take."""


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """How a node is to be drained.

    Attributes:
        seconds: that handing over may take; what has not been handed over by then is left.
        drop: whether to leave at once, without handing anything over.
        rate: bytes a second to hand over at most; None for no limit.
        stop: whether the daemon is to stop when it has left.
    """

    seconds: float
    drop: bool = False
    rate: float | None = None
    stop: bool = False


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain has come, in blocks.

    Attributes:
        state: ``serving`` where it was cancelled or never begun, ``draining``, or ``drained``: the
            node is no member of the pool any more, accepts no puts, and serves what it holds.
        total: blocks that it holds.
        held: others had them before.
        moved: others have taken them.
        left: nobody has.
        bytes: of those that were moved.
        finished: whether this is the last word.
    """

    state: DrainState
    total: int = 0
    held: int = 0
    moved: int = 0
    left: int = 0
    bytes: int = 0
    finished: bool = False


class DrainTarget(Protocol):
    """A node that can be drained."""

    def drain(self, order: DrainOrder) -> AsyncIterator[DrainProgress]:
        """Drain the node; it comes back where the iterator is closed before the last word.

        Raises:
            InvalidRequest: it is in no pool, or is being drained already, or there is no other node
                to hand anything to.
        """

    async def resume(self) -> DrainProgress:
        """Bring the node back, from whatever state: it joins the pool and accepts puts again."""

    def stop(self) -> None:
        """Stop the daemon."""
