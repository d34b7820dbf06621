"""A bare round trip to Redis with as many bytes as a lookup of a chain: the limit of ``match``."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import redis.asyncio
import uvloop

from benchmarks.measure import Sample, median_time
from kvstore.directory.names import HASH_PART

ANSWER: Final = 16
"""Bytes of the value that is asked for: with its frame as many as those of a lookup's answer."""


@contextmanager
def round_trips(port: int, hashes: int, calls: int) -> Iterator[tuple[Sample, Sample]]:
    """Samples of the median seconds of a GET whose key is as long as the parts of ``hashes``.

    Args:
        port: of Redis on loopback.
        hashes: how many hashes the lookup names that this is the limit of.
        calls: how many are made for one sample.

    Yields:
        Through redis-py's asyncio client on uvloop, as nodes ask; and over a plain blocking socket.
    """
    key = b"k" * (hashes * HASH_PART)
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        socket.create_connection(("127.0.0.1", port)) as raw,
    ):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = redis.asyncio.Redis(host="127.0.0.1", port=port, protocol=2)
        raw.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, ANSWER))
        raw.sendall(b"v" * ANSWER + b"\r\n")
        if raw.recv(64) != b"+OK\r\n":
            raise RuntimeError("Redis does not take a value")
        request = b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key)
        expected = len(b"$%d\r\n\r\n" % ANSWER) + ANSWER

        def once() -> None:
            raw.sendall(request)
            if len(raw.recv(4096)) != expected:
                raise RuntimeError("Redis answered something else")

        yield (
            lambda: runner.run(_median(client, key, calls)),
            lambda: median_time(once, calls),
        )
        runner.run(client.aclose())


async def _median(client: redis.asyncio.Redis, key: bytes, calls: int) -> float:
    clock = time.perf_counter
    times = []
    for _ in range(calls):
        began = clock()
        async with asyncio.timeout(1.0):
            await client.execute_command("GET", key)  # type: ignore[no-untyped-call]
        times.append(clock() - began)
    return statistics.median(times)
