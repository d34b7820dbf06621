"""Prefix caching on a GPU: the same KV to the bit, and nothing waits that need not.

Run by hand where there is a GPU: `scripts/gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from client.buffers import BlockSource, PutBlocks
from client.results import HELD, STORED, PutResult
from kvstore.identity import ROOT_PARENT, Namespace
from rdma.segments import SEGMENT_SHIFT, SegmentMap
from tests.client.memory_store import MemoryStore, MemoryViews
from tests.client.test_paged_gpu import busy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from client.transformers_memory import KVMemory  # noqa: E402
from client.transformers_paged import PagedPrefixCache  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

SEGMENT = 64 << 20
SEGMENTS = 2


class ArenaStore(MemoryStore):
    """Blocks in segments as a node shares them, so that the GPU reads and writes them itself."""

    def __init__(self, namespace: Namespace, arena: SegmentMap) -> None:
        super().__init__(namespace)
        self.arena = arena
        self.places: dict[bytes, int] = {}
        self.held = 0

    @contextmanager
    def view(
        self, hashes: Sequence[bytes], *, device: bool = False, deadline: float | None = None
    ) -> Iterator[MemoryViews]:
        size = self.namespace.block_bytes
        views = [
            self.arena.views([self.places[one]], size)[0] if one in self.places else None
            for one in hashes
        ]
        self.held += 1
        yield MemoryViews(views, self.valid, self.failure)
        self.held -= 1

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        deadline: float | None = None,
    ) -> PutResult:
        assert isinstance(blocks, BlockSource)
        size = self.namespace.block_bytes
        wanted = [at for at, one in enumerate(hashes) if one not in self.places]
        for at in wanted:
            number, slot = divmod(len(self.places), SEGMENT // size)
            self.places[hashes[at]] = (number << SEGMENT_SHIFT) + slot * size
        into = [self.arena.writable(self.places[hashes[at]], size) for at in wanted]
        for buffer in into:
            buffer[:] = b"\xee" * size
        blocks.write(wanted, into)
        return PutResult(bytes(STORED if at in wanted else HELD for at in range(len(hashes))))


def llama(dtype: Any) -> Any:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval().to("cuda", dtype)


@pytest.fixture(scope="module")
def arena() -> Iterator[SegmentMap]:
    from client.pinning import pinned_segments

    pinned = pinned_segments()
    mapped = SegmentMap()
    for number in range(SEGMENTS):
        fd = os.memfd_create("arena")
        os.ftruncate(fd, SEGMENT)
        mapped.add(number, fd, SEGMENT, populate=False)
    assert pinned.wait(30)
    yield mapped
    assert mapped.close() == 0


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(torch.bfloat16)


def made(model: Any, arena: SegmentMap, **options: Any) -> tuple[PagedPrefixCache, ArenaStore]:
    memory = KVMemory(model, 2048)
    memory._tensors.fill_(float("nan"))
    store = ArenaStore(memory.namespace("m"), arena)
    return PagedPrefixCache(store, model, memory, **options), store


def prompt(tokens: int, seed: int = 1) -> Any:
    return torch.randint(1, 1024, (1, tokens), generator=torch.Generator().manual_seed(seed))


def scores(model: Any, ids: Any, cache: Any, held: int) -> Any:
    with torch.inference_mode():
        return model(ids[:, held:].cuda(), past_key_values=cache, logits_to_keep=1).logits[0, -1]


def test_scores_are_those_behind_the_kv_that_was_saved(model: Any, arena: SegmentMap) -> None:
    prefix, ids = prompt(1600), torch.cat([prompt(1600), prompt(77, seed=2)], 1)
    cache, store = made(model, arena)
    with cache:
        state, _ = cache.restore(prefix)
        scores(model, prefix, state, 0)
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in state.layers]
        saved = cache.store(prefix, state).result()
        assert saved is not None
        assert saved.stored == 100
        own = transformers.DynamicCache(ddp_cache_data=kept, config=model.config)
        expected = scores(model, ids, own, 1600)
        for _ in range(3):
            cache.memory._tensors.fill_(float("nan"))
            state, reused = cache.restore(ids)
            assert reused.tokens == 1600
            got = scores(model, ids, state, 1600)
            assert torch.equal(got, expected)
            assert state.finish()
            assert store.held == 0
            for layer, pair in zip(state.layers, kept, strict=True):
                assert torch.equal(layer.keys[:, :, :1600], pair[0])
                assert torch.equal(layer.values[:, :, :1600], pair[1])
            cache.drop(state)


def test_the_host_waits_for_nothing(model: Any, arena: SegmentMap) -> None:
    prefix, ids = prompt(800, seed=3), torch.cat([prompt(800, seed=3), prompt(40, seed=4)], 1)
    cache, _ = made(model, arena)
    with cache:
        state, _ = cache.restore(prefix)
        scores(model, prefix, state, 0)
        cache.store(prefix, state).result()
        state, _ = cache.restore(ids)
        expected = scores(model, ids, state, 800).cpu()
        for _ in range(3):
            busy()
            # The memory is in use until then, so that the load may not begin before.
            cache.drop(state)
            busy()
            state, _ = cache.restore(ids)
            other, _ = cache.restore(ids)
            assert not state.arrived or not other.arrived, "the host waited"
            got = scores(model, ids, other, 800)
            cache.drop(state)
            state = other
            assert torch.equal(got.cpu(), expected)
        cache.drop(state)


def test_a_chat_gives_the_same_tokens(arena: SegmentMap) -> None:
    model, plain = llama(torch.float32), llama(torch.float32)
    chat, reused = prompt(210).cuda(), []
    cache, _ = made(model, arena, background=True, deadline=10.0)
    options = {"max_new_tokens": 24, "do_sample": False}
    with cache:
        for turn in range(4):
            expected = plain.generate(chat, **options)
            got = cache.generate(chat, **options)
            assert torch.equal(got.output, expected)
            reused.append(got.reused.tokens)
            chat = torch.cat([got.output, prompt(30, seed=turn).cuda()], 1)
            with cache._freed:
                assert cache._freed.wait_for(lambda: not cache._saving, 10)
    assert reused == [0, 224, 272, 336]
