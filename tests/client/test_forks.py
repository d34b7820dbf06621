"""A process that forks with a client open: parent and child are apart from then on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.identity import Namespace, prefix_hashes
from tests.running import DaemonProcess, daemon_process, make_config, wait_for

BLOCK = 1 << 20
BLOCKS = 8
NAMES = prefix_hashes(range(4 * BLOCKS), 4)
DATA = np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK), np.uint8)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    config = make_config(
        tmp_path_factory.mktemp("forks"), dram={"capacity": "64MiB", "segment": "32MiB"}
    )
    with daemon_process(config) as running:
        yield running


def in_child(work: Callable[[], bool]) -> int:
    """Start ``work`` in a forked child, which is killed if it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            signal.alarm(20)
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def reads_well(client: kvstore.Client, turns: range) -> bool:
    """Whether single blocks, and all at once, have their own bytes."""
    into = np.zeros((BLOCKS, BLOCK), np.uint8)
    for turn in turns:
        position = turn % BLOCKS
        if client.get([NAMES[position]], into[:1], deadline=10.0).found != 1:
            return False
        if not np.array_equal(into[0], DATA[position]):
            return False
    return client.get(NAMES, into, deadline=10.0).found == BLOCKS and np.array_equal(into, DATA)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_parent_and_child_get_their_own_blocks(daemon: DaemonProcess, transport: str) -> None:
    space = Namespace(transport, "uint8", "raw", 4, BLOCK)
    with kvstore.connect(daemon.url, space, transport=transport, deadline=10.0) as client:
        assert client.put(NAMES, DATA).stored == BLOCKS
        assert reads_well(client, range(8))
        child = in_child(lambda: reads_well(client, range(0, 800, 3)))
        assert reads_well(client, range(1, 800, 5))
        assert status_of(child) == 0
        assert client.stats().connects == 1


def test_a_childs_end_leaves_the_parents_session(daemon: DaemonProcess) -> None:
    space = Namespace("ends", "uint8", "raw", 4, BLOCK)
    with kvstore.connect(daemon.url, space, deadline=10.0) as client:
        client.put(NAMES, DATA)
        with client.view(NAMES) as views:

            def close() -> bool:
                valid = views.valid
                views.release()
                client.close()
                return not valid

            assert status_of(in_child(close)) == 0
            assert views.valid
            assert [bytes(view) for view in views if view is not None] == [
                row.tobytes() for row in DATA
            ]
        assert reads_well(client, range(4))
        assert client.stats().connects == 1


def test_a_child_does_not_keep_its_parents_session(tmp_path: Path) -> None:
    with daemon_process(make_config(tmp_path)) as daemon:
        space = Namespace("m", "uint8", "raw", 4, 4096)
        client = kvstore.connect(daemon.url, space, deadline=10.0)
        socket_path = str(daemon.config.listen.unix)
        assert accepted(socket_path) == 1
        blocked, gate = os.pipe()
        child = in_child(lambda: bool(os.read(blocked, 1)))
        client.close()
        wait_for(lambda: accepted(socket_path) == 0)
        os.write(gate, b"x")
        assert status_of(child) == 0
        os.close(blocked)
        os.close(gate)


def accepted(path: str) -> int:
    """How many connections a Unix socket's listener has open."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    # Of the flags 00010000 marks who listens, of the states 03 who is connected.
    return sum(path in line and " 03 " in line for line in lines)


def test_an_asyncio_client_begins_anew(daemon: DaemonProcess) -> None:
    space = Namespace("asyncio", "uint8", "raw", 4, BLOCK)

    async def reads(client: kvstore.AsyncClient) -> bool:
        into = np.zeros((BLOCKS, BLOCK), np.uint8)
        found = (await client.get(NAMES, into)).found
        return found == BLOCKS and np.array_equal(into, DATA)

    async def run() -> tuple[int, bool, int]:
        async with await kvstore.aconnect(daemon.url, space, deadline=10.0) as client:
            await client.put(NAMES, DATA)

            def in_a_loop_of_its_own() -> bool:
                return asyncio.new_event_loop().run_until_complete(reads(client))

            status = status_of(in_child(in_a_loop_of_its_own))
            return status, await reads(client), client.stats().connects

    assert asyncio.run(run()) == (0, True, 1)
