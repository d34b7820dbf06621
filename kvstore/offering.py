"""Asking another node of the pool to take copies of blocks that this one holds."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from kvstore.directory.interface import Directory
from kvstore.errors import KVStoreError
from kvstore.identity import Namespace
from kvstore.owners import Owners
from kvstore.protocol.messages import MAX_HASHES, Take, TakeAnswer

_log = structlog.get_logger(__name__)

_MOST_IDLE_MS = 1 << 62


class Offers:
    """What this node offers to others.

    Args:
        directory: says who this node is to them.
        owners: ways to them.
    """

    def __init__(self, directory: Directory, owners: Owners) -> None:
        self._directory = directory
        self._owners = owners

    async def offer(
        self,
        number: int,
        namespace: Namespace,
        shard: int,
        hashes: Sequence[bytes],
        *,
        idle: float,
        deadline: float,
    ) -> TakeAnswer:
        """Offer a chain to a member; returns when it has taken it, or will not.

        Args:
            number: of the member.
            namespace: of the chain.
            shard: of the chain.
            hashes: the chain from its first block on.
            idle: seconds since the last use of what is new to the other.
            deadline: seconds on the event loop's clock.

        Returns:
            What the member answered; ``unavailable`` where it did not answer.
        """
        me = self._directory.me
        puller = self._owners.puller(number, namespace, shard)
        if me is None or puller is None or len(hashes) > MAX_HASHES:
            return TakeAnswer(0, "unavailable")
        idle_ms = min(max(int(idle * 1000), 0), _MOST_IDLE_MS)
        request = Take(me.number, me.incarnation, hashes, idle_ms)
        peer = puller.peer
        try:
            session = await peer.ready(deadline)
            heard = session.heard
            try:
                answer = await session.take(request, deadline)
            except KVStoreError as error:
                peer.judge(session, heard, error)
                raise
        except KVStoreError as error:
            _log.info("offer failed", peer=repr(peer), error=str(error))
            return TakeAnswer(0, "unavailable")
        peer.answered()
        return answer
