"""The feed of a shard: whoever follows it ends with the blocks that the shard holds, or is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.feed import Feed
from kvstore.identity import HASH_BYTES
from kvstore.node import Node
from kvstore.protocol.messages import BLOCK_REMOVED, BLOCK_STORED
from tests.kvstore.test_node import NAMESPACE, NodeMachine, chain, make_node, name, put

BLOCKS = [bytes([number]) * HASH_BYTES for number in range(8)]
CAPACITY = 5


def split(joined: bytes) -> list[bytes]:
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


@dataclass
class Follower:
    """What somebody believes who asks a feed, and the held set where changes were lost."""

    position: int = 0
    believed: set[bytes] = field(default_factory=set)

    def ask(self, feed: Feed, limit: int, held: set[bytes]) -> int:
        """One question; returns how many changes came."""
        recorded = feed.since(self.position, limit)
        self.position = recorded.sequence
        if not recorded.complete:
            assert (recorded.kinds, recorded.hashes) == (b"", b"")
            self.believed = set(held)
        changes = list(zip(recorded.kinds, split(recorded.hashes), strict=True))
        for kind, block in changes:
            if kind == BLOCK_STORED:
                self.believed.add(block)
            else:
                self.believed.discard(block)
        assert len(changes) <= limit
        return len(changes)

    def catch_up(self, feed: Feed, limit: int, held: set[bytes]) -> None:
        while self.ask(feed, limit, held):
            pass
        assert self.position == feed.sequence
        assert self.believed == held


# --- the log by itself --------------------------------------------------------------------------


class FeedMachine(RuleBasedStateMachine):
    """A feed beside a list of all changes, with followers that ask when they like."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[bytes] = set()
        self.begin(1)
        self.followers = [Follower() for _ in range(3)]

    def begin(self, start: int) -> None:
        self.start, self.feed = start, Feed(start, CAPACITY)
        self.changes: list[tuple[int, bytes]] = []

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=2 * CAPACITY))
    def change(self, blocks: list[bytes]) -> None:
        for block in blocks:
            if block in self.held:
                self.held.remove(block)
                self.feed.removed(block)
                self.changes.append((BLOCK_REMOVED, block))
            else:
                self.held.add(block)
                self.feed.stored(block)
                self.changes.append((BLOCK_STORED, block))

    @rule(block=st.sampled_from(BLOCKS))
    def change_unnoticed_and_record_anew(self, block: bytes) -> None:
        self.held ^= {block}
        self.begin(self.feed.sequence + 2 * CAPACITY)

    @rule(who=st.integers(0, 2), limit=st.integers(1, 2 * CAPACITY))
    def ask_once(self, who: int, limit: int) -> None:
        self.followers[who].ask(self.feed, limit, self.held)

    @rule(who=st.integers(0, 2), limit=st.integers(1, 2 * CAPACITY))
    def catch_up(self, who: int, limit: int) -> None:
        self.followers[who].catch_up(self.feed, limit, self.held)

    @rule(back=st.integers(-2, 3 * CAPACITY), limit=st.integers(1, 2 * CAPACITY))
    def every_answer_is_that_of_the_list(self, back: int, limit: int) -> None:
        after = max(self.start + len(self.changes) - back, 0)
        recorded = self.feed.since(after, limit)
        place = after - self.start
        reaches = max(0, len(self.changes) - CAPACITY) <= place <= len(self.changes)
        assert recorded.complete is reaches
        expected = self.changes[place:][:limit] if reaches else []
        found = list(zip(recorded.kinds, split(recorded.hashes), strict=True))
        assert found == expected
        assert recorded.sequence == (after + len(expected) if reaches else self.feed.sequence)

    @invariant()
    def the_log_is_bounded(self) -> None:
        assert self.feed.sequence == self.start + len(self.changes)
        assert len(self.feed._kinds) == min(len(self.changes), CAPACITY)
        assert len(self.feed._hashes) == HASH_BYTES * len(self.feed._kinds)


TestFeed = FeedMachine.TestCase


def test_to_begin_is_to_learn_the_position_and_no_more() -> None:
    feed = Feed(70)
    feed.stored(BLOCKS[1])
    assert feed.since(0, 10) == (71, False, b"", b"")
    assert feed.since(71, 10) == (71, True, b"", b"")
    feed.removed(BLOCKS[1])
    assert feed.since(71, 10) == (72, True, bytes([BLOCK_REMOVED]), BLOCKS[1])


@given(position=st.integers(0, 2**64 - 1), start=st.integers(1, 2**62))
def test_a_position_of_another_recording_is_not_taken_for_one(position: int, start: int) -> None:
    feed = Feed(start, CAPACITY)
    for block in BLOCKS[:3]:
        feed.stored(block)
    assert feed.since(position, 10).complete is (start <= position <= start + 3)


@pytest.mark.parametrize(("start", "capacity"), [(0, 5), (-1, 5), (1, 0)])
def test_a_feed_begins_after_a_number_and_remembers_something(start: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="can't begin"):
        Feed(start, capacity)


# --- the feed of a node -------------------------------------------------------------------------


class FollowedMachine(NodeMachine):
    """A node that is followed: what it tells adds up to what it holds, whatever happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.shard.feed = Feed(1, 20)
        self.feed = self.node.follow(self.shard)
        self.followers = [Follower() for _ in range(2)]

    @rule(who=st.integers(0, 1), limit=st.integers(1, 30))
    def ask(self, who: int, limit: int) -> None:
        self.followers[who].ask(self.feed, limit, set(self.shard.committed))

    @rule(who=st.integers(0, 1), limit=st.integers(1, 30))
    def catch_up(self, who: int, limit: int) -> None:
        self.followers[who].catch_up(self.feed, limit, set(self.shard.committed))

    @rule()
    def someone_else_comes_and_goes(self) -> None:
        assert self.node.follow(self.shard) is self.feed
        self.node.unfollow(self.shard)
        assert self.shard.feed is self.feed


TestFollowedNode = FollowedMachine.TestCase


@pytest.fixture
def node() -> Node:
    node = make_node()
    yield node
    node.dram.close()


def test_nothing_is_recorded_before_the_first_and_after_the_last_follower(node: Node) -> None:
    shard = node.shard(NAMESPACE, 0)
    put(node, (1,))
    assert shard.feed is None
    feed = node.follow(shard)
    position = feed.sequence
    put(node, (2, 2))
    assert feed.since(position, 9).hashes == b"".join(chain((2, 2)))
    assert node.follow(shard) is feed
    node.unfollow(shard)
    put(node, (3,))
    assert feed.since(position, 9).hashes[-HASH_BYTES:] == name(3)
    node.unfollow(shard)
    assert shard.feed is None
    put(node, (4,))
    assert feed.since(position, 9).hashes[-HASH_BYTES:] == name(3)


def test_a_new_recording_does_not_know_positions_of_the_one_before(node: Node) -> None:
    shard = node.shard(NAMESPACE, 0)
    position = node.follow(shard).sequence
    node.unfollow(shard)
    put(node, (1,))
    feed = node.follow(shard)
    assert not feed.since(position, 9).complete
    assert not feed.since(position + 1, 9).complete


def test_a_block_that_is_being_written_is_no_change(node: Node) -> None:
    shard = node.shard(NAMESPACE, 0)
    feed = node.follow(shard)
    position = feed.sequence
    _, reservation = node.reserve(shard, "default", bytes(32), chain((1, 1)), number=1, most=9)
    assert reservation is not None
    node.abort(reservation)
    assert feed.since(position, 9) == (position, True, b"", b"")


def test_only_its_own_shard_is_in_a_feed(node: Node) -> None:
    other = node.shard(NAMESPACE, 1)
    feed = node.follow(other)
    put(node, (1,))
    assert feed.since(feed.sequence, 9).hashes == b""
