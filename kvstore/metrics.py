"""Counters and histograms of one node, cheap enough to touch on every request.

The node adds to plain integers and bisect-indexed buckets from its event loop; nothing is locked,
formatted or allocated there. ``kvstore.exposition`` reads the totals when Prometheus scrapes.

Hits and misses are counted by block, and only through ``hit`` and ``miss``, so that
``hits + misses == lookups`` always holds.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

from kvstore.accounts import Account
from kvstore.departures import DepartureReason

Direction = Literal["in", "out"]
MissReason = Literal["absent", "pending", "corrupt", "no_space", "medium", "deadline"]
"""Why a block was a miss: not held; still being written; failed its checksum; no room to bring it
up; its medium failed; not there within the deadline."""
PutOutcome = Literal["stored", "held", "busy", "refused", "aborted"]
CopyOutcome = Literal["made", "short", "dropped", "gone"]
"""What came of copies: as many machines hold the block as was asked for; fewer do, as there are no
more that would take it; too much was waiting to be copied; the block had left before."""

MOST_OWNERS: Final = 4096
"""Nodes that pulls are counted by; pools have fewer, but names come from other machines."""

TRANSPORTS: Final = ("shm", "rdma", "tcp")
"""The transports of this version, by name."""

LATENCY_BUCKETS: Final = tuple(
    float(f"{base}e{exponent}") for exponent in range(-6, 1) for base in (1, 2, 5)
)
"""Upper bounds in seconds, from a microsecond to five seconds, three a decade."""


class Histogram:
    """Observations counted by bucket; ``observe`` costs well under a microsecond.

    Attributes:
        bounds: inclusive upper bounds, ascending.
        counts: observations of each bucket, with a last one for what is above all bounds.
        total: sum of all observations.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation (seconds for latencies)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Upper bound of the bucket that holds the ``share`` quantile; 0 without observations.

        What lies above every bound is reported as the last bound.
        """
        wanted = share * self.count
        seen = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound
        return self.bounds[-1] if self.count else 0.0


@dataclass(slots=True)
class Occupancy:
    """What a tier holds, in bytes and blocks; ``lost`` is neither free for use nor holding any."""

    capacity: int = 0
    used: int = 0
    lost: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class RdmaState:
    """The RDMA device as it is now, and what it has done since the node started.

    Attributes:
        up: whether sessions can use it.
        openings: how often it was opened; more than once after it failed.
        registered_bytes: of the node's memory.
        queue_pairs: connected now.
        queue_pairs_made: since the start.
        chains: of work requests posted.
        work_requests: posted.
        written_bytes: to clients.
        read_bytes: from clients.
        failures: queue pairs that ended in error, by reason.
    """

    up: bool = False
    openings: int = 0
    registered_bytes: int = 0
    queue_pairs: int = 0
    queue_pairs_made: int = 0
    chains: int = 0
    work_requests: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Metrics:
    """Everything one node counts. The event loop's thread is the only one that writes.

    Counters of several labels are keyed by tuples in the order of the names below.
    """

    hits: Counter[str] = field(default_factory=Counter)
    """Blocks found, by tier."""
    misses: Counter[MissReason] = field(default_factory=Counter)
    """Blocks not found, by reason."""
    lookups: int = 0
    """Blocks asked for by get."""
    matched: Counter[Literal["held", "remote", "absent"]] = field(default_factory=Counter)
    """Blocks asked for by match and exists, by answer; they are no lookups."""
    moved_bytes: Counter[tuple[str, Direction]] = field(default_factory=Counter)
    """Payload bytes; ``in`` is towards the node."""
    puts: Counter[PutOutcome] = field(default_factory=Counter)
    """Blocks offered by put, by what became of them."""
    pulls: Counter[PutOutcome] = field(default_factory=Counter)
    """Blocks that other nodes hold and this one wanted, by what became of them."""
    pulled_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks received from other nodes, by the node's name."""
    pulled_bytes: Counter[str] = field(default_factory=Counter)
    """Likewise in bytes."""
    pull_failures: Counter[str] = field(default_factory=Counter)
    """Other nodes that did not bring what they were thought to hold, by reason."""
    copies: Counter[CopyOutcome] = field(default_factory=Counter)
    """Blocks stored here of which copies on other nodes were asked for, by what came of it."""
    offered: Counter[str] = field(default_factory=Counter)
    """Blocks that other nodes offered: ``taken``, ``held`` before, or why they were not taken."""
    wrong_hints: int = 0
    """Times that another node turned out not to hold what the directory said."""
    evictions: Counter[tuple[str, DepartureReason]] = field(default_factory=Counter)
    """Extents given up, by tier and reason."""
    demotions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Blocks moved down, by (from, to)."""
    promotions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Blocks copied up, by (from, to)."""
    errors: Counter[str] = field(default_factory=Counter)
    """Requests answered with an error, by the error's code."""
    requests: Counter[str] = field(default_factory=Counter)
    """Requests answered, by operation."""
    match_seconds: Histogram = field(default_factory=Histogram)
    get_seconds: Histogram = field(default_factory=Histogram)
    put_seconds: Histogram = field(default_factory=Histogram)
    ssd_read_seconds: Histogram = field(default_factory=Histogram)
    ssd_write_seconds: Histogram = field(default_factory=Histogram)
    tenants: tuple[Account, ...] = ()
    """What each tenant of the configuration holds, and all others together."""
    occupancy: dict[str, Occupancy] = field(default_factory=dict)
    """Filled in by the node's ``refresh`` before a scrape (see ``kvstore.exposition``)."""
    rdma: RdmaState = field(default_factory=RdmaState)
    """Likewise."""
    gpus: dict[str, bool] = field(default_factory=dict)
    """Likewise: whether each GPU of the HBM tier is in use, by its number."""
    sessions: int = 0
    """Sessions open now."""
    transports: Counter[str] = field(default_factory=Counter)
    """Sessions open now, by transport."""
    sessions_opened: int = 0
    """Sessions accepted since the start."""
    pins: int = 0
    """Pins held now, by sessions and administrators together."""
    reservations: int = 0
    """Blocks reserved and not yet committed."""
    followers: int = 0
    """Who follows the node's events now."""
    follower_failures: Counter[Literal["gap", "stuck"]] = field(default_factory=Counter)
    """Followers that were too slow: events were lost to them, or they were cut off."""
    internal_errors: int = 0
    """Exceptions caught at a boundary that names them; anything above 0 is a bug."""

    def hit(self, tier: str, blocks: int = 1) -> None:
        """Count blocks that a get found in ``tier``."""
        self.hits[tier] += blocks
        self.lookups += blocks

    def miss(self, reason: MissReason, blocks: int = 1) -> None:
        """Count blocks that a get did not return, and why."""
        self.misses[reason] += blocks
        self.lookups += blocks

    def moved(self, transport: str, direction: Direction, size: int) -> None:
        """Count payload bytes towards (``in``) or from (``out``) the node."""
        self.moved_bytes[transport, direction] += size

    def pulled(self, node: str, blocks: int, size: int) -> None:
        """Count blocks, of ``size`` bytes together, that came from another node.

        Names beyond ``MOST_OWNERS`` count as ``others``.
        """
        if node not in self.pulled_bytes and len(self.pulled_bytes) >= MOST_OWNERS:
            node = "others"
        self.pulled_blocks[node] += blocks
        self.pulled_bytes[node] += size

    def latencies(self) -> dict[str, Histogram]:
        """The histograms by operation: match, get, put, ssd_read, ssd_write."""
        return {
            "match": self.match_seconds,
            "get": self.get_seconds,
            "put": self.put_seconds,
            "ssd_read": self.ssd_read_seconds,
            "ssd_write": self.ssd_write_seconds,
        }
