"""A follower of a whole node, with a client's work and blocks on the move between its tiers."""

from __future__ import annotations

import asyncio
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest

import kvstore
from kvstore.config import TlsSection
from kvstore.control.event_client import EventClient, Following
from kvstore.tls import reaching
from kvstore.units import parse_address
from tests.kvstore.directory.servers import free_port
from tests.kvstore.test_events import Held, held_by
from tests.running import DaemonThread, daemon_process, make_config
from tests.tls import Authority

BLOCK = 64 << 10
NAMESPACE = kvstore.Namespace("acme/llama", "uint8", "raw", 4, BLOCK)
PATIENCE = 30.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(make_config(tmp_path, ssd={"capacity": "24MiB"})) as daemon:
        yield daemon


def following(node: DaemonThread) -> Following:
    address = parse_address(str(node.daemon.control_url).removeprefix("http://"))
    return Following(lambda: EventClient(address))


def chain(seed: int, length: int = 16) -> list[bytes]:
    return kvstore.prefix_hashes([seed] * (4 * length), 4)


def work(node: DaemonThread, seed: int) -> None:
    """Store more than DRAM has room for, and bring some of it back."""
    with kvstore.connect(node.url, NAMESPACE, deadline=20.0) as client:
        for number in range(seed, seed + 40):
            client.put(chain(number), [bytes(BLOCK)] * 16)
        for number in range(seed + 20, seed + 30):
            client.get(chain(number), [bytearray(BLOCK) for _ in range(16)])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.02)


def metrics_of(node: DaemonThread) -> str:
    with closing(urllib.request.urlopen(str(node.daemon.metrics_url), timeout=PATIENCE)) as page:
        text: str = page.read().decode()
    return text


async def test_a_follower_knows_a_working_node(node: DaemonThread) -> None:
    follower = following(node)
    changes: set[str] = set()
    tiers: set[tuple[str, ...]] = set()

    async def follow() -> None:
        async with aclosing(follower.batches()) as batches:
            async for batch in batches:
                changes.update(event.change for event in batch.events)
                tiers.update(event.tiers for event in batch.events)

    def known() -> Held:
        name = NAMESPACE.fingerprint
        return {(name, 0, one): at for one, at in follower.map.blocks(name, 0).items()}

    def held() -> Held:
        found: Held = node.call(held_by, node.daemon.node.index)
        return found

    async def until_agreed() -> None:
        async with asyncio.timeout(PATIENCE):
            while not follower.map.complete or known() != await asyncio.to_thread(held):
                await asyncio.sleep(0.05)

    await asyncio.to_thread(work, node, 1)
    task = asyncio.create_task(follow())
    await until_agreed()
    await asyncio.to_thread(work, node, 100)
    await until(lambda: changes == {"stored", "moved", "removed"})
    await until(lambda: tiers >= {("dram",), ("ssd",), ("dram", "ssd"), ()})
    await until_agreed()
    assert "kvstore_followers 1.0" in await asyncio.to_thread(metrics_of, node)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_follower_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.files("router")
    router = TlsSection(ca=files.ca, certificate=files.certificate, key=files.key)
    config = make_config(tmp_path / "node", tls=authority.section(clients="certificate"))
    with DaemonThread(config) as node:
        address = parse_address(str(node.daemon.control_url).removeprefix("https://"))
        follower = Following(lambda: EventClient(address, context=reaching(router)))
        task = asyncio.create_task(follower.run())
        with kvstore.connect(node.url, NAMESPACE, deadline=20.0) as client:
            await asyncio.to_thread(client.put, chain(1), [bytes(BLOCK)] * 16)
        async with asyncio.timeout(PATIENCE):
            while len(follower.map) < 16:
                await asyncio.sleep(0.02)
        assert follower.map.prefix(NAMESPACE, chain(1)) == ("dram",) * 16
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- nodes in processes of their own -------------------------------------------------------------


async def test_a_node_stands_still_and_is_started_anew(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        listen={"control": f"127.0.0.1:{free_port()}", "metrics": None},
        ssd={"capacity": "24MiB"},
    )
    # A heartbeat comes every three seconds.
    follower = Following(lambda: EventClient(config.listen.control, timeout=5.0))
    words: list[str] = []

    async def follow() -> None:
        async with aclosing(follower.batches()) as batches:
            async for batch in batches:
                words.append(batch.word)

    def tiers() -> tuple[str, ...]:
        return follower.map.prefix(NAMESPACE, chain(1))

    with daemon_process(config) as node:
        with kvstore.connect(node.url, NAMESPACE, deadline=20.0) as client:
            await asyncio.to_thread(client.put, chain(1), [bytes(BLOCK)] * 16)
        task = asyncio.create_task(follow())
        await until(lambda: follower.map.complete)
        assert tiers() == ("dram",) * 16
        first = follower.map.incarnation
        node.signal(signal.SIGSTOP)
        await until(lambda: not follower.connected)
        assert tiers() == ("dram",) * 16
        node.signal(signal.SIGCONT)
        await until(lambda: follower.connected)
        assert (words.count("reset"), "resumed" in words) == (1, True)
        assert await asyncio.to_thread(node.stop) == 0
        await until(lambda: not follower.connected)
        await asyncio.to_thread(node.start)
        await until(lambda: follower.map.complete and follower.map.incarnation != first)
        assert tiers() == ("ssd",) * 16  # warm again
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
