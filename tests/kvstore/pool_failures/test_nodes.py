"""What becomes of a pool when one of its nodes dies, hangs or is started anew."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.kvstore.directory.servers import RedisServer
from tests.kvstore.pool_failures.pool import Client, Pool
from tests.kvstore.watched import chain
from tests.running import DaemonProcess, wait_for

pytestmark = pytest.mark.timeout(180)

CHAINS = [chain("nodes", number, length=24) for number in range(12)]
BOTH, ALONE = CHAINS[:6], CHAINS[6:]
"""What two nodes hold, and what one of them holds alone."""


class Reading(threading.Thread):
    """Reads one chain after the other that others hold."""

    def __init__(self, client: Client) -> None:
        super().__init__(name="reading")
        self.found: dict[int, int] = {}
        self.failure: BaseException | None = None
        self._client = client

    def run(self) -> None:
        try:
            for number in range(len(CHAINS)):
                # Of those that two nodes hold and of those that one does, by turns.
                at = number // 2 + (number % 2) * len(BOTH)
                self.found[at] = self._client.read(CHAINS[at])
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.failure = error


def three(pool: Pool, redis: RedisServer) -> tuple[list[DaemonProcess], list[Client]]:
    """Two owners and a home that all can read from."""
    nodes = pool.start(*(pool.config(name, redis.url) for name in ("one", "two", "home")))
    clients = [pool.client(node) for node in nodes]
    first, second, home = clients
    for hashes in CHAINS:
        first.put(hashes)
    for hashes in BOTH:
        second.put(hashes)
    for hashes in CHAINS:
        home.is_promised(hashes, 24)
    return nodes, clients


def test_an_owner_is_killed_while_others_read_from_it(pool: Pool, redis: RedisServer) -> None:
    (one, _, home), (_, _, reader) = three(pool, redis)
    with pool.local_hits(home) as local:
        reading = Reading(reader)
        reading.start()
        wait_for(lambda: reading.found or reading.failure)
        one.kill()
        local.go_on()
        reading.join(60)
        assert not reading.is_alive()
        assert reading.failure is None
        # What another holds, too, is had from there.
        for hashes in BOTH:
            reader.reads(hashes)
        # Of the rest no more is promised than home has got.
        for hashes in ALONE:
            reader.is_promised(hashes, reader.local(hashes))
            held = reader.local(hashes)
            assert reader.read(hashes) == held
    # Started anew it is read from again.
    one.start()
    again = pool.client(one)
    fresh = chain("nodes", "fresh", length=24)
    again.put(fresh)
    reader.reads(fresh)


def test_an_owner_hangs_and_goes_on(pool: Pool, redis: RedisServer) -> None:
    (one, _, home), (_, _, reader) = three(pool, redis)
    with pool.local_hits(home) as local:
        one.signal(signal.SIGSTOP)
        try:
            reading = Reading(reader)
            reading.start()
            local.go_on()
            reading.join(60)
            assert not reading.is_alive()
            assert reading.failure is None
            for hashes in BOTH:
                reader.reads(hashes)
            for hashes in ALONE:
                reader.is_promised(hashes, reader.local(hashes))
            local.go_on()
        finally:
            one.signal(signal.SIGCONT)
        # It is a member again by itself, with what it holds.
        for hashes in ALONE:
            reader.reads(hashes)
        local.go_on()


def test_a_node_starts_anew_before_it_is_missed(pool: Pool, redis: RedisServer) -> None:
    """With a heartbeat so slow that its first start counts as alive for the whole test."""
    slow = {"heartbeat": "20s"}
    (one,) = pool.start(pool.config("one", redis.url, cluster=slow, ssd={"capacity": "64MiB"}))
    before = pool.client(one)
    for hashes in BOTH:
        before.put(hashes)
    assert one.stop() == 0
    one.start()
    # The others look more often, and so hear of the last start.
    home, third = pool.start(pool.config("home", redis.url), pool.config("third", redis.url))
    first, reader = pool.client(one), pool.client(home)
    for hashes in ALONE:
        first.put(hashes)
    for hashes in CHAINS:
        reader.is_promised(hashes, 24)
    one.kill()
    with pool.local_hits(home) as local:
        one.start()
        again = pool.client(one)
        # What lay on SSD is there still, and what only DRAM held is not.
        kept = {number: again.local(hashes) for number, hashes in enumerate(CHAINS)}
        assert [kept[number] for number in range(len(BOTH))] == [24] * len(BOTH)
        assert any(blocks < 24 for blocks in kept.values())
        local.go_on()
        # Whoever never asks it finds out, too.
        other = pool.client(third)
        for number, hashes in enumerate(CHAINS):
            reader.reads(hashes, kept[number])
            other.is_promised(hashes, kept[number])
        local.go_on()
