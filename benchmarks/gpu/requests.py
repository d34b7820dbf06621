"""The prompts of a trace, scaled to what a machine has room and time for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu.model import VOCABULARY
from kvstore.trace import BLOCK_TOKENS, Trace

PLACES: Final = (
    Path("../shared/traces/conversation.jsonl"),
    Path("shared/traces/conversation.jsonl"),
)
"""Where the trace is looked for if ``$TRACE`` does not say."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        arrival: seconds after the first, as in the trace.
        ids: its tokens, ``[1, tokens]``, on the CPU.
    """

    arrival: float
    ids: Any

    @property
    def tokens(self) -> int:
        """How many they are."""
        count: int = self.ids.shape[1]
        return count


def prompts(count: int, scale: int) -> list[Prompt]:
    """The first requests of the trace.

    Args:
        count: how many.
        scale: every block of the trace gets so many times fewer tokens than it had.

    Raises:
        FileNotFoundError: the trace is not there.
    """
    requests = list(islice(Trace(_path()), count))
    each = BLOCK_TOKENS // scale
    first = requests[0].timestamp
    found = []
    for request in requests:
        length = max(request.input_length // scale, 2)
        found.append(
            Prompt((request.timestamp - first) / 1e3, _tokens(request.hash_ids, each)[:, :length])
        )
    return found


def _tokens(hash_ids: Sequence[int], each: int) -> Any:
    """Tokens that are equal where ids are."""
    return torch.cat([_block(number, each) for number in hash_ids], 1)


@cache
def _block(number: int, each: int) -> Any:
    random = np.random.default_rng(number)
    return torch.from_numpy(random.integers(1, VOCABULARY, (1, each), dtype=np.int64))


def _path() -> Path:
    told = os.environ.get("TRACE")
    for path in (Path(told),) if told else PLACES:
        if path.exists():
            return path
    raise FileNotFoundError("no trace: say with TRACE=FILE where conversation.jsonl is")
