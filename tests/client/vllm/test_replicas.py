"""Ranks share what they store only where it is certain that they hold the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from client.vllm.replicas import replicas


def engine(ranks: int, heads: int, **model: Any) -> Any:
    fields = {
        "architecture": "LlamaForCausalLM",
        "get_total_num_kv_heads": lambda: heads,
        "model_arch_config": SimpleNamespace(per_layer_overrides=None),
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**fields | model),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )


def caches(*specs: Any, told: int = 1) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_tp_replicas=told, kv_cache_groups=groups)


def layer(heads: int = 1, most_shards: int | None = None) -> Any:
    return SimpleNamespace(num_kv_heads=heads, max_tp_shards=most_shards)


@pytest.mark.parametrize(
    ("ranks", "heads", "expected"),
    [(1, 1, 1), (1, 8, 1), (2, 1, 2), (8, 8, 1), (8, 4, 2), (16, 2, 8), (6, 4, 1)],
)
def test_ranks_that_outnumber_the_heads(ranks: int, heads: int, expected: int) -> None:
    each = layer(max(1, heads // ranks))
    assert replicas(engine(ranks, heads), caches(each)) == expected


def test_what_vllm_says_itself() -> None:
    assert replicas(engine(4, 16), caches(layer(1, most_shards=1), told=4)) == 4


@pytest.mark.parametrize(
    ("config", "specs"),
    [
        (engine(4, 2, architecture="MiMoV2FlashForCausalLM"), [layer()]),
        (
            engine(4, 2, model_arch_config=SimpleNamespace(per_layer_overrides=[{}, {"a": 1}])),
            [layer()],
        ),
        (engine(4, 2), [layer(), layer(2)]),
        (engine(4, 2), [layer(), layer(1, most_shards=1)]),
        (engine(4, 2), [SimpleNamespace(kv_cache_specs={"a": layer(), "b": layer(2)})]),
    ],
    ids=["architecture", "layers that vary", "more heads", "latents", "within a group"],
)
def test_what_is_not_certain(config: Any, specs: list[Any]) -> None:
    assert replicas(config, caches(*specs)) == 1
