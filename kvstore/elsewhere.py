"""What operators are told of the blocks that other nodes of the pool hold, or held.

It comes from the directory, so it is as right as hints are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvstore.catalog import Catalog
from kvstore.control.interface import Ending, Explanation, MatchReport
from kvstore.directory.interface import Directory, Reach

_UNEXPLAINED: Final = (Ending.NEVER_STORED, Ending.FORGOTTEN, Ending.OTHER_NAMESPACE)
"""Endings that say less than that a node has left which held the block."""


class Elsewhere:
    """The rest of the pool, as one node has heard of it.

    Args:
        catalog: knows how many shards a namespace has.
        directory: knows who holds what.
        lookup_deadline: seconds that the directory is waited for.
    """

    def __init__(self, catalog: Catalog, directory: Directory, lookup_deadline: float) -> None:
        self._catalog = catalog
        self._directory = directory
        self._lookup_deadline = lookup_deadline

    async def match(
        self, here: MatchReport, namespace: bytes, hashes: Sequence[bytes]
    ) -> MatchReport:
        """How far a prefix reaches, with the blocks of others after those held here."""
        reach = await self._reach(namespace, hashes, here.blocks)
        return replace(here, tiers=here.tiers + ("remote",) * (reach.blocks - here.blocks))

    async def explain(
        self, here: Explanation, namespace: bytes, hashes: Sequence[bytes]
    ) -> Explanation:
        """Why it ends, with what others hold of it, and with who held what comes then and left."""
        reach = await self._reach(namespace, hashes, here.blocks)
        found = replace(here, remote=reach.blocks - here.blocks)
        if reach.blocks == len(hashes):
            return found
        gone = await self._gone(namespace, hashes, reach)
        if not gone:
            return found
        unexplained = found.ending in _UNEXPLAINED and not found.remote
        ending = Ending.NODE_GONE if unexplained else found.ending
        return replace(found, ending=ending, gone=gone)

    async def _reach(self, namespace: bytes, hashes: Sequence[bytes], start: int) -> Reach:
        known = self._catalog.find(namespace)
        if known is None or start == len(hashes):
            return Reach(start)
        return await self._directory.reach(
            namespace, known.shards, hashes, start, deadline=self._deadline()
        )

    async def _gone(self, namespace: bytes, hashes: Sequence[bytes], reach: Reach) -> str:
        """Name of a node that held the block after all that are held, and is gone."""
        known = self._catalog.find(namespace)
        if known is None or reach.failure is not None or not self._directory.gone:
            return ""
        end = reach.blocks + 1
        traces = await self._directory.traces(
            namespace, known.shards, hashes[:end], reach.blocks, deadline=self._deadline()
        )
        gone = self._directory.gone
        held = {number for owners in traces.owners for number in owners}
        return next((gone[number].member.node for number in sorted(held) if number in gone), "")

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._lookup_deadline
