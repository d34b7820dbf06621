"""What a node must answer for its operators: plain dataclasses, and the protocol that gives them.

The gRPC service (``kvstore.control.service``) translates between these and the wire and holds the
bounds below before it calls; the node implements ``ControlTarget`` without knowing of gRPC.

Hashes and namespace fingerprints are 32 raw bytes. Ages are seconds before now, so that no two
clocks are compared. Errors are raised as ``kvstore.errors`` classes and reach the caller as such.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, Protocol

MAX_HASHES: Final = 65536
"""Hashes in one request."""
MAX_PAGE: Final = 1000
"""Blocks in one answer."""
MAX_NAMESPACES: Final = 10_000
"""Namespaces in one answer; the target gives those with most bytes."""
MAX_CORRUPT: Final = 100
"""Corrupt blocks named by one ``verify``; all are counted."""
MIN_BEGINNING: Final = 8
"""Hex digits by which a block may be named if they are unique."""
MAX_PIN_SECONDS: Final = 366 * 86400.0
"""Longest lifetime of a pin that has one."""

Tier = Literal["hbm", "dram", "ssd"]


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier: its space in bytes, what it holds, and what describes its medium."""

    name: str
    capacity: int
    used: int
    lost: int
    """Bytes neither free for use nor holding a block."""
    blocks: int
    state: str = "ok"
    """``ok``, or why the tier takes no more blocks."""
    details: Mapping[str, str] = field(default_factory=dict)
    """What describes the medium, for people: policy, directory, segments, huge pages."""


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What one tenant holds, in bytes, and its quotas where it has any."""

    name: str
    """``*``: all tenants without a section in the configuration."""
    dram: int
    ssd: int
    dram_quota: int | None = None
    ssd_quota: int | None = None
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Who the node is and how it does."""

    name: str
    incarnation: str
    version: str
    pid: int
    uptime: float
    state: Literal["starting", "serving", "draining", "stopping"]
    listens: tuple[str, ...]
    """URLs that clients may connect to, and those of control plane and metrics."""
    sessions: int
    namespaces: int
    blocks: int
    pins: int
    reservations: int
    tiers: tuple[TierReport, ...]
    transports: Mapping[str, int] = field(default_factory=dict)
    """Sessions open, by transport."""
    rdma: str = ""
    """The RDMA device, port and GID in use, or why there is none."""
    tenants: tuple[TenantReport, ...] = ()


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """One namespace that the node knows, with what it holds of it."""

    fingerprint: bytes
    description: Mapping[str, str | int]
    """The fields as ``identity.Namespace.describe`` gives them; empty if only the hash is known."""
    blocks: int
    bytes: int
    shards: tuple[int, ...]
    """Shards of which the node holds anything."""
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block of one shard."""

    namespace: bytes
    shard: int
    hash: bytes
    parent: bytes
    """The parent's hash; ``identity.ROOT_PARENT`` for the first block of a prefix."""
    state: Literal["committed", "reserved"]
    tiers: tuple[str, ...]
    """Tiers that hold a copy, fastest first."""
    size: int
    children: int
    age: float
    idle: float
    """Seconds since the last use."""
    pins: int
    checksum: int | None = None
    """crc32c of the payload, where it is known."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """Enough to name a block: its namespace and its hash."""

    namespace: bytes
    hash: bytes


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """Which blocks to list, and from where; None means any."""

    namespace: bytes | None = None
    shard: int | None = None
    tier: str | None = None
    cursor: bytes = b""
    """Empty for the first page, else the cursor of the page before."""
    limit: int = 100


@dataclass(frozen=True, slots=True)
class BlockPage:
    """Some blocks, and the cursor of the next page: empty where this one is the last."""

    blocks: tuple[BlockReport, ...]
    cursor: bytes = b""


@dataclass(frozen=True, slots=True)
class MatchReport:
    """How far a prefix reaches: the slowest tier over the shards, for each block that is held.

    Tier ``remote`` stands for other nodes of the pool, as its directory says.
    """

    asked: int
    tiers: tuple[str, ...]

    @property
    def blocks(self) -> int:
        """Length of the longest contiguous prefix held, in blocks."""
        return len(self.tiers)


class Ending(StrEnum):
    """Why a prefix ends where it does."""

    COMPLETE = "complete"
    """It does not: all blocks asked for are held."""
    NEVER_STORED = "never_stored"
    """Nobody stored the next block since the node keeps record."""
    FORGOTTEN = "forgotten"
    """It was never stored, or left so long ago that the node no longer remembers."""
    DEPARTED = "departed"
    """It was stored and left: ``tier``, ``reason`` and ``ago`` say from where, why and when."""
    PENDING = "pending"
    """It is being written now."""
    SHARD_ABSENT = "shard_absent"
    """Some shards hold it, but not ``shard``."""
    OTHER_NAMESPACE = "other_namespace"
    """Only another namespace holds it: ``nearest`` and ``differences`` say which and how."""
    CORRUPT = "corrupt"
    """Its bytes did not match their checksum, so it was dropped."""
    NODE_GONE = "node_gone"
    """The node that held it left the cluster."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prefix ends; fields that the ending does not use keep their defaults."""

    asked: int
    blocks: int
    """Blocks held before the end."""
    ending: Ending
    hash: bytes = b""
    """The first block that is not held; empty if all are."""
    shard: int | None = None
    tier: str = ""
    reason: str = ""
    """A ``departures.DepartureReason``."""
    ago: float | None = None
    nearest: bytes = b""
    """Fingerprint of the namespace that differs least."""
    differences: tuple[str, ...] = ()
    """``field: ours is X, theirs is Y``, one a field."""
    remote: int = 0
    """Blocks after those held here that other nodes of the pool hold, as its directory says."""
    gone: str = ""
    """The node that held the block after all these, and has left the pool."""


@dataclass(frozen=True, slots=True)
class PinReport:
    """An administrator's pin on a prefix, named by its last block."""

    namespace: bytes
    hash: bytes
    blocks: int
    bytes: int
    expires: float | None
    """Seconds until it ends by itself, or None."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What ``evict``, ``flush`` or ``unpin`` did, in blocks of one shard."""

    blocks: int
    """Blocks that left (or, for unpin, that are no longer pinned)."""
    bytes: int
    moved: int = 0
    """Blocks that a flush copied to the tier below first."""
    kept: int = 0
    """Blocks left in place because they are pinned or in use."""


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """How far a verification is. The last one has ``finished`` set."""

    checked: int
    """Blocks looked at; a copy whose checksum nobody took is one of them."""
    total: int
    """Blocks to look at, less those that have gone meanwhile."""
    bytes: int
    corrupt: int = 0
    unreadable: int = 0
    """Blocks that the medium did not give back: not known to be wrong."""
    names: tuple[BlockName, ...] = ()
    """Blocks found corrupt since the progress before."""
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles of one operation's latency since the start, in seconds."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The node's counters at one moment, for ``top``: rates come from two of them.

    ``kvstore.control.snapshot.take`` builds it from ``kvstore.metrics.Metrics``.
    """

    clock: float
    """The node's monotonic clock, in seconds; only differences mean anything."""
    lookups: int
    hits: Mapping[str, int]
    misses: Mapping[str, int]
    puts: Mapping[str, int]
    moved_bytes: Mapping[str, int]
    """By ``transport direction``, as in ``shm out``."""
    evictions: Mapping[str, int]
    """By ``tier reason``."""
    demotions: int
    promotions: int
    sessions: int
    pins: int
    reservations: int
    latencies: Mapping[str, Latency]
    tiers: tuple[TierReport, ...]
    matched: Mapping[str, int] = field(default_factory=dict)
    """Blocks asked for by match and exists, ``held`` or ``absent``; they are no lookups."""


class ControlTarget(Protocol):
    """A node, as its operators see it.

    Methods run on the node's event loop: what touches a medium is awaited, never blocking.
    """

    async def status(self) -> NodeStatus:
        """Identity, addresses and totals."""
        ...

    async def snapshot(self) -> Snapshot:
        """Counters for a live view; cheap enough for several calls a second."""
        ...

    async def namespaces(self) -> Sequence[NamespaceReport]:
        """Namespaces known, those with most bytes first, at most ``MAX_NAMESPACES``."""
        ...

    async def find(
        self, beginning: str, namespace: bytes | None, limit: int
    ) -> Sequence[BlockName]:
        """Held blocks whose hash begins with these lower-case hex digits, at most ``limit``."""
        ...

    async def list_blocks(self, query: BlockQuery) -> BlockPage:
        """A page of blocks in an order that stays put while blocks come and go.

        Raises:
            InvalidRequest: the cursor is not one of this node's.
        """
        ...

    async def inspect(
        self, namespace: bytes, hash: bytes, *, prefix: bool, limit: int
    ) -> Sequence[BlockReport]:
        """The block, once for each shard that holds it; nothing where none does.

        With ``prefix``, also the blocks before it, root first, then by shard; at most ``limit``
        reports, the last ones of the prefix.
        """
        ...

    async def match(self, namespace: bytes, hashes: Sequence[bytes]) -> MatchReport:
        """How far the prefix reaches, without counting as a use of its blocks."""
        ...

    async def explain(self, namespace: bytes, hashes: Sequence[bytes]) -> Explanation:
        """Why the prefix ends where it does. An unknown namespace is an answer, not an error."""
        ...

    async def pin(self, namespace: bytes, hash: bytes, seconds: float | None) -> PinReport:
        """Keep the block and all before it, on every shard, for ``seconds`` or until unpinned.

        Pinning what is pinned replaces the lifetime.

        Raises:
            InvalidRequest: the node does not hold the block.
            OutOfSpace: too much would be pinned.
        """
        ...

    async def pins(self) -> Sequence[PinReport]:
        """Administrators' pins, at most ``MAX_PAGE``."""
        ...

    async def unpin(self, namespace: bytes, hash: bytes) -> Removal:
        """End the pin named by its last block; ``blocks`` is 0 where there was none."""
        ...

    async def evict(self, namespace: bytes, hash: bytes | None) -> Removal:
        """Drop the block and all after it from every tier and shard; without ``hash``, everything.

        Blocks that are pinned, and those they follow, stay and are counted as ``kept``.
        """
        ...

    async def flush(self, tier: str) -> Removal:
        """Empty a tier; pinned blocks stay.

        Blocks that only this tier holds are copied to the tier below where there is one with room,
        and dropped otherwise.

        Raises:
            InvalidRequest: the node has no such tier.
        """
        ...

    def verify(self, namespace: bytes | None, tier: str | None) -> AsyncIterator[VerifyProgress]:
        """Compare all committed blocks with their checksums, dropping what is corrupt.

        With a tier, only what lies there is looked at and counted. Yields progress at least once a
        second and once at the end. Ends when the iterator is closed.

        Raises:
            InvalidRequest: the node has no such tier.
        """
        ...
