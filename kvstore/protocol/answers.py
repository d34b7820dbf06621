"""What a node answers to each operation when all went well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.protocol import fields

__all__ = [
    "ABSENT",
    "BLOCK_REMOVED",
    "BLOCK_STORED",
    "BUSY",
    "DRAM",
    "FILL",
    "HBM",
    "HELD",
    "REFUSED",
    "REMOTE",
    "SSD",
    "AbortAnswer",
    "Answer",
    "ExistsAnswer",
    "FollowAnswer",
    "GetAnswer",
    "MatchAnswer",
    "PingAnswer",
    "ReserveAnswer",
    "SegmentsAnswer",
    "TakeAnswer",
    "Welcome",
    "WriteAnswer",
]

ABSENT: Final = 0
HBM: Final = 1
DRAM: Final = 2
SSD: Final = 3
REMOTE: Final = 4

FILL: Final = 0
HELD: Final = 1
BUSY: Final = 2
REFUSED: Final = 3

BLOCK_REMOVED: Final = 0
BLOCK_STORED: Final = 1

_OWN_TIERS: Final = bytes((ABSENT, HBM, DRAM, SSD))
_TIERS: Final = bytes((ABSENT, HBM, DRAM, SSD, REMOTE))
_HELD_TIERS: Final = bytes((HBM, DRAM, SSD, REMOTE))
_VERDICTS: Final = bytes((FILL, HELD, BUSY, REFUSED))
_FLAGS: Final = bytes((0, 1))
_KINDS: Final = bytes((BLOCK_REMOVED, BLOCK_STORED))


class Answer(Protocol):
    """What a node answers to one operation when all went well."""

    def values(self) -> list[object]:
        """Return what stands in the header after the request id and the status."""


@dataclass(slots=True)
class Welcome:
    """Answer to :class:`Hello`: the session is open.

    Attributes:
        node: stable name of the node.
        incarnation: differs at every start of the node.
        transport: the transport chosen among those offered.
        block_bytes: size of every block of the namespace, in bytes.
        limits: ``max_payload`` (bytes) and ``max_hashes`` of this session.
        details: what the transport chosen needs.
    """

    node: str
    incarnation: str
    transport: str
    block_bytes: int
    limits: dict[str, int]
    details: dict[str, object]

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [
            self.node,
            self.incarnation,
            self.transport,
            self.block_bytes,
            self.limits,
            self.details,
        ]

    @classmethod
    def parse(cls, values: Sequence[object]) -> Welcome:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 6, "WELCOME")
        node, incarnation, transport, block_bytes, limits, details = values
        agreed = {
            name: fields.integer(limit, 0, fields.MAX_BYTES, f"limit {name}")
            for name, limit in fields.mapping(limits, "limits").items()
        }
        return cls(
            fields.text(node, "node"),
            fields.text(incarnation, "incarnation"),
            fields.text(transport, "transport"),
            fields.integer(block_bytes, 1, fields.MAX_BYTES, "block bytes"),
            agreed,
            fields.mapping(details, "details"),
        )


@dataclass(slots=True)
class MatchAnswer:
    """Answer to :class:`Match`: the tier of each block of the prefix held, none absent.

    Blocks that other nodes hold, as far as is known, come last and are ``REMOTE``.
    """

    tiers: bytes

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [self.tiers]

    @classmethod
    def parse(cls, values: Sequence[object]) -> MatchAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 1, "the answer to MATCH")
        return cls(fields.codes(values[0], _HELD_TIERS, fields.MAX_HASHES, "tiers"))


@dataclass(slots=True)
class ExistsAnswer:
    """Answer to :class:`Exists`: a tier of the node for each hash asked about, 0 where absent."""

    tiers: bytes

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [self.tiers]

    @classmethod
    def parse(cls, values: Sequence[object]) -> ExistsAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 1, "the answer to EXISTS")
        return cls(fields.codes(values[0], _OWN_TIERS, fields.MAX_HASHES, "tiers"))


@dataclass(slots=True)
class GetAnswer:
    """Answer to :class:`Get`.

    Attributes:
        lease: names the pins that last until :class:`Release`; 0 where there are none.
        tiers: the tier that each block asked for came from, 0 for a miss; ``REMOTE`` where the node
            had to bring it from another one.
        locations: where the blocks found lie, in order, if the transport says so; else ``None``.
        checksums: the crc32c of each block found, in order, where that was asked for.
    """

    lease: int
    tiers: bytes
    locations: Sequence[int] | None = None
    checksums: list[int] | None = None

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        locations = fields.pack_locations(self.locations)
        return [self.lease, self.tiers, locations, self.checksums]

    @classmethod
    def parse(cls, values: Sequence[object]) -> GetAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 4, "the answer to GET")
        lease, tiers, locations, checksums = values
        if checksums is not None:
            checksums = fields.integers(checksums, 0xFFFF_FFFF, fields.MAX_HASHES, "checksums")
        return cls(
            fields.integer(lease, 0, fields.MAX_U64, "lease"),
            fields.codes(tiers, _TIERS, fields.MAX_HASHES, "tiers"),
            fields.unpack_locations(locations, "locations"),
            checksums,
        )


@dataclass(slots=True)
class ReserveAnswer:
    """Answer to :class:`Reserve`.

    Attributes:
        reservation: names the reservation; 0 where no block is to be filled.
        verdicts: for each block ``FILL`` (the caller writes it), ``HELD`` (held already),
            ``BUSY`` (another session writes it) or ``REFUSED`` (no room, here or before it).
        locations: where the blocks to be filled lie, in order, if the transport says so.
    """

    reservation: int
    verdicts: bytes
    locations: Sequence[int] | None = None

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [self.reservation, self.verdicts, fields.pack_locations(self.locations)]

    @classmethod
    def parse(cls, values: Sequence[object]) -> ReserveAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 3, "the answer to RESERVE")
        reservation, verdicts, locations = values
        return cls(
            fields.integer(reservation, 0, fields.MAX_U64, "reservation"),
            fields.codes(verdicts, _VERDICTS, fields.MAX_HASHES, "verdicts"),
            fields.unpack_locations(locations, "locations"),
        )


@dataclass(slots=True)
class WriteAnswer:
    """Answer to :class:`Write`: for each index 1 where the block is committed now, else 0."""

    committed: bytes

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [self.committed]

    @classmethod
    def parse(cls, values: Sequence[object]) -> WriteAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 1, "the answer to WRITE")
        return cls(fields.codes(values[0], _FLAGS, fields.MAX_HASHES, "committed"))


@dataclass(slots=True)
class AbortAnswer:
    """Answer to :class:`Abort`: the reservation is gone."""

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return []

    @classmethod
    def parse(cls, values: Sequence[object]) -> AbortAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 0, "the answer to ABORT")
        return cls()


@dataclass(slots=True)
class SegmentsAnswer:
    """Answer to :class:`Segments`: ``(number, size in bytes)`` of each segment.

    The file descriptors come with the first byte of the answer's frame, in the same order.
    """

    segments: list[tuple[int, int]]

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [[value for segment in self.segments for value in segment]]

    @classmethod
    def parse(cls, values: Sequence[object]) -> SegmentsAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 1, "the answer to SEGMENTS")
        flat = fields.integers(values[0], fields.MAX_BYTES, 2 * fields.MAX_SEGMENTS, "segments")
        if len(flat) % 2:
            fields.wrong("segments must be pairs of number and size")
        return cls(list(zip(flat[::2], flat[1::2], strict=True)))


@dataclass(slots=True)
class TakeAnswer:
    """Answer to :class:`Take`, once the blocks are there, or are not coming.

    Attributes:
        held: how many leading blocks of the chain the node holds now.
        why_not_more: empty where it is all of them; else ``refused`` (the node takes nothing now),
            ``no_space``, or how bringing them failed.
    """

    held: int
    why_not_more: str = ""

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [self.held, self.why_not_more]

    @classmethod
    def parse(cls, values: Sequence[object]) -> TakeAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 2, "the answer to TAKE")
        return cls(
            fields.integer(values[0], 0, fields.MAX_HASHES, "held"),
            fields.text(values[1], "why not more"),
        )


@dataclass(slots=True)
class PingAnswer:
    """Answer to :class:`Ping`."""

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return []

    @classmethod
    def parse(cls, values: Sequence[object]) -> PingAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 0, "the answer to PING")
        return cls()


@dataclass(slots=True)
class FollowAnswer:
    """Answer to :class:`Follow`.

    Attributes:
        sequence: number of the last change included: what the next request is to say.
        complete: whether no change between the position asked about and ``sequence`` is missing.
            Where it is false there are no changes, and what the follower believed is void.
        kinds: for each change ``BLOCK_STORED`` or ``BLOCK_REMOVED``, in their order.
        hashes: the block of each change.
    """

    sequence: int
    complete: bool
    kinds: bytes = b""
    hashes: Sequence[bytes] = ()

    def values(self) -> list[object]:
        """Return the values in the order in which they travel."""
        return [self.sequence, self.complete, self.kinds, fields.joined_hashes(self.hashes)]

    @classmethod
    def parse(cls, values: Sequence[object]) -> FollowAnswer:
        """Check ``values`` and return the answer that they are."""
        fields.arguments(values, 4, "the answer to FOLLOW")
        sequence, complete, kinds, blob = values
        hashes = fields.split_hashes(blob)
        answer = cls(
            fields.integer(sequence, 1, fields.MAX_U64, "sequence"),
            fields.flag(complete, "complete"),
            fields.codes(kinds, _KINDS, fields.MAX_HASHES, "kinds"),
            hashes,
        )
        if len(answer.kinds) != len(hashes):
            fields.wrong("there must be one hash for each change")
        return answer
