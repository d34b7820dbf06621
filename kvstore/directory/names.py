"""What things are called in Redis. Pure.

Everything of a pool begins with ``kvs:{pool}`` or ``kvs:{pool:...}``. What is in braces decides the
slot in a Redis Cluster: the membership of a pool is in one slot, and the locations of a chain are
in one slot, so that one script sees all it needs.

A location is a field of a Redis hash, a bucket; the value names the owners. Chains are spread over
tags by the first byte of the hash of their first block, and the blocks under a tag over 1,024
buckets: small enough to be kept as listpacks (under 512 fields of at most 64 bytes), which take a
third of the memory of a hash table.

==========================  =====================================================================
``kvs:{P}:number``          the number given last
``kvs:{P}:members``         set of the numbers of members
``kvs:{P}:member:N``        record of a member; expires with its lease
``kvs:{P}:summaries``       hash: what each member said of itself last
``kvs:{P}:version``         hash: how often members came or went, went, and up to which was swept;
                            what names the data since they were empty last
``kvs:{P}:sweep``           who sweeps now
``kvs:{P:NS:R}``            a tag: there while anything has been told under it within a day
``kvs:{P:NS:R}:BBB``        a bucket of it
==========================  =====================================================================

``P`` is the pool, ``NS`` 16 hex digits of the namespace's fingerprint, ``R`` two of the first
block's hash, ``BBB`` the bucket.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvstore.directory.interface import Place
from kvstore.errors import ConfigError
from kvstore.identity import HASH_BYTES
from kvstore.protocol.fields import JoinedHashes

HASH_PART: Final = 12
"""Bytes of a prefix hash that the directory keeps: two for the bucket, ten in the field."""

NAME_BYTES: Final = 2 + HASH_PART
NUMBER_BYTES: Final = 4
_POOL: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHARD: Final = struct.Struct("<H")
_NUMBER: Final = struct.Struct("<I")


def check_pool(pool: str) -> str:
    """Return the name of a pool if it can be one.

    Raises:
        ConfigError: it has other characters than letters, digits and ``_.-``, or over 64 of them.
    """
    if not _POOL.fullmatch(pool):
        raise ConfigError(f"a pool's name has 1 to 64 letters, digits and _.-, not {pool[:80]!r}")
    return pool


def pool_prefix(pool: str) -> bytes:
    """What the keys of a pool's membership begin with."""
    return b"kvs:{%s}" % pool.encode()


def location_pattern(pool: str) -> bytes:
    """What all buckets of a pool match, as a pattern of Redis; tags do not."""
    return b"kvs:{%s:*}:*" % pool.encode()


def tag(pool: str, namespace: bytes, root: bytes) -> bytes:
    """The key that the locations of a chain begin with.

    Args:
        pool: its name.
        namespace: fingerprint.
        root: hash of the chain's first block.
    """
    return b"kvs:{%s:%s:%02x}" % (pool.encode(), namespace[:8].hex().encode(), root[0])


def hash_parts(blocks: Iterable[bytes]) -> bytes:
    """The parts of prefix hashes that the directory keeps, one after the other.

    Not their first byte, which all first blocks under one tag share.
    """
    joined = blocks.joined if type(blocks) is JoinedHashes else b"".join(blocks)
    whole = np.frombuffer(joined, np.uint8).reshape(-1, HASH_BYTES)
    return whole[:, 1 : 1 + HASH_PART].tobytes()


def name(place: Place) -> bytes:
    """What names a block under its tag."""
    return _SHARD.pack(place.shard) + place.hash[1 : 1 + HASH_PART]


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Numbers of members as a value names them."""
    return b"".join(map(_NUMBER.pack, numbers))


def unpack_numbers(value: bytes) -> tuple[int, ...]:
    """The numbers in a value; a broken tail is ignored."""
    whole = len(value) - len(value) % NUMBER_BYTES
    return tuple(number for (number,) in _NUMBER.iter_unpack(value[:whole]))


def unpack_reach(answer: bytes) -> tuple[int, list[tuple[int, ...]]]:
    """What the script ``reach`` returned: how many blocks, and for each shard the owners.

    Raises:
        struct.error: it is shorter than it says.
    """
    (blocks,), at, owners = _NUMBER.unpack_from(answer), NUMBER_BYTES, []
    while at < len(answer):
        (length,) = _NUMBER.unpack_from(answer, at)
        at += NUMBER_BYTES
        if at + length > len(answer):
            raise struct.error(f"{length} bytes of owners from byte {at} of {len(answer)}")
        owners.append(unpack_numbers(answer[at : at + length]))
        at += length
    return blocks, owners
