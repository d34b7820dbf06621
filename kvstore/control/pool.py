"""What a node says of its pool, and of itself as one of its members: plain data.

``kvstore.control.pool_service`` puts it on the wire; the node implements ``PoolTarget``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

MAX_PULLS: Final = 1000
"""Owners named in one answer; those of most bytes are."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One member of the pool, as the node that was asked has heard of it last."""

    number: int
    """Of its membership; 0 for the node that was asked while it is no member."""
    node: str
    incarnation: str
    host: str
    """Names the machine that it runs on."""
    data: str
    control: str
    """``host:port`` of its control plane; empty where it has none."""
    asked: bool = False
    """Whether this is the node that was asked."""
    summary: Mapping[str, float] = field(default_factory=dict)
    """What it told the directory of itself last; see ``LoadReport.figures``."""


@dataclass(frozen=True, slots=True)
class GoneReport:
    """A member that left or died since the node that was asked has been in the pool."""

    number: int
    node: str
    ago: float
    """Seconds since it was missed."""


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """How the directory does, as seen by the node that was asked."""

    kind: str
    """``redis``, or ``memory`` within one process."""
    reachable: bool
    heard: float | None = None
    """Seconds since it last answered a sign of life; None if it never did."""
    failing: float | None = None
    """Seconds since it ceased to answer; None where it answers."""
    operations: Mapping[str, int] = field(default_factory=dict)
    """What it answered since the node's start, by kind."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """What it did not, by ``kind code``, as in ``reach deadline_exceeded``."""
    refused: int = 0
    """Lookups that were not tried, because it had not answered before."""
    queued: int = 0
    """Changes that wait to be told."""
    joins: int = 0
    """How often the node became a member."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The pool, as the node that was asked sees it."""

    pool: str
    members: tuple[MemberReport, ...]
    """By number; the node that was asked is among them, also while it is no member."""
    gone: tuple[GoneReport, ...]
    """Members that were missed lately, the last one first."""
    directory: DirectoryReport


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a node has received from another one since its start."""

    node: str
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a member holds and does."""

    node: str
    incarnation: str
    figures: Mapping[str, float]
    """``blocks``; ``dram_used``, ``dram_capacity`` and the same of ``ssd`` in bytes; ``sessions``;
    ``uptime`` in seconds; ``lookups``, ``hits`` and ``remote_hits`` in blocks since the start;
    ``pulled_bytes``; the rates of ``kvstore.heat``; 1 for ``draining`` while it leaves."""
    pulls: tuple[PullReport, ...]
    """By owner, those of most bytes first."""


class PoolTarget(Protocol):
    """A node, as a member of its pool."""

    async def pool(self) -> PoolReport:
        """The pool as this node sees it.

        Raises:
            InvalidRequest: it is in none.
        """
        ...

    async def load(self) -> LoadReport:
        """This node's own figures, as they are now."""
        ...
