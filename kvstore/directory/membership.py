"""What a node knows of the members of its pool, itself among them. Pure.

Leases end by Redis's clock and by nobody else's: a node learns that it is no member any more by
being told so, and that another is none by its absence from the roster. Numbers are given in order,
each with its entry in the roster, so a number up to the last one given that is not in the roster
names nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstore.directory.interface import NOBODY, Gone, Member
from kvstore.directory.names import pack_numbers

_FIELDS: Final = ("node", "incarnation", "host", "data", "control")
_LARGEST: Final = 16_384
_MOST_FIGURES: Final = 256
_LARGEST_FIGURE: Final = 1e300
_MOST_GONE: Final = 64
"""Members that are gone and remembered, for people."""


def encode_member(member: Member) -> bytes:
    """The record of a member."""
    return json.dumps({field: getattr(member, field) for field in _FIELDS}).encode()


def decode_member(number: int, record: bytes) -> Member | None:
    """The member of a record; None where it makes no sense, as an other version's may not."""
    fields = _object(record)
    texts = [value for field in _FIELDS if isinstance(value := fields.get(field), str)]
    if len(texts) != len(_FIELDS) or not 0 < number < 1 << 32:
        return None
    node, incarnation, host, data, control = texts
    return Member(number, node, incarnation, host, data, control)


def encode_summary(summary: Mapping[str, float]) -> bytes:
    """A summary, as it is told."""
    return json.dumps(dict(summary)).encode()


def decode_summary(text: bytes) -> dict[str, float] | None:
    """The figures of a summary; None where it makes no sense."""
    figures = _object(text)
    if len(figures) > _MOST_FIGURES:
        return None
    return {
        str(key): float(value)
        for key, value in figures.items()
        if isinstance(value, int | float) and abs(value) <= _LARGEST_FIGURE
    }


def _object(text: bytes) -> dict[str, object]:
    try:
        found = json.loads(text) if len(text) <= _LARGEST else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Version:
    """How far the pool's membership has come.

    Attributes:
        changes: how often members came or went.
        deaths: how often members went.
        swept: up to which of ``deaths`` their locations have been swept away.
    """

    changes: int = -1
    deaths: int = 0
    swept: int = 0


class Membership:
    """This node's membership, and the others.

    Args:
        member: this node, without a number.

    Attributes:
        record: of this node.
        me: None while this node is no member, as far as it knows.
        others: live members by number, of several starts at one address the last.
        before: number of the membership that lapsed last, ``NOBODY`` if none did.
        epoch: what names the directory's data that ``before`` is of.
        version: as the directory said last.
        last: the number given last in the pool, as of the roster.
        gone: others that were missed in a roster, by number; the last one last.
    """

    def __init__(self, member: Member) -> None:
        self.record = encode_member(member)
        self.me: Member | None = None
        self.others: Mapping[int, Member] = {}
        self.before = NOBODY
        self.epoch = b""
        self.version = Version()
        self.last = NOBODY
        self.gone: Mapping[int, Gone] = {}
        self._member = member
        self._live = b""
        self._read = Version()

    @property
    def live(self) -> bytes:
        """The numbers of the others, packed."""
        return self._live

    @property
    def stale(self) -> bool:
        """Whether the roster has changed since it was read."""
        return self._read.changes != self.version.changes

    def joined(self, number: int, epoch: bytes = b"") -> None:
        """Take note of the number given, and of what names the data that it is of."""
        self.me = replace(self._member, number=number)
        self.before = number
        self.epoch = epoch
        self._read = Version()

    def lapsed(self) -> None:
        """Take note that the directory does not know this node as a member."""
        self.me = None

    def left(self) -> None:
        """Take note that this node is no member any more, and won't be again under its number."""
        self.me = None
        self.before = NOBODY
        self.others = {}
        self._live = b""

    def heard(self, version: Version) -> None:
        """Take note of what the directory says to a heartbeat."""
        self.version = version

    def roster(
        self,
        last: int,
        numbers: Sequence[int],
        records: Mapping[int, bytes],
        summaries: Mapping[int, bytes],
        now: float = 0.0,
    ) -> None:
        """Take over the roster.

        Args:
            last: the number given last.
            numbers: all members.
            records: of those that were not known, and of others that may have changed.
            summaries: by number, of those for which there is one; all others keep theirs.
            now: seconds on the event loop's clock.
        """
        before = self.others
        mine = self.me.number if self.me else NOBODY
        others: dict[int, Member] = {}
        for number in numbers:
            member = self.others.get(number)
            if number in records:
                member = decode_member(number, records[number])
            if member is None or number == mine:
                continue
            if number in summaries:
                member = replace(member, summary=decode_summary(summaries[number]))
            others[number] = member
        self.others = self._latest(others)
        self.last = last
        self._live = pack_numbers(self.others)
        self._read = self.version
        self._miss(before, now)

    def _latest(self, others: Mapping[int, Member]) -> dict[int, Member]:
        """Those of which no later start is at the same address.

        What a node held before it was started anew it holds no more, though its lease goes on.
        """
        starts = list(others.values()) if self.me is None else [*others.values(), self.me]
        latest: dict[str, int] = {}
        for member in starts:
            latest[member.data] = max(member.number, latest.get(member.data, NOBODY))
        return {number: one for number, one in others.items() if latest[one.data] == number}

    def _miss(self, before: Mapping[int, Member], now: float) -> None:
        """Take note of who was there before and is not any more, not under another number either.

        Where Redis lost everything, all members get new numbers and are as alive as before.
        """
        missed = sorted(before.keys() - self.others.keys())
        gone = {**self.gone, **{number: Gone(before[number], now) for number in missed}}
        alive = {one.incarnation for one in self.others.values()}
        rest = [(n, one) for n, one in gone.items() if one.member.incarnation not in alive]
        self.gone = dict(rest[-_MOST_GONE:])

    def dead(self, number: int) -> bool:
        """Whether a number is known to name nobody."""
        mine = self.me.number if self.me else NOBODY
        return number <= self.last and number not in self.others and number != mine
