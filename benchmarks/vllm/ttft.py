"""Time to the first token of prompts whose first nine tenths the store holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.vllm.fleet import Running, rotated
from benchmarks.vllm.process import EngineFailed
from benchmarks.vllm.prompts import Family

ANSWER_TOKENS = 16
"""Output that is compared with that of the engine without a connector."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer.

    Attributes:
        key: of the contender.
        length: tokens of the prompt.
        turn: its number.
        seconds: to the first token.
        cached: tokens of the prompt that were not computed.
        equal: whether the output is that of the engine without a connector.
    """

    key: str
    length: int
    turn: int
    seconds: float
    cached: int
    equal: bool


LOCAL = "local"
"""Key of the engine without a connector where the prefix is in its own cache still."""


def measure(
    running: Sequence[Running],
    lengths: Sequence[int],
    turns: int,
    progress: Callable[[str], None],
) -> list[Turn]:
    """Let all engines answer the same prompts in turn, after each has answered the prefix once.

    Before each answer the engine's own prefix cache is emptied: only the store can help. A
    contender whose engine fails takes no more turns; its ``failure`` says why.

    Args:
        running: the first one has no connector.
        lengths: of the prompts, in tokens.
        turns: for each length.
        progress: told what is being done.
    """
    found: list[Turn] = []
    for length in lengths:
        family = Family(length)
        for each in rotated(running, 0):
            progress(f"{length} tokens: {each.contender.key} computes the prefix")
            _answer(each, family.prompt("first"), 1)
        for turn in range(turns):
            progress(f"{length} tokens, turn {turn + 1} of {turns}")
            found += _turn(running, family, turn)
    return found


def _turn(running: Sequence[Running], family: Family, turn: int) -> list[Turn]:
    prompt = family.prompt(f"turn {turn}")
    answers = {
        each.contender.key: answer
        for each in rotated(running, turn)
        if (answer := _answer(each, prompt, ANSWER_TOKENS)) is not None
    }
    plain = running[0]
    right = answers.get(plain.contender.key)
    if right is None:
        raise EngineFailed(f"the engine without a connector: {plain.failure}")
    found = [
        _as_turn(key, family, turn, answer, answer["outputs"] == right["outputs"])
        for key, answer in answers.items()
    ]
    return [*found, _with_own_cache(plain, family, turn)]


def _with_own_cache(plain: Running, family: Family, turn: int) -> Turn:
    """A turn in which the engine has the prefix itself, from the turn before."""
    answer = plain.up.generate([family.prompt(f"own {turn}")], ANSWER_TOKENS)
    return _as_turn(LOCAL, family, turn, answer, True)


def _as_turn(key: str, family: Family, turn: int, answer: dict[str, Any], equal: bool) -> Turn:
    return Turn(key, family.length, turn, answer["first"][0], answer["cached"][0], equal)


def _answer(running: Running, prompt: list[int], tokens: int) -> dict[str, Any] | None:
    try:
        running.forget()
        return running.up.generate([prompt], tokens)
    except EngineFailed as error:
        running.failure = str(error)
        return None
