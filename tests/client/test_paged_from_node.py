"""From a node's GPU into KV tensors, by all that lies between: only the GPU is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvstore
from client import paged
from client.pinning import PinnedSegments
from client.prefix import PrefixMatch
from kvstore.protocol.messages import HBM
from rdma import segments
from tests.client import cuda_stand_in
from tests.client.cuda_stand_in import Gpu, cuda_copies
from tests.client.gpu_store import Store, open_store
from tests.client.test_pinning import Registrar
from tests.running import wait_for
from tests.shared_gpu import SharedGpu

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from client.transformers_memory import KVMemory  # noqa: E402
from client.transformers_paged import PagedPrefixCache  # noqa: E402
from tests.client.test_transformers_paged import llama, prompt  # noqa: E402

OPTIONS = {"max_new_tokens": 2, "do_sample": False}
TOKENS = 34
BLOCKS = 8


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with cuda_copies() as module:
        yield module


@pytest.fixture
def memory(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> KVMemory:
    """KV of a model, as on a GPU."""
    gpu, pinned = Gpu(5), PinnedSegments(Registrar())
    monkeypatch.setattr(segments, "_watchers", [pinned])

    def direct(tensors: Any, groups: Any, room: int, staged: Any) -> Any:
        copies = kernels.CudaCopies(gpu, tensors, groups, pinned, staged, room)
        copies._device = SimpleNamespace(index=0)
        return copies

    monkeypatch.setattr(paged, "_without_the_cpu", direct)
    monkeypatch.setattr(paged, "_device", lambda tensor: "a stand-in")
    # The model does not compute late, so that it can't wait late either.
    monkeypatch.setattr(cuda_stand_in.Event, "wait", cuda_stand_in.Event.synchronize)
    memory = KVMemory(llama(), 96, block_tokens=4)
    memory._tensors.fill_(float("nan"))
    return memory


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as running:
        yield running


@pytest.fixture
def client(store: Store, memory: KVMemory) -> Iterator[kvstore.Client]:
    names = memory.namespace("m")
    with kvstore.connect(store.url, names, gpu=SharedGpu(0), deadline=20.0) as connected:
        yield connected


def reused(cache: PagedPrefixCache, ids: Any, expected: Any) -> PrefixMatch:
    """Where a prompt's prefix came from; its output is right."""
    cache.memory._tensors.fill_(float("nan"))
    got = cache.generate(ids, **OPTIONS)
    assert torch.equal(got.output, expected)
    return got.reused


def came_from_hbm(cache: PagedPrefixCache, ids: Any, expected: Any) -> bool:
    """Use a prefix; whether all of it lay on the GPU."""
    return reused(cache, ids, expected).tiers == {"hbm": 4 * BLOCKS}


def pins(store: Store) -> int:
    """How many answers sessions keep blocks in place for."""
    return sum(len(session._leases) for session in store.daemon.server.sessions())


def test_a_prefix_comes_from_the_gpu_to_the_bit(
    store: Store, client: kvstore.Client, memory: KVMemory
) -> None:
    model, ids = llama(), prompt(TOKENS)
    expected = llama().generate(ids, **OPTIONS)
    with PagedPrefixCache(client, model, memory) as cache:
        assert reused(cache, ids, expected).tokens == 0
        assert reused(cache, ids, expected).tiers == {"dram": 4 * BLOCKS}
        wait_for(partial(came_from_hbm, cache, ids, expected), 60.0)
        longer = torch.cat([ids, prompt(9, seed=2)], 1)
        after = llama().generate(longer, **OPTIONS)
        reused(cache, longer, after)
        # What was saved behind the prefix is still in DRAM: one load from both tiers.
        assert reused(cache, longer, after).tiers == {"hbm": 4 * BLOCKS, "dram": 8}
    assert not cache.counts.errors


def test_copies_that_are_evicted_meanwhile_cost_nothing_but_time(
    memory: KVMemory, tmp_path: Path
) -> None:
    model, size = llama(), memory.paged.layout.block_bytes
    hbm = {"capacity": 2 * BLOCKS * size, "segment": 2 * BLOCKS * size}
    prompts = [prompt(TOKENS, seed=seed) for seed in range(3)]
    expected = [llama().generate(ids, **OPTIONS) for ids in prompts]
    with (
        open_store(tmp_path, hbm=hbm) as store,
        kvstore.connect(
            store.url, memory.namespace("m"), gpu=SharedGpu(0), deadline=20.0
        ) as client,
        PagedPrefixCache(client, model, memory) as cache,
    ):
        # There is room for two of the three, so that each drives out another.
        for at in (0, 1, 2, 0, 1, 2):
            cache.generate(prompts[at], **OPTIONS)
            wait_for(partial(came_from_hbm, cache, prompts[at], expected[at]), 60.0)
        assert len(store.gpus.copies) <= 2 * BLOCKS
    assert not cache.counts.errors


def test_leases_end_with_the_load(store: Store, client: kvstore.Client, memory: KVMemory) -> None:
    model, ids = llama(), prompt(TOKENS)
    with PagedPrefixCache(client, model, memory) as cache:
        cache.generate(ids, **OPTIONS)
        names = kvstore.prefix_hashes(ids[0, :-1].numpy(), 4)

        def there() -> bool:
            with client.view(names, device=True) as views:
                return views.codes == bytes([HBM]) * BLOCKS

        wait_for(there)
        state, found = cache.restore(ids)
        assert found.tiers == {"hbm": 4 * BLOCKS}
        assert pins(store)
        assert state.finish()
        wait_for(lambda: not pins(store))
        cache.drop(state)
