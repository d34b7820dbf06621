"""Which nodes of a pool are to hold copies of a chain, or to take it over. Pure.

Chains are spread over the nodes by their hash, in proportion to the room that each has, and so that
a chain goes where it went before as long as that room is about the same. No two copies of a block
are on one machine: what loses the one would lose the other, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Final

from kvstore.directory.interface import Member
from kvstore.entry import Entry

DRAINING: Final = "draining"
"""The figure of a summary that isn't 0 while its node hands over what it holds."""
_FULL: Final = 1 / 64
"""The room of a node that is full, as a share of its capacity: what it used longest ago may go."""
_UNKNOWN: Final = float(1 << 30)
"""The room, in bytes, of a node that has not yet said how much it has."""
_BRANCHES: Final = 4
"""So many children make a block the end of what many chains share."""
_SCALE: Final = 1 << 64


def drains(member: Member) -> bool:
    """Whether a member has said that it hands over what it holds, and takes nothing."""
    return bool(member.summary and member.summary.get(DRAINING))


def ranked(members: Iterable[Member], key: bytes) -> list[Member]:
    """Those of the members that take blocks, the one that a key belongs to first.

    Args:
        members: of the pool.
        key: what the chain is spread by; see ``spread_by``.
    """
    able = [member for member in members if not drains(member)]
    return sorted(able, key=lambda member: (-_score(member, key), member.number))


def for_copies(
    members: Iterable[Member], key: bytes, *, host: str, count: int, avoid: Collection[int] = ()
) -> list[Member]:
    """Members on as many other machines, the best first; fewer where there are no more.

    Args:
        members: of the pool, without this node.
        key: what the chain is spread by.
        host: this node's machine, and so none of theirs.
        count: how many are wanted.
        avoid: numbers of members that have turned out not to take it.
    """
    hosts = {host}
    chosen: list[Member] = []
    for member in ranked(members, key):
        if len(chosen) == count:
            break
        if member.host not in hosts and member.number not in avoid:
            hosts.add(member.host)
            chosen.append(member)
    return chosen


def for_move(members: Iterable[Member], key: bytes, *, host: str) -> list[Member]:
    """All members that may take a chain over, the best first; those of this machine come last.

    Args:
        members: of the pool, without this node.
        key: what the chain is spread by.
        host: this node's machine.
    """
    return sorted(ranked(members, key), key=lambda member: member.host == host)


def spread_by(path: Sequence[Entry]) -> bytes:
    """What a chain is spread by: the hash of the first block that it shares with few others.

    All turns of one conversation stay together, and conversations that begin alike do not.

    Args:
        path: the chain from its first block on.
    """
    for entry in reversed(path):
        parent = entry.parent
        if parent is None or branches(parent):
            return entry.hash
    return b""


def branches(entry: Entry) -> bool:
    """Whether many chains part after a block."""
    return sum(1 for _ in islice(entry.children(), _BRANCHES)) == _BRANCHES


def _score(member: Member, key: bytes) -> float:
    """Weighted rendezvous hashing: the highest of a key wins, in proportion to the weights."""
    digest = blake2b(key + member.node.encode(), digest_size=8).digest()
    share = (int.from_bytes(digest) + 0.5) / _SCALE
    return -_weight(member) / math.log(share)


def _weight(member: Member) -> float:
    """The room that a member has, to a power of two, so that it is mostly the same as before."""
    summary = member.summary
    if not summary:
        return _UNKNOWN
    capacity = summary.get("dram_capacity", 0.0) + summary.get("ssd_capacity", 0.0)
    used = summary.get("dram_used", 0.0) + summary.get("ssd_used", 0.0)
    room = max(capacity - used, capacity * _FULL, 1.0)
    return float(2 ** math.floor(math.log2(room)))
