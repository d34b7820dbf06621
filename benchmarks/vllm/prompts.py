"""Prompts as token ids, drawn from names: the same name is always the same text."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.vllm.shape import VOCABULARY

SHARED = 0.9
"""Share of a prompt that an earlier request has had as well."""


def text(name: str, tokens: int) -> list[int]:
    """``tokens`` token ids that stand for the text called ``name``."""
    drawn = random.Random(name)
    return [drawn.randrange(1, VOCABULARY) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Family:
    """Prompts of one length that share their first nine tenths.

    Attributes:
        length: tokens of a prompt.
    """

    length: int

    @property
    def shared(self) -> int:
        """Tokens that all prompts of the family begin with."""
        return int(self.length * SHARED)

    def prompt(self, member: str) -> list[int]:
        """The prompt of the family that ends as ``member`` does."""
        common = text(f"family {self.length}", self.shared)
        return common + text(f"{self.length} {member}", self.length - self.shared)


def unrelated(turn: str, count: int, length: int) -> list[list[int]]:
    """``count`` prompts that share nothing with each other, nor with those of another turn."""
    return [text(f"unrelated {turn} {number}", length) for number in range(count)]
