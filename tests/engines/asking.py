"""What a test asks an engine, and what the engine answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.engines.models import VOCABULARY


@dataclass(frozen=True)
class Ask:
    """One request, decoded greedily.

    Attributes:
        prompt: token ids.
        tokens: how many to generate.
        transfer: the request's `kv_transfer_params`.
        salt: the request's `cache_salt`.
        adapter: directory of the LoRA adapter to use.
        priority: lower is sooner, where the engine schedules by it.
        abort_tokens: abort when that many tokens are there; at once if 0.
        abort_steps: abort after that many steps of the engine.
        sampling: more of vLLM's `SamplingParams`.
    """

    prompt: tuple[int, ...]
    tokens: int = 8
    transfer: dict[str, Any] | None = None
    salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    abort_tokens: int | None = None
    abort_steps: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        tokens: generated ids.
        scores: log probability of each.
        cached: tokens of the prompt that were not computed, as vLLM counts them.
        reason: vLLM's finish reason: `length`, `stop`, `abort`, `error`.
        transfer: `kv_transfer_params` of the output.
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    cached: int
    reason: str
    transfer: dict[str, Any] | None = None


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """`length` random token ids; one seed's longer prompt begins with its shorter one."""
    return tuple(np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist())


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    """The same tokens, with the same probabilities as far as rounding allows."""
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-3)
