"""Prefix hashes of a long prompt, against the bare digests they are made of."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator

from benchmarks.measure import Row, Settings, alternate, median_time
from kvstore.identity import prefix_hashes

TOKENS = 32 * 1024
BLOCK_TOKENS = 16
BUDGET = 6e-3


def measure(settings: Settings) -> Iterator[Row]:
    """The rows of the prefix hash."""
    source = random.Random(7)
    tokens = [source.randrange(128_000) for _ in range(TOKENS)]
    # As long as what one link of the chain digests: the parent's hash and the block's tokens.
    messages = [os.urandom(32 + 4 * BLOCK_TOKENS) for _ in range(TOKENS // BLOCK_TOKENS)]
    sha256 = hashlib.sha256

    def bare() -> None:
        for message in messages:
            sha256(message).digest()

    calls = settings.calls(40)
    rounds = alternate(
        settings,
        lambda: median_time(lambda: prefix_hashes(tokens, BLOCK_TOKENS), calls),
        lambda: median_time(bare, calls),
    )
    subject = "prefix hashes, 32 Ki tokens in blocks of 16"
    yield Row("hashing", subject, "2048 bare sha256", "s", "under", 2.5, rounds, "tokens as a list")
    budgeted = tuple((taken, BUDGET) for taken, _ in rounds)
    yield Row("hashing-time", subject, "6 ms", "s", "under", 1.0, budgeted)
