"""The prefix level over a stand-in client: what is loaded is what was saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import client.prefix
from client.layout import HeadMajorLayout
from client.prefix import AsyncPrefixes, PackedBlocks, Prefixes
from kvstore.errors import NamespaceMismatch
from kvstore.identity import ExtraKey
from tests.client.memory_store import AsyncMemoryStore, MemoryStore

LAYOUT = HeadMajorLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_tokens=4)
TOKENS = list(range(100, 118))


def tensors(tokens: int, seed: int | None = None) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(seed)
    shape = (LAYOUT.kv_heads, tokens, LAYOUT.head_dim)

    def one() -> Any:
        return np.zeros(shape, np.float32) if seed is None else random.random(shape, np.float32)

    return [(one(), one()) for _ in range(LAYOUT.layers)]


def same(one: Any, two: Any, tokens: int) -> bool:
    return all(
        np.array_equal(a[:, :tokens], b[:, :tokens])
        for pair, other in zip(one, two, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(LAYOUT.namespace("m"))


def test_save_match_load(store: MemoryStore) -> None:
    prefixes = Prefixes(store, LAYOUT)
    saved, loaded = tensors(18, 1), tensors(18)
    assert prefixes.match(TOKENS).tokens == 0
    assert prefixes.save(TOKENS, saved).stored == 4
    match = prefixes.match([*TOKENS, 1, 2, 3])
    assert (match.tokens, match.tiers) == (16, {"dram": 16})
    result = prefixes.load(TOKENS, loaded)
    assert (result.tokens, result.tiers, result.failure) == (16, {"dram": 16}, None)
    assert same(saved, loaded, 16)
    assert not loaded[0][0][:, 16:].any()


def test_what_is_held_is_not_packed_again(store: MemoryStore) -> None:
    prefixes = Prefixes(store, LAYOUT)
    prefixes.save(TOKENS[:12], tensors(12, 1))
    result = prefixes.save(TOKENS, tensors(18, 1))
    assert (result.held, result.stored, store.packed) == (3, 1, 4)


def test_a_prefix_longer_than_a_batch(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.prefix, "BATCH_BYTES", 3 * LAYOUT.block_bytes)
    prefixes = Prefixes(store, LAYOUT)
    saved, loaded = tensors(40, 1), tensors(40)
    assert prefixes.save(range(40), saved).stored == 10
    assert prefixes.load(range(40), loaded).tokens == 40
    assert same(saved, loaded, 40)


def test_extra_keys_keep_prefixes_apart(store: MemoryStore) -> None:
    prefixes = Prefixes(store, LAYOUT)
    prefixes.save(TOKENS, tensors(18, 1), extra_keys=(ExtraKey.lora("a"),))
    assert prefixes.match(TOKENS).tokens == 0
    assert prefixes.match(TOKENS, extra_keys=(ExtraKey.cache_salt("a"),)).tokens == 0
    assert prefixes.match(TOKENS, extra_keys=(ExtraKey.lora("a"),)).tokens == 16


def test_a_hole_ends_the_prefix(store: MemoryStore) -> None:
    prefixes = Prefixes(store, LAYOUT)
    prefixes.save(TOKENS, tensors(18, 1))
    del store.blocks[list(store.blocks)[2]]
    assert prefixes.load(TOKENS, tensors(18)).tokens == 8


def test_a_node_that_is_gone_is_a_miss(store: MemoryStore) -> None:
    prefixes = Prefixes(store, LAYOUT)
    prefixes.save(TOKENS, tensors(18, 1))
    store.failure = "unavailable"
    assert prefixes.match(TOKENS).failure == "unavailable"
    assert prefixes.load(TOKENS, tensors(18)).tokens == 0
    saved = prefixes.save(TOKENS, tensors(18, 1))
    assert (saved.failed, saved.failure) == (4, "unavailable")


def test_views_that_lost_their_pins_count_for_nothing(store: MemoryStore) -> None:
    prefixes = Prefixes(store, LAYOUT)
    prefixes.save(TOKENS, tensors(18, 1))
    store.valid = False
    assert prefixes.load(TOKENS, tensors(18)).tokens == 0


def test_a_parent_that_went_meanwhile(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.prefix, "BATCH_BYTES", 2 * LAYOUT.block_bytes)
    store.forget_parents = True
    saved = Prefixes(store, LAYOUT).save(TOKENS, tensors(18, 1))
    assert (saved.stored, saved.failed, saved.failure) == (2, 2, "parent_absent")


def test_another_layout_is_refused(store: MemoryStore) -> None:
    other = HeadMajorLayout(2, 2, 4, "float16", 4)
    with pytest.raises(NamespaceMismatch, match="layout"):
        Prefixes(store, other)
    with pytest.raises(NamespaceMismatch, match="tokens"):
        Prefixes(store, LAYOUT).save(TOKENS, tensors(4, 1))
    with pytest.raises(NamespaceMismatch):
        Prefixes(store, LAYOUT).load(TOKENS, tensors(4))


def test_packed_blocks_write_what_is_asked_for() -> None:
    kept = tensors(32, 1)
    blocks = PackedBlocks(LAYOUT, kept, 1, 7)
    assert len(blocks) == 7
    into = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(4)]
    blocks.write([0, 1, 4, 6], into)
    one = memoryview(bytearray(LAYOUT.block_bytes))
    for position, block in zip([0, 1, 4, 6], into, strict=True):
        LAYOUT.pack(kept, 1 + position, [one])
        assert block == one
    blocks.write([], [])


async def test_the_asyncio_twin_does_the_same(store: MemoryStore) -> None:
    prefixes = AsyncPrefixes(AsyncMemoryStore(store), LAYOUT)
    saved, loaded = tensors(18, 1), tensors(18)
    assert (await prefixes.save(TOKENS, saved)).stored == 4
    assert (await prefixes.match(TOKENS)).tokens == 16
    assert (await prefixes.load(TOKENS, loaded)).tokens == 16
    assert same(saved, loaded, 16)
    store.forget_parents = True
    store.failure = "unavailable"
    assert (await prefixes.save(TOKENS, saved)).failure == "unavailable"
