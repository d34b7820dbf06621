"""Saying what is held, for one session: how far a prefix reaches, and which blocks there are."""

from __future__ import annotations

import time
from typing import Final

from kvstore.entry import ShardIndex
from kvstore.identity import Namespace
from kvstore.movement import Movement
from kvstore.node import Node
from kvstore.protocol.messages import ABSENT, REMOTE, Exists, ExistsAnswer, Match, MatchAnswer
from kvstore.remote import Remote
from kvstore.reply import Handled, Reply

_REMOTE: Final = bytes([REMOTE])


class Matching:
    """Answers MATCH and EXISTS; neither waits for a medium.

    Args:
        node: where the blocks are.
        movement: brings blocks up from SSD; None where there is no SSD.
        namespace: the client's namespace.
        shard: the client's shard of each block.
        remote: the rest of the pool; None where the node is alone.
    """

    def __init__(
        self,
        node: Node,
        movement: Movement | None,
        namespace: Namespace,
        shard: ShardIndex,
        remote: Remote | None,
    ) -> None:
        self._node = node
        self._movement = movement
        self._namespace = namespace
        self._shard = shard
        self._shards = node.shards(namespace)
        self._remote = remote

    def match(self, request: Match, deadline: float) -> Handled:
        """How far a prefix reaches over all shards.

        Args:
            request: the prefix.
            deadline: seconds on the event loop's clock, for asking the rest of the pool.
        """
        began = time.perf_counter()
        node, hashes = self._node, request.hashes
        # Shards are never forgotten, so that all of them need to be found only once.
        self._shards = self._shards or node.shards(self._namespace)
        tiers = node.index.match_joined(self._shards, request.joined)
        if request.prefetch and self._movement is not None:
            wanted = node.index.lookup(self._shard, hashes[: len(tiers)])
            self._movement.prefetch(self._namespace.tenant, wanted)
        if self._remote is not None and len(tiers) < len(hashes):
            return self._match_further(self._remote, request, tiers, deadline, began)
        self._count(len(hashes), len(tiers))
        node.metrics.match_seconds.observe(time.perf_counter() - began)
        return Reply(MatchAnswer(tiers))

    async def _match_further(
        self, remote: Remote, request: Match, tiers: bytes, deadline: float, began: float
    ) -> Reply:
        """How far other nodes hold what is not here."""
        hashes, metrics = request.hashes, self._node.metrics
        reached = await remote.reach(self._namespace, hashes, len(tiers), deadline)
        elsewhere = reached - len(tiers)
        if request.prefetch and elsewhere:
            remote.prefetch(self._namespace, hashes[:reached])
        metrics.matched["remote"] += elsewhere
        self._count(len(hashes) - elsewhere, len(tiers))
        metrics.match_seconds.observe(time.perf_counter() - began)
        return Reply(MatchAnswer(tiers + _REMOTE * elsewhere))

    def exists(self, request: Exists) -> Reply:
        """Which blocks the shard holds, each by itself."""
        tiers = self._node.index.exists((self._shard,), request.hashes)
        self._count(len(tiers), len(tiers) - tiers.count(ABSENT))
        return Reply(ExistsAnswer(tiers))

    def _count(self, asked: int, held: int) -> None:
        matched = self._node.metrics.matched
        matched["held"] += held
        matched["absent"] += asked - held
