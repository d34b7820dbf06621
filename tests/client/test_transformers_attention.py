"""Attention behind a prefix: what Transformers' own gives, whatever the cache and the mask."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from client import transformers_attention  # noqa: E402
from client.transformers_attention import ATTENTION, attend, mask, register  # noqa: E402

CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


class Layer:
    """What ``attend`` asks of a module."""

    is_causal = True
    num_key_value_groups = 4
    training = False


def tensors(new: int, tokens: int, device: str) -> tuple[Any, Any, Any]:
    """Query, and keys and values whose tokens lie outermost."""
    random = torch.Generator().manual_seed(new * 1000 + tokens)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = (
        torch.randn(1, length, heads, 64, generator=random).to(device, dtype).transpose(1, 2)
        for length, heads in ((new, 8), (tokens, 2), (tokens, 2))
    )
    return query, key, value


def eager(query: Any, key: Any, value: Any, scaling: float) -> Any:
    """In 64 bits, by definition."""
    query, key, value = (one.double().cpu() for one in (query, key, value))
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    new, tokens = scores.shape[2:]
    hidden = torch.ones(new, tokens, dtype=torch.bool).triu(tokens - new + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("new", "tokens"),
    [
        *((1, 1), (1, 77), (2, 2), (3, 4), (5, 64), (17, 130), (200, 333), (90, 90)),
        *((255, 4400), (4100, 4101)),
    ],
)
def test_the_last_token_sees_all(device: str, new: int, tokens: int) -> None:
    if device == "cpu" and new > 300:
        pytest.skip("the CPU has one way for all sizes")
    query, key, value = tensors(new, tokens, device)
    with torch.inference_mode():
        got, _ = attend(Layer(), query, key, value, None, scaling=0.2)
    expected = eager(query, key, value, 0.2)
    error = (got.double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-2 if device == "cuda" else 1e-5)


def test_two_parts_are_joined_to_the_whole() -> None:
    query, key, value = tensors(40, 200, "cpu")
    key, value = (one.repeat_interleave(4, 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * 0.2
    scores += torch.full((40, 200), -torch.inf).triu(161)
    parts = []
    for part in (slice(0, 130), slice(130, 200)):
        some = scores[..., part]
        parts += [some.softmax(-1) @ value[:, :, part], some.logsumexp(-1)]
    parts[3] = parts[3].unsqueeze(-1)
    got = transformers_attention.joined(*parts)
    assert torch.allclose(got, scores.softmax(-1) @ value, atol=1e-5)


@pytest.mark.parametrize("device", [DEVICES[1]])
@pytest.mark.parametrize(("new", "tokens"), [(256, 4352), (300, 4396), (700, 9000)])
def test_the_last_token_sees_all_in_two_parts(
    device: str, new: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_attention, "JOINED_PAIRS", 1)
    test_the_last_token_sees_all(device, new, tokens)


@pytest.mark.parametrize("device", [DEVICES[1]])
@pytest.mark.parametrize(
    ("new", "tokens"), [(255, 131_400), (1638, 20_000), (1638, 32_768), (4096, 12_288)]
)
def test_two_kernels_are_used_where_they_are_faster(
    device: str, new: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    real = transformers_attention._in_two_parts

    def seen(query: Any, key: Any, value: Any, far: int, scaling: float | None) -> Any:
        used.append(far)
        return real(query, key, value, far, scaling)

    monkeypatch.setattr(transformers_attention, "_in_two_parts", seen)
    query, key, value = tensors(new, tokens, device)
    with torch.inference_mode():
        attend(Layer(), query, key, value, None, scaling=0.2)
    hopper = torch.cuda.get_device_capability()[0] >= 9
    expected = {(1638, 32_768): [28_672], (4096, 12_288): [8192]}
    assert used == (expected.get((new, tokens), []) if hopper else [])


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_no_mask_is_made_on_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask was made")

    query, key, value = tensors(100, 5000, device)
    monkeypatch.setattr(torch, "ones", fail)
    attend(Layer(), query, key, value, None, scaling=0.2)


def sizes(q: int, kv: int, offset: Any, **options: Any) -> dict[str, Any]:
    return {"batch_size": 1, "q_length": q, "kv_length": kv, "q_offset": offset, **options}


def test_a_mask_is_made_only_where_it_is_needed() -> None:
    assert mask(**sizes(4, 10, 6)) is None
    assert mask(**sizes(4, 10, 6, attention_mask=torch.ones(1, 10, dtype=torch.bool))) is None
    padded = torch.ones(1, 10, dtype=torch.bool)
    padded[0, 0] = False
    assert not mask(**sizes(4, 10, 6, attention_mask=padded))[..., 0].any()
    # A cache with room behind the tokens: the last one does not see all.
    behind = mask(**sizes(4, 10, 0))
    assert behind[0, 0].tolist() == torch.ones(4, 10, dtype=torch.bool).tril().tolist()
    assert mask(**sizes(4, 10, torch.tensor(6))) is not None

    def window(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - 2)

    assert mask(**sizes(4, 10, 6, mask_function=window))[0, 0].sum() == 8


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A model, and the same with our attention."""
    register()
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    plain = transformers.LlamaForCausalLM(config).eval()
    ours = transformers.LlamaForCausalLM(config).eval()
    ours.load_state_dict(plain.state_dict())
    plain.set_attn_implementation("eager")
    ours.set_attn_implementation(ATTENTION)
    return plain, ours


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_model_gives_what_it_gave(models: tuple[Any, Any], kind: str, padding: int) -> None:
    ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    seen = torch.ones(2, 24, dtype=torch.long)
    seen[0, :padding] = 0
    outputs = []
    for model in models:
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        else:
            cache = transformers.DynamicCache(config=model.config)
        with torch.inference_mode():
            parts = [
                model(
                    ids[:, first:last],
                    attention_mask=seen[:, :last] if padding else None,
                    past_key_values=cache,
                ).logits
                for first, last in ((0, 9), (9, 10), (10, 24))
            ]
        outputs.append(torch.cat(parts, 1)[:, padding:])
    assert torch.allclose(*outputs, atol=1e-4)


def test_an_encoder_sees_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(5, 9, "cpu")
    got, _ = attend(Layer(), query, key, value, None, scaling=0.2, is_causal=False)
    key, value = (one.repeat_interleave(4, 1) for one in (key, value))
    expected = torch.softmax(query @ key.transpose(2, 3) * 0.2, -1) @ value
    assert torch.allclose(got, expected.transpose(1, 2), atol=1e-5)


def test_registering_again_does_no_harm() -> None:
    register()
    assert transformers.AttentionInterface()[ATTENTION] is transformers_attention.attend
