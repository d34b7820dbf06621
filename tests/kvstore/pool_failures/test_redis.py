"""What becomes of a pool when its Redis is gone, empty, late, full or another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kvstore.directory.servers import RedisServer, Sentinels, require_redis
from tests.kvstore.pool_failures.pool import Client, LocalHits, Pool, running_redis
from tests.kvstore.pool_failures.slow import SlowLink
from tests.kvstore.watched import chain

pytestmark = pytest.mark.timeout(180)

OLD, NEW, LATER = (chain("redis", name, length=24) for name in ("old", "new", "later"))


@contextmanager
def two(pool: Pool, url: str) -> Iterator[tuple[Client, Client, LocalHits]]:
    """Clients of an owner, which holds ``OLD``, and of a home, where local hits go on."""
    one, home = pool.start(pool.config("one", url), pool.config("home", url))
    owner, reader = pool.client(one), pool.client(home)
    owner.put(OLD)
    with pool.local_hits(home) as local:
        yield owner, reader, local


def goes_without(reader: Client, local: LocalHits, chain: list[bytes]) -> None:
    """What others hold is a miss, and local hits go on."""
    for _ in range(5):
        assert reader.read(chain) == 0
    local.go_on()


def test_redis_is_down_at_the_start(pool: Pool, redis: RedisServer) -> None:
    redis.kill()
    with two(pool, redis.url) as (_, reader, local):
        goes_without(reader, local, OLD)
        redis.start()
        reader.reads(OLD)
        local.go_on()


def test_redis_dies_and_comes_back_empty(pool: Pool, redis: RedisServer) -> None:
    with two(pool, redis.url) as (owner, reader, local):
        reader.is_promised(OLD, 24)
        redis.kill()
        goes_without(reader, local, NEW)
        # Stored while there was nobody to tell.
        owner.put(NEW)
        # What was found out before is still had.
        assert reader.get(OLD) == 24
        redis.start()
        reader.reads(NEW)
        local.go_on()


def test_redis_is_emptied(pool: Pool, redis: RedisServer) -> None:
    with two(pool, redis.url) as (_, reader, local):
        reader.is_promised(OLD, 24)
        redis.do("FLUSHALL")
        local.go_on()
        reader.reads(OLD)


def test_redis_hangs(pool: Pool, redis: RedisServer) -> None:
    with two(pool, redis.url) as (owner, reader, local):
        reader.is_promised(OLD, 24)
        with redis.stopped():
            owner.put(NEW)
            goes_without(reader, local, NEW)
        reader.reads(OLD)
        reader.reads(NEW)


def test_every_answer_of_redis_is_late(pool: Pool, tmp_path: Path) -> None:
    with (
        running_redis(tmp_path, tcp=True) as redis,
        SlowLink(redis.port).open() as link,
        two(pool, f"redis://127.0.0.1:{link.port}") as (owner, reader, local),
    ):
        reader.is_promised(OLD, 24)
        # Later than a lookup is waited for, earlier than a heartbeat is.
        link.delay = 0.5
        owner.put(NEW)
        reader.is_promised(OLD, 0)
        goes_without(reader, local, NEW)
        link.delay = 0.0
        reader.reads(OLD)
        reader.reads(NEW)


def test_redis_is_out_of_memory(pool: Pool, redis: RedisServer) -> None:
    with two(pool, redis.url) as (owner, reader, local):
        reader.is_promised(OLD, 24)
        redis.do("CONFIG", "SET", "maxmemory", 1)
        owner.put(NEW)
        # What it knew it knows; what is new it refuses.
        goes_without(reader, local, NEW)
        reader.reads(OLD)
        redis.do("CONFIG", "SET", "maxmemory", 0)
        owner.put(LATER)
        reader.reads(LATER)
        reader.reads(NEW)
        local.go_on()


def test_redis_fails_over(pool: Pool, tmp_path: Path) -> None:
    require_redis()
    group = Sentinels(tmp_path / "group")
    try:
        group.start()
        with two(pool, group.url) as (owner, reader, local):
            reader.is_promised(OLD, 24)
            group.servers[0].kill()
            owner.put(NEW)
            goes_without(reader, local, LATER)
            reader.reads(NEW)
            reader.reads(OLD)
            local.go_on()
    finally:
        group.kill()
