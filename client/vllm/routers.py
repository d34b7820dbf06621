"""Tells cache-aware routers, through vLLM's own KV events, what the store gained and lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from client.blocking import Client
from client.vllm.announcements import Announcements
from client.vllm.counts import Counts
from client.vllm.events import Ledger
from client.vllm.following import Following
from client.vllm.publishing import Publishing, announced


class Routers:
    """The listener of the scheduler's side where vLLM publishes KV events.

    Args:
        clients: one for each shard of each namespace; closed at the end.
        pool: vLLM's block pool.
        spec: of the engine's one KV cache group.
        block_tokens: tokens in one block.
        locality: where the node is, as ``publishing.locality_of`` says.
        counts: errors kept from the engine are counted there.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        *,
        pool: Any,
        spec: Any,
        block_tokens: int,
        locality: str,
        counts: Counts,
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._clients = clients
        self._followings = [Following(client, counts) for client in clients]
        self._announcements = Announcements(Ledger(), self._followings)
        self._publishing = Publishing(spec, locality)

    def open(self) -> None:
        """Begin to follow the node's shards."""
        for following in self._followings:
            following.start()

    def held(self, request: Any, first: int, hashes: Sequence[bytes], parent: bytes) -> None:
        """Take note that the store holds blocks of a request; see ``scheduler.Listener``."""
        known = self._announcements.known(hashes)
        if known == len(hashes):
            return
        before = hashes[known - 1] if known else parent
        self._announcements.announce(
            announced(
                request, first + known, hashes[known:], before, self._block_tokens, self._pool
            )
        )

    def clear(self) -> None:
        """Take back all that was announced."""
        self._announcements.clear()

    def take(self) -> Iterable[Any]:
        """The events since the last call, in vLLM's form."""
        return self._publishing.published(self._announcements.take())

    def close(self) -> None:
        """Stop following."""
        for client in self._clients:
            client.close()
        for following in self._followings:
            following.close()
