"""What the answers of several members come to, taken together. Pure.

A pool's blocks are counted as copies: one that two nodes hold counts twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from kvstore.control.interface import (
    BlockName,
    Ending,
    Explanation,
    MatchReport,
    NamespaceReport,
    NodeStatus,
    Removal,
    VerifyProgress,
)
from kvstore.control.pool import MemberReport

T = TypeVar("T")

_REMOTE: Final = "remote"
_NUMBER_BYTES: Final = 4
_TELLING: Final = (
    Ending.PENDING,
    Ending.SHARD_ABSENT,
    Ending.CORRUPT,
    Ending.DEPARTED,
    Ending.NODE_GONE,
    Ending.OTHER_NAMESPACE,
    Ending.FORGOTTEN,
    Ending.NEVER_STORED,
)
"""Endings, from the one that says most to the one that says least."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What one member said."""

    member: MemberReport
    value: T


@dataclass(frozen=True, slots=True)
class Failure:
    """A member that did not say what it was asked."""

    number: int
    node: str
    control: str
    error: str
    """Code of the error, as ``kvstore.errors`` has it."""
    message: str


@dataclass(frozen=True, slots=True)
class Total:
    """A tier of all nodes together."""

    capacity: int
    used: int
    blocks: int


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """All nodes that answered, together."""

    nodes: int
    sessions: int
    blocks: int
    pins: int
    reservations: int
    tiers: Mapping[str, Total]


def totals(answers: Sequence[Answer[NodeStatus]]) -> PoolTotals:
    """The sums over nodes."""
    found = [answer.value for answer in answers]
    tiers: dict[str, Total] = {}
    for tier in (tier for status in found for tier in status.tiers):
        before = tiers.get(tier.name, Total(0, 0, 0))
        tiers[tier.name] = Total(
            before.capacity + tier.capacity, before.used + tier.used, before.blocks + tier.blocks
        )
    return PoolTotals(
        len(found),
        sum(one.sessions for one in found),
        sum(one.blocks for one in found),
        sum(one.pins for one in found),
        sum(one.reservations for one in found),
        tiers,
    )


# --- names ----------------------------------------------------------------------------------------


def merge_namespaces(found: Iterable[Sequence[NamespaceReport]]) -> list[NamespaceReport]:
    """The namespaces that any node knows, those with most bytes first."""
    merged: dict[bytes, NamespaceReport] = {}
    for report in (report for reports in found for report in reports):
        before = merged.get(report.fingerprint)
        merged[report.fingerprint] = report if before is None else _both(before, report)
    return sorted(merged.values(), key=lambda one: one.bytes, reverse=True)


def _both(one: NamespaceReport, other: NamespaceReport) -> NamespaceReport:
    return NamespaceReport(
        one.fingerprint,
        one.description or other.description,
        one.blocks + other.blocks,
        one.bytes + other.bytes,
        tuple(sorted({*one.shards, *other.shards})),
        one.sessions + other.sessions,
    )


def merge_names(found: Iterable[Sequence[BlockName]], limit: int) -> list[BlockName]:
    """The blocks that any node holds, each once, at most ``limit``."""
    return list(dict.fromkeys(name for names in found for name in names))[:limit]


# --- pages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Position:
    """Where a listing of a pool's blocks goes on: nodes come by number.

    Attributes:
        number: of the node; all of those before it have been listed.
        cursor: within that node, empty at its beginning.
    """

    number: int = 0
    cursor: bytes = b""

    def encode(self) -> bytes:
        """As a cursor for people to give back."""
        return self.number.to_bytes(_NUMBER_BYTES, "big") + self.cursor

    @classmethod
    def decode(cls, cursor: bytes) -> "Position":
        """From such a cursor; an empty one is the beginning.

        Raises:
            ValueError: it is too short to be one.
        """
        if not cursor:
            return cls()
        if len(cursor) < _NUMBER_BYTES:
            raise ValueError("not a cursor of a pool")
        return cls(int.from_bytes(cursor[:_NUMBER_BYTES], "big"), cursor[_NUMBER_BYTES:])


def next_node(
    members: Sequence[MemberReport], at: Position
) -> tuple[MemberReport, Position] | None:
    """The node to list next, and from where; None at the end.

    A node that has left the pool since is passed over, and the one after it listed from its start.
    """
    for member in sorted(members, key=lambda one: one.number):
        if member.number == at.number:
            return member, at
        if member.number > at.number:
            return member, Position(member.number)
    return None


# --- prefixes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that holds a block, and in which tier."""

    number: int
    node: str
    tier: str


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """How far a prefix reaches over all nodes."""

    asked: int
    holders: tuple[tuple[Holder, ...], ...]
    """For each block that is held: by whom, of those that answered; nobody where only the
    directory says that it is held."""

    @property
    def blocks(self) -> int:
        """Length of the longest contiguous prefix, in blocks."""
        return len(self.holders)


def held_here(report: MatchReport) -> int:
    """How many leading blocks a node holds itself."""
    return next((at for at, tier in enumerate(report.tiers) if tier == _REMOTE), len(report.tiers))


def merge_matches(answers: Sequence[Answer[MatchReport]]) -> PoolMatch:
    """How far the prefix is held by the nodes together."""
    reports = [(answer.member, answer.value, held_here(answer.value)) for answer in answers]
    longest = max((report.blocks for _, report, _ in reports), default=0)
    holders = tuple(
        tuple(
            Holder(member.number, member.node, report.tiers[at])
            for member, report, here in reports
            if at < here
        )
        for at in range(longest)
    )
    return PoolMatch(max((report.asked for _, report, _ in reports), default=0), holders)


def reach(answers: Sequence[Answer[Explanation]]) -> int:
    """How many leading blocks the nodes hold together."""
    return max((one.value.blocks + one.value.remote for one in answers), default=0)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Why a prefix ends in a pool."""

    explanation: Explanation
    nodes: tuple[str, ...]
    """Who says so; empty where nobody has to."""


def conclude(
    answers: Sequence[Answer[Explanation]],
    about: Sequence[Answer[Explanation]],
    hashes: Sequence[bytes],
    *,
    lost: bool,
) -> Conclusion:
    """Why the prefix ends over all nodes.

    Args:
        answers: what each node said of the whole prefix.
        about: what each said of the first block that none holds, alone.
        hashes: the prefix.
        lost: whether members have left lately: then what nobody remembers may have been theirs.
    """
    asked, held = len(hashes), reach(answers)
    if held >= asked:
        return Conclusion(Explanation(asked, asked, Ending.COMPLETE), ())
    gone = next(
        (
            answer.value.gone
            for answer in answers
            if answer.value.gone and answer.value.blocks + answer.value.remote == held
        ),
        "",
    )
    known = [answer for answer in about if answer.value.ending in _TELLING]
    best = min(known, key=_telling, default=None)
    found = best.value if best is not None else Explanation(1, 0, Ending.FORGOTTEN)
    if gone and _TELLING.index(found.ending) > _TELLING.index(Ending.NODE_GONE):
        found = Explanation(1, 0, Ending.NODE_GONE)
    if lost and found.ending is Ending.NEVER_STORED:
        found = replace(found, ending=Ending.FORGOTTEN)
    said = [answer.member.node for answer in known if answer.value.ending is found.ending]
    whole = replace(found, asked=asked, blocks=held, hash=hashes[held], remote=0, gone=gone)
    return Conclusion(whole, tuple(said))


def _telling(answer: Answer[Explanation]) -> tuple[int, float]:
    found = answer.value
    return _TELLING.index(found.ending), found.ago if found.ago is not None else 0.0


# --- what was done --------------------------------------------------------------------------------


def merge_removals(removals: Iterable[Removal]) -> Removal:
    """What all nodes did together."""
    found = list(removals)
    return Removal(
        sum(one.blocks for one in found),
        sum(one.bytes for one in found),
        sum(one.moved for one in found),
        sum(one.kept for one in found),
    )


def merge_progress(steps: Iterable[VerifyProgress]) -> VerifyProgress:
    """How far all nodes are together, without names; finished where all are."""
    found = list(steps)
    return VerifyProgress(
        sum(one.checked for one in found),
        sum(one.total for one in found),
        sum(one.bytes for one in found),
        sum(one.corrupt for one in found),
        sum(one.unreadable for one in found),
        finished=bool(found) and all(one.finished for one in found),
    )
