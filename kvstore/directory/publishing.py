"""Tells the directory what this node holds: changes as they come, and now and then everything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from kvstore.directory.changes import MOST_CHANGES, Batch, Changes
from kvstore.directory.interface import NOBODY, Inventory, Place, hold_nothing
from kvstore.directory.membership import Membership
from kvstore.directory.names import name, tag
from kvstore.directory.pace import Pace
from kvstore.directory.scripts import MOST_RECORDS, PUBLISH, Script
from kvstore.directory.statistics import Statistics
from kvstore.errors import KVStoreError

_log = structlog.get_logger(__name__)

_TELLERS: Final = 4
"""Batches that are told at a time, of one tag each."""

_ENOUGH: Final = 65_536
"""Changes that wait before an advertisement stops adding to them; at most a third of all room."""

_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0

Run = Callable[[Script, bytes, Any], Awaitable[Any]]
"""Runs a script with one argument within the pace's patience; counts it; raises KVStoreError."""


class Publisher:
    """What this node has to tell, and the tasks that tell it.

    Args:
        pool: whose directory.
        run: runs a script.
        membership: says under which number.
        pace: when.
        statistics: counted in.
        capacity: changes that may wait.
    """

    def __init__(
        self,
        pool: str,
        run: Run,
        membership: Membership,
        pace: Pace,
        statistics: Statistics,
        capacity: int = MOST_CHANGES,
    ) -> None:
        self.inventory: Inventory = hold_nothing
        self._pool = pool
        self._run = run
        self._membership = membership
        self._pace = pace
        self._statistics = statistics
        self._changes = Changes(capacity)
        self._enough = min(_ENOUGH, capacity // 3)
        self._tags: dict[tuple[bytes, int], bytes] = {}
        self._told: set[bytes] = set()
        self._changed = asyncio.Event()
        self._due_batches = 0
        self._due = float("inf")
        self._rescheduled = asyncio.Event()
        self._interrupted = False
        self._full_pause = pace.full

    @property
    def overflowed(self) -> bool:
        """Whether changes had to be forgotten, so that what was told is not to be relied on."""
        return self._changes.overflowed

    def note(self, place: Place, number: int, held: bool, *, urgent: bool = True) -> None:
        """Take note that a member, or this node if ``NOBODY``, holds a block or not.

        Before this node has joined nothing is kept: all is told then.
        """
        if self._membership.before == NOBODY:
            return
        waiting = len(self._changes)
        self._changes.note(
            self._tag(place), name(place), number, held, batch=MOST_RECORDS, urgent=urgent
        )
        if self._changes.overflowed and not len(self._changes):
            self._statistics.dropped += waiting
        self._statistics.queued = len(self._changes)
        if self._changes.urgent:
            self._changed.set()

    def _tag(self, place: Place) -> bytes:
        key = (place.namespace, place.root[0])
        found = self._tags.get(key)
        if found is None:
            if len(self._tags) >= _ENOUGH:
                self._tags.clear()
            found = self._tags[key] = tag(self._pool, place.namespace, place.root)
        return found

    def begin_anew(self) -> None:
        """Forget what waits, and tell everything: this node has another number."""
        self._changes.clear()
        self._told.clear()
        self._interrupted = True
        self.advertise_in(0.0)

    def advertise_in(self, seconds: float) -> None:
        """Tell everything in so many seconds at the latest."""
        self._due = min(self._due, asyncio.get_running_loop().time() + seconds)
        self._rescheduled.set()

    async def tell(self) -> None:
        """Tell changes as they come; without end."""
        pause = _FIRST_PAUSE
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._pace.flush)
            self._changed.clear()
            self._due_batches = self._changes.ready(MOST_RECORDS)
            if all(await asyncio.gather(*(self._tell_all() for _ in range(_TELLERS)))):
                pause = _FIRST_PAUSE
                if self._changes.urgent:
                    self._changed.set()
                continue
            self._changed.set()
            await asyncio.sleep(pause * (0.5 + 0.5 * random.random()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _tell_all(self) -> bool:
        """Tell the batches of this round until there are none; False where that did not work.

        What comes meanwhile gathers for the next round: in a stream of changes, each alone would
        cost Redis and this node a call.
        """
        while True:
            me = self._membership.me
            if me is None or self._changes.overflowed:
                return not self._changes.urgent
            batch = self._changes.take(MOST_RECORDS) if self._due_batches > 0 else None
            if batch is None:
                return True
            self._due_batches -= 1
            if not await self._tell(batch, me.number):
                return False

    async def _tell(self, batch: Batch, number: int) -> bool:
        # Whatever ends this, the batch is not left behind as being told.
        landed = False
        try:
            fresh, full = await self._run(PUBLISH, batch.tag, batch.records(number))
            self._changes.told(batch)
            landed = True
        except KVStoreError:
            return False
        finally:
            if not landed:
                self._changes.give_back(batch)
            self._statistics.queued = len(self._changes)
        self._count(batch)
        if full:
            self._refused(batch)
        else:
            self._full_pause = self._pace.full
        if fresh and batch.tag in self._told:
            _log.warning("directory_lost_locations", tag=batch.tag.decode())
            self._told.clear()
            self.advertise_in(0.0)
        self._told.add(batch.tag)
        return True

    def _count(self, batch: Batch) -> None:
        others = sum(number != NOBODY for _, number in batch.changes)
        self._statistics.withdrawn += others
        self._statistics.published += len(batch.changes) - others

    def _refused(self, batch: Batch) -> None:
        self._statistics.dropped += sum(batch.changes.values())
        self._statistics.failures["publish", "out_of_space"] += 1
        if self._due > asyncio.get_running_loop().time() + self._full_pause:
            _log.warning("directory_full", retry_in=self._full_pause)
            self._interrupted = True
            self.advertise_in(self._full_pause)
            self._full_pause = min(2 * self._full_pause, self._pace.refresh)

    async def advertise(self) -> None:
        """Tell everything whenever that is due; without end."""
        while True:
            await self._until_due()
            refresh = self._pace.refresh * (0.9 + 0.2 * random.random())
            self._due = asyncio.get_running_loop().time() + refresh
            if self._membership.me is not None:
                await self._advertise()

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while (left := self._due - loop.time()) > 0:
            self._rescheduled.clear()
            try:
                async with asyncio.timeout(None if left == float("inf") else left):
                    await self._rescheduled.wait()
            except TimeoutError:
                return

    async def _advertise(self) -> None:
        loop = asyncio.get_running_loop()
        self._interrupted = False
        self._statistics.advertisements += 1
        pages = iter(self.inventory())
        while not self._interrupted:
            began = loop.time()
            page = next(pages, None)
            if page is None:
                break
            for place in page:
                self.note(place, NOBODY, True, urgent=False)
            # At most a fifth of the event loop's time, whatever a page takes.
            await asyncio.sleep(max(0.001, 4 * (loop.time() - began)))
            await self._room()
        self._hurry()

    async def _room(self) -> None:
        if len(self._changes) < self._enough:
            return
        self._hurry()
        while len(self._changes) >= self._enough // 2 and not self._interrupted:
            await asyncio.sleep(0.01)

    def _hurry(self) -> None:
        self._changes.hurry()
        self._changed.set()
