"""The Transformers integration over a stand-in client: same tokens, less computed."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import AccessDenied, InvalidRequest
from tests.client.memory_store import MemoryStore

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from client.transformers import PrefixCache, layout_of  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def cache(model: Any) -> PrefixCache:
    return PrefixCache(MemoryStore(layout_of(model, 4).namespace("m")), model, layout_of(model, 4))


def prompt(tokens: int, seed: int = 1) -> Any:
    return torch.randint(1, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


OPTIONS = {"max_new_tokens": 8, "do_sample": False}


def test_a_growing_chat_gives_the_same_tokens(model: Any, cache: PrefixCache) -> None:
    chat, reused = prompt(21), []
    for turn in range(4):
        expected = model.generate(chat, **OPTIONS)
        got = cache.generate(chat, **OPTIONS)
        assert torch.equal(got.output, expected)
        reused.append(got.reused.tokens)
        chat = torch.cat([got.output, prompt(5, seed=turn + 2)], dim=1)
    assert reused == [0, 28, 40, 52]
    assert cache.counts.requests == 4
    assert cache.counts.reused_tokens == sum(reused)


def test_the_whole_prompt_is_never_taken_from_the_store(model: Any, cache: PrefixCache) -> None:
    ids = prompt(16)
    cache.generate(ids, **OPTIONS)
    again = cache.generate(ids, **OPTIONS)
    assert again.reused.tokens == 12
    assert torch.equal(again.output, model.generate(ids, **OPTIONS))


def test_a_structured_output_is_understood(cache: PrefixCache) -> None:
    ids = prompt(16)
    cache.generate(ids, return_dict_in_generate=True, **OPTIONS)
    assert cache.generate(ids, **OPTIONS).reused.tokens == 12


def test_a_store_that_fails_never_shows(model: Any, cache: PrefixCache) -> None:
    ids = prompt(16)
    store = cache.client
    assert isinstance(store, MemoryStore)

    def denied(*args: Any, **kwargs: Any) -> Any:
        raise AccessDenied("no")

    store.match = store.put = denied  # type: ignore[method-assign]
    got = cache.generate(ids, **OPTIONS)
    assert torch.equal(got.output, model.generate(ids, **OPTIONS))
    assert (got.reused.tokens, got.saved, cache.counts.errors) == (0, None, 2)


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (prompt(8).repeat(2, 1), {}),
        (prompt(8), {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}),
        (prompt(8), {"num_beams": 2}),
        (prompt(8), {"use_cache": False}),
        (prompt(1), {}),
    ],
)
def test_what_it_cannot_serve_goes_past_it(
    model: Any, cache: PrefixCache, ids: Any, options: dict[str, Any]
) -> None:
    got = cache.generate(ids, **OPTIONS, **options)
    assert torch.equal(got.output, model.generate(ids, **OPTIONS, **options))
    assert (got.saved, cache.counts.bypassed) == (None, 1)


def test_a_model_with_sliding_windows_is_refused(model: Any) -> None:
    class Sliding:
        dtype = model.dtype
        config = transformers.Gemma2Config()

    with pytest.raises(InvalidRequest, match="attention"):
        layout_of(Sliding())
