"""Sessions that follow their shard, and what ends blocks that they are told of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.protocol.messages import Exists, Follow, FollowAnswer, Reserve, Write
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content
from tests.kvstore.watched import Operator, Watched, chain, connected, name
from tests.running import make_config, wait_for

PAIR = Namespace("m", "float32", "test", 16, BLOCK, tp_size=2)
OTHERS = Namespace("m", "float32", "test", 16, BLOCK, tenant="others")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make_config(tmp_path)) as running:
        yield running


def begin(peer: Peer) -> int:
    answer = ask(peer, 0)
    assert (answer.complete, list(answer.hashes)) == (False, [])
    return answer.sequence


def ask(peer: Peer, after: int, limit: int = 1000) -> FollowAnswer:
    answer: FollowAnswer = peer.ask(Follow(after, limit))[0]
    return answer


def changes(answer: FollowAnswer) -> list[tuple[int, bytes]]:
    assert answer.complete
    return list(zip(answer.kinds, answer.hashes, strict=True))


def recording(daemon: Watched) -> int:
    return sum(shard.feed is not None for shard in daemon.daemon.node.index.shards)


def test_blocks_are_told_when_they_can_be_found(daemon: Watched) -> None:
    hashes = chain("told", length=3)
    with connected(daemon) as writer, connected(daemon) as follower:
        position = begin(follower)
        number = writer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
        assert changes(ask(follower, position)) == []
        writer.ask(Write(number, [1], 0, BLOCK), content(hashes[1]))
        assert changes(ask(follower, position)) == [], "its parent is not there"
        writer.ask(Write(number, [0], 0, BLOCK), content(hashes[0]))
        answer = ask(follower, position)
        assert changes(answer) == [(1, hashes[0]), (1, hashes[1])]
        assert changes(ask(follower, position, limit=1)) == [(1, hashes[0])]
        assert changes(ask(follower, position + 1, limit=1)) == [(1, hashes[1])]
        assert changes(ask(follower, answer.sequence)) == []
    wait_for(lambda: daemon.metrics.requests["follow"] == 7)


@pytest.mark.parametrize("which", [name(1), None], ids=["a block", "the namespace"])
def test_what_an_operator_evicts_is_told(daemon: Watched, which: bytes | None) -> None:
    with connected(daemon) as peer:
        peer.put([name(1), name(1, 1)])
        position = begin(peer)
        Operator(daemon).evict(NAMESPACE.fingerprint, which)
        assert changes(ask(peer, position)) == [(0, name(1, 1)), (0, name(1))]
        assert peer.ask(Exists([name(1), name(1, 1)]))[0].tiers == b"\0\0"


def test_what_was_damaged_is_told(tmp_path: Path) -> None:
    config = make_config(tmp_path, policy={"integrity": "always"})
    with Watched(config) as daemon, connected(daemon) as peer:
        peer.put([name(1)])
        position = begin(peer)
        node = daemon.daemon.node
        (entry,) = node.index.find(name(1))
        node.dram.view(entry.dram, BLOCK)[7] ^= 1  # type: ignore[arg-type]
        Operator(daemon).verify()
        assert changes(ask(peer, position)) == [(0, name(1))]


def test_room_taken_by_another_tenant_is_told(daemon: Watched) -> None:
    fits = (8 << 20) // BLOCK
    with connected(daemon) as peer, connected(daemon, OTHERS) as other:
        position = begin(peer)
        ours = [name("ours", number) for number in range(fits)]
        for block in ours:
            peer.put([block])
        position = ask(peer, position).sequence
        for number in range(fits // 2):
            other.put([name("theirs", number)])
        gone = changes(ask(peer, position))
        assert len(gone) >= fits // 2
        held = set(ours) - {block for _, block in gone}
        tiers = peer.ask(Exists(ours))[0].tiers
        assert held == {block for block, tier in zip(ours, tiers, strict=True) if tier}
        assert {kind for kind, _ in gone} == {0}


def test_each_shard_is_followed_by_itself(daemon: Watched) -> None:
    with connected(daemon, PAIR) as first, connected(daemon, PAIR, shard=1) as second:
        positions = begin(first), begin(second)
        assert positions[0] != positions[1]
        first.put([name(1)])
        second.put([name(2)])
        assert changes(ask(first, positions[0])) == [(1, name(1))]
        assert changes(ask(second, positions[1])) == [(1, name(2))]
        assert not ask(first, positions[1]).complete, "a position of another shard"


def test_recording_ends_with_the_last_session_that_follows(daemon: Watched) -> None:
    with connected(daemon) as peer:
        with connected(daemon) as first:
            position = begin(first)
            with connected(daemon) as second:
                begin(second)
                begin(second)
            wait_for(lambda: daemon.metrics.sessions == 2)
            peer.put([name(1)])
            assert changes(ask(first, position)) == [(1, name(1))]
        wait_for(lambda: daemon.metrics.sessions == 1)
        assert recording(daemon) == 0
        answer = ask(peer, position)
        assert not answer.complete
        assert recording(daemon) == 1
    wait_for(lambda: recording(daemon) == 0)


def test_a_follower_that_fell_behind_is_told_so(
    daemon: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(daemon) as peer:
        position = begin(peer)
        for shard in daemon.daemon.node.index.shards:
            assert shard.feed is not None
            monkeypatch.setattr(shard.feed, "_capacity", 4)
        peer.put(chain("first", length=4))
        assert len(changes(ask(peer, position))) == 4
        peer.put(chain("more", length=1))
        answer = ask(peer, position)
        assert answer == FollowAnswer(position + 5, False, b"", ())
        assert changes(ask(peer, answer.sequence)) == []
        assert len(changes(ask(peer, position + 1))) == 4
