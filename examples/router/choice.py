"""Which engine a prompt goes to. Pure: what nodes hold and how busy engines are is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.control.block_map import BlockMap
from kvstore.identity import ExtraKey, Namespace, prefix_hashes

SLOWER: Final = {"hbm": 1.0, "dram": 1.0, "ssd": 0.75}
"""What a block is worth by the tier that it comes from: a little less where it has to be read."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What speaks for an engine.

    Attributes:
        tokens: of the prompt that its node holds.
        worth: the same, weighed by tier.
        busy: requests that it is answering.
    """

    tokens: int
    worth: float
    busy: int


def offer(
    known: BlockMap | None,
    namespaces: Sequence[Namespace],
    hashes: Mapping[int, Sequence[bytes]],
    busy: int,
) -> Offer:
    """What a node has of a prompt, in whichever namespace it has most.

    Args:
        known: what its node holds; None where nobody knows.
        namespaces: those that the prompt may be of.
        hashes: of the prompt's blocks, by the tokens in a block.
        busy: requests that its engine is answering.
    """
    best = Offer(0, 0.0, busy)
    for namespace in namespaces if known is not None else ():
        tiers = known.prefix(namespace, hashes[namespace.block_tokens]) if known else ()
        worth = sum(SLOWER[tier] for tier in tiers) * namespace.block_tokens
        if worth > best.worth:
            best = Offer(len(tiers) * namespace.block_tokens, worth, busy)
    return best


def order(offers: Sequence[Offer], turn: int, most_ahead: int) -> list[int]:
    """In which order engines are tried.

    The one with the longest prefix comes first, of several such the least busy one, and of those
    each in its turn. One that is far busier than the others waits, whatever its node holds:
    computing a prompt again takes less time than a long queue.

    Args:
        offers: of each engine.
        turn: number of the request.
        most_ahead: how many requests an engine may be answering more than the least busy one.
    """
    idle = min(each.busy for each in offers)

    def rank(at: int) -> tuple[bool, float, int, int]:
        crowded = offers[at].busy - idle > most_ahead
        return crowded, -offers[at].worth, offers[at].busy, (at - turn) % len(offers)

    return sorted(range(len(offers)), key=rank)


def hashes_of(
    tokens: Sequence[int], namespaces: Sequence[Namespace], salt: object
) -> dict[int, list[bytes]]:
    """The prefix hashes of a prompt, by the tokens in a block.

    Args:
        tokens: of the prompt.
        namespaces: those that it may be of.
        salt: the request's ``cache_salt``, if any.
    """
    extras = (ExtraKey.cache_salt(salt),) if isinstance(salt, str) and salt else ()
    sizes = {namespace.block_tokens for namespace in namespaces}
    return {size: prefix_hashes(tokens, size, extras) for size in sizes}


def candidates(model: Any, namespaces: Sequence[Namespace]) -> list[Namespace]:
    """The namespaces of a model; all, where none has its name: engines may serve it by another."""
    return [one for one in namespaces if one.model == model] or list(namespaces)


def tokens_of(body: Mapping[str, Any]) -> list[int] | None:
    """The token ids of a request that has them as its prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(type(each) is int for each in prompt):
        return prompt
    return None
