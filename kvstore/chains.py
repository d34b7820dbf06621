"""Chains that other nodes were found to hold, for gets that name single blocks. Pure.

A match knows the whole chain and is told who holds it; the get that follows it, perhaps in another
session, names blocks. What is kept between the two is bounded, and the chain that nobody has asked
about for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.fields import HASH_BYTES, joined_hashes

MOST_CHAINS: Final = 256
"""Chains of one namespace that are remembered."""

MOST_BLOCKS: Final = 65_536
"""Blocks of all of them together, but for those of the last one: some 12 MB."""


@dataclass(eq=False, slots=True)
class Chain:
    """A chain, as far as all its shards are held by somebody.

    Attributes:
        hashes: from its first block on.
        owners: for each shard numbers of members that hold all of it, as far as hints are right.
        joined: the hashes as they travel.
    """

    hashes: Sequence[bytes]
    owners: Sequence[Sequence[int]]
    joined: bytes


class Chains:
    """The chains of one namespace.

    Args:
        most_chains: kept at most.
        most_blocks: of all chains together, but the last.
    """

    def __init__(self, most_chains: int = MOST_CHAINS, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_chains = most_chains
        self._most_blocks = most_blocks
        self._chains: OrderedDict[Chain, None] = OrderedDict()
        self._by_block: dict[bytes, Chain] = {}
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._chains)

    def remember(self, hashes: Sequence[bytes], owners: Sequence[Sequence[int]]) -> Chain:
        """Take note of who holds a chain.

        Args:
            hashes: the chain, at least one block.
            owners: for each shard the members that hold it.
        """
        joined = joined_hashes(hashes)
        chain = self._by_block.get(joined[-HASH_BYTES:])
        if chain is not None and chain.joined == joined:
            chain.owners = owners
            self._chains.move_to_end(chain)
            return chain
        hashes = tuple(hashes)
        chain = Chain(hashes, owners, joined)
        self._chains[chain] = None
        self._blocks += len(hashes)
        self._by_block.update(dict.fromkeys(hashes, chain))
        while len(self._chains) > self._most_chains or (
            self._blocks > self._most_blocks and len(self._chains) > 1
        ):
            self._forget()
        return chain

    def find(self, block: bytes) -> Chain | None:
        """The chain that a block is part of, if one is remembered."""
        chain = self._by_block.get(block)
        if chain is not None:
            self._chains.move_to_end(chain)
        return chain

    def _forget(self) -> None:
        oldest, _ = self._chains.popitem(last=False)
        self._blocks -= len(oldest.hashes)
        for block in oldest.hashes:
            if self._by_block.get(block) is oldest:
                del self._by_block[block]
