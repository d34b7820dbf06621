"""What a node knows of the members."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.directory.interface import NOBODY
from kvstore.directory.membership import (
    Membership,
    Version,
    decode_member,
    decode_summary,
    encode_member,
    encode_summary,
)
from kvstore.directory.names import unpack_numbers
from kvstore.directory.pace import Pace
from kvstore.errors import ConfigError
from tests.kvstore.directory.pools import member


def test_a_member_reads_as_it_was_written() -> None:
    one = replace(member("one"), control="one:9001", number=7)
    assert decode_member(7, encode_member(one)) == one
    assert decode_summary(encode_summary({"blocks": 3, "rate": 0.5})) == {
        "blocks": 3.0,
        "rate": 0.5,
    }


@given(
    st.binary(max_size=60) | st.sampled_from([b"[]", b"3", b"{}", b'{"node": 1}', b"x" * 20_000])
)
def test_records_of_others_are_not_trusted(record: bytes) -> None:
    assert decode_member(7, record) is None
    summary = decode_summary(record)
    assert summary is None or all(isinstance(value, float) for value in summary.values())


@pytest.mark.parametrize("record", [b"[" * 16_000, b'{"a":%s}' % (b"9" * 4000), b'{"a":NaN}'])
def test_summaries_that_are_made_to_break_things(record: bytes) -> None:
    assert decode_summary(record) in (None, {})


@pytest.mark.parametrize("number", [0, -1, 1 << 32])
def test_a_number_that_locations_cannot_name_is_nobody(number: int) -> None:
    assert decode_member(number, encode_member(member("one"))) is None


def test_the_roster_is_the_others() -> None:
    membership = Membership(member("one"))
    membership.joined(5)
    records = {n: encode_member(member(f"node {n}")) for n in (3, 5, 6)}
    membership.heard(Version(4, 1, 0))
    assert membership.stale
    membership.roster(6, [3, 5, 6], records, {3: b'{"blocks": 1}'})
    assert not membership.stale
    assert set(membership.others) == {3, 6}
    assert set(unpack_numbers(membership.live)) == {3, 6}
    assert membership.others[3].summary == {"blocks": 1.0}
    # Those known already come without their records, and keep what they said.
    membership.roster(7, [3, 5, 7], {7: b"no record"}, {})
    assert set(membership.others) == {3}
    assert membership.others[3].summary == {"blocks": 1.0}


def test_only_numbers_given_before_the_roster_are_dead() -> None:
    membership = Membership(member("one"))
    membership.joined(5)
    membership.roster(8, [3, 5], {3: encode_member(member("three"))}, {})
    assert [n for n in range(1, 12) if membership.dead(n)] == [1, 2, 4, 6, 7, 8]


def test_a_lapse_keeps_the_number_and_leaving_does_not() -> None:
    membership = Membership(member("one"))
    membership.joined(5)
    membership.heard(Version(2))
    membership.roster(5, [5], {}, {})
    assert not membership.stale
    membership.lapsed()
    assert (membership.me, membership.before) == (None, 5)
    membership.joined(5)
    assert membership.stale
    membership.left()
    assert (membership.me, membership.before, membership.live) == (None, NOBODY, b"")


@pytest.mark.parametrize("heartbeat", [0.0, -1.0, 21.0])
def test_a_lease_is_bounded(heartbeat: float) -> None:
    with pytest.raises(ConfigError, match="heartbeat"):
        Pace(heartbeat=heartbeat)


def test_of_several_starts_at_one_address_the_last_counts() -> None:
    membership = Membership(member("one"))
    membership.joined(8)
    names = {2: "one", 3: "two", 5: "two", 6: "three"}
    records = {number: encode_member(member(name)) for number, name in names.items()}
    membership.roster(8, list(records), records, {})
    # 2 is an earlier start of this node.
    assert set(membership.others) == {5, 6}
    assert unpack_numbers(membership.live) == (5, 6)
    assert membership.dead(3)
    assert membership.dead(2)


def test_who_is_missed_is_remembered_until_it_is_back() -> None:
    membership = Membership(member("one"))
    membership.joined(1)
    records = {n: encode_member(member(name)) for n, name in {2: "two", 3: "three"}.items()}
    membership.roster(3, [1, 2, 3], records, {}, now=10.0)
    assert not membership.gone
    membership.roster(3, [1, 3], {}, {}, now=20.0)
    membership.roster(3, [1], {}, {}, now=30.0)
    assert {n: (one.member.node, one.when) for n, one in membership.gone.items()} == {
        2: ("two", 20.0),
        3: ("three", 30.0),
    }
    membership.roster(3, [1, 2], records, {}, now=40.0)
    assert list(membership.gone) == [3]


def test_a_member_under_another_number_is_not_gone() -> None:
    membership = Membership(member("one"))
    membership.joined(1)
    record = encode_member(member("two"))
    membership.roster(2, [1, 2], {2: record}, {}, now=10.0)
    membership.joined(101)
    membership.roster(101, [101], {}, {}, now=20.0)
    assert list(membership.gone) == [2]
    membership.roster(102, [101, 102], {102: record}, {}, now=30.0)
    assert not membership.gone


def test_few_of_those_that_are_gone_are_remembered() -> None:
    membership = Membership(member("one"))
    membership.joined(1)
    for number in range(2, 300):
        records = {number: encode_member(member(f"n{number}"))}
        membership.roster(300, [1, number], records, {}, now=float(number))
    assert len(membership.gone) < 100
    assert list(membership.gone)[-1] == 298
