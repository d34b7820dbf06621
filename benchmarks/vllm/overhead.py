"""What a connector costs a workload that it cannot help: prompts that share nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.vllm.fleet import Running, rotated
from benchmarks.vllm.process import EngineFailed
from benchmarks.vllm.prompts import unrelated

REQUESTS = 8
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 48
WARM_UP = 2
"""Turns that do not count."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch.

    Attributes:
        key: of the contender.
        turn: its number.
        seconds: from handing over the batch until the engine had nothing left to do, saves
            included that it waits for.
        equal: whether the outputs are those of the engine without a connector.
    """

    key: str
    turn: int
    seconds: float
    equal: bool


def measure(running: Sequence[Running], turns: int, progress: Callable[[str], None]) -> list[Turn]:
    """Let all engines answer the same new batch in turn.

    Between turns each engine works off what its connector put aside, and its own prefix cache is
    emptied.

    Args:
        running: the first one has no connector.
        turns: that count.
        progress: told what is being done.

    Raises:
        EngineFailed: one of the engines did.
    """
    found: list[Turn] = []
    for turn in range(-WARM_UP, turns):
        progress(f"no reuse, turn {turn + 1} of {turns}")
        prompts = unrelated(str(turn), REQUESTS, PROMPT_TOKENS)
        answers = {}
        for each in rotated(running, turn):
            try:
                answers[each.contender.key] = each.up.generate(prompts, OUTPUT_TOKENS)
                each.forget()
            except EngineFailed as error:
                each.failure = str(error)
        right = answers.get(running[0].contender.key)
        if right is None:
            raise EngineFailed(f"the engine without a connector: {running[0].failure}")
        if turn >= 0:
            found += [
                Turn(key, turn, answer["idle"], answer["outputs"] == right["outputs"])
                for key, answer in answers.items()
            ]
    return found
