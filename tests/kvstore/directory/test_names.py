"""Keys, fields and values."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.directory.interface import Place
from kvstore.directory.names import (
    HASH_PART,
    NAME_BYTES,
    check_pool,
    hash_parts,
    name,
    pack_numbers,
    pool_prefix,
    tag,
    unpack_numbers,
    unpack_reach,
)
from kvstore.errors import ConfigError
from kvstore.protocol.fields import JoinedHashes
from tests.kvstore.directory.pools import NAMESPACE, OTHER_NAMESPACE, chain


def test_a_chain_has_one_tag() -> None:
    root = bytes([0xA7]) + bytes(31)
    assert tag("pool", NAMESPACE, root) == b"kvs:{pool:%s:a7}" % NAMESPACE[:8].hex().encode()
    assert tag("pool", NAMESPACE, root) != tag("pool", OTHER_NAMESPACE, root)
    assert pool_prefix("pool") == b"kvs:{pool}"


def test_names_tell_blocks_and_shards_apart() -> None:
    blocks = chain("a", 100)
    names = {
        name(Place(NAMESPACE, shard, blocks[0], block)) for block in blocks for shard in (0, 300)
    }
    assert len(names) == 200
    assert {len(found) for found in names} == {NAME_BYTES}


def test_first_blocks_of_one_tag_spread_over_buckets() -> None:
    roots = [bytes([7]) + block[1:] for block in chain("roots", 400)]
    assert len({hash_parts([root])[:2] for root in roots}) > 300
    assert hash_parts(roots) == b"".join(root[1 : 1 + HASH_PART] for root in roots)
    assert hash_parts(JoinedHashes(b"".join(roots))) == hash_parts(roots)
    assert hash_parts([]) == b""


@given(st.lists(st.integers(1, (1 << 32) - 1)), st.binary(max_size=3))
def test_values_name_numbers(numbers: list[int], tail: bytes) -> None:
    assert list(unpack_numbers(pack_numbers(numbers) + tail)) == numbers


def _reached(blocks: int, owners: list[list[int]]) -> bytes:
    values = map(pack_numbers, owners)
    framed = (struct.pack("<I", len(value)) + value for value in values)
    return struct.pack("<I", blocks) + b"".join(framed)


_numbers = st.lists(st.integers(1, (1 << 32) - 1), max_size=8)


@given(st.integers(0, 65_536), st.lists(_numbers, max_size=4))
def test_an_answer_names_the_owners_of_each_shard(blocks: int, owners: list[list[int]]) -> None:
    assert unpack_reach(_reached(blocks, owners)) == (blocks, [tuple(one) for one in owners])


@given(st.lists(_numbers, min_size=1, max_size=4), st.data())
def test_an_answer_that_is_cut_off_is_refused(owners: list[list[int]], data: st.DataObject) -> None:
    whole = _reached(7, owners)
    boundaries = {len(_reached(7, owners[:at])) for at in range(len(owners) + 1)}
    end = data.draw(st.integers(0, len(whole)).filter(lambda at: at not in boundaries))
    with pytest.raises(struct.error):
        unpack_reach(whole[:end])


@pytest.mark.parametrize("pool", ["", "a b", "{x}", "a:b", "x" * 65, "pool*", "pool\n"])
def test_a_pool_that_would_break_keys_is_refused(pool: str) -> None:
    with pytest.raises(ConfigError, match="pool's name"):
        check_pool(pool)


def test_a_pool_may_be_called() -> None:
    assert check_pool("eu-1.prod_a") == "eu-1.prod_a"
