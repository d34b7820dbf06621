"""Blocks read on a GPU by many at once, while copies come and go all the time."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from kvstore.protocol.messages import HBM
from tests.client.gpu_reader import names
from tests.client.gpu_store import ROOM, Store, is_right, open_store, put
from tests.running import wait_for
from tests.shared_gpu import SharedGpu

PROMPTS = 12
LENGTH = 5
"""Blocks of a prompt. All prompts together have four times as many as the GPU has room for."""
SECONDS = 2.0


def evictions(store: Store) -> int:
    """How many copies have made room."""
    counted = dict(store.daemon.node.metrics.evictions)
    return sum(count for (tier, _), count in counted.items() if tier == "hbm")


def read_on(store: Store, seed: int, until: float, seen: list[int]) -> None:
    """Read prompts that chance picks, and look at each block more than once while it is held."""
    chance, gpu = random.Random(seed), SharedGpu(0)
    clients = [store.connect(gpu=gpu) for _ in range(2)]
    while time.monotonic() < until or not seen[seed] or not evictions(store):
        client, prompt = chance.choice(clients), chance.randrange(PROMPTS)
        views = client.view(names(LENGTH, prompt), device=True)
        shown = list(views)
        if chance.random() < 0.1:
            client.close()
            clients[clients.index(client)] = store.connect(gpu=gpu)
        for _ in range(2):
            for at, view in enumerate(shown):
                assert is_right(view, prompt, at)
            time.sleep(chance.random() / 500)
        seen[seed] += views.codes.count(HBM)
        views.release()
    for client in clients:
        client.close()
    assert gpu.mapped == 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_is_read_is_what_was_put(tmp_path: Path, policy: str) -> None:
    with open_store(tmp_path, policy={"hbm": policy}) as store:
        with store.connect(0) as writer:
            for prompt in range(PROMPTS):
                put(writer, prompt, LENGTH)
        seen, failures, until = [0] * 3, [], time.monotonic() + SECONDS

        def read(seed: int) -> None:
            try:
                read_on(store, seed, until, seen)
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                failures.append(error)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert all(seen)
        wait_for(lambda: not store.sessions and not store.sharers)
        assert not store.departing
        wait_for(lambda: not store.daemon.node.metrics.pins)
        statistics = store.gpus[0].tier.statistics()
        assert statistics.departing == 0
        assert statistics.blocks <= ROOM
