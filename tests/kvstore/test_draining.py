"""Draining a node, in pools of daemons in one process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest

import kvstore
from kvstore.control.drain import DrainOrder, DrainProgress
from kvstore.control.drain_client import DrainClient
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.protocol.messages import Reserve, TakeAnswer, Write, request_header
from kvstore.taking import Taking
from kvstore.units import parse_address
from tests.kvstore.peer import NAMESPACE, content
from tests.kvstore.pooled import DRAM, REMOTE, Pool, PooledNode, pool
from tests.kvstore.test_replication import holds, put, replicas
from tests.kvstore.watched import Watched, chain, connected
from tests.running import make_config, wait_for

ORDER = DrainOrder(30.0)
CHAINS = [chain("drained", at, length=6) for at in range(8)]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Pool]:
    with pool(tmp_path, 3) as running:
        yield running


def drain(
    node: PooledNode,
    order: DrainOrder = ORDER,
    each: Callable[[DrainProgress], object] = lambda _: None,
) -> DrainProgress:
    """Drain a node; what it said last."""

    async def follow() -> DrainProgress:
        last = DrainProgress("serving")
        async with aclosing(cast(Any, node.daemon.draining.drain(order))) as steps:
            async for step in steps:
                last = step
                each(step)
        return last

    found: DrainProgress = node.call(follow)
    return found


def name(node: PooledNode) -> str:
    return node.config.node.name


def members(node: PooledNode) -> set[str]:
    """The others that a node knows."""

    def look() -> set[str]:
        return {member.node for member in node.cluster.directory.members.values()}

    found: set[str] = node.call(look)
    return found


def somewhere(nodes: Sequence[PooledNode], hashes: Sequence[bytes]) -> bool:
    """Whether one of the nodes holds a whole chain."""
    return any(holds(node, hashes) for node in nodes)


def test_the_others_hold_everything_after_a_drain(three: Pool) -> None:
    one, *others = three.nodes
    for hashes in CHAINS:
        put(one, hashes)
    last = drain(one)
    assert last == DrainProgress(
        "drained", total=48, moved=48, bytes=48 * NAMESPACE.block_bytes, finished=True
    )
    assert all(somewhere(others, hashes) for hashes in CHAINS)
    assert all(other.metrics.offered["taken"] for other in others), "they are spread"
    assert [members(other) for other in others] == [{"node2"}, {"node1"}]
    for hashes in CHAINS:
        for other in others:
            assert set(other.match(hashes)) <= {DRAM[0], REMOTE[0]}
            assert 0 not in other.get(hashes)


def test_a_drained_node_serves_what_it_holds_and_takes_no_puts(three: Pool) -> None:
    one, *_ = three.nodes
    put(one, CHAINS[0])
    drain(one)
    assert one.get(CHAINS[0]) == DRAM * 6
    assert put(one, CHAINS[1]).refused == 6
    assert put(one, CHAINS[0]).held == 6


def test_a_node_comes_back_when_it_is_told_to(three: Pool) -> None:
    one, other, _ = three.nodes
    put(one, CHAINS[0])
    drain(one)
    back = one.call(one.daemon.draining.resume)
    assert back.state == "serving"
    assert members(other) == {"node0", "node2"}
    assert put(one, CHAINS[1]).stored == 6
    assert other.match(CHAINS[1]) == REMOTE * 6
    assert drain(one).state == "drained"


def test_what_others_have_is_made_their_own_and_not_moved(three: Pool) -> None:
    one, other, _ = three.nodes
    put(one, CHAINS[0])
    other.match(CHAINS[0])
    other.get(CHAINS[0])
    assert replicas(other, CHAINS[0]) == 6
    last = drain(one)
    assert (last.held, last.moved, last.left) == (6, 0, 0)
    assert replicas(other, CHAINS[0]) == 0


def test_a_drain_is_cancelled_by_closing_it(three: Pool) -> None:
    one, other, _ = three.nodes
    for hashes in CHAINS:
        put(one, hashes)

    async def begin_and_leave() -> None:
        order = DrainOrder(30.0, rate=float(NAMESPACE.block_bytes))
        async with aclosing(cast(Any, one.daemon.draining.drain(order))) as steps:
            async for step in steps:
                assert step.state == "draining"
                if step.moved:
                    return

    one.call(begin_and_leave)
    assert one.daemon.draining.state == "serving"
    assert put(one, chain("after", length=2)).stored == 2
    assert "node0" in members(other)
    assert drain(one).left == 0


def test_a_drain_is_cancelled_by_resuming(three: Pool) -> None:
    one, *_ = three.nodes
    for hashes in CHAINS:
        put(one, hashes)
    states: list[str] = []

    async def both() -> DrainProgress:
        async def follow() -> DrainProgress:
            async for step in one.daemon.draining.drain(DrainOrder(30.0, rate=1.0)):
                states.append(step.state)
            return step

        following = asyncio.create_task(follow())
        while one.daemon.draining.state != "draining":
            await asyncio.sleep(0)
        with pytest.raises(InvalidRequest):
            async for _ in one.daemon.draining.drain(ORDER):
                pass
        assert (await one.daemon.draining.resume()).state == "serving"
        return await following

    last: DrainProgress = one.call(both)
    assert (last.state, last.finished) == ("serving", True)
    assert put(one, chain("after", length=2)).stored == 2


def test_a_node_that_is_leaving_is_brought_back_when_it_has_left(
    three: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Redis hangs, and whoever drained hangs up meanwhile."""
    one, other, _ = three.nodes
    leave, open_ = one.cluster.leave, one.cluster.open
    done: list[str] = []

    async def both() -> None:
        leaving, may_leave = asyncio.Event(), asyncio.Event()

        async def leave_late() -> None:
            leaving.set()
            await may_leave.wait()
            await leave()
            done.append("left")

        async def join() -> None:
            done.append("joined")
            await open_()

        monkeypatch.setattr(one.cluster, "leave", leave_late)
        monkeypatch.setattr(one.cluster, "open", join)

        async def follow() -> None:
            async with aclosing(cast(Any, one.daemon.draining.drain(ORDER))) as steps:
                async for _ in steps:
                    pass

        following = asyncio.create_task(follow())
        await leaving.wait()
        following.cancel()
        back = asyncio.create_task(one.daemon.draining.resume())
        for _ in range(100):
            await asyncio.sleep(0)
        may_leave.set()
        assert (await back).state == "serving"
        await asyncio.gather(following, return_exceptions=True)

    one.call(both)
    assert done == ["left", "joined"]
    assert "node0" in members(other)


def test_what_is_offered_at_once_is_bounded_by_the_rate(
    three: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, *_ = three.nodes
    put(one, chain("slow", length=8))
    offered: list[int] = []
    take = Taking.take

    async def count(self: Taking, *arguments: Any) -> TakeAnswer:
        offered.append(len(arguments[2].hashes))
        return await take(self, *arguments)

    monkeypatch.setattr(Taking, "take", count)
    last = drain(one, DrainOrder(30.0, rate=4.0 * NAMESPACE.block_bytes))
    assert (last.moved, last.left) == (8, 0)
    assert offered == [4, 8], "offers name the chain from its first block on"


def test_dropping_leaves_the_pool_at_once(three: Pool) -> None:
    one, *others = three.nodes
    put(one, CHAINS[0])
    last = drain(one, DrainOrder(30.0, drop=True))
    assert (last.state, last.left, last.moved) == ("drained", 6, 0)
    assert not somewhere(others, CHAINS[0][:1])
    assert members(others[0]) == {"node2"}


def test_what_is_worth_most_is_kept_where_there_is_too_little_room(tmp_path: Path) -> None:
    """Of twice as much as the other can take, that goes which was used last."""
    with pool(tmp_path, 2) as running:
        one, other = running.nodes
        mine = [chain("mine", at, length=16) for at in range(7)]
        theirs = [chain("theirs", at, length=16) for at in range(4)]
        for hashes in mine:
            put(one, hashes)
        for hashes in theirs:
            put(other, hashes)
        for hashes in reversed(mine):
            one.get(hashes)  # the first is now the one used last
        for hashes in theirs[2:]:
            other.get(hashes)
        last = drain(one)
        assert last.state == "drained"
        # Of the other's 128 blocks of room 64 were free, 32 were used before all of these.
        assert all(holds(other, hashes) for hashes in mine[:4]), "those used last are there"
        assert 64 < last.moved <= 96
        assert last.left == 7 * 16 - last.moved
        assert all(holds(other, hashes) for hashes in theirs[2:])


def test_whole_prefixes_arrive_and_prompts_that_begin_alike_share_them(three: Pool) -> None:
    one, *others = three.nodes
    begin = chain("shared", length=4)
    ends = [chain("end", at, length=3) for at in range(10)]
    put(one, begin)
    for end in ends:
        put(one, end, parent=begin[-1])
    assert drain(one).left == 0
    for end in ends:
        assert somewhere(others, begin + end)


def test_blocks_of_a_put_that_had_begun_are_moved_too(three: Pool) -> None:
    one, *others = three.nodes
    put(one, CHAINS[0])
    with connected(one) as peer:
        late = chain("late", length=1)
        answer = peer.ask(Reserve(bytes(32), late))[0]
        wrote = False

        def write(step: DrainProgress) -> None:
            nonlocal wrote
            if not wrote and step.state == "draining":
                wrote = True
                # From the loop's own thread: the answer is read later.
                request = Write(answer.reservation, [0], 0, len(content(late[0])))
                peer.send(request_header(77, 5000, request), content(late[0]))

        last = drain(one, DrainOrder(30.0, rate=4.0 * NAMESPACE.block_bytes), write)
        assert peer.receive()[0][1] == 0
    assert last.state == "drained"
    assert somewhere(others, late)


def test_a_target_that_is_gone_is_passed_over(three: Pool) -> None:
    one, other, gone = three.nodes
    for hashes in CHAINS:
        put(one, hashes)
    gone.vanish()
    last = drain(one)
    assert (last.left, last.moved) == (0, 48)
    assert all(holds(other, hashes) for hashes in CHAINS)


def test_nobody_that_answers_at_first_is_asked_once_more(
    three: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, *others = three.nodes
    put(one, CHAINS[0])
    take, failures = Taking.take, itertools.count()

    async def take_later(self: Taking, *arguments: Any) -> TakeAnswer:
        if next(failures) < 2:
            raise Unavailable("not now")
        return await take(self, *arguments)

    monkeypatch.setattr(Taking, "take", take_later)
    assert drain(one).left == 0
    assert somewhere(others, CHAINS[0])


def test_what_a_target_took_that_is_gone_before_the_end_is_moved_again(three: Pool) -> None:
    one, *others = three.nodes
    for hashes in CHAINS:
        put(one, hashes)
    gone: list[PooledNode] = []

    def lose(_: DrainProgress) -> None:
        taken = [node for node in others if node.metrics.offered["taken"]]
        if taken and not gone:
            gone.append(taken[0])
            (number,) = (n for n, one in three.memory.members.items() if one.node == name(taken[0]))
            three.memory.leave(number)

    last = drain(one, DrainOrder(30.0, rate=40.0 * NAMESPACE.block_bytes), lose)
    (other,) = (node for node in others if node not in gone)
    assert (last.left, last.moved) == (0, 48)
    assert all(holds(other, hashes) for hashes in CHAINS)


def test_nodes_that_are_drained_are_no_targets(three: Pool) -> None:
    one, other, third = three.nodes
    put(one, CHAINS[0])
    put(other, CHAINS[1])
    # Told by nothing but its refusal: in this process a summary is as old as its membership.
    third.call(lambda: setattr(third.daemon.node, "accepts_puts", False))
    assert drain(one).left == 0
    assert holds(other, CHAINS[0])
    assert third.metrics.offered["taken"] == 0
    assert drain(other).left == 12
    third.call(lambda: setattr(third.daemon.node, "accepts_puts", True))


def test_a_node_with_nobody_to_take_what_it_holds_is_not_drained(tmp_path: Path) -> None:
    with pool(tmp_path, 1) as running:
        (one,) = running.nodes
        put(one, CHAINS[0])
        with pytest.raises(InvalidRequest):
            drain(one)
        assert put(one, CHAINS[1]).stored == 6
        assert drain(one, DrainOrder(1.0, drop=True)).state == "drained"


def test_a_node_in_no_pool_is_not_drained(tmp_path: Path) -> None:
    with Watched(make_config(tmp_path)) as lone:

        async def attempt() -> None:
            async for _ in lone.daemon.draining.drain(ORDER):
                pass

        with pytest.raises(InvalidRequest):
            lone.call(attempt)


def test_a_deadline_ends_a_drain_with_what_is_left(three: Pool) -> None:
    one, *_ = three.nodes
    for hashes in CHAINS:
        put(one, hashes)
    last = drain(one, DrainOrder(0.0))
    assert (last.state, last.moved, last.left) == ("drained", 0, 48)


def test_what_only_the_ssd_holds_is_moved(tmp_path: Path) -> None:
    marks = {"low_watermark": 0.5, "high_watermark": 0.7}
    with pool(tmp_path, 2, ssd={"capacity": "64MiB"}, policy=marks) as running:
        one, other = running.nodes
        many = [chain("ssd", at, length=16) for at in range(16)]
        for hashes in many:
            put(one, hashes)
            one.get(hashes)
            wait_for(lambda: one.used <= 0.7 * (8 << 20))
        mine = [hashes for hashes in many if holds(one, hashes)]
        assert len(mine) > 8, "more than its DRAM has room for"
        drain(one)
        assert all(holds(other, hashes) for hashes in mine)


def test_a_drain_over_grpc(three: Pool) -> None:
    one, *others = three.nodes
    put(one, CHAINS[0])
    address = parse_address((one.daemon.control_url or "").removeprefix("http://"))

    async def ask() -> tuple[DrainProgress, DrainProgress]:
        async with DrainClient(address) as client:
            steps = [step async for step in client.drain(DrainOrder(30.0, rate=1e9))]
            back = await client.resume()
            with pytest.raises(InvalidRequest):
                async for _ in client.drain(DrainOrder(-1.0)):
                    pass
        return steps[-1], back

    last, back = asyncio.run(ask())
    assert (last.state, last.moved, last.finished) == ("drained", 6, True)
    assert back.state == "serving"
    assert not one.daemon.stopping.is_set()

    async def stop() -> None:
        async with DrainClient(address) as client:
            async for _ in client.drain(DrainOrder(30.0, stop=True)):
                pass

    asyncio.run(stop())
    wait_for(one.daemon.stopping.is_set)
    assert somewhere(others, CHAINS[0])


def test_kvstore_connects_to_a_drained_node(three: Pool) -> None:
    one, *_ = three.nodes
    put(one, CHAINS[0])
    drain(one)
    with kvstore.connect(one.url, NAMESPACE, deadline=5.0) as client:
        assert client.match(CHAINS[0]).blocks == 6
