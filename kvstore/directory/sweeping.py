"""Clears away what dead members left behind: slowly, and by one member at a time.

Who finds that members have died since the last sweep, and none of late, claims the sweep in Redis
and goes through all buckets. Members that were alive when it began, or have come since, are left
alone; so is every number given since.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from kvstore.directory.interface import Member
from kvstore.directory.link import Link
from kvstore.directory.membership import Membership
from kvstore.directory.names import location_pattern, pack_numbers, pool_prefix
from kvstore.directory.pace import Pace
from kvstore.directory.scripts import CLAIM, SWEEP, SWEPT
from kvstore.directory.statistics import Statistics
from kvstore.errors import KVStoreError

_log = structlog.get_logger(__name__)

_CLAIM_MILLISECONDS: Final = 60_000

Run = Callable[..., Awaitable[Any]]


class Sweeper:
    """This node's part in it.

    Args:
        pool: whose directory.
        link: to walk through its keys.
        run: runs a script within the pace's patience.
        membership: who is alive.
        pace: when.
        statistics: counted in.
    """

    def __init__(
        self,
        pool: str,
        link: Link,
        run: Run,
        membership: Membership,
        pace: Pace,
        statistics: Statistics,
    ) -> None:
        self._pool = pool
        self._link = link
        self._run = run
        self._membership = membership
        self._pace = pace
        self._statistics = statistics
        self._deaths = -1
        self._died_at = float("-inf")

    def watch(self, now: float) -> None:
        """Take note of what the membership says, at every heartbeat."""
        if self._deaths != self._membership.version.deaths:
            self._deaths = self._membership.version.deaths
            self._died_at = now

    def missed(self, now: float) -> None:
        """Take note that a roster lacks members, which a heartbeat may tell only later."""
        self._died_at = now

    @property
    def quiet(self) -> bool:
        """Whether nobody has died of late, so that the dead won't be back under their numbers."""
        return asyncio.get_running_loop().time() - self._died_at >= self._pace.grace

    async def sweep(self) -> None:
        """Sweep when there is something to sweep; without end."""
        while True:
            await asyncio.sleep(self._pace.sweep * (0.5 + random.random()))
            me = self._membership.me
            if me is None or not self._due():
                continue
            try:
                await self._sweep(me)
            except KVStoreError as error:
                _log.info("directory_sweep_stopped", error=str(error))

    def _due(self) -> bool:
        version = self._membership.version
        return version.deaths != version.swept and self.quiet

    async def _sweep(self, me: Member) -> None:
        deaths, last = self._membership.version.deaths, self._membership.last
        alive = {me.number, *self._membership.others}
        before = self._statistics.swept
        prefix = pool_prefix(self._pool)
        pages = self._link.scan(location_pattern(self._pool), seconds=self._pace.patience)
        async for keys in pages:
            if not await self._run(CLAIM, prefix, me.number, _CLAIM_MILLISECONDS, deaths):
                return
            began = asyncio.get_running_loop().time()
            live = pack_numbers(alive | set(self._membership.others))
            for key in keys:
                await self._sweep_bucket(key, live, last)
            # Half of the time at most is taken up by this.
            await asyncio.sleep(max(0.001, asyncio.get_running_loop().time() - began))
        await self._run(SWEPT, prefix, me.number, deaths)
        _log.info("directory_swept", locations=self._statistics.swept - before)

    async def _sweep_bucket(self, key: bytes, live: bytes, last: int) -> None:
        cursor = b"0"
        while True:
            cursor, gone = await self._run(SWEEP, key, live, last, cursor)
            self._statistics.swept += gone
            if cursor == b"0":
                return
