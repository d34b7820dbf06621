"""What a client asks of a node.

A request knows how to put its arguments into a header (``arguments``), how to check and read
them back (``parse``), and how to check and read the answer to it (``read``): an answer that does
not fit what was asked is refused there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

from kvstore.protocol import fields
from kvstore.protocol.answers import (
    ABSENT,
    FILL,
    AbortAnswer,
    Answer,
    ExistsAnswer,
    FollowAnswer,
    GetAnswer,
    MatchAnswer,
    PingAnswer,
    ReserveAnswer,
    SegmentsAnswer,
    TakeAnswer,
    Welcome,
    WriteAnswer,
)

__all__ = [
    "Abort",
    "Exists",
    "Follow",
    "Get",
    "Hello",
    "Match",
    "Ping",
    "Release",
    "Request",
    "Reserve",
    "Segments",
    "Take",
    "Write",
]

A_co = TypeVar("A_co", bound=Answer, covariant=True)


class Request(Protocol[A_co]):
    """One request of a client.

    Attributes:
        op: the number of the operation on the wire.

    """

    op: ClassVar[int]

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""

    def read(self, values: Sequence[object]) -> A_co:
        """Check and return the answer to this request that ``values`` are."""


def _as_many(number: int, expected: int, what: str) -> None:
    if number != expected:
        fields.wrong(f"{expected} {what} expected, not {number}")


@dataclass(slots=True)
class Hello:
    """Opens the session; the first request on every connection.

    Attributes:
        version: protocol version of the client.
        tenant: whose cache is meant.
        token: the tenant's credential, if the node wants one.
        namespace: the fields of the namespace (``Namespace.describe()``).
        shard: the client's shard of each block.
        transports: the transports that the client can use, the one it likes most first.
        client: a name for logs.
        offers: what the node must know to use a transport, by the transport's name.
    """

    op: ClassVar[int] = 1

    version: int
    tenant: str
    token: str | None
    namespace: dict[str, object]
    shard: int
    transports: list[str]
    client: str = ""
    offers: dict[str, object] = field(default_factory=dict)

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [
            self.version,
            self.tenant,
            self.token,
            self.namespace,
            self.shard,
            self.transports,
            self.client,
            self.offers,
        ]

    def __repr__(self) -> str:
        """Describe the request without its token."""
        return f"Hello(tenant={self.tenant!r}, shard={self.shard}, client={self.client!r})"

    @classmethod
    def parse(cls, values: Sequence[object]) -> Hello:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 8, "HELLO")
        version, tenant, token, namespace, shard, transports, client, offers = values
        if type(transports) is not list or not 0 < len(transports) <= fields.MAX_TRANSPORTS:
            fields.wrong(f"transports must be a list of 1 to {fields.MAX_TRANSPORTS} names")
        return cls(
            fields.integer(version, 0, 0xFFFF, "protocol version"),
            fields.text(tenant, "tenant"),
            None if token is None else fields.text(token, "token"),
            fields.mapping(namespace, "namespace"),
            fields.integer(shard, 0, 0xFFFF, "shard"),
            [fields.text(name, "transport") for name in transports],
            fields.text(client, "client name"),
            fields.mapping(offers, "offers"),
        )

    def read(self, values: Sequence[object]) -> Welcome:
        """Check and return the answer to this request that ``values`` are."""
        answer = Welcome.parse(values)
        if answer.transport not in self.transports:
            fields.wrong(f"the transport {answer.transport!r} was not offered")
        return answer


@dataclass(slots=True)
class Match:
    """Asks how long a prefix of ``hashes`` is held, over all shards.

    Attributes:
        hashes: the hashes of a chain, each the parent of the next.
        prefetch: whether the node shall start to bring up what lies in a slower tier.
    """

    op: ClassVar[int] = 2

    hashes: Sequence[bytes]
    prefetch: bool = False

    @property
    def joined(self) -> bytes:
        """The hashes as they travel, one behind the other."""
        return fields.joined_hashes(self.hashes)

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.joined, self.prefetch]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Match:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 2, "MATCH")
        return cls(fields.JoinedHashes.parse(values[0]), fields.flag(values[1], "prefetch"))

    def read(self, values: Sequence[object]) -> MatchAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = MatchAnswer.parse(values)
        if len(answer.tiers) > len(self.hashes):
            fields.wrong("more blocks matched than were asked about")
        return answer


@dataclass(slots=True)
class Exists:
    """Asks which of ``hashes`` the client's shard holds, each by itself."""

    op: ClassVar[int] = 3

    hashes: Sequence[bytes]

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [fields.join_hashes(self.hashes)]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Exists:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 1, "EXISTS")
        return cls(fields.split_hashes(values[0]))

    def read(self, values: Sequence[object]) -> ExistsAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = ExistsAnswer.parse(values)
        _as_many(len(answer.tiers), len(self.hashes), "tiers")
        return answer


@dataclass(slots=True)
class Get:
    """Asks for the bytes of blocks.

    Attributes:
        hashes: the blocks wanted, each by itself.
        offset: first byte wanted of each block.
        length: how many bytes of each block; 0 for all from ``offset`` to the end.
        wait: whether to wait, up to the deadline, for blocks that another session is writing.
        destinations: where the payload is to land, in the transport's own words, or ``None``.
        checksums: whether the answer is to name the crc32c of each block, which must be wanted
            whole. Nodes ask each other so, and nothing is brought from a third one for it.
        device: whether a block that lies on a GPU within the client's reach may be answered there,
            under the tier code of HBM. It travels only where it is true.
    """

    op: ClassVar[int] = 4

    hashes: Sequence[bytes]
    offset: int = 0
    length: int = 0
    wait: bool = False
    destinations: Sequence[int] | None = None
    checksums: bool = False
    device: bool = False

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        always: list[object] = [
            fields.join_hashes(self.hashes),
            self.offset,
            self.length,
            self.wait,
            fields.pack_locations(self.destinations),
            self.checksums,
        ]
        return [*always, True] if self.device else always

    @classmethod
    def parse(cls, values: Sequence[object]) -> Get:
        """Check ``values`` and return the request that they are."""
        device = False
        if len(values) == 7:
            *values, last = values
            device = fields.flag(last, "device")
        fields.arguments(values, 6, "GET")
        hashes, offset, length, wait, destinations, checksums = values
        return cls(
            fields.split_hashes(hashes),
            fields.integer(offset, 0, fields.MAX_BYTES, "offset"),
            fields.integer(length, 0, fields.MAX_BYTES, "length"),
            fields.flag(wait, "wait"),
            fields.unpack_locations(destinations, "destinations"),
            fields.flag(checksums, "checksums"),
            device,
        )

    def read(self, values: Sequence[object]) -> GetAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = GetAnswer.parse(values)
        tiers = answer.tiers
        _as_many(len(tiers), len(self.hashes), "tiers")
        found = len(tiers) - tiers.count(ABSENT)
        if answer.locations is not None:
            _as_many(len(answer.locations), found, "locations")
        if self.checksums or answer.checksums is not None:
            _as_many(len(answer.checksums or ()), found if self.checksums else 0, "checksums")
        return answer


@dataclass(slots=True)
class Release:
    """Gives back the pins of leases. One-way: it is never answered."""

    op: ClassVar[int] = 5

    leases: list[int]

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.leases]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Release:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 1, "RELEASE")
        return cls(fields.integers(values[0], fields.MAX_U64, fields.MAX_HASHES, "leases"))


@dataclass(slots=True)
class Reserve:
    """Asks for room for a chain of blocks.

    Attributes:
        parent: hash of the block before the first one; 32 zero bytes for a root.
        hashes: the chain, each block the parent of the next.
        copies: how many nodes are to hold the chain in the end, this one counted; 0 where the node
            is to say. It travels only where it isn't 0.
    """

    op: ClassVar[int] = 6

    parent: bytes
    hashes: Sequence[bytes]
    copies: int = 0

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        always: list[object] = [self.parent, fields.join_hashes(self.hashes)]
        return [*always, self.copies] if self.copies else always

    @classmethod
    def parse(cls, values: Sequence[object]) -> Reserve:
        """Check ``values`` and return the request that they are."""
        if len(values) != 3:
            fields.arguments(values, 2, "RESERVE")
        copies = values[2] if len(values) == 3 else 0
        return cls(
            fields.one_hash(values[0], "parent"),
            fields.split_hashes(values[1]),
            fields.integer(copies, 0, fields.MAX_COPIES, "copies"),
        )

    def read(self, values: Sequence[object]) -> ReserveAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = ReserveAnswer.parse(values)
        _as_many(len(answer.verdicts), len(self.hashes), "verdicts")
        if answer.locations is not None:
            _as_many(len(answer.locations), answer.verdicts.count(FILL), "locations")
        return answer


@dataclass(slots=True)
class Write:
    """Fills blocks that were reserved.

    The payload, where the transport sends it inline, is ``length`` bytes for each index.

    Attributes:
        reservation: the reservation that the blocks belong to.
        indexes: positions of the blocks in the ``RESERVE``, no two alike.
        offset: first byte written of each block.
        length: bytes written of each block; 0 where the request only commits.
        commit: whether the blocks are complete with this.
        checksums: the crc32c of each whole block, if the client computed them.
        sources: where the payload comes from, in the transport's own words, or ``None``.
    """

    op: ClassVar[int] = 7

    reservation: int
    indexes: list[int]
    offset: int = 0
    length: int = 0
    commit: bool = True
    checksums: list[int] | None = None
    sources: Sequence[int] | None = None

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [
            self.reservation,
            self.indexes,
            self.offset,
            self.length,
            self.commit,
            self.checksums,
            fields.pack_locations(self.sources),
        ]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Write:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 7, "WRITE")
        reservation, indexes, offset, length, commit, checksums, sources = values
        positions = fields.integers(indexes, fields.MAX_HASHES - 1, fields.MAX_HASHES, "indexes")
        if len(set(positions)) != len(positions):
            fields.wrong("no index may come twice")
        if checksums is not None:
            checksums = fields.integers(checksums, 0xFFFF_FFFF, fields.MAX_HASHES, "checksums")
            _as_many(len(checksums), len(positions), "checksums")
        return cls(
            fields.integer(reservation, 1, fields.MAX_U64, "reservation"),
            positions,
            fields.integer(offset, 0, fields.MAX_BYTES, "offset"),
            fields.integer(length, 0, fields.MAX_BYTES, "length"),
            fields.flag(commit, "commit"),
            checksums,
            fields.unpack_locations(sources, "sources"),
        )

    def read(self, values: Sequence[object]) -> WriteAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = WriteAnswer.parse(values)
        _as_many(len(answer.committed), len(self.indexes), "results")
        return answer


@dataclass(slots=True)
class Abort:
    """Gives a reservation back; what it had not committed is dropped."""

    op: ClassVar[int] = 8

    reservation: int

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.reservation]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Abort:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 1, "ABORT")
        return cls(fields.integer(values[0], 1, fields.MAX_U64, "reservation"))

    def read(self, values: Sequence[object]) -> AbortAnswer:
        """Check and return the answer to this request that ``values`` are."""
        return AbortAnswer.parse(values)


@dataclass(slots=True)
class Segments:
    """Asks for the file descriptors of segments (``shm`` only)."""

    op: ClassVar[int] = 9

    numbers: list[int]

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.numbers]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Segments:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 1, "SEGMENTS")
        return cls(fields.integers(values[0], 0xFFFF_FFFF, fields.MAX_SEGMENTS, "segments"))

    def read(self, values: Sequence[object]) -> SegmentsAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = SegmentsAnswer.parse(values)
        if [number for number, _ in answer.segments] != self.numbers:
            fields.wrong("other segments were answered than asked for")
        return answer


@dataclass(slots=True)
class Ping:
    """Asks whether the node is there."""

    op: ClassVar[int] = 10

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return []

    @classmethod
    def parse(cls, values: Sequence[object]) -> Ping:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 0, "PING")
        return cls()

    def read(self, values: Sequence[object]) -> PingAnswer:
        """Check and return the answer to this request that ``values`` are."""
        return PingAnswer.parse(values)


@dataclass(slots=True)
class Follow:
    """Asks what the client's shard gained and lost since a position.

    Attributes:
        after: the ``sequence`` of the last answer; 0 to begin.
        limit: how many changes the answer may bring.
    """

    op: ClassVar[int] = 11

    after: int
    limit: int

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.after, self.limit]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Follow:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 2, "FOLLOW")
        return cls(
            fields.integer(values[0], 0, fields.MAX_U64, "position"),
            fields.integer(values[1], 1, fields.MAX_HASHES, "limit"),
        )

    def read(self, values: Sequence[object]) -> FollowAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = FollowAnswer.parse(values)
        count = len(answer.kinds)
        if count > self.limit:
            fields.wrong("more changes were answered than asked for")
        if answer.complete and answer.sequence != self.after + count:
            fields.wrong("the number of changes does not fit their numbers")
        if count and not answer.complete:
            fields.wrong("changes were answered after others had been lost")
        return answer


@dataclass(slots=True)
class Take:
    """One node of a pool asks another to take copies of blocks that it holds, by pulling them.

    Attributes:
        member: number of the node that asks, in the pool.
        incarnation: of its start.
        hashes: a chain of the session's shard from its first block on.
        idle_ms: how long ago the blocks were last used, in ms. None used later makes room for them.
    """

    op: ClassVar[int] = 12

    member: int
    incarnation: str
    hashes: Sequence[bytes]
    idle_ms: int = 0

    def arguments(self) -> list[object]:
        """Return what stands in the header after the deadline."""
        return [self.member, self.incarnation, fields.join_hashes(self.hashes), self.idle_ms]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Take:
        """Check ``values`` and return the request that they are."""
        fields.arguments(values, 4, "TAKE")
        member, incarnation, hashes, idle = values
        return cls(
            fields.integer(member, 1, 0xFFFF_FFFF, "member"),
            fields.text(incarnation, "incarnation"),
            fields.split_hashes(hashes),
            fields.integer(idle, 0, fields.MAX_U64, "idle"),
        )

    def read(self, values: Sequence[object]) -> TakeAnswer:
        """Check and return the answer to this request that ``values`` are."""
        answer = TakeAnswer.parse(values)
        if answer.held > len(self.hashes):
            fields.wrong("more blocks were taken than offered")
        return answer
