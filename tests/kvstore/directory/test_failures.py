"""What becomes of a pool when its Redis is late, gone, full, emptied or closed to it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.directory.address import Access
from kvstore.directory.interface import Directory
from kvstore.directory.redis import RedisDirectory
from kvstore.directory.scripts import COMMANDS
from tests.kvstore.directory.conftest import QUICK, Join
from tests.kvstore.directory.pools import (
    chain,
    joined,
    number,
    places,
    reach,
    store,
    until,
    until_reach,
)
from tests.kvstore.directory.servers import RedisServer

BLOCKS = chain("a", 40)
SWEEPING = replace(QUICK, heartbeat=0.5, grace=0.2)

PATIENCE = 3.0
"""Seconds that something may take beyond its time where other tests run beside it."""


async def _pair(node: Join, **options: Any) -> tuple[RedisDirectory, RedisDirectory]:
    """Two members, of which the second holds ``BLOCKS``."""
    first, second = node("one"), node("two", **options)
    await first.open()
    await second.open(lambda: iter([places(BLOCKS)]))
    await joined(first, second)
    await until_reach(first, BLOCKS, len(BLOCKS), owners={number(second)})
    return first, second


async def _asked(directory: Directory, seconds: float) -> str | None:
    """How a lookup failed, which took about as long as it may at most."""
    began = time.monotonic()
    found = await reach(directory, BLOCKS, seconds=seconds)
    assert found.failure is None or (found.blocks, found.owners) == (0, ())
    assert time.monotonic() - began < seconds + PATIENCE
    return found.failure


async def _closes(directory: Directory) -> None:
    """Lookups fail; after the first, they are not tried."""
    assert await _asked(directory, 0.1) in ("deadline_exceeded", "unavailable")
    tried = directory.statistics.failures["reach", "deadline_exceeded"]
    for _ in range(100):
        assert await _asked(directory, 0.1) == "unavailable"
    assert directory.statistics.failures["reach", "deadline_exceeded"] == tried
    assert directory.statistics.refused >= 100


async def test_redis_is_down_at_the_start(node: Join, server: RedisServer) -> None:
    server.kill()
    first, second = node("one"), node("two")
    began = time.monotonic()
    await first.open()
    await second.open(lambda: iter([places(BLOCKS)]))
    assert time.monotonic() - began < PATIENCE
    assert await _asked(first, 5.0) == "unavailable"
    store(second, BLOCKS[:3])
    await asyncio.sleep(0.3)
    assert first.me is None
    server.start()
    await joined(first, second)
    await until_reach(first, BLOCKS, len(BLOCKS))


async def test_redis_is_killed_and_comes_back_empty(node: Join, server: RedisServer) -> None:
    first, second = await _pair(node)
    server.kill()
    await _closes(first)
    late = chain("late", 5)
    store(second, late)
    server.start()
    await until_reach(first, BLOCKS, len(BLOCKS))
    # Not always by then: a batch whose answer was lost with Redis has been told again by itself.
    await until(lambda: second.statistics.advertisements >= 2)
    await joined(first, second)
    # Nothing was kept for the old number, so this comes from the inventory or was said again.
    store(second, late)
    await until_reach(first, late, 5, owners={number(second)})


async def test_redis_hangs_for_longer_than_a_lease(node: Join, server: RedisServer) -> None:
    first, second = await _pair(node)
    numbers = number(first), number(second)
    gone, came = BLOCKS[20:], chain("b", 7)
    with server.stopped():
        await _closes(first)
        for place in reversed(places(BLOCKS)[20:]):
            second.removed(place)
        store(second, came)
        await asyncio.sleep(QUICK.lease / 1000 + 0.3)
        assert await _asked(first, 0.1) == "unavailable"
    await until_reach(first, came, 7)
    await until_reach(first, BLOCKS, len(BLOCKS) - len(gone))
    # Nobody died, so nobody is another member, and nothing has to be told again.
    assert (number(first), number(second)) == numbers
    assert second.statistics.advertisements == 1


async def test_late_answers_close_the_way_until_they_are_fast_again(
    node: Join, server: RedisServer
) -> None:
    first, _ = await _pair(node)
    with server.stopped():
        await _closes(first)
        assert first.statistics.operations["probe"] == 0
    await until_reach(first, BLOCKS, len(BLOCKS))
    assert first.statistics.operations["probe"] >= 1


async def test_a_lookup_without_time_says_nothing_of_redis(node: Join, server: RedisServer) -> None:
    first, _ = await _pair(node)
    with server.stopped():
        for seconds in (-1.0, 0.0, 0.0001):
            assert await _asked(first, seconds) == "deadline_exceeded"
    assert (await reach(first, BLOCKS)).blocks == len(BLOCKS)


async def test_redis_is_flushed(node: Join, server: RedisServer) -> None:
    first, second = await _pair(node)
    server.do("FLUSHALL")
    await until(lambda: first.statistics.joins == second.statistics.joins == 2)
    await joined(first, second)
    await until_reach(first, BLOCKS, len(BLOCKS), owners={number(second)})


async def test_all_tell_all_where_redis_is_flushed(node: Join, server: RedisServer) -> None:
    """Also those whose numbers are below what the emptied Redis gives next."""
    chains = {f"member {at}": chain(f"flushed {at}", 5) for at in range(4)}
    members = {name: node(name) for name in chains}
    reader = node("reader")
    await reader.open()
    for name, blocks in chains.items():
        await members[name].open(lambda blocks=blocks: iter([places(blocks)]))  # type: ignore[misc]
    await joined(reader, *members.values())
    for blocks in chains.values():
        await until_reach(reader, blocks, 5)
    server.do("FLUSHALL")
    for name, blocks in chains.items():
        await until(lambda name=name: members[name].statistics.joins == 2)  # type: ignore[misc]
        await until_reach(reader, blocks, 5)


async def test_locations_are_lost_and_the_membership_is_not(
    node: Join, server: RedisServer
) -> None:
    first, second = await _pair(node)
    before = number(second)
    for key in server.do("KEYS", "kvs:{pool:*"):
        server.do("DEL", key)
    assert (await reach(first, BLOCKS)).blocks == 0
    # Found out with the next block that is told under that tag.
    other = places([BLOCKS[0], chain("c", 1)[0]])[1]
    second.stored(other)
    await until_reach(first, BLOCKS, len(BLOCKS))
    assert number(second) == before


async def test_everything_is_told_again_now_and_then(node: Join, server: RedisServer) -> None:
    first, _ = await _pair(node, pace=replace(QUICK, refresh=0.3))
    for key in server.do("KEYS", "kvs:{pool:*"):
        server.do("DEL", key)
    await until_reach(first, BLOCKS, len(BLOCKS))


async def test_a_full_redis_refuses_blocks_and_nothing_else(
    node: Join, server: RedisServer
) -> None:
    held = places(BLOCKS)
    first, second = node("one"), node("two")
    await first.open()
    await second.open(lambda: iter([list(held)]))
    await joined(first, second)
    await until_reach(first, BLOCKS, len(BLOCKS))
    server.do("CONFIG", "SET", "maxmemory", 1)
    came = chain("b", 10)
    store(second, came)
    await until(lambda: second.statistics.dropped >= 10)
    assert second.statistics.failures["publish", "out_of_space"] >= 1
    assert (await reach(first, came)).blocks == 0
    # Lookups, removals and heartbeats go on, and new members come in.
    third = node("three")
    await third.open()
    await joined(first, second, third)
    numbers = number(first), number(second), number(third)
    del held[30:]
    for place in reversed(places(BLOCKS)[30:]):
        second.removed(place)
    await until_reach(first, BLOCKS, 30)
    await asyncio.sleep(2 * QUICK.lease / 1000)
    await joined(first, second, third)
    assert (number(first), number(second), number(third)) == numbers
    assert not [key for key in first.statistics.failures if key[0] in ("beat", "join")]
    # With room again, all that is held is told again after a while.
    held[:] = places(BLOCKS)
    server.do("CONFIG", "SET", "maxmemory", 0)
    await until_reach(first, BLOCKS, len(BLOCKS), seconds=30.0)


async def test_more_changes_than_there_is_room_for(node: Join, server: RedisServer) -> None:
    held = places(BLOCKS)
    first, second = node("one"), node("two", capacity=100)
    await first.open()
    await second.open(lambda: iter([held[:10]]))
    await joined(first, second)
    store(second, BLOCKS)
    await until_reach(first, BLOCKS, len(BLOCKS))
    before = number(second)
    with server.stopped():
        # All but the inventory goes, and far more than there is room for comes and goes.
        for place in reversed(held[10:]):
            second.removed(place)
        for name in range(10):
            for place in places(chain(f"passing {name}", 30)):
                second.stored(place)
                second.removed(place)
        assert second.statistics.dropped >= 100
        assert second.statistics.queued <= 100
    await until(lambda: second.me is not None and number(second) != before)
    await until_reach(first, BLOCKS, 10, owners={number(second)})


async def test_a_wrong_password_is_put_right_without_a_restart(
    node: Join, server: RedisServer, tmp_path: Path
) -> None:
    server.do("CONFIG", "SET", "requirepass", "right")
    server.password = "right"
    path = tmp_path / "password"
    path.write_text("wrong\n")
    first, second = (node(name, access=Access(password_file=path)) for name in ("one", "two"))
    await first.open()
    await second.open(lambda: iter([places(BLOCKS)]))
    await until(lambda: first.statistics.failures["join", "access_denied"] > 0)
    assert await _asked(first, 5.0) == "unavailable"
    path.unlink()
    await asyncio.sleep(0.3)
    path.write_text("right\n")
    await joined(first, second)
    await until_reach(first, BLOCKS, len(BLOCKS))


async def test_a_user_who_may_do_only_what_is_needed(
    node: Join, server: RedisServer, tmp_path: Path
) -> None:
    allowed = [f"+{command}" for command in COMMANDS.split()]
    server.do("ACL", "SETUSER", "kv", "on", ">secret", "~kvs:*", "-@all", *allowed)
    path = tmp_path / "password"
    path.write_text("secret")
    url = f"unix://kv@{server.path}"
    access = Access(password_file=path)
    first, second = (node(name, url=url, access=access, pace=SWEEPING) for name in ("one", "two"))
    await first.open()
    await second.open(lambda: iter([places(BLOCKS)]))
    await joined(first, second)
    await until_reach(first, BLOCKS, len(BLOCKS))
    await _die(second)
    await until(lambda: first.statistics.swept == len(BLOCKS))
    assert not [key for key in first.statistics.failures if key[1] == "access_denied"]


async def _die(directory: RedisDirectory) -> None:
    """As if its process had been killed."""
    tasks = directory._tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_dies_is_no_member_and_is_swept_away(node: Join, server: RedisServer) -> None:
    first, second = await _pair(node, pace=SWEEPING)
    third = node("three", pace=SWEEPING)
    await third.open(lambda: iter([places(BLOCKS[:5])]))
    await joined(first, second, third)
    await until_reach(first, BLOCKS[:5], 5, owners={number(second), number(third)})
    await _die(second)
    await until_reach(first, BLOCKS, 5, owners={number(third)})
    await until(lambda: third.statistics.operations["swept"] == 1)
    # Some may have been met by lookups before, and withdrawn.
    assert 0 < third.statistics.swept <= len(BLOCKS)
    buckets = server.do("KEYS", "kvs:{pool:*}:*")
    assert sum(server.do("HLEN", bucket) for bucket in buckets) == 5
    await until_reach(first, BLOCKS, 5, owners={number(third)})
    # Once is enough.
    swept = third.statistics.operations["sweep"]
    await asyncio.sleep(3 * QUICK.sweep)
    assert third.statistics.operations["sweep"] == swept


async def test_who_was_held_up_is_an_owner_again_of_all_that_it_told(node: Join) -> None:
    patient = replace(QUICK, grace=60.0)
    first, second, third = (node(name, pace=patient) for name in ("one", "two", "three"))
    await first.open()
    for owner in (second, third):
        await owner.open(lambda: iter([places(BLOCKS)]))
    await joined(first, second, third)
    both = {number(second), number(third)}
    await until_reach(first, BLOCKS, len(BLOCKS), owners=both)
    await _die(second)
    await second._link.close(seconds=10.0)
    # Lookups meet the location of a member whose lease is over.
    await until_reach(first, BLOCKS, len(BLOCKS), owners={number(third)})
    await second.open()
    await until_reach(first, BLOCKS, len(BLOCKS), owners=both)


async def test_a_dead_owner_does_not_hide_a_live_one(node: Join) -> None:
    first, second = await _pair(node, pace=replace(QUICK, sweep=1000.0))
    third = node("three")
    await third.open(lambda: iter([places(BLOCKS[:12])]))
    await joined(first, second, third)
    await until_reach(first, BLOCKS[:12], 12, owners={number(second), number(third)})
    await _die(second)
    await until_reach(first, BLOCKS, 12, owners={number(third)})


async def test_a_number_that_another_has_by_now_is_given_up(
    node: Join, server: RedisServer
) -> None:
    """As after a failover to a replica that had not heard of the last members."""
    first, second = await _pair(node)
    before = number(second)
    server.do("SET", f"kvs:{{pool}}:member:{before}", "somebody else", "PX", 60_000)
    await until(lambda: second.me is not None and number(second) != before)
    await until_reach(first, BLOCKS, len(BLOCKS), owners={number(second)})


async def test_a_lease_that_a_clock_made_too_long_is_cut(node: Join, server: RedisServer) -> None:
    _, second = await _pair(node)
    await _die(second)
    key = f"kvs:{{pool}}:member:{number(second)}"
    server.do("PEXPIRE", key, 3_600_000)
    await until(lambda: server.do("PTTL", key) <= 60_000)


async def test_what_makes_no_sense_is_passed_over(node: Join, server: RedisServer) -> None:
    """As of another version, or of somebody else's keys."""
    first, second = await _pair(node)
    server.do("SET", "kvs:{pool}:member:77", "[1, 2]")
    server.do("SADD", "kvs:{pool}:members", 77, "x")
    server.do("HSET", "kvs:{pool}:summaries", number(second), "no JSON")
    server.do("HINCRBY", "kvs:{pool}:version", "changes", 1)
    await asyncio.sleep(0.5)
    assert set(first.members) == {number(second)}
    assert (await reach(first, BLOCKS)).blocks == len(BLOCKS)
    # Keys of the wrong type.
    server.do("SET", "kvs:{pool}:summaries", "x")
    for key in server.do("KEYS", "kvs:{pool:*}:*"):
        server.do("SET", key, "x")
    found = await reach(first, BLOCKS)
    assert (found.blocks, found.failure) == (0, "unavailable")
    await asyncio.sleep(0.3)
    server.do("DEL", "kvs:{pool}:summaries")
    await until(lambda: set(first.members) == {number(second)})


@pytest.mark.parametrize("count", [1, 40])
async def test_lookups_at_once_wait_within_their_deadlines(node: Join, count: int) -> None:
    first, _ = await _pair(node)
    found = await asyncio.gather(*(reach(first, BLOCKS) for _ in range(5 * count)))
    assert {one.blocks for one in found} == {len(BLOCKS)}


async def test_a_lookup_may_be_cancelled(node: Join, server: RedisServer) -> None:
    first, _ = await _pair(node)
    with server.stopped():
        task = asyncio.create_task(reach(first, BLOCKS, seconds=60.0))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await reach(first, BLOCKS)).blocks == len(BLOCKS)


async def test_leaving_does_not_wait_for_a_redis_that_hangs(
    node: Join, server: RedisServer
) -> None:
    first, _ = await _pair(node)
    with server.stopped():
        began = time.monotonic()
        await first.close()
        assert time.monotonic() - began < 3.0


async def test_an_inventory_that_fails_is_asked_again(node: Join) -> None:
    asked = 0

    def inventory() -> list[list[object]]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("a mistake of the node's")
        return [places(BLOCKS)]  # type: ignore[list-item]

    first, second = node("one"), node("two", pace=replace(QUICK, refresh=0.2))
    await first.open()
    await second.open(inventory)  # type: ignore[arg-type]
    await until_reach(first, BLOCKS, len(BLOCKS))
    assert second.statistics.failures["advertise", "internal"] == 1
