"""Prefix caching in memory that the store reads by itself: the same tokens, computed once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.errors import AccessDenied, ConfigError, InvalidRequest, NamespaceMismatch
from tests.client.memory_store import MemoryStore

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from client.paged_copies import LayersLoading  # noqa: E402
from client.transformers import layout_of  # noqa: E402
from client.transformers_attention import ATTENTION  # noqa: E402
from client.transformers_memory import KVMemory  # noqa: E402
from client.transformers_paged import PagedPrefixCache  # noqa: E402

LAYERS = 3
OPTIONS = {"max_new_tokens": 8, "do_sample": False}


def llama() -> Any:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def plain() -> Any:
    """The model as Transformers runs it."""
    return llama()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def made(model: Any, tokens: int = 96, sequences: int = 2, **options: Any) -> PagedPrefixCache:
    memory = KVMemory(model, tokens, sequences=sequences, block_tokens=4)
    memory._tensors.fill_(float("nan"))
    return PagedPrefixCache(MemoryStore(memory.namespace("m")), model, memory, **options)


@pytest.fixture
def cache(model: Any) -> Iterator[PagedPrefixCache]:
    with made(model) as cache:
        yield cache


def store_of(cache: PagedPrefixCache) -> MemoryStore:
    assert isinstance(cache.client, MemoryStore)
    return cache.client


def prompt(tokens: int, seed: int = 1) -> Any:
    return torch.randint(1, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def test_a_growing_chat_gives_the_same_tokens(plain: Any, cache: PagedPrefixCache) -> None:
    chat, reused = prompt(21), []
    for turn in range(4):
        expected = plain.generate(chat, **OPTIONS)
        got = cache.generate(chat, **OPTIONS)
        assert torch.equal(got.output, expected)
        reused.append(got.reused.tokens)
        chat = torch.cat([got.output, prompt(5, seed=turn + 2)], dim=1)
    assert reused == [0, 28, 40, 52]
    assert cache.counts.reused_tokens == sum(reused)
    assert store_of(cache).packed == cache.counts.stored_blocks == 16


def test_another_process_finds_the_same_blocks(plain: Any, cache: PagedPrefixCache) -> None:
    ids = prompt(30)
    cache.generate(ids, **OPTIONS)
    with made(llama(), tokens=41, sequences=1) as other:
        store_of(other).blocks = store_of(cache).blocks
        got = other.generate(ids, **OPTIONS)
    assert got.reused.tokens == 28
    assert got.reused.tiers == {"dram": 28}
    assert torch.equal(got.output, plain.generate(ids, **OPTIONS))


@pytest.mark.parametrize("gpu", [None, 0])
def test_blocks_are_wanted_on_a_gpu_where_one_takes_them(
    cache: PagedPrefixCache, gpu: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.memory.gpu is None
    cache.generate(prompt(16), **OPTIONS)
    monkeypatch.setattr(KVMemory, "gpu", gpu)
    assert cache.generate(prompt(16), **OPTIONS).reused.tokens
    assert store_of(cache).devices == [False, gpu is not None]


def test_the_blocks_have_the_tokens_outermost(model: Any, cache: PagedPrefixCache) -> None:
    ids = prompt(9)
    state, _ = cache.restore(ids)
    with torch.inference_mode():
        model(ids, past_key_values=state)
    expected = torch.stack(
        [torch.stack([layer.keys[0], layer.values[0]]) for layer in state.layers]
    ).transpose(2, 3)
    saved = cache.store(ids, state).result()
    assert saved is not None
    assert saved.stored == 2
    blocks = list(store_of(cache).blocks.values())
    assert blocks == [
        expected[:, :, first : first + 4].contiguous().numpy().tobytes() for first in (0, 4)
    ]


def test_what_was_loaded_is_not_offered_again(cache: PagedPrefixCache) -> None:
    cache.generate(prompt(16), **OPTIONS)
    store = store_of(cache)
    offered: list[int] = []
    put = store.put

    def seen(hashes: Sequence[bytes], *args: Any, **kwargs: Any) -> Any:
        offered.append(len(hashes))
        return put(hashes, *args, **kwargs)

    store.put = seen  # type: ignore[method-assign]
    got = cache.generate(torch.cat([prompt(16), prompt(9, seed=3)], dim=1), **OPTIONS)
    assert got.reused.tokens == 16
    assert offered == [4]
    store.forget_parents = True
    store.blocks.clear()
    again = cache.generate(prompt(16), **OPTIONS)
    assert (again.reused.tokens, again.saved and again.saved.stored) == (0, 5)


def test_a_parent_that_went_is_offered_again(cache: PagedPrefixCache) -> None:
    cache.generate(prompt(16), **OPTIONS)
    state, reused = cache.restore(prompt(20))
    assert reused.tokens == 16
    with torch.inference_mode():
        cache.model(prompt(20)[:, 16:], past_key_values=state)
    store_of(cache).blocks.clear()
    saved = cache.store(prompt(20), state).result()
    assert saved is not None
    assert saved.stored == 5


def test_a_store_that_fails_never_shows(plain: Any, cache: PagedPrefixCache) -> None:
    ids = prompt(16)
    store = store_of(cache)

    def denied(*args: Any, **kwargs: Any) -> Any:
        raise AccessDenied("no")

    store.view = store.put = denied  # type: ignore[method-assign]
    got = cache.generate(ids, **OPTIONS)
    assert torch.equal(got.output, plain.generate(ids, **OPTIONS))
    assert (got.reused.tokens, got.saved, cache.counts.errors) == (0, None, 2)
    assert len(cache._free) == 2


def test_blocks_that_lost_their_pins_are_not_used(plain: Any, cache: PagedPrefixCache) -> None:
    ids = prompt(16)
    cache.generate(ids, **OPTIONS)
    store = store_of(cache)
    store.valid = False
    store.blocks = {key: bytes(len(data)) for key, data in store.blocks.items()}
    got = cache.generate(ids, **OPTIONS)
    assert torch.equal(got.output, plain.generate(ids, **OPTIONS))
    assert got.reused.tokens == 0


class Slow(LayersLoading):
    """A load as a GPU does it: a layer is there once it was waited for, all after ``finish``."""

    def __init__(self, bring: Callable[[int], None]) -> None:
        super().__init__()
        self.bring = bring
        self.waited: list[int] = []
        self.over = False

    def wait(self, layer: int) -> None:
        self.waited.append(layer)
        self.bring(layer)

    @property
    def done(self) -> bool:
        return self.over

    def finish(self) -> None:
        self.over = True


@contextmanager
def slow_loads(cache: PagedPrefixCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Slow]]:
    """Have each layer arrive only when it is waited for."""
    loads: list[Slow] = []
    paged = cache.memory.paged

    def load_layers(blocks: Any, ids: Any, *, after: object | None = None) -> Slow:
        def bring(layer: int) -> None:
            start, size = paged.layout.layer_range(layer)
            parts = [block[start : start + size] for block in blocks]
            paged.scatter(parts, ids, layers=(layer, 1))

        loads.append(Slow(bring))
        return loads[-1]

    with monkeypatch.context() as patched:
        patched.setattr(paged, "load_layers", load_layers)
        yield loads


def test_each_layer_waits_for_its_own_part(
    plain: Any, cache: PagedPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(16)
    cache.generate(ids, **OPTIONS)
    cache.memory._tensors.fill_(float("nan"))
    with slow_loads(cache, monkeypatch) as loads:
        got = cache.generate(ids, **OPTIONS)
    assert torch.equal(got.output, plain.generate(ids, **OPTIONS))
    assert got.reused.tokens == 12
    assert [load.waited for load in loads] == [list(range(LAYERS))]


def test_blocks_are_let_go_after_the_first_token(
    cache: PagedPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(16)
    cache.generate(ids, **OPTIONS)
    store, held = store_of(cache), [0]
    view = store.view

    @contextmanager
    def counted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with view(*args, **kwargs) as views:
            held[0] += 1
            yield views
            held[0] -= 1

    store.view = counted  # type: ignore[method-assign,assignment]
    with slow_loads(cache, monkeypatch) as loads, torch.inference_mode():
        state, reused = cache.restore(ids)
        assert held == [1]
        cache.model(ids[:, reused.tokens :], past_key_values=state)
        assert held == [1], "the load may still read them"
        loads[0].over = True
        cache.model(ids[:, :1], past_key_values=state)
        assert held == [0]
        cache.drop(state)


def test_a_node_lost_during_a_load_costs_time_alone(
    plain: Any, cache: PagedPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(16)
    cache.generate(ids, **OPTIONS)
    store = store_of(cache)
    store.valid = False
    store.blocks = {key: bytes(len(data)) for key, data in store.blocks.items()}
    for options in ({}, {"streamer": Streamer()}):
        with slow_loads(cache, monkeypatch):
            got = cache.generate(ids, **OPTIONS, **options)
        assert torch.equal(got.output, plain.generate(ids, **OPTIONS))
        assert got.reused.tokens == 0
    shown = options["streamer"]
    assert isinstance(shown, Streamer)
    assert shown.tokens == got.output[0].tolist()
    assert cache.counts.errors == 2


class Streamer:
    """Keeps what it was shown."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing more."""


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (prompt(8).repeat(2, 1), {}),
        (prompt(8), {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}),
        (prompt(8), {"num_beams": 2}),
        (prompt(8), {"use_cache": False}),
        (prompt(8), {"cache_implementation": "static"}),
        (prompt(1), {}),
        (prompt(97), {}),
    ],
)
def test_what_it_cannot_serve_goes_past_it(
    plain: Any, cache: PagedPrefixCache, ids: Any, options: dict[str, Any]
) -> None:
    got = cache.generate(ids, **OPTIONS, **options)
    assert torch.equal(got.output, plain.generate(ids, **OPTIONS, **options))
    assert (got.saved, cache.counts.bypassed) == (None, 1)


def test_an_output_that_outgrows_the_memory_goes_on(plain: Any, model: Any) -> None:
    ids = prompt(10)
    with made(model, tokens=16) as cache:
        got = cache.generate(ids, max_new_tokens=40, do_sample=False)
        assert torch.equal(got.output, plain.generate(ids, max_new_tokens=40, do_sample=False))
        assert got.saved is not None
        assert (got.saved.stored, len(got.saved.codes)) == (4, 4)
        again = cache.generate(got.output[:, :16], **OPTIONS)
        assert again.reused.tokens == 12
        assert torch.equal(again.output, plain.generate(got.output[:, :16], **OPTIONS))


def test_tokens_that_moved_are_not_saved(plain: Any, model: Any) -> None:
    with made(model, tokens=16) as cache, torch.inference_mode():
        ids = prompt(20)
        state, _ = cache.restore(ids[:, :10])
        model(ids[:, :10], past_key_values=state)
        model(ids[:, 10:], past_key_values=state)
        assert (state.get_seq_length(), state.kept) == (20, 10)
        saved = cache.store(ids, state).result()
        assert saved is not None
        assert len(saved.codes) == 2


def test_saving_in_the_background_holds_up_only_who_needs_its_memory(
    plain: Any, model: Any
) -> None:
    let, began = threading.Event(), threading.Event()
    with made(model, sequences=1, background=True, deadline=10.0) as cache:
        store = store_of(cache)
        put = store.put

        def slow(*args: Any, **kwargs: Any) -> Any:
            began.set()
            assert let.wait(10)
            return put(*args, **kwargs)

        store.put = slow  # type: ignore[method-assign]
        ids = prompt(16)
        got = cache.generate(ids, **OPTIONS)
        assert got.saved is None
        assert began.wait(10)
        assert not store.blocks
        releasing = threading.Timer(0.05, let.set)
        releasing.start()
        again = cache.generate(ids, **OPTIONS)
        releasing.join()
    assert again.reused.tokens == 12
    assert torch.equal(again.output, plain.generate(ids, **OPTIONS))


def test_a_save_that_breaks_is_told_and_leaves_its_memory(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with made(model, sequences=1, background=True, deadline=10.0) as cache:

        def broken(*args: Any, **kwargs: Any) -> None:
            raise ArithmeticError("no")

        store_of(cache).put = broken  # type: ignore[method-assign,assignment]
        cache.generate(prompt(16), **OPTIONS)
        cache.generate(prompt(16), **OPTIONS)
    assert cache.counts.bypassed == 0
    assert caplog.text.count("blocks could not be saved") == 2


def test_memory_that_is_all_in_use(plain: Any, model: Any) -> None:
    ids = prompt(16)
    with made(model, sequences=1) as cache:
        state, _ = cache.restore(ids)
        with pytest.raises(InvalidRequest, match="in use"):
            cache.restore(ids)
        got = cache.generate(ids, **OPTIONS)
        assert torch.equal(got.output, plain.generate(ids, **OPTIONS))
        assert cache.counts.bypassed == 1
        cache.drop(state)
        cache.restore(ids)


def test_a_model_that_fails_leaves_its_memory(
    cache: PagedPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("no")

    monkeypatch.setattr(cache.model, "generate", fail)
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            cache.generate(prompt(16), **OPTIONS)
    assert len(cache._free) == 2


def test_wrong_sizes_are_refused(model: Any, cache: PagedPrefixCache) -> None:
    with pytest.raises(InvalidRequest, match="97"):
        cache.restore(prompt(97))
    with pytest.raises(ConfigError):
        KVMemory(model, 0)
    with pytest.raises(NamespaceMismatch, match="layout"):
        PagedPrefixCache(
            MemoryStore(layout_of(model, 4).namespace("m")),
            model,
            KVMemory(model, 8, block_tokens=4),
        )


def test_the_attention_of_the_model_is_the_fast_one(cache: PagedPrefixCache) -> None:
    assert cache.model.config._attn_implementation == ATTENTION
