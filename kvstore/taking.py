"""Taking copies of blocks that another node of the pool offers: as ordinary blocks, not replicas.

Who asks must be a member of the pool, in the start that the directory knows, and the blocks are
pulled from where the directory says that it is. So whatever somebody claims to be, this node comes
to hold nothing but blocks of the session's own namespace that a member of the pool has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from kvstore.directory.interface import Member
from kvstore.entry import ShardIndex
from kvstore.errors import AccessDenied
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.node import Node
from kvstore.owners import Owners
from kvstore.protocol.messages import Take, TakeAnswer
from kvstore.pull import Pull

_SLOTS: Final = 4
"""Offers that are taken at a time; others wait."""
_SHARE: Final = 0.8
"""Of the time that whoever asks waits: for what is left of it the answer has to reach it."""


class Taking:
    """What a node takes from others.

    Args:
        node: takes it.
        members: the live members by number, as they are now.
        owners: ways to them.
        most_bytes: bytes that one pull may hold reserved at once.
    """

    def __init__(
        self,
        node: Node,
        members: Callable[[], Mapping[int, Member]],
        owners: Owners,
        *,
        most_bytes: int,
    ) -> None:
        self._node = node
        self._members = members
        self._owners = owners
        self._most_bytes = most_bytes
        self._slots = asyncio.Semaphore(_SLOTS)

    async def take(
        self, namespace: Namespace, shard: ShardIndex, request: Take, deadline: float
    ) -> TakeAnswer:
        """Take what a member offers, as far as there is room for it.

        Args:
            namespace: of the chain.
            shard: of the chain.
            request: the offer.
            deadline: seconds on the event loop's clock; the answer comes before.

        Raises:
            AccessDenied: who offers is no member of the pool.
        """
        member = self._members().get(request.member)
        if member is None or member.incarnation != request.incarnation:
            raise AccessDenied("only members of the pool may offer blocks")
        now = asyncio.get_running_loop().time()
        deadline = now + max(deadline - now, 0.0) * _SHARE
        used = self._node.clock() - request.idle_ms / 1000
        before = _held(shard, request)
        if not self._node.accepts_puts:
            return TakeAnswer(before, "refused")
        answer = TakeAnswer(before)
        if before < len(request.hashes):
            answer = await self._pull(namespace, shard, request, used, deadline)
        answer = _as_it_is(answer, _held(shard, request), len(request.hashes))
        self._count(request, before, answer)
        entries = [shard.committed[block] for block in request.hashes[: answer.held]]
        self._node.index.own(entries)
        self._node.index.date(entries[before:], used)
        return answer

    def _count(self, request: Take, before: int, answer: TakeAnswer) -> None:
        offered = self._node.metrics.offered
        offered["held"] += before
        offered["taken"] += max(answer.held - before, 0)
        if left := len(request.hashes) - answer.held:
            offered[answer.why_not_more or "unavailable"] += left

    async def _pull(
        self, namespace: Namespace, shard: ShardIndex, request: Take, used: float, deadline: float
    ) -> TakeAnswer:
        puller = self._owners.puller(request.member, namespace, shard.number)
        if puller is None:
            return TakeAnswer(0, "unavailable")
        pull = Pull(
            self._node,
            [puller],
            ROOT_PARENT,
            request.hashes,
            self._most_bytes,
            replica=False,
            used=used,
        )
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            return TakeAnswer(0, "deadline")
        try:
            pulled = await pull.run(deadline)
        finally:
            self._slots.release()
        return TakeAnswer(pulled.held, pulled.why_not_more)


def _as_it_is(answer: TakeAnswer, held: int, asked: int) -> TakeAnswer:
    """An answer to what has come by now: others bring blocks, too, and blocks leave."""
    return TakeAnswer(held, "" if held == asked else answer.why_not_more or "unavailable")


def _held(shard: ShardIndex, request: Take) -> int:
    """How many leading blocks of an offer are here already."""
    committed = shard.committed
    for at, block in enumerate(request.hashes):
        if block not in committed:
            return at
    return len(request.hashes)
