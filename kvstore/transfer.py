"""Bringing one chain of one shard here from those who hold it, as far as anybody wants it.

All who want blocks of the chain at a time share one transfer, and each waits for its own blocks. An
owner that fails is not asked again by the same transfer; where none is left the directory is asked
once more, and then what has not come is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog

from kvstore.chains import Chain
from kvstore.directory.interface import Directory, Place
from kvstore.entry import ShardIndex
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.node import Node
from kvstore.owners import Owners
from kvstore.pull import Pull, Puller

_log = structlog.get_logger(__name__)

_MOST_WITHDRAWN: Final = 4096
"""Locations taken away at once where an owner turns out to lack the rest of a chain."""


class Transfer:
    """One chain on its way.

    Args:
        node: where it is wanted.
        directory: who may hold it.
        owners: ways there.
        namespace: of the chain.
        number: of the shard.
        chain: what was found out about it.
        slots: bounds how many transfers have memory reserved at a time.
        lookup_deadline: seconds that the directory is waited for.
        most_bytes: bytes that this one may hold reserved at once.

    Attributes:
        over: whether it has come to its end.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        owners: Owners,
        namespace: Namespace,
        number: int,
        chain: Chain,
        *,
        slots: asyncio.Semaphore,
        lookup_deadline: float,
        most_bytes: int,
    ) -> None:
        self.over = False
        self._node = node
        self._directory = directory
        self._owners = owners
        self._namespace = namespace
        self._number = number
        self._hashes = chain.hashes
        self._numbers = chain.owners[number]
        self._slots = slots
        self._lookup_deadline = lookup_deadline
        self._most_bytes = most_bytes
        self._shard: ShardIndex = node.shard(namespace, number)
        self._wanted = 0
        self._deadline = 0.0
        self._tried: set[int] = set()
        self._asked_at = -1
        self._step: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Transfer of {self._wanted} blocks, tried {sorted(self._tried)}>"

    def want(self, blocks: int, deadline: float) -> None:
        """Take note that so many leading blocks of the chain are wanted.

        Args:
            blocks: how many.
            deadline: until when, in seconds on the event loop's clock.
        """
        self._wanted = max(self._wanted, blocks)
        self._deadline = max(self._deadline, deadline)

    async def arrival(self, position: int) -> None:
        """Wait until the block at a position can be served, or is not brought any more."""
        block, shard = self._hashes[position], self._shard
        while block not in shard.committed:
            coming = shard.reserved.get(block)
            if coming is not None:
                await self._node.arrival(coming)
            elif self.over:
                return
            else:
                # Shielded: others wait for it, too.
                await asyncio.shield(self._step)

    async def run(self) -> None:
        """Bring what is wanted. Never raises but for being cancelled."""
        try:
            await self._bring()
        except Exception as error:  # noqa: BLE001 - boundary: a transfer that fails is a miss
            self._node.metrics.internal_errors += 1
            _log.error("transfer failed", exc_info=error)
        finally:
            self.over = True
            self._note_step()

    def _note_step(self) -> None:
        step, self._step = self._step, asyncio.get_running_loop().create_future()
        step.set_result(None)

    async def _bring(self) -> None:
        clock = asyncio.get_running_loop().time
        while (held := self._held()) < self._wanted and clock() < self._deadline:
            ways = self._ways()
            if ways:
                await self._pull(ways)
                if self._held() == held and not self._tried.intersection(ways):
                    return  # there is no room for more
            elif held <= self._asked_at or not await self._ask_again(held):
                return

    def _held(self) -> int:
        """How many leading blocks of those wanted are here; what is here is whole prefixes."""
        committed, low, high = self._shard.committed, 0, self._wanted
        while low < high:
            middle = (low + high) // 2
            if self._hashes[middle] in committed:
                low = middle + 1
            else:
                high = middle
        return low

    def _ways(self) -> dict[int, Puller]:
        """Ways to owners that are there and have not failed, by number."""
        namespace, shard = self._namespace, self._number
        ways = {
            number: self._owners.puller(number, namespace, shard)
            for number in self._numbers
            if number not in self._tried and self._owners.usable(number, namespace, shard)
        }
        return {number: way for number, way in ways.items() if way is not None}

    async def _ask_again(self, held: int) -> bool:
        """Ask the directory who holds the rest; returns whether there is anybody new."""
        self._asked_at = held
        now = asyncio.get_running_loop().time()
        reach = await self._directory.reach(
            self._namespace.fingerprint,
            self._namespace.shards,
            self._hashes,
            held,
            deadline=min(now + self._lookup_deadline, self._deadline),
        )
        if reach.blocks <= held:
            return False
        self._numbers = reach.owners[self._number]
        return bool(self._ways())

    async def _pull(self, ways: Mapping[int, Puller]) -> None:
        deadline = self._deadline
        pull = Pull(
            self._node,
            list(ways.values()),
            ROOT_PARENT,
            self._hashes,
            self._most_bytes,
            wanted=lambda: self._wanted,
            on_reserved=self._note_step,
        )
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            return
        try:
            await pull.run(deadline)
        finally:
            self._slots.release()
        for number, puller in ways.items():
            if puller in pull.failed:
                self._judge(number, pull, puller, deadline)

    def _judge(self, number: int, pull: Pull, puller: Puller, deadline: float) -> None:
        """Draw conclusions from an owner that did not do what it was thought to."""
        why, lacking = pull.failed[puller], pull.lacking.get(puller)
        self._node.metrics.pull_failures[why] += 1
        if why != "deadline" or deadline == self._deadline:
            self._tried.add(number)
        if lacking is None:
            return
        self._node.metrics.wrong_hints += 1
        for block in self._hashes[lacking : lacking + _MOST_WITHDRAWN]:
            place = Place(self._namespace.fingerprint, self._number, self._hashes[0], block)
            self._directory.withdraw(place, number)
