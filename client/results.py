"""What the clients answer: values, never exceptions, where a node has less than was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.protocol.messages import ABSENT, DRAM, HBM, REMOTE, SSD

TIER_NAMES: Final = {ABSENT: "absent", HBM: "hbm", DRAM: "dram", SSD: "ssd", REMOTE: "remote"}
"""Names of the tier codes that travel; ``remote`` is another node, whatever its tier."""

STORED: Final = 0
HELD: Final = 1
BUSY: Final = 2
REFUSED: Final = 3
FAILED: Final = 4

_OUTCOMES: Final = ("stored", "held", "busy", "refused", "failed")


def tier_counts(codes: bytes) -> dict[str, int]:
    """How many blocks lie in each tier, for the tiers that hold any."""
    counts = ((name, codes.count(code)) for code, name in TIER_NAMES.items() if code != ABSENT)
    return {name: count for name, count in counts if count}


def leading_hits(codes: bytes) -> int:
    """How many blocks were found before the first miss."""
    first_miss = codes.find(ABSENT)
    return len(codes) if first_miss < 0 else first_miss


def _shown(counts: dict[str, int], failure: str | None, *known: str) -> str:
    """What a result looks like at a prompt: how many blocks of each kind, and why no more."""
    shown = [f"{name}={count}" for name, count in counts.items() if count or name == "blocks"]
    parts = [*known, *shown]
    return ", ".join(parts if failure is None else [*parts, f"failure={failure!r}"])


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prefix reaches.

    Attributes:
        codes: the tier code of each block held, from the first on, without a gap.
        failure: why nothing is known, as the code of an error; ``None`` where the node answered.
    """

    codes: bytes
    failure: str | None = None

    def __repr__(self) -> str:
        return f"Match({_shown({'blocks': self.blocks, **tier_counts(self.codes)}, self.failure)})"

    @property
    def blocks(self) -> int:
        """Number of blocks held."""
        return len(self.codes)

    @property
    def tiers(self) -> list[str]:
        """The name of the tier of each block held."""
        return [TIER_NAMES[code] for code in self.codes]


@dataclass(frozen=True, slots=True)
class GetResult:
    """Which of the blocks asked for were found.

    Attributes:
        codes: the tier code that each block came from, 0 for a miss.
        failure: why all of them are misses, as the code of an error; ``None`` where the node
            answered.
    """

    codes: bytes
    failure: str | None = None

    def __repr__(self) -> str:
        counts = {"blocks": len(self.codes), **tier_counts(self.codes)}
        counts["absent"] = len(self.codes) - self.found
        return f"GetResult({_shown(counts, self.failure)})"

    @property
    def hits(self) -> list[bool]:
        """Whether each block was found."""
        return [code != ABSENT for code in self.codes]

    @property
    def found(self) -> int:
        """Number of blocks found."""
        return len(self.codes) - self.codes.count(ABSENT)

    @property
    def prefix(self) -> int:
        """Number of blocks found before the first miss."""
        return leading_hits(self.codes)

    @property
    def tiers(self) -> list[str]:
        """The name of the tier that each block came from, ``absent`` for a miss."""
        return [TIER_NAMES[code] for code in self.codes]


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of the blocks that were to be stored.

    Attributes:
        codes: for each block ``STORED`` (by this call), ``HELD`` (already), ``BUSY`` (another
            session writes it), ``REFUSED`` (no room) or ``FAILED`` (the node did not confirm it).
        failure: why some failed, as the code of an error; ``None`` where the node answered.
    """

    codes: bytes
    failure: str | None = None

    def __repr__(self) -> str:
        counts = {name: self.codes.count(code) for code, name in enumerate(_OUTCOMES)}
        return f"PutResult({_shown(counts, self.failure)})"

    @property
    def stored(self) -> int:
        """Number of blocks stored by this call."""
        return self.codes.count(STORED)

    @property
    def held(self) -> int:
        """Number of blocks that the node held already."""
        return self.codes.count(HELD)

    @property
    def busy(self) -> int:
        """Number of blocks that another session is writing."""
        return self.codes.count(BUSY)

    @property
    def refused(self) -> int:
        """Number of blocks that found no room, themselves or before them in the chain."""
        return self.codes.count(REFUSED)

    @property
    def failed(self) -> int:
        """Number of blocks that the node did not confirm before the deadline."""
        return self.codes.count(FAILED)

    @property
    def outcomes(self) -> list[str]:
        """The outcome of each block by its name."""
        return [_OUTCOMES[code] for code in self.codes]


class Change(NamedTuple):
    """One block that a shard gained or lost.

    Attributes:
        hash: its prefix hash.
        stored: whether it can be found from then on; else it is held no longer, in no tier.
    """

    hash: bytes
    stored: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What a shard gained and lost since a position.

    Attributes:
        sequence: the position to ask from next; the one asked about where ``failure`` is set.
        complete: whether nothing is missing between the position asked about and ``sequence``. If
            it is false there are no changes, and what was believed of the node is void: ask it
            anew (``exists``) before following on from ``sequence``.
        changes: in the order in which they happened; where there are any, there may be more.
        failure: why nothing is known, as the code of an error; ``None`` where the node answered.
    """

    sequence: int
    complete: bool
    changes: Sequence[Change] = ()
    failure: str | None = None

    def __repr__(self) -> str:
        stored = sum(change.stored for change in self.changes)
        counts = {"stored": stored, "removed": len(self.changes) - stored}
        known = f"sequence={self.sequence}, complete={self.complete}"
        return f"Changes({_shown(counts, self.failure, known)})"


@dataclass(frozen=True, slots=True)
class ClientStats:
    """What a client has done since it was made.

    Attributes:
        url: where the node is.
        connected: whether a session is open now.
        transport: how payload moves, ``""`` before the first session.
        transport_why: why not another way that was liked more, ``""`` where there was none.
        node: name of the node, ``""`` before the first session.
        incarnation: which start of the node answered last.
        calls: calls made.
        hits: blocks found by gets and views.
        misses: blocks asked for by gets and views and not found, for whatever reason.
        stored: blocks stored.
        bytes_read: payload bytes received or viewed.
        bytes_written: payload bytes stored.
        timeouts: calls that reached their deadline.
        failures: calls that ended without an answer for another reason.
        connects: sessions opened.
    """

    url: str
    connected: bool
    transport: str
    transport_why: str
    node: str
    incarnation: str
    calls: int
    hits: int
    misses: int
    stored: int
    bytes_read: int
    bytes_written: int
    timeouts: int
    failures: int
    connects: int
