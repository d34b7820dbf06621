"""Taking a node out of its pool while the others go on to serve what it holds.

A node that is drained accepts no puts and still answers gets, of its own clients and of the nodes
that pull from it. When what it holds has been handed over it leaves the pool, and serves its own
clients from what it has until it is stopped. Whatever goes wrong on the way brings it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

import structlog

from kvstore.control.drain import DrainOrder, DrainProgress, DrainState
from kvstore.directory.interface import Directory
from kvstore.errors import InvalidRequest
from kvstore.handover import Handover, Tally
from kvstore.node import Node
from kvstore.offering import Offers
from kvstore.placement import drains

_log = structlog.get_logger(__name__)

_REPORT_SECONDS: Final = 0.25


class Pool(Protocol):
    """A node's membership, and its ways to the other members."""

    @property
    def directory(self) -> Directory:
        """The node's view of the pool."""

    @property
    def offers(self) -> Offers:
        """What the node offers to others."""

    @property
    def host(self) -> str:
        """The node's machine."""

    async def leave(self) -> None:
        """Leave the pool."""

    async def open(self) -> None:
        """Join the pool."""


class Draining:
    """Whether a node is drained: a ``DrainTarget``.

    Args:
        node: is drained.
        stop: stops the daemon.

    Attributes:
        pool: that it leaves; None where it is in none.
        state: as ``DrainProgress`` says.
    """

    def __init__(self, node: Node, stop: Callable[[], None]) -> None:
        self.state: DrainState = "serving"
        self.stop = stop
        self._node = node
        self.pool: Pool | None = None
        self._tally = Tally()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Draining {self.state}>"

    async def drain(self, order: DrainOrder) -> AsyncIterator[DrainProgress]:
        """See ``DrainTarget.drain``."""
        if self.state == "draining":
            raise InvalidRequest("the node is being drained already")
        if self.state == "drained":
            yield self._progress(finished=True)
            return
        pool = self._admit(order)
        self._begin()
        self._task = task = asyncio.get_running_loop().create_task(self._drain(pool, order))
        try:
            while not task.done():
                yield self._progress()
                await asyncio.wait((task,), timeout=_REPORT_SECONDS)
        finally:
            await self._end(task)
        if not task.cancelled():
            task.result()
        yield self._progress(finished=True)

    async def resume(self) -> DrainProgress:
        """See ``DrainTarget.resume``."""
        if self._task is not None:
            await self._end(self._task)
        if self.state == "drained" and self.pool is not None:
            await self.pool.open()
            self._serve()
        return self._progress(finished=True)

    async def close(self) -> None:
        """End a drain that is under way, as the daemon stops."""
        if self._task is not None:
            await self._end(self._task)

    # --- inside --------------------------------------------------------------------------------

    def _admit(self, order: DrainOrder) -> Pool:
        if self.pool is None:
            raise InvalidRequest("the node is in no pool that it could leave")
        if order.drop:
            return self.pool
        if self.pool.directory.me is None:
            raise InvalidRequest("the node has not joined its pool: is the directory there?")
        others = self.pool.directory.members.values()
        if all(drains(member) for member in others):
            raise InvalidRequest("no other node of the pool takes what this one holds")
        return self.pool

    def _begin(self) -> None:
        self.state = "draining"
        self._tally = Tally()
        self._node.accepts_puts = False
        _log.info("draining", blocks=len(self._node.index))

    def _serve(self) -> None:
        self.state = "serving"
        self._node.accepts_puts = True
        _log.info("serving again")

    async def _drain(self, pool: Pool, order: DrainOrder) -> None:
        if order.drop:
            self._tally.total = self._tally.left = len(self._node.index)
        else:
            handover = Handover(
                self._node,
                pool.directory,
                pool.offers,
                host=pool.host,
                deadline=asyncio.get_running_loop().time() + order.seconds,
                rate=order.rate,
            )
            self._tally = handover.tally
            await handover.run()
        # From here on there is no way back but by joining again.
        self.state = "drained"
        tally = self._tally
        _log.info("drained", moved=tally.moved, held=tally.held, left=tally.left)
        await pool.leave()

    async def _end(self, task: asyncio.Task[None]) -> None:
        """Wait for the end of a drain, which is at once where it has not come to leave the pool."""
        if self._task is task and self.state == "draining":
            # Before any wait: whoever hangs up may cancel this more than once.
            self._task = None
            task.cancel()
            self._serve()
        # A node that is leaving its pool stays known by its task: who brings it back waits for it.
        await asyncio.wait((task,))

    def _progress(self, *, finished: bool = False) -> DrainProgress:
        tally = self._tally
        return DrainProgress(
            self.state, tally.total, tally.held, tally.moved, tally.left, tally.bytes, finished
        )
