"""One engine process of the demo: a small Llama on the CPU that answers requests twice.

Each request is generated without the store and then with it, and both are compared. The results
go to standard output, one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvstore

SEED = 20_240
VOCABULARY = 8_192
SYSTEM_TOKENS = 1_300
QUESTION_TOKENS = 48
ANSWER_TOKENS = 10
BLOCK_TOKENS = 16


class FirstToken:
    """A streamer that remembers when the first new token came."""

    def __init__(self) -> None:
        self._calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        """Take tokens: first those of the prompt, then each new one."""
        self._calls += 1
        if self._calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Take the end of the output."""


def build_model() -> Any:
    """A Llama of about 20 M parameters with seeded random weights."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1_408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8_192,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM
    return model(config).eval()


def text(name: str, tokens: int) -> Any:
    """Token ids that stand for a text: always the same for one name."""
    seed = int.from_bytes(kvstore.prefix_hashes(list(name.encode()), len(name))[0][:4], "little")
    return torch.randint(1, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def answer(model: Any, cache: Any | None, prompt: Any) -> tuple[Any, float, Any]:
    """Generate greedily.

    Returns:
        Prompt and output, the seconds to the first token, and what came from the store.
    """
    streamer = FirstToken()
    options = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "streamer": streamer}
    began = time.perf_counter()
    if cache is None:
        return model.generate(prompt, **options), streamer.at - began, None
    generation = cache.generate(prompt, **options)
    return generation.output, streamer.at - began, generation.reused


def requests(model: Any, cache: Any, questions: int, turns: int) -> Iterator[dict[str, object]]:
    """Answer single questions under one system prompt, then a chat that grows under the same."""
    system = text("system", SYSTEM_TOKENS)
    for number in range(1, questions + 1):
        prompt = torch.cat([system, text(f"question {number}", QUESTION_TOKENS)], dim=1)
        yield compare(model, cache, f"question {number}", prompt)[0]
    chat = system
    for number in range(1, turns + 1):
        chat = torch.cat([chat, text(f"turn {number}", QUESTION_TOKENS)], dim=1)
        row, chat = compare(model, cache, f"chat, turn {number}", chat)
        yield row


def compare(model: Any, cache: Any, name: str, prompt: Any) -> tuple[dict[str, object], Any]:
    """Answer one request without and with the store."""
    expected, cold, _ = answer(model, None, prompt)
    output, warm, reused = answer(model, cache, prompt)
    row = {
        "request": name,
        "prompt": prompt.shape[1],
        "reused": reused.tiers,
        "cold": cold,
        "warm": warm,
        "same": bool(torch.equal(output, expected)),
    }
    return row, expected


def main() -> int:
    """Answer the requests that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--questions", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    arguments = parser.parse_args()
    model = build_model()
    answer(model, None, text("warm-up", 64))
    layout = kvstore.layout_of(model, BLOCK_TOKENS)
    namespace = layout.namespace("demo-llama", revision=f"seed-{SEED}")
    with kvstore.connect(arguments.url, namespace, deadline=2.0) as client:
        cache = kvstore.PrefixCache(client, model, layout)
        for row in requests(model, cache, arguments.questions, arguments.turns):
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
