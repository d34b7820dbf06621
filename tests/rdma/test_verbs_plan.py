import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdma.errors import BadPlace
from rdma.verbs.plan import Piece, Work, plan, proof, select, triples


def works(
    local: list[tuple[int, int]],
    length: int,
    named: list[int],
    pieces: int = 4,
    most: int = 1 << 20,
) -> list[Work]:
    return plan(local, length, named, most_pieces=pieces, most_bytes=most)


def test_a_block_is_one_work_request() -> None:
    assert works([(1000, 7)], 64, [5000, 9, 64]) == [Work(5000, 9, (Piece(1000, 64, 7),), 64)]


def test_blocks_that_follow_each_other_at_the_peer_are_gathered() -> None:
    (work,) = works([(1000, 7), (9000, 8)], 64, [5000, 9, 64, 5064, 9, 64])
    assert work == Work(5000, 9, (Piece(1000, 64, 7), Piece(9000, 64, 8)), 128)


def test_blocks_that_follow_each_other_on_both_sides_are_one_piece() -> None:
    (work,) = works([(1000, 7), (1064, 7)], 64, [5000, 9, 64, 5064, 9, 64])
    assert work.pieces == (Piece(1000, 128, 7),)


def test_another_key_begins_another_work_request() -> None:
    assert len(works([(1000, 7), (1064, 7)], 64, [5000, 9, 64, 5064, 10, 64])) == 2


def test_a_block_in_several_pieces_is_scattered() -> None:
    found = works([(1000, 7)], 64, [5000, 9, 16, 7000, 9, 40, 100, 3, 8])
    assert [(work.remote, work.key, work.pieces) for work in found] == [
        (5000, 9, (Piece(1000, 16, 7),)),
        (7000, 9, (Piece(1016, 40, 7),)),
        (100, 3, (Piece(1056, 8, 7),)),
    ]


def test_a_large_block_is_cut() -> None:
    found = works([(1000, 7)], 10_000, [5000, 9, 10_000], most=4096)
    assert [(work.remote, work.length) for work in found] == [
        (5000, 4096),
        (9096, 4096),
        (13192, 1808),
    ]


def test_nothing_is_nothing() -> None:
    assert works([], 64, []) == []


@pytest.mark.parametrize(
    "named",
    [
        [1],
        [5000, 9, 0],
        [5000, 9, -1],
        [5000, 1 << 32, 64],
        [5000, -1, 64],
        [(1 << 64) - 63, 9, 64],
        [-1, 9, 64],
        [5000, 9, 63],
        [5000, 9, 65],
        [5000, 9, 64, 5064, 9, 64],
        [],
    ],
)
def test_memory_that_makes_no_sense_is_refused(named: list[int]) -> None:
    with pytest.raises(BadPlace):
        works([(1000, 7)], 64, named)
    with pytest.raises(BadPlace):
        select(named, 64, [1])


def test_select_keeps_the_blocks_found() -> None:
    named = [1000, 1, 64, 2000, 2, 32, 3000, 3, 32, 4000, 4, 64]
    assert select(named, 64, bytes([2, 0, 2])) == [1000, 1, 64, 4000, 4, 64]
    assert select(named, 64, [0, 1, 0]) == named[3:9]


cuts = st.lists(st.integers(1, 50), min_size=1, max_size=5)


@given(
    blocks=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1)), max_size=8),
    parts=cuts,
    gaps=st.lists(st.booleans(), min_size=1, max_size=10),
    pieces=st.integers(1, 4),
    most=st.integers(1, 200),
)
def test_every_byte_goes_where_it_belongs(
    blocks: list[tuple[int, int]], parts: list[int], gaps: list[bool], pieces: int, most: int
) -> None:
    length = sum(parts)
    local = [(slot * length, key) for slot, key in blocks]
    named, expected, at, number = [], [], 10_000, 0
    for address, key in local:
        start = address
        for part in parts:
            at += 7 if gaps[number % len(gaps)] else 0
            number += 1
            named += [at, 5, part]
            expected += [(at + i, start + i, key) for i in range(part)]
            at, start = at + part, start + part
    planned = plan(local, length, named, most_pieces=pieces, most_bytes=most)
    moved = []
    for work in planned:
        assert work.length == sum(piece.length for piece in work.pieces) <= most
        assert len(work.pieces) <= pieces
        at = work.remote
        for piece in work.pieces:
            moved += [(at + i, piece.address + i, piece.key) for i in range(piece.length)]
            at += piece.length
    assert moved == expected


def test_triples_are_read_in_order() -> None:
    assert list(triples([1, 2, 3, 4, 5, 6])) == [(1, 2, 3), (4, 5, 6)]


def test_a_proof_reads_the_last_byte_written() -> None:
    landing = Piece(64, 1, 3)
    writes = works([(1000, 7), (9000, 8)], 64, [5000, 9, 64, 7000, 10, 64])
    assert proof(writes, landing) == Work(7063, 10, (landing,), 0, proves=True)
    assert proof(writes, landing, (4096, 11)) == Work(4096, 11, (landing,), 0, proves=True)
