"""How a client learns what a shard of its node gains and loses."""

from __future__ import annotations

from typing import Final

from client.operations import Call, Operation, Terms
from client.results import Change, Changes
from kvstore.errors import InvalidRequest
from kvstore.protocol import messages

LIMIT: Final = 4_096
"""Changes that one answer may bring where the caller doesn't say."""

_MOST_POSITION: Final = (1 << 64) - 1


def check(after: int, limit: int) -> None:
    """Accept a position and a number of changes.

    Raises:
        InvalidRequest: one of them is out of range.
    """
    if not 0 <= after <= _MOST_POSITION:
        raise InvalidRequest(f"{after} is no position: take the sequence of an answer, or 0")
    if not 1 <= limit <= messages.MAX_HASHES:
        raise InvalidRequest(f"an answer brings 1 to {messages.MAX_HASHES} changes, not {limit}")


def follow(terms: Terms, after: int, limit: int) -> Operation[Changes]:
    """Find what this shard gained and lost since a position."""
    request = messages.Follow(after, min(limit, terms.max_hashes))
    answer: messages.FollowAnswer = yield Call(request)
    changes = [
        Change(block, kind == messages.BLOCK_STORED)
        for kind, block in zip(answer.kinds, answer.hashes, strict=True)
    ]
    return Changes(answer.sequence, answer.complete, changes)
