"""Blocks that a process reads on a GPU keep their bytes, however its session ends.

A process holds half of the GPU's room. Others then fill all the rest several times over, and the
process looks at what a copy that is still under way would read.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvstore
from kvstore.departures import DepartureReason
from kvstore.protocol.messages import HBM
from tests.client.gpu_reader import names
from tests.client.gpu_store import ROOM, Reader, Store, bring_up, open_store, put, reader, storm
from tests.running import wait_for

HELD = ROOM // 2
PROMPT = 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as running:
        yield running


@pytest.fixture
def other(store: Store) -> Iterator[kvstore.Client]:
    """Another client of the same tenant, whose blocks want the room."""
    with store.connect(0) as client:
        put(client, PROMPT, HELD)
        bring_up(client, PROMPT, HELD)
        yield client


@pytest.fixture
def holder(store: Store, other: kvstore.Client) -> Iterator[Reader]:
    with reader(store) as process:
        yield process


def look(holder: Reader) -> list[str]:
    """Have the process hold the blocks; what it reads."""
    codes, digests = holder.ask("view", HELD, PROMPT)
    assert bytes.fromhex(codes) == bytes([HBM]) * HELD
    assert len(set(digests)) == HELD
    found: list[str] = digests
    return found


def fill(other: kvstore.Client, first: int = 100) -> None:
    storm(other, ROOM - HELD, first)


def all_room_is_back(other: kvstore.Client) -> None:
    put(other, 500, ROOM)
    bring_up(other, 500, ROOM)


def test_blocks_stay_as_long_as_the_lease(holder: Reader, other: kvstore.Client) -> None:
    seen = look(holder)
    fill(other)
    assert holder.ask("digests") == seen
    assert holder.ask("valid")
    holder.ask("release")
    all_room_is_back(other)


def test_a_stalled_process_loses_nothing(holder: Reader, other: kvstore.Client) -> None:
    seen = look(holder)
    holder.signal(signal.SIGSTOP)
    try:
        fill(other)
    finally:
        holder.signal(signal.SIGCONT)
    assert holder.ask("digests") == seen
    assert holder.ask("valid")


def test_the_room_of_a_killed_process_comes_back(
    holder: Reader, other: kvstore.Client, store: Store
) -> None:
    look(holder)
    holder.kill()
    wait_for(lambda: store.sessions == 1 and not store.departing, 20.0)
    all_room_is_back(other)


def test_a_process_that_outlives_its_connection_reads_on(
    holder: Reader, other: kvstore.Client, store: Store
) -> None:
    """As one that is dying does, whose socket is closed before its GPU has stopped."""
    seen = look(holder)
    holder.ask("drop")
    wait_for(lambda: store.departing == 1, 20.0)
    fill(other)
    assert holder.ask("digests") == seen
    assert not holder.ask("valid")
    holder.kill()
    wait_for(lambda: not store.departing, 20.0)
    all_room_is_back(other)


def test_a_session_that_the_node_ends_is_read_from_still(
    holder: Reader, other: kvstore.Client, store: Store
) -> None:
    seen = look(holder)
    holder.ask("break")
    wait_for(lambda: store.daemon.node.metrics.errors["protocol"], 20.0)
    fill(other)
    assert holder.ask("digests") == seen
    holder.ask("release")
    holder.ask("close")
    # The node listens to that session no more, so that only the end of the process is sure.
    wait_for(lambda: store.departing == 1, 20.0)
    fill(other, 200)
    holder.kill()
    wait_for(lambda: not store.departing, 20.0)
    all_room_is_back(other)


def test_a_client_that_is_closed_under_its_copies_waits_for_them(
    holder: Reader, other: kvstore.Client, store: Store
) -> None:
    seen = look(holder)
    holder.ask("close")
    assert not holder.ask("valid")
    fill(other)
    assert holder.ask("digests") == seen  # it would be killed, were the memory unmapped
    assert store.sessions == 2
    holder.ask("release")
    wait_for(lambda: store.sessions == 1, 20.0)
    assert not store.departing
    all_room_is_back(other)


def test_the_child_of_a_fork_leaves_them_to_its_parent(
    holder: Reader, other: kvstore.Client, store: Store
) -> None:
    seen = look(holder)
    assert holder.ask("fork", HELD, PROMPT) == 0
    assert holder.ask("valid")
    fill(other)
    assert holder.ask("digests") == seen
    assert store.sessions == 2
    holder.ask("release")
    all_room_is_back(other)


def test_blocks_that_leave_the_node_stay_for_who_reads_them(
    holder: Reader, other: kvstore.Client, store: Store
) -> None:
    seen = look(holder)
    node = store.daemon.node
    (shard,) = node.index.shards

    def drop() -> None:
        held = next(entry for entry in shard.committed.values() if entry.pins)
        node.drop(held.path()[0], "dram", DepartureReason.CORRUPT)

    store.call(drop)
    assert not other.exists(names(HELD, PROMPT)).found
    fill(other)
    assert holder.ask("digests") == seen
    holder.ask("drop")
    wait_for(lambda: store.departing == 1, 20.0)
    fill(other, 200)
    assert holder.ask("digests") == seen
    holder.kill()
    wait_for(lambda: not store.departing, 20.0)
    all_room_is_back(other)


def test_a_node_that_stops_waits_for_reads(tmp_path: Path) -> None:
    store = Store(tmp_path, node={"state_directory": str(tmp_path), "grace": 50.0})
    stop = threading.Thread(target=store.__exit__, args=(None, None, None))

    def end() -> None:
        if stop.ident is None:
            stop.start()
        stop.join()

    with ExitStack() as stack:
        store.__enter__()
        stack.callback(end)
        with store.connect(0) as client:
            put(client, PROMPT, HELD)
            bring_up(client, PROMPT, HELD)
        holder = stack.enter_context(reader(store))
        seen = look(holder)
        stop.start()
        wait_for(lambda: store.daemon.server.stopping, 20.0)
        assert holder.ask("digests") == seen
        assert holder.ask("valid")
        assert store.devices[0].live
        holder.ask("release")
        stop.join(30)
        assert not stop.is_alive()
        assert not store.devices[0].live
        assert not holder.ask("valid")
