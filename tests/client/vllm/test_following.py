from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import kvstore
from client.results import Change, Changes, GetResult
from client.vllm import following
from client.vllm.announcements import Announcements
from client.vllm.counts import Counts
from client.vllm.events import Announced, Ledger
from client.vllm.following import Following, News
from kvstore.identity import ROOT_PARENT, Namespace, prefix_hashes
from tests.client.vllm.test_events import Router
from tests.running import DaemonThread, make_config, wait_for


def name(number: int) -> bytes:
    return sha256(number.to_bytes(4, "big")).digest()


def announced(number: int) -> Announced:
    block = name(number)
    return Announced(block, ROOT_PARENT, b"engine" + block, None, [number])


class Shard:
    """A shard's feed and what it holds, without a node."""

    def __init__(self, begin: int = 1_000, capacity: int = 1 << 20) -> None:
        self.held: set[bytes] = set()
        self.log: list[Change] = []
        self.begin = begin
        self.capacity = capacity
        self.failure: str | None = None
        self.error: Exception | None = None
        self.followed: list[int] = []
        self.asked: list[Sequence[bytes]] = []

    def store(self, *blocks: bytes) -> None:
        self.held.update(blocks)
        self.log += [Change(block, True) for block in blocks]

    def remove(self, *blocks: bytes) -> None:
        self.held.difference_update(blocks)
        self.log += [Change(block, False) for block in blocks]

    def start_anew(self, *held: bytes) -> None:
        self.begin += len(self.log) + 1_000_000
        self.log = []
        self.held = set(held)

    def follow(self, after: int, *, limit: int, deadline: float | None = None) -> Changes:
        assert deadline is not None
        self.followed.append(after)
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            return Changes(after, True, failure=self.failure)
        first = after - self.begin
        end = len(self.log)
        if not max(0, end - self.capacity) <= first <= end:
            return Changes(self.begin + end, False)
        part = self.log[first : first + limit]
        return Changes(after + len(part), True, part)

    def exists(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        assert deadline is not None
        self.asked.append(hashes)
        if self.failure is not None:
            return GetResult(bytes(len(hashes)), self.failure)
        return GetResult(bytes(2 if block in self.held else 0 for block in hashes))


def followed(shard: Shard) -> Following:
    """One that has begun to follow and said so."""
    one = Following(shard, Counts())
    one.poll()
    assert one.take() == News([], True)
    return one


# --- the feed ----------------------------------------------------------------------------------


def test_begins_with_everything_in_doubt() -> None:
    shard = Shard()
    shard.store(name(1))
    shard.remove(name(1))
    one = followed(shard)
    assert shard.followed == [0]
    one.poll()
    assert one.take() == News([], False)
    assert shard.followed == [0, 1_002]


def test_what_is_removed_is_news_once() -> None:
    shard = Shard()
    one = followed(shard)
    shard.store(name(1), name(2))
    shard.remove(name(1), name(2))
    one.poll()
    assert one.take() == News([name(1), name(2)], False)
    one.poll()
    assert one.take() == News([], False)


@pytest.mark.parametrize("between", [False, True], ids=["one reading", "two readings"])
def test_what_came_back_is_no_news(between: bool) -> None:
    shard = Shard()
    one = followed(shard)
    shard.remove(name(1), name(2))
    if between:
        one.poll()
    shard.store(name(1))
    one.poll()
    assert one.take() == News([name(2)], False)


def test_reads_on_while_there_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LIMIT", 3)
    monkeypatch.setattr(following, "MANY", 2)
    shard = Shard()
    one = followed(shard)
    shard.remove(*map(name, range(7)))
    one.poll()
    assert len(one.take().removed) == 7
    assert shard.followed[1:] == [1_000, 1_003, 1_006]


def test_lost_changes_put_everything_in_doubt() -> None:
    shard = Shard(capacity=2)
    one = followed(shard)
    shard.remove(name(1), name(2), name(3))
    one.poll()
    assert one.take() == News([], True)
    shard.start_anew()
    one.poll()
    assert one.take() == News([], True)


def test_an_engine_that_never_listens_costs_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(following, "MOST_REMOVED", 5)
    shard = Shard()
    one = followed(shard)
    shard.remove(*map(name, range(5)))
    one.poll()
    shard.remove(name(9))
    one.poll()
    assert one.take() == News([], True)


# --- asking ------------------------------------------------------------------------------------


def test_asks_in_pieces_what_is_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "PIECE", 2)
    shard = Shard()
    one = followed(shard)
    shard.store(name(0), name(3))
    one.check([name(number) for number in range(5)])
    one.poll()
    assert [len(piece) for piece in shard.asked] == [2, 2, 1]
    assert one.take() == News([name(1), name(2), name(4)], False)


def test_a_node_that_is_away_says_nothing_and_is_asked_again() -> None:
    shard = Shard()
    one = followed(shard)
    one.check([name(1)])
    shard.failure = "unavailable"
    one.poll()
    assert one.take() == News([], False)
    assert shard.asked == []
    shard.failure = None
    one.poll()
    assert one.take() == News([name(1)], False)


def test_a_piece_without_answer_is_asked_again() -> None:
    shard = Shard()
    one = followed(shard)
    one.check([name(1)])
    answers = iter(["deadline_exceeded", None])
    exists = shard.exists

    def slow(hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        shard.failure = next(answers)
        answer = exists(hashes, deadline=deadline)
        shard.failure = None
        return answer

    shard.exists = slow  # type: ignore[method-assign]
    one.poll()
    assert one.take() == News([], False)
    one.poll()
    assert one.take() == News([name(1)], False)


def test_doubt_waits_for_checks_under_way() -> None:
    shard = Shard()
    one = followed(shard)
    shard.start_anew()
    one.poll()
    one.check([name(1)])
    assert one.take() == News([], False)
    one.poll()
    assert one.take() == News([name(1)], True)
    assert one.take() == News([], False)


# --- the thread --------------------------------------------------------------------------------


def wait_for_news(one: Following) -> News:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        news = one.take()
        if news.removed or news.lost:
            return news
        time.sleep(0.001)
    raise AssertionError("no news")


def test_the_thread_reads_until_it_is_closed() -> None:
    shard = Shard()
    one = Following(shard, Counts(), pause=0.001)
    one.start()
    assert wait_for_news(one) == News([], True)
    shard.remove(name(1))
    assert wait_for_news(one) == News([name(1)], False)
    one.close()
    read = len(shard.followed)
    time.sleep(0.01)
    assert len(shard.followed) == read
    one.close()


def test_closing_does_not_wait_for_the_pause() -> None:
    one = Following(Shard(), Counts(), pause=3600)
    one.start()
    wait_for_news(one)
    begin = time.monotonic()
    one.close()
    assert time.monotonic() - begin < 5
    assert "kvstore-following" not in {thread.name for thread in threading.enumerate()}


def test_closing_what_never_started() -> None:
    Following(Shard(), Counts()).close()


def test_an_error_is_counted_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    shard = Shard()
    shard.error = ValueError("nobody expected this")
    counts = Counts()
    one = Following(shard, counts, pause=0.001)
    one.start()
    while len(shard.followed) < 3:
        time.sleep(0.001)
    shard.error = None
    assert wait_for_news(one) == News([], True)
    one.close()
    assert counts.take()["guarded_errors"] >= 2
    assert sum("following the store failed" in text for text in caplog.messages) == 1


def test_an_error_while_following_puts_everything_in_doubt() -> None:
    shard = Shard()
    one = Following(shard, Counts(), pause=0.001)
    one.start()
    assert wait_for_news(one).lost
    shard.error = ValueError("nobody expected this")
    read = len(shard.followed)
    while len(shard.followed) < read + 2:
        time.sleep(0.001)
    shard.remove(name(1))
    shard.error = None
    assert wait_for_news(one) == News([], True)
    one.close()


# --- routers -----------------------------------------------------------------------------------

numbers = st.integers(0, 5)


class RouterOfTwoShards(RuleBasedStateMachine):
    """Whenever all is quiet, a router holds nothing that a shard has lost.

    Blocks come and go at both shards, whenever; they are announced some time after they were
    stored; readings, restarts and absences fall anywhere in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shards = [Shard(capacity=4), Shard(begin=7_000)]
        self.followings = [Following(shard, Counts()) for shard in self.shards]
        self.announcements = Announcements(Ledger(), self.followings)
        self.router = Router()
        self.saved: list[int] = []

    @rule(number=numbers)
    def save(self, number: int) -> None:
        for shard in self.shards:
            if shard.failure is None and name(number) not in shard.held:
                shard.store(name(number))
        if all(name(number) in shard.held for shard in self.shards):
            self.saved.append(number)

    @rule()
    def announce(self) -> None:
        self.announcements.announce([announced(number) for number in self.saved])
        self.saved = []

    @rule(at=st.integers(0, 1), number=numbers)
    def evict(self, at: int, number: int) -> None:
        if name(number) in self.shards[at].held:
            self.shards[at].remove(name(number))

    @rule(at=st.integers(0, 1), warm=st.sets(numbers))
    def start_anew(self, at: int, warm: set[int]) -> None:
        shard = self.shards[at]
        shard.start_anew(*(shard.held & set(map(name, warm))))

    @rule(at=st.integers(0, 1), failure=st.sampled_from([None, "unavailable"]))
    def go_away_or_come_back(self, at: int, failure: str | None) -> None:
        self.shards[at].failure = failure

    @rule(at=st.integers(0, 1))
    def read(self, at: int) -> None:
        self.followings[at].poll()

    @rule()
    def take(self) -> None:
        self.router.apply(self.announcements.take())

    @rule()
    def calm_down(self) -> None:
        for shard in self.shards:
            shard.failure = None
        self.announce()
        for _ in range(3):
            for each in self.followings:
                each.poll()
            self.take()
        held = self.shards[0].held & self.shards[1].held
        assert self.router.held <= {b"engine" + block for block in held}


TestRouterOfTwoShards = RouterOfTwoShards.TestCase
TestRouterOfTwoShards.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_router_learns_of_what_stays() -> None:
    shard = Shard()
    one = followed(shard)
    announcements = Announcements(Ledger(), [one])
    router = Router()
    shard.store(name(1), name(2))
    announcements.announce([announced(1), announced(2)])
    for _ in range(3):
        one.poll()
        router.apply(announcements.take())
    assert router.held == {b"engine" + name(1), b"engine" + name(2)}
    announcements.clear()
    router.apply(announcements.take())
    assert router.held == set()


def test_a_block_stored_again_before_its_announcement_stays_announced() -> None:
    shard = Shard()
    one = followed(shard)
    announcements = Announcements(Ledger(), [one])
    router = Router()
    shard.remove(name(1))
    one.poll()
    shard.store(name(1))
    announcements.announce([announced(1)])
    for _ in range(3):
        router.apply(announcements.take())
        one.poll()
    assert router.held == {b"engine" + name(1)}


def test_a_block_that_was_gone_before_its_announcement_is_taken_back() -> None:
    shard = Shard()
    one = followed(shard)
    announcements = Announcements(Ledger(), [one])
    router = Router()
    shard.store(name(1))
    shard.remove(name(1))
    one.poll()
    router.apply(announcements.take())
    announcements.announce([announced(1)])
    router.apply(announcements.take())
    assert router.held == {b"engine" + name(1)}
    one.poll()
    router.apply(announcements.take())
    assert router.held == set()


def test_only_what_stands_announced_is_known() -> None:
    shard = Shard()
    one = followed(shard)
    announcements = Announcements(Ledger(), [one])
    chain = [name(number) for number in (1, 2, 3)]
    assert announcements.known(chain) == 0
    announcements.announce([announced(1), announced(2), announced(3)])
    assert announcements.known(chain) == 3
    shard.remove(name(2))
    shard.store(name(1), name(3))
    one.poll()
    assert announcements.known(chain) == 1


def test_what_was_announced_is_asked_about_once() -> None:
    shard = Shard()
    one = followed(shard)
    announcements = Announcements(Ledger(), [one])
    shard.store(name(1), name(2))
    for numbers in ([1], [1, 2], [2]):
        announcements.announce([announced(number) for number in numbers])
        one.poll()
    assert [list(piece) for piece in shard.asked] == [[name(1)], [name(2)]]


# --- a real node -------------------------------------------------------------------------------

BLOCK = 64 << 10
FITS = (8 << 20) // BLOCK
NUMBERS = count()


def namespace() -> Namespace:
    return Namespace("m", "uint8", "raw", 4, BLOCK)


def chain(blocks: int) -> list[Announced]:
    """A prompt that no test has stored yet, under names by which the engine knows it."""
    tokens = [next(NUMBERS), *range(1, 4 * blocks)]
    hashes = [ROOT_PARENT, *prefix_hashes(tokens, 4)]
    return [
        Announced(block, parent, b"engine" + block, b"engine" + parent, tokens[:4])
        for parent, block in pairwise(hashes)
    ]


def held(client: kvstore.Client, blocks: Sequence[Announced]) -> set[bytes]:
    hits = client.exists([block.hash for block in blocks]).hits
    return {block.engine_hash for block, hit in zip(blocks, hits, strict=True) if hit}


def test_a_router_knows_what_a_real_node_holds(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    router = Router()
    told: list[Announced] = []
    with ExitStack() as stack:
        first = ExitStack()
        daemon = first.enter_context(DaemonThread(config))
        stack.push(first)
        client = stack.enter_context(kvstore.connect(daemon.url, namespace(), deadline=5.0))
        one = Following(client, Counts(), pause=0.001)
        stack.callback(one.close)
        announcements = Announcements(Ledger(), [one])
        one.start()

        def agrees() -> bool:
            router.apply(announcements.take())
            return router.held == held(client, told)

        for _ in range(2 * FITS // 10):
            blocks = chain(10)
            hashes = [block.hash for block in blocks]
            assert client.put(hashes, np.zeros((10, BLOCK), np.uint8)).stored == 10
            announcements.announce(blocks)
            told += blocks
        wait_for(agrees)
        assert 10 <= len(router.held) <= FITS < len(told)

        first.close()
        router.apply(announcements.take())
        assert router.held, "a node that is away may come back with everything"
        stack.enter_context(DaemonThread(config))
        wait_for(lambda: agrees() and not router.held)
