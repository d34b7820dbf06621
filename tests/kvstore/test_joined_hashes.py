"""Hashes as they travel behave as those that they are."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.fields import JoinedHashes

EACH = tuple(sha256(bytes([number])).digest() for number in range(9))
JOINED = JoinedHashes(b"".join(EACH))

_index = st.none() | st.integers(-12, 12)


@given(_index, _index, st.none() | st.integers(-3, 3).filter(bool))
def test_a_slice_is_that_of_the_hashes(
    start: int | None, stop: int | None, step: int | None
) -> None:
    found = JOINED[start:stop:step]
    assert tuple(found) == EACH[start:stop:step]
    assert len(found) == len(EACH[start:stop:step])


def test_a_slice_travels_as_it_is() -> None:
    found = JOINED[2:5]
    assert isinstance(found, JoinedHashes)
    assert found.joined == b"".join(EACH[2:5])


@pytest.mark.parametrize("index", range(-9, 9))
def test_a_hash_is_found_by_its_number(index: int) -> None:
    assert JOINED[index] == EACH[index]


@pytest.mark.parametrize("index", [9, -10, 1 << 40])
def test_there_are_no_others(index: int) -> None:
    with pytest.raises(IndexError):
        JOINED[index]


def test_they_equal_the_same_hashes() -> None:
    same: list[object] = [JOINED, list(EACH), EACH]
    hashes = JoinedHashes(JOINED.joined)
    assert all(hashes == other for other in same)
    others: list[object] = [JOINED[1:], list(EACH[1:]), b"", 7]
    assert all(hashes != other for other in others)
