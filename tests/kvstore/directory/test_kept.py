"""Connections that are kept for lookups, with a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionBroken
from redis.exceptions import NoScriptError

from kvstore.directory.kept import Kept
from tests.kvstore.directory.servers import RedisServer


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(server.url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def kept(client: Redis) -> AsyncIterator[Kept]:
    kept = Kept(client)
    yield kept
    await kept.close()


async def test_calls_one_after_the_other_share_a_connection(kept: Kept) -> None:
    assert len({await kept.do("CLIENT", "ID") for _ in range(5)}) == 1


async def test_calls_at_once_have_one_each(kept: Kept) -> None:
    found = await asyncio.gather(*(kept.do("CLIENT", "ID") for _ in range(5)))
    assert len(set(found)) == 5


async def test_a_connection_that_has_ended_costs_no_call(kept: Kept, client: Redis) -> None:
    before = await kept.do("CLIENT", "ID")
    await client.execute_command("CLIENT", "KILL", "ID", before)  # type: ignore[no-untyped-call]
    assert await kept.do("CLIENT", "ID") != before


async def test_the_answer_to_a_call_given_up_is_nobody_elses(kept: Kept, client: Redis) -> None:
    await kept.do("PING")
    waiting = asyncio.create_task(kept.do("BLPOP", "list", 0))
    async with asyncio.timeout(10):
        while b"blpop" not in await info(client):
            await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    await client.execute_command("RPUSH", "list", "what was waited for")  # type: ignore[no-untyped-call]
    assert await kept.do("ECHO", "mine") == b"mine"


async def info(client: Redis) -> bytes:
    found = await client.execute_command("CLIENT", "LIST")  # type: ignore[no-untyped-call]
    return str(found).encode()


@pytest.mark.parametrize(
    ("word", "heard"),
    [
        (b"", b""),
        (b"a b\r\n$3\r\n\0\xff", b"a b\r\n$3\r\n\0\xff"),
        (b"p" * 1_000_000, b"p" * 1_000_000),
        (-12, b"-12"),
        ("Wörter", "Wörter".encode()),
    ],
)
async def test_words_come_as_they_are(kept: Kept, word: bytes | str | int, heard: bytes) -> None:
    assert await kept.do("ECHO", word) == heard
    assert await kept.do("ECHO", "what comes next") == b"what comes next"


async def test_an_error_of_redis_keeps_the_connection(kept: Kept) -> None:
    before = await kept.do("CLIENT", "ID")
    with pytest.raises(NoScriptError):
        await kept.do("EVALSHA", "0" * 40, 0)
    assert await kept.do("CLIENT", "ID") == before


async def test_a_redis_that_is_gone_is_an_error(kept: Kept, server: RedisServer) -> None:
    await kept.do("PING")
    server.kill()
    with pytest.raises(ConnectionBroken):
        await kept.do("PING")


async def test_what_is_in_use_when_it_closes_is_closed_later(kept: Kept, client: Redis) -> None:
    number = await kept.do("CLIENT", "ID")
    waiting = asyncio.create_task(kept.do("BLPOP", "list", 0))
    async with asyncio.timeout(10):
        while b"blpop" not in await info(client):
            await asyncio.sleep(0.01)
        await kept.close()
        await client.execute_command("RPUSH", "list", "what was waited for")  # type: ignore[no-untyped-call]
        assert await waiting == [b"list", b"what was waited for"]
        while f"'id': '{number}'".encode() in await info(client):
            await asyncio.sleep(0.01)
