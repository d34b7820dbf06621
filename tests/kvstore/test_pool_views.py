"""Answers of several members, taken together; and which member somebody means."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.control.interface import (
    BlockName,
    Ending,
    Explanation,
    MatchReport,
    NamespaceReport,
    Removal,
    VerifyProgress,
)
from kvstore.control.members import check_same, control_address, find_member
from kvstore.control.pool import LoadReport, MemberReport
from kvstore.control.pool_views import (
    Answer,
    Position,
    conclude,
    merge_matches,
    merge_names,
    merge_namespaces,
    merge_progress,
    merge_removals,
    next_node,
    reach,
)
from kvstore.errors import Unavailable

HASHES = [hashlib.sha256(bytes([at])).digest() for at in range(12)]


def member(number: int, node: str = "", control: str = "") -> MemberReport:
    name = node or f"node{number}"
    return MemberReport(
        number, name, f"start{number}", "host", f"10.0.0.{number}:9410", control or f"c{number}:1"
    )


def said(number: int, blocks: int, ending: Ending, **fields: object) -> Answer[Explanation]:
    return Answer(member(number), Explanation(12, blocks, ending, **fields))  # type: ignore[arg-type]


# --- prefixes -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_a_pool_reaches_as_far_as_its_best_node(reports: list[tuple[int, int]]) -> None:
    answers = []
    for number, (here, remote) in enumerate(reports):
        tiers = ("dram",) * here + ("remote",) * min(remote, 12 - here)
        answers.append(Answer(member(number), MatchReport(12, tiers)))
    merged = merge_matches(answers)
    assert merged.asked == 12
    assert merged.blocks == max(len(answer.value.tiers) for answer in answers)
    for at, holders in enumerate(merged.holders):
        assert {one.number for one in holders} == {
            number for number, (here, _) in enumerate(reports) if here > at
        }


def test_the_ending_that_says_most_is_the_pools() -> None:
    answers = [said(1, 3, Ending.NEVER_STORED), said(2, 5, Ending.FORGOTTEN)]
    about = [
        said(1, 0, Ending.DEPARTED, ago=60.0, tier="dram", reason="capacity"),
        said(2, 0, Ending.FORGOTTEN),
        said(3, 0, Ending.DEPARTED, ago=5.0, tier="ssd", reason="ssd_reclaim"),
    ]
    found = conclude(answers, about, HASHES, lost=False)
    assert (found.explanation.blocks, found.explanation.asked) == (5, 12)
    assert (found.explanation.ending, found.explanation.tier) == (Ending.DEPARTED, "ssd")
    assert found.explanation.hash == HASHES[5]
    assert found.nodes == ("node1", "node3")
    pending = conclude(answers, [*about, said(4, 0, Ending.PENDING)], HASHES, lost=False)
    assert pending.explanation.ending is Ending.PENDING


def test_a_node_that_left_explains_what_the_others_cant() -> None:
    answers = [
        said(1, 3, Ending.NODE_GONE, gone="elsewhere"),
        said(2, 5, Ending.NEVER_STORED, gone="lost"),
    ]
    about = [said(1, 0, Ending.NEVER_STORED), said(2, 0, Ending.NEVER_STORED)]
    found = conclude(answers, about, HASHES, lost=True)
    assert (found.explanation.ending, found.explanation.gone) == (Ending.NODE_GONE, "lost")
    departed = [*about, said(3, 0, Ending.DEPARTED, ago=1.0)]
    assert conclude(answers, departed, HASHES, lost=True).explanation.ending is Ending.DEPARTED


def test_where_members_left_nobody_can_say_that_a_block_never_was() -> None:
    answers = [said(1, 0, Ending.NEVER_STORED)]
    for lost, ending in ((False, Ending.NEVER_STORED), (True, Ending.FORGOTTEN)):
        assert conclude(answers, answers, HASHES, lost=lost).explanation.ending is ending


def test_a_prefix_that_several_nodes_hold_in_parts_is_complete() -> None:
    answers = [said(1, 4, Ending.NEVER_STORED, remote=8), said(2, 0, Ending.NEVER_STORED)]
    assert reach(answers) == 12
    assert conclude(answers, answers, HASHES, lost=True).explanation.ending is Ending.COMPLETE


def test_a_block_that_came_meanwhile_is_no_reason() -> None:
    answers = [said(1, 4, Ending.NEVER_STORED)]
    about = [said(1, 1, Ending.COMPLETE)]
    assert conclude(answers, about, HASHES, lost=False).explanation.ending is Ending.FORGOTTEN


# --- sums -----------------------------------------------------------------------------------------


def test_namespaces_are_added_up_and_described_by_who_can() -> None:
    one = NamespaceReport(b"a" * 32, {}, 3, 30, (0,), 1)
    other = NamespaceReport(b"a" * 32, {"model": "m"}, 5, 50, (0, 1), 2)
    small = NamespaceReport(b"b" * 32, {}, 1, 1, (0,))
    found = merge_namespaces([[small, one], [other]])
    assert found == [NamespaceReport(b"a" * 32, {"model": "m"}, 8, 80, (0, 1), 3), small]


def test_names_are_listed_once() -> None:
    name, other = BlockName(b"a", b"1"), BlockName(b"a", b"2")
    assert merge_names([[name], [name, other]], 3) == [name, other]
    assert merge_names([[name], [name, other]], 1) == [name]


def test_what_was_done_is_added_up() -> None:
    assert merge_removals([Removal(1, 10, 2, 3), Removal(4, 40)]) == Removal(5, 50, 2, 3)
    done, under_way = VerifyProgress(5, 5, 50, 1, finished=True), VerifyProgress(1, 9, 10)
    assert merge_progress([done, under_way]) == VerifyProgress(6, 14, 60, 1)
    assert merge_progress([done, done]).finished
    assert not merge_progress([]).finished


# --- pages ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.binary(max_size=68))
def test_a_position_comes_back_from_its_cursor(number: int, cursor: bytes) -> None:
    at = Position(number, cursor)
    assert Position.decode(at.encode()) == at


def test_a_listing_passes_over_nodes_that_left() -> None:
    members = [member(7), member(3)]
    assert next_node(members, Position()) == (members[1], Position(3))
    assert next_node(members, Position(3, b"x")) == (members[1], Position(3, b"x"))
    assert next_node(members, Position(5, b"x")) == (members[0], Position(7))
    assert next_node(members, Position(8)) is None
    with pytest.raises(ValueError, match="cursor"):
        Position.decode(b"\1")


# --- members --------------------------------------------------------------------------------------


def test_a_member_is_found_by_what_names_it_alone() -> None:
    members = [member(1), member(2), member(3, "2"), member(4, "twin"), member(5, "twin")]
    assert find_member(members, "node1").number == 1
    assert find_member(members, "2").number == 3
    assert find_member(members, "1").number == 1
    assert find_member(members, "c2:1").number == 2
    assert find_member(members, "10.0.0.4:9410").number == 4
    assert find_member(members, "start5").number == 5
    with pytest.raises(ValueError, match="several nodes"):
        find_member(members, "twin")
    with pytest.raises(ValueError, match="no member"):
        find_member(members, "node")


def test_the_last_start_of_a_node_is_meant() -> None:
    before = MemberReport(4, "node", "old", "host", "10.0.0.1:9410", "c:1")
    after = MemberReport(9, "node", "new", "host", "10.0.0.1:9410", "c:1")
    assert find_member([after, before], "node") is after


def test_who_answers_must_be_who_was_meant() -> None:
    meant = member(1)
    check_same(meant, LoadReport("node1", "start1", {}, ()))
    with pytest.raises(Unavailable, match="started anew"):
        check_same(meant, LoadReport("node1", "start2", {}, ()))
    with pytest.raises(Unavailable, match="node2 answers"):
        check_same(meant, LoadReport("node2", "start2", {}, ()))


def test_a_member_has_a_control_address_or_is_not_there() -> None:
    assert control_address(member(1, control="10.0.0.1:9401")) == ("10.0.0.1", 9401)
    with pytest.raises(Unavailable, match="no control plane"):
        control_address(MemberReport(1, "node1", "start1", "host", "10.0.0.1:9410", ""))
    with pytest.raises(Unavailable, match="control address of node1"):
        control_address(member(1, control="nowhere"))
