"""A real daemon with blocks on a real GPU, and KV tensors beside them: every byte, whatever ends.

Run by hand where there is a GPU: `scripts/gpu test_hbm_node_gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from client.paged import PagedMemory
from client.pinning import pinned_segments
from client.transformers_paged import PagedBlocks
from kvstore.identity import Namespace
from kvstore.protocol.messages import DRAM, HBM
from tests.client.test_paged import torch
from tests.client.test_paged_gpu import KV, on_gpu
from tests.running import DaemonProcess, daemon_process, make_config, wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

COUNT = 32
"""Blocks of a prompt; HBM has room for four prompts, DRAM for eleven."""
PROMPTS = 8


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return on_gpu(KV.tensors())


@pytest.fixture(scope="module")
def memory(tensors: dict[str, Any]) -> PagedMemory:
    return KV.memory(tensors)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("node")
    hbm = {"capacity": "256MiB", "segment": "64MiB"}
    config = make_config(directory, dram={"capacity": "768MiB", "segment": "128MiB"}, hbm=hbm)
    with daemon_process(config) as running:
        yield running


def space(memory: PagedMemory) -> Namespace:
    layout = memory.layout
    return Namespace("m", layout.dtype, layout.name, 16, layout.block_bytes)


@pytest.fixture
def client(node: DaemonProcess, memory: PagedMemory) -> Iterator[kvstore.Client]:
    with kvstore.connect(node.url, space(memory), gpu=memory.gpu, deadline=20.0) as connected:
        yield connected


def names(prompt: int) -> list[bytes]:
    return kvstore.prefix_hashes(np.full(16 * COUNT, prompt + 1, np.int64), 16)


def fill(tensors: dict[str, Any], ids: Sequence[int], value: int) -> None:
    """Give blocks the bytes of a prompt, another value for each layer and block."""
    for number, layer in enumerate(tensors.values()):
        for at, block in enumerate(ids):
            layer[block].view(torch.int16).fill_(value * 4096 + number * 64 + at)


def holds(tensors: dict[str, Any], ids: Sequence[int], value: int) -> bool:
    return all(
        bool((layer[block].view(torch.int16) == value * 4096 + number * 64 + at).all())
        for number, layer in enumerate(tensors.values())
        for at, block in enumerate(ids)
    )


def save(client: kvstore.Client, memory: PagedMemory, tensors: dict[str, Any], prompt: int) -> None:
    ids = list(range(COUNT))
    fill(tensors, ids, prompt % 8)
    saved = client.put(names(prompt), PagedBlocks(memory, ids, memory.mark()))
    assert saved.stored + saved.held == COUNT


def load(
    client: kvstore.Client, memory: PagedMemory, prompt: int, ids: Sequence[int], by_layer: bool
) -> bytes:
    """Load a prompt; the tiers that it came from."""
    with client.view(names(prompt), device=True) as views:
        blocks = [view for view in views if view is not None]
        assert len(blocks) == COUNT
        if by_layer:
            memory.load_layers(blocks, ids, after=memory.mark()).finish()
        else:
            memory.scatter(blocks, ids, after=memory.mark())
        assert views.valid
        return views.codes


def bring_up(client: kvstore.Client, prompt: int) -> None:
    def there() -> bool:
        with client.view(names(prompt), device=True) as views:
            return views.codes == bytes([HBM]) * COUNT

    wait_for(there, 30.0)


def test_a_prompt_comes_from_the_gpu(
    client: kvstore.Client, memory: PagedMemory, tensors: dict[str, Any]
) -> None:
    save(client, memory, tensors, 1)
    assert pinned_segments().wait(30)
    for by_layer in (False, True):
        bring_up(client, 1)
        ids = list(range(COUNT, 2 * COUNT))
        fill(tensors, ids, 7)
        assert load(client, memory, 1, ids, by_layer) == bytes([HBM]) * COUNT
        assert holds(tensors, ids, 1)


def test_an_eviction_storm_changes_no_byte(
    client: kvstore.Client,
    node: DaemonProcess,
    memory: PagedMemory,
    tensors: dict[str, Any],
) -> None:
    for prompt in range(PROMPTS):
        save(client, memory, tensors, prompt)
    torch.cuda.synchronize()
    seen: set[int] = set()
    wrong: list[str] = []

    def reader(number: int) -> None:
        ids = list(range((2 + number) * COUNT, (3 + number) * COUNT))
        with (
            torch.cuda.stream(torch.cuda.Stream()),
            kvstore.connect(node.url, space(memory), gpu=memory.gpu, deadline=20.0) as mine,
        ):
            for turn in range(24):
                prompt = (turn // 2 + 3 * number) % PROMPTS
                fill(tensors, ids, 7 - prompt)
                seen.update(load(mine, memory, prompt, ids, turn % 3 == 0))
                if not holds(tensors, ids, prompt):
                    wrong.append(f"reader {number}, turn {turn}")

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen <= {HBM, DRAM}
    assert DRAM in seen


ENGINE = """
import json, sys, numpy as np, kvstore, torch
from kvstore.identity import Namespace
url, text, count = *sys.argv[1:], %d
torch.zeros(1, device="cuda")
client = kvstore.connect(url, Namespace.parse(json.loads(text)), gpu=0, deadline=20.0)
names = kvstore.prefix_hashes(np.full(16 * count, 2, np.int64), 16)
views = client.view(names, device=True)
print(sorted(set(views.codes)), flush=True)
sys.stdin.read()
"""


def test_an_engine_that_is_killed_with_leases_holds_up_nobody(
    client: kvstore.Client, node: DaemonProcess, memory: PagedMemory, tensors: dict[str, Any]
) -> None:
    save(client, memory, tensors, 1)
    bring_up(client, 1)
    command = [sys.executable, "-c", ENGINE % COUNT, node.url, json.dumps(space(memory).describe())]
    engine = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == f"[{HBM}]\n"
    finally:
        engine.kill()
        engine.communicate()
    for prompt in range(2, PROMPTS):
        save(client, memory, tensors, prompt)
        bring_up(client, prompt)
    ids = list(range(COUNT, 2 * COUNT))
    for prompt in range(1, PROMPTS):
        fill(tensors, ids, 7 - prompt)
        load(client, memory, prompt, ids, by_layer=False)
        assert holds(tensors, ids, prompt)
