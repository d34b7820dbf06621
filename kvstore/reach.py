"""How far a prefix is held by a shard, and in which tiers: what every match asks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final

from kvstore.accounts import OTHERS, Account
from kvstore.entry import TIER_CODES, Entry, ShardIndex
from kvstore.identity import HASH_BYTES
from tiers.lru import Lru

_NOTHING: Final = Entry(ShardIndex(b"", 0, 0, Account(OTHERS, Lru(1))), b"", None, 0.0)


def codes(shard: ShardIndex, hashes: Iterable[bytes]) -> bytes:
    """The tier code of each block on its own."""
    entries = map(shard.committed.get, hashes, repeat(_NOTHING))
    return bytes([entry.state for entry in entries]).translate(TIER_CODES)


def slowest(found: Sequence[bytes]) -> bytes:
    """The slowest tier over the shards, for each block that all of them have."""
    if len(found) == 1:
        return found[0]
    return bytes(map(max, *found)) if found else b""


def chain_codes(shard: ShardIndex, joined: bytes) -> bytes:
    """The tier codes of the prefix that is held; see `Index.match_joined`."""
    length = _reach(shard.committed, joined)
    states: list[int] = []
    hashes: list[bytes] = []
    entry = shard.committed.get(joined[(length - 1) * HASH_BYTES : length * HASH_BYTES])
    for _ in range(length):
        if entry is None:
            break
        states.append(entry.state)
        hashes.append(entry.hash)
        entry = entry.parent
    hashes.reverse()
    if b"".join(hashes) != joined[: length * HASH_BYTES]:
        each = range(0, len(joined), HASH_BYTES)
        return prefix_codes(shard, [joined[at : at + HASH_BYTES] for at in each])
    states.reverse()
    return _until_absent(bytes(states).translate(TIER_CODES))


def _reach(committed: Mapping[bytes, Entry], joined: bytes) -> int:
    """A number of hashes of which the last is committed and the next, if there is one, isn't."""
    low, high = 0, len(joined) // HASH_BYTES
    while low < high:
        middle = (low + high) // 2
        if joined[middle * HASH_BYTES : (middle + 1) * HASH_BYTES] in committed:
            low = middle + 1
        else:
            high = middle
    return low


def prefix_codes(shard: ShardIndex, hashes: Iterable[bytes]) -> bytes:
    """The tier codes of the prefix that is held."""
    return _until_absent(codes(shard, hashes))


def _until_absent(found: bytes) -> bytes:
    end = found.find(0)
    return found if end < 0 else found[:end]
