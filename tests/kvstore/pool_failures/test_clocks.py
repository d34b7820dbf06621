"""What becomes of a pool when a clock jumps: that of Redis, by which leases end, or a node's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.directory.scripts import MOST_LEASE
from tests.kvstore.directory.servers import RedisServer
from tests.kvstore.pool_failures.clocks import Clock, jump_in_redis
from tests.kvstore.pool_failures.pool import HEALS, Pool
from tests.kvstore.watched import chain
from tests.running import wait_for

pytestmark = pytest.mark.timeout(180)

OLD, NEW, LOST = (chain("clocks", name, length=24) for name in ("old", "new", "lost"))
HOUR = 3600

jumps = pytest.mark.parametrize("seconds", [HOUR, -HOUR], ids=["ahead", "back"])


@jumps
def test_the_clock_of_redis_jumps(pool: Pool, redis: RedisServer, seconds: int) -> None:
    one, home = pool.start(pool.config("one", redis.url), pool.config("home", redis.url))
    owner, reader = pool.client(one), pool.client(home)
    owner.put(OLD)
    reader.is_promised(OLD, 24)
    with pool.local_hits(home) as local:
        jump_in_redis(redis, seconds)
        owner.put(NEW)
        local.go_on()
        reader.reads(NEW)
        reader.reads(OLD)
        # Who dies just before a jump back has a lease that is an hour longer.
        owner.put(LOST)
        reader.is_promised(LOST, 24)
        one.kill()
        jump_in_redis(redis, seconds)
        assert reader.read(LOST) == 0
        reader.is_promised(LOST, 0)
        local.go_on()
        keys = redis.do("KEYS", "kvs:{kvstore}:member:*")
        wait_for(lambda: all(redis.do("PTTL", key) <= MOST_LEASE for key in keys), HEALS)
        one.start()
        again = pool.client(one)
        again.put(LOST)
        reader.reads(LOST)


@jumps
def test_the_clock_of_a_node_jumps(
    pool: Pool, redis: RedisServer, tmp_path: Path, seconds: int
) -> None:
    clock = Clock(tmp_path / "clock")
    nodes = [pool.config(name, redis.url) for name in ("one", "home")]
    one, home = pool.start(*nodes, environment=clock.environment)
    owner, reader = pool.client(one), pool.client(home)
    owner.put(OLD)
    reader.is_promised(OLD, 24)
    members = sorted(redis.do("SMEMBERS", "kvs:{kvstore}:members"))
    with pool.local_hits(home) as local:
        clock.jump_to(seconds)
        owner.put(NEW)
        local.go_on()
        reader.reads(OLD)
        reader.reads(NEW)
        # Nobody has been taken for dead.
        assert sorted(redis.do("SMEMBERS", "kvs:{kvstore}:members")) == members
