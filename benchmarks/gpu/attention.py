"""Attention of one layer behind a prefix, of a model of 8 B parameters.

    python -m benchmarks.gpu.attention

What ``client.transformers_attention`` does, what Transformers' own does, and the kernels of cuDNN
where they can do the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.gpu.ttft import one_kernel
from client.transformers_attention import attend

SIZES: Final = ((1, 32_768), (128, 16_384), (410, 8_192), (819, 16_384), (1_638, 32_768))
WHOLE: Final = (8_192, 32_768)
TURNS: Final = 7


class Layer(torch.nn.Module):
    """What attention asks of a module."""

    is_causal = True
    num_key_value_groups = 4


def milliseconds(work: Callable[[], object]) -> float:
    """Median time of something on the device; infinite where it can't be done."""
    taken: list[float] = []
    try:
        for _ in range(TURNS + 2):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            taken.append(first.elapsed_time(last))
    except RuntimeError as error:
        print(str(error).splitlines()[0])
        return float("inf")
    return sorted(taken[2:])[TURNS // 2]


def tensors(new: int, count: int) -> tuple[Any, Any, Any]:
    """Query, and keys and values whose tokens lie outermost."""
    query, key, value = (
        torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for length, heads in ((new, 32), (count, 8), (count, 8))
    )
    return query, key, value


def rate(new: int, count: int, took: float, *, causal: bool = True) -> float:
    """TFLOP/s."""
    pairs = new * count - (new * new / 2 if causal else 0)
    return 4 * pairs * 32 * 128 / took / 1e9


def measure() -> dict[str, float]:
    """All figures, in ms."""
    found: dict[str, float] = {}

    def note(name: str, new: int, count: int, work: Callable[[], object]) -> None:
        found[f"{new} behind {count - new}: {name}"] = took = milliseconds(work)
        print(
            f"{new:6} of {count:6} {name:24} {took:9.3f} ms {rate(new, count, took):8.1f} TFLOP/s"
        )

    for new, count in SIZES:
        query, key, value = tensors(new, count)
        note("ours", new, count, lambda: attend(Layer(), query, key, value, None))  # noqa: B023
        if new == 128:
            seen = torch.ones(1, 1, new, count, dtype=torch.bool, device="cuda").tril(count - new)
            note(
                "sdpa with a mask",
                new,
                count,
                lambda: sdpa_attention_forward(Layer(), query, key, value, seen),  # noqa: B023
            )
        note("cuDNN, all seen", new, count, lambda: _cudnn(query, key, value, False))  # noqa: B023
        with one_kernel():
            note("one kernel", new, count, lambda: attend(Layer(), query, key, value, None))  # noqa: B023
    for new, count in ((2_048, 20_480), (2_304, 24_576), (2_560, 28_672)):
        query, key, value = tensors(new, count)
        torch.cuda.synchronize()
        began = time.perf_counter()
        attend(Layer(), query, key, value, None)
        torch.cuda.synchronize()
        found[f"{new} behind {count - new}: first time"] = took = (
            time.perf_counter() - began
        ) * 1e3
        print(f"{new:6} of {count:6} {'first time':24} {took:9.3f} ms")
    for count in WHOLE:
        query, key, value = tensors(count, count)
        note("ours", count, count, lambda: attend(Layer(), query, key, value, None))  # noqa: B023
        note("cuDNN", count, count, lambda: _cudnn(query, key, value, True))  # noqa: B023
    return found


def _cudnn(query: Any, key: Any, value: Any, causal: bool) -> Any:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def main() -> None:
    """Print the figures; write them where ``$OUT`` says."""
    with torch.inference_mode():
        found = measure()
    if out := os.environ.get("OUT"):
        Path(out, "attention.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
