"""More Redis than one: Sentinels that fail over, a cluster that loses a part; and TLS."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.directory.address import Access, Address
from kvstore.directory.interface import Directory
from kvstore.directory.redis import RedisDirectory
from tests.kvstore.directory.conftest import QUICK
from tests.kvstore.directory.pools import (
    chain,
    joined,
    member,
    number,
    places,
    reach,
    store,
    until,
    until_reach,
)
from tests.kvstore.directory.servers import RedisServer, Sentinels, cluster, require_redis

CHAINS = [chain(f"chain {name}", 6) for name in range(24)]

Keep = Callable[[Directory], Directory]


async def _pair(url: str, keep: Keep) -> tuple[RedisDirectory, RedisDirectory]:
    """Two members, of which the second holds ``CHAINS``."""
    pace = replace(QUICK, heartbeat=0.5)
    first, second = (
        RedisDirectory(Address.parse(url), "pool", member(name), pace=pace)
        for name in ("one", "two")
    )
    keep(first)
    keep(second)
    await first.open()
    await second.open(lambda: (places(blocks) for blocks in CHAINS))
    await joined(first, second)
    for blocks in CHAINS:
        await until_reach(first, blocks, 6)
    return first, second


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    require_redis()
    these = Sentinels(tmp_path)
    try:
        these.start()
        yield these
    finally:
        these.kill()


async def test_a_failover_is_followed(sentinels: Sentinels, keep: Keep) -> None:
    first, second = await _pair(sentinels.url, keep)
    sentinels.servers[0].kill()
    late = chain("late", 4)
    store(second, late)
    began = time.monotonic()
    await reach(first, CHAINS[0], seconds=0.1)
    assert time.monotonic() - began < 3
    replica = sentinels.servers[1]
    await until(lambda: bool(replica.do("INFO", "replication")["role"] == "master"), 20.0)
    await until_reach(first, late, 4, seconds=20.0)
    for blocks in CHAINS:
        await until_reach(first, blocks, 6, owners={number(second)})
    # The new master may not have heard all that the old one was told.
    await until(lambda: second.statistics.advertisements >= 2)


async def test_sentinels_ask_for_a_password_of_their_own(tmp_path: Path, keep: Keep) -> None:
    require_redis()
    guarded = Sentinels(tmp_path / "guarded", sentinels=1, password="for-sentinels")
    path = tmp_path / "password"
    path.write_text("wrong\n")
    access = Access(sentinel_password_file=path)
    try:
        guarded.start()
        address = Address.parse(guarded.url)
        only = RedisDirectory(address, "pool", member("one"), access=access, pace=QUICK)
        keep(only)
        await only.open()
        await until(lambda: bool(only.statistics.failures))
        assert only.me is None
        path.write_text("for-sentinels\n")
        await until(lambda: only.me is not None)
        await only.close()
    finally:
        guarded.kill()


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[list[RedisServer]]:
    require_redis()
    with cluster(tmp_path) as servers:
        yield servers


def _holding(masters: list[RedisServer], pattern: str) -> RedisServer:
    return next(server for server in masters if server.do("KEYS", pattern))


async def test_a_cluster_that_loses_a_master_keeps_the_rest(
    masters: list[RedisServer], keep: Keep
) -> None:
    url = f"redis+cluster://127.0.0.1:{masters[0].port}"
    first, second = await _pair(url, keep)
    membership = _holding(masters, "kvs:{pool}:members")
    lost = next(server for server in masters if server is not membership)
    assert lost.do("KEYS", "kvs:{pool:*}:*")
    reached = {blocks[0]: 6 for blocks in CHAINS}
    lost.kill()
    # Those who look where nobody answers find out once; the others are not held up.
    for _ in range(3):
        for blocks in CHAINS:
            reached[blocks[0]] = (await reach(first, blocks, seconds=0.5)).blocks
    assert set(reached.values()) == {0, 6}
    began = time.monotonic()
    again = {blocks[0]: (await reach(first, blocks, seconds=5.0)).blocks for blocks in CHAINS}
    assert time.monotonic() - began < 4
    assert again == reached
    assert (len(first.members), first.statistics.joins) == (1, 1)
    # It comes back with its slots and without its keys.
    lost.start()
    for blocks in CHAINS:
        store(second, blocks[:1])
    for blocks in CHAINS:
        await until_reach(first, blocks, 6, owners={number(second)}, seconds=20.0)


async def test_a_cluster_is_swept_on_every_master(masters: list[RedisServer], keep: Keep) -> None:
    url = f"redis+cluster://127.0.0.1:{masters[1].port}"
    pace = replace(QUICK, heartbeat=0.5, grace=0.2)
    third = RedisDirectory(Address.parse(url), "pool", member("three"), pace=pace)
    keep(third)
    first, second = await _pair(url, keep)
    await third.open()
    await joined(first, second, third)
    assert all(server.do("KEYS", "kvs:{pool:*}:*") for server in masters)
    await second.close()
    await until(lambda: not any(server.do("KEYS", "kvs:{pool:*}:*") for server in masters))


@pytest.fixture
def certified(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that talks TLS only, and asks for certificates."""
    require_redis()
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    server = RedisServer(
        tmp_path / "redis",
        tcp=True,
        tls_cert_file=certificate,
        tls_key_file=key,
        tls_ca_cert_file=certificate,
    )
    server.options |= {"tls-port": server.port, "port": 0}
    server.start()
    yield server
    server.kill()


async def test_tls_with_certificates_of_both_sides(
    certified: RedisServer, tmp_path: Path, keep: Keep
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    address = Address.parse(f"rediss://localhost:{certified.port}")

    def join(name: str, access: Access) -> RedisDirectory:
        directory = RedisDirectory(address, "pool", member(name), access, QUICK)
        keep(directory)
        return directory

    known = Access(ca=certificate, certificate=certificate, key=key)
    first, second = join("one", known), join("two", known)
    await first.open()
    await second.open(lambda: iter([places(CHAINS[0])]))
    await joined(first, second)
    await until_reach(first, CHAINS[0], 6)
    # Neither is a server trusted that nobody vouches for, nor a node let in without certificate.
    for access in (Access(), Access(ca=certificate)):
        stranger = join("stranger", access)
        await stranger.open()
        await until(lambda it=stranger: bool(it.statistics.failures))  # type: ignore[misc]
        await asyncio.sleep(0.2)
        assert stranger.me is None
