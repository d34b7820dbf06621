"""Checksums of blocks that come in pieces."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kvstore.sums import Sums

SIZE = 100


@given(st.lists(st.lists(st.integers(1, SIZE), max_size=5), max_size=4), st.randoms())
def test_blocks_have_the_same_sums_in_one_piece_and_in_many(cuts: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    sums = Sums(SIZE)
    expected = []
    for edges in cuts:
        block = random.randbytes(SIZE)
        expected.append(crc32c(block))
        at = 0
        for edge in sorted({*edges, SIZE}):
            sums(memoryview(block)[at:edge])
            at = edge
    assert sums.done == expected


def test_a_block_that_is_not_complete_has_no_sum() -> None:
    sums = Sums(SIZE)
    sums(memoryview(bytes(SIZE - 1)))
    assert sums.done == []
