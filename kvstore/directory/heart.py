"""Keeps this node a member of its pool, and knows who else is one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from kvstore.directory.interface import Summary, say_nothing
from kvstore.directory.link import Link
from kvstore.directory.membership import Membership, Version, encode_summary
from kvstore.directory.names import pool_prefix
from kvstore.directory.pace import Pace
from kvstore.directory.publishing import Publisher
from kvstore.directory.scripts import BEAT, JOIN, ROSTER
from kvstore.directory.statistics import Statistics
from kvstore.directory.sweeping import Sweeper
from kvstore.errors import KVStoreError, Unavailable

_log = structlog.get_logger(__name__)

_CENSUSES: Final = 4.0
"""How many members, on average, look for dead ones in one heartbeat."""


class Heart:
    """The heartbeat.

    Args:
        pool: whose.
        link: to ask who the servers are.
        run: runs a script within the pace's patience; counts it; raises KVStoreError.
        publisher: told when everything has to be told anew.
        sweeper: told of deaths.
        membership: what is known of the members; kept here.
        pace: when.
        statistics: counted in.

    Attributes:
        summary: asked for what this node has to say of itself.
    """

    def __init__(
        self,
        pool: str,
        link: Link,
        run: Callable[..., Awaitable[Any]],
        publisher: Publisher,
        sweeper: Sweeper,
        membership: Membership,
        pace: Pace,
        statistics: Statistics,
    ) -> None:
        self.summary: Summary = say_nothing
        self._prefix = pool_prefix(pool)
        self._link = link
        self._run = run
        self._publisher = publisher
        self._sweeper = sweeper
        self._membership = membership
        self._pace = pace
        self._statistics = statistics
        self._outage = False
        self._heard_at = float("-inf")
        self._servers: frozenset[str] = frozenset()

    async def beats(self) -> None:
        """Give signs of life; without end."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                await self._beat()
            except KVStoreError:
                self._outage = True
                if self._statistics.failing_since is None:
                    self._statistics.failing_since = began
            # Not all in step: nodes that lost the same Redis come back one after the other.
            pause = self._pace.heartbeat * (0.9 + 0.1 * random.random())
            await asyncio.sleep(max(0.0, pause - (clock() - began)))

    async def _beat(self) -> None:
        version = await self._say_alive() or await self._say_alive()
        if version is None:
            raise Unavailable("the directory forgets this node as soon as it has joined")
        self._membership.heard(version)
        self._heard_at = self._statistics.heard_at = asyncio.get_running_loop().time()
        self._statistics.failing_since = None
        self._sweeper.watch(self._heard_at)
        if self._outage:
            await self._recover()
        census = random.random() < _CENSUSES / (len(self._membership.others) + 1)
        if census or self._membership.stale:
            await self._read_roster(census)

    async def _say_alive(self) -> Version | None:
        """Join first where need be; None where it turns out that the membership has lapsed."""
        me = self._membership.me
        if me is None or self._publisher.overflowed:
            await self._join(keep=not self._publisher.overflowed)
            me = self._membership.me
        assert me is not None
        summary = encode_summary(self.summary())
        words = (me.number, self._membership.record, self._pace.lease, summary)
        version = await self._run(BEAT, self._prefix, *words)
        if not version:
            _log.warning("directory_membership_lapsed", number=me.number)
            self._membership.lapsed()
            return None
        return Version(*version)

    async def _join(self, keep: bool) -> None:
        mine = self._membership
        highest = max(mine.before, mine.last)
        words = (mine.record, self._pace.lease, mine.before, int(keep), mine.epoch, highest)
        number, kept, epoch = await self._run(JOIN, self._prefix, *words)
        mine.joined(int(number), epoch)
        self._statistics.joins += 1
        _log.info("directory_joined", number=int(number), kept=bool(kept))
        if not kept:
            self._publisher.begin_anew()
            self._servers = await self._identity()
        elif asyncio.get_running_loop().time() - self._heard_at >= self._pace.grace:
            # Taken for dead long enough to have been swept away.
            self._publisher.advertise_in(0.0)

    async def _recover(self) -> None:
        """Tell everything, where Redis is another one than before it was gone.

        What it has from its disk or from its master may lack the last it was told.
        """
        servers = await self._identity()
        if not servers or servers != self._servers:
            _log.warning("directory_replaced")
            self._publisher.advertise_in(0.0)
        else:
            _log.info("directory_back")
        self._servers = servers
        self._outage = False

    async def _identity(self) -> frozenset[str]:
        """Of the servers; empty where they don't say, as Redis's user may not be allowed to ask."""
        try:
            return await self._link.identity(seconds=self._pace.patience)
        except KVStoreError:
            return frozenset()

    async def _read_roster(self, census: bool) -> None:
        before = self._membership.others
        # A census reads everything: should a number have been given twice, it ends there.
        known = b"" if census else self._membership.live
        words = (known, int(census))
        last, numbers, records, summaries = await self._run(ROSTER, self._prefix, *words)
        now = asyncio.get_running_loop().time()
        self._membership.roster(
            int(last),
            [int(number) for number in numbers],
            dict(zip(map(int, records[::2]), records[1::2], strict=True)),
            dict(zip(map(int, summaries[::2]), summaries[1::2], strict=True)),
            now=now,
        )
        if before.keys() - self._membership.others.keys():
            self._sweeper.missed(now)
        self._statistics.members = len(self._membership.others)
        if before.keys() != self._membership.others.keys():
            _log.info("directory_members", members=sorted(self._membership.others))
