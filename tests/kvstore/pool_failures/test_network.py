"""What becomes of a pool whose nodes are on machines that don't reach each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kvstore.pool_failures.network import Network, network
from tests.kvstore.pool_failures.pool import Client, LocalHits, Pool, running_redis
from tests.kvstore.watched import chain
from tests.running import wait_for

pytestmark = pytest.mark.timeout(180)

CHAINS = [chain("network", number, length=24) for number in range(4)]


@contextmanager
def apart(pool: Pool, lan: Network, directory: Path) -> Iterator[tuple[Client, Client, LocalHits]]:
    """Clients of an owner and of a home, each node on a machine of its own, and Redis between."""
    with running_redis(
        directory, tcp=True, prefix=lan.inside("hub"), bind=lan.address("hub"), protected_mode="no"
    ) as redis:
        url = f"redis://{lan.address('hub')}:{redis.port}"
        configs = [
            pool.config(side, url, listen={"tcp": f"{lan.address(side)}:9410", "insecure": True})
            for side in ("one", "home")
        ]
        one, home = pool.start(*configs, prefixes=[lan.inside(side) for side in ("one", "home")])
        owner, reader = pool.client(one), pool.client(home)
        for hashes in CHAINS:
            owner.put(hashes)
        reader.reads(CHAINS[0])
        reader.is_promised(CHAINS[1], 24)
        with pool.local_hits(home) as local:
            yield owner, reader, local


@pytest.fixture
def lan() -> Iterator[Network]:
    with network() as made:
        yield made


def test_two_nodes_are_parted_while_both_see_redis(
    pool: Pool, lan: Network, tmp_path: Path
) -> None:
    with apart(pool, lan, tmp_path) as (owner, reader, local):
        with lan.parted():
            # The session breaks off without a word.
            assert reader.get(CHAINS[1]) == 0
            local.go_on()
            # Who can't be reached is counted on no more, however long it is said to be there.
            wait_for(lambda: len(reader.match(CHAINS[2])) == 0)
            until = time.monotonic() + 3.0
            while time.monotonic() < until:
                assert len(reader.match(CHAINS[2])) == 0
                time.sleep(0.02)
            assert owner.match(CHAINS[2]) == ("dram",) * 24
            local.go_on()
        for hashes in CHAINS:
            reader.reads(hashes)
        local.go_on()


def test_a_node_is_cut_off_from_everybody(pool: Pool, lan: Network, tmp_path: Path) -> None:
    with apart(pool, lan, tmp_path) as (_, reader, local):
        with lan.unplugged("home"):
            assert reader.get(CHAINS[1]) == 0
            for _ in range(5):
                assert reader.read(CHAINS[2]) == 0
            local.go_on()
        for hashes in CHAINS:
            reader.reads(hashes)
        local.go_on()


def test_an_owner_is_cut_off_from_everybody(pool: Pool, lan: Network, tmp_path: Path) -> None:
    with apart(pool, lan, tmp_path) as (owner, reader, local):
        with lan.unplugged("one"):
            assert reader.get(CHAINS[1]) == 0
            reader.is_promised(CHAINS[2], 0)
            assert owner.match(CHAINS[2]) == ("dram",) * 24
            local.go_on()
        for hashes in CHAINS:
            reader.reads(hashes)
        local.go_on()
