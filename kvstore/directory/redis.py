"""The directory of a pool of many nodes, in Redis.

Nothing here is waited for by those who store blocks, and a lookup is waited for until its deadline
at most; where Redis is late or gone, the next lookups don't wait at all. All else is done by tasks
in the background, which go on trying for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import structlog

from kvstore.directory.address import Access, Address
from kvstore.directory.changes import MOST_CHANGES
from kvstore.directory.gate import Gate
from kvstore.directory.heart import Heart
from kvstore.directory.interface import (
    MOST_HASHES,
    NOBODY,
    Directory,
    Gone,
    Inventory,
    Member,
    Place,
    Reach,
    Summary,
    hold_nothing,
    say_nothing,
)
from kvstore.directory.link import Link
from kvstore.directory.membership import Membership
from kvstore.directory.names import (
    check_pool,
    hash_parts,
    pack_numbers,
    pool_prefix,
    tag,
    unpack_reach,
)
from kvstore.directory.pace import Pace
from kvstore.directory.publishing import Publisher
from kvstore.directory.scripts import LEAVE, REACH, Script
from kvstore.directory.statistics import Statistics
from kvstore.directory.sweeping import Sweeper
from kvstore.errors import DeadlineExceeded, InternalError, KVStoreError, Unavailable

_log = structlog.get_logger(__name__)

_LOOKUPS: Final = 32
"""Lookups under way at a time; others wait their turn, within their deadlines."""

_PROBE_SECONDS: Final = 0.02
_LEAVE_SECONDS: Final = 1.0


class RedisDirectory(Directory):
    """One node's view of a pool whose nodes share a Redis.

    Args:
        address: where Redis is.
        pool: name of the pool; pools of other names in one Redis know nothing of each other.
        member: this node, without a number.
        access: what Redis asks for.
        pace: when what is done.
        capacity: changes that may wait to be told.

    Raises:
        ConfigError: the pool can't have that name, or the password can't be read.
    """

    name: ClassVar[str] = "redis"

    def __init__(
        self,
        address: Address,
        pool: str,
        member: Member,
        access: Access | None = None,
        pace: Pace | None = None,
        capacity: int = MOST_CHANGES,
    ) -> None:
        self.statistics = Statistics()
        self._address = address
        self._access = access or Access()
        self._access.password()
        self._pool = check_pool(pool)
        self._prefix = pool_prefix(pool)
        self._pace = pace or Pace()
        self._membership = Membership(member)
        self._gate = Gate()
        self._capacity = capacity
        self._link: Link
        self._sweeper: Sweeper
        self._publisher: Publisher | None = None
        self._lookups = asyncio.Semaphore(_LOOKUPS)
        self._shut = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failing: set[str] = set()

    def __repr__(self) -> str:
        return f"<RedisDirectory of pool {self._pool} at {self._address}>"

    async def open(
        self, inventory: Inventory = hold_nothing, summary: Summary = say_nothing
    ) -> None:
        """Begin to join the pool."""
        self._link = link = Link(self._address, self._access)
        shared = (self._membership, self._pace, self.statistics)
        self._sweeper = sweeper = Sweeper(self._pool, link, self._run, *shared)
        self._publisher = publisher = Publisher(self._pool, self._run, *shared, self._capacity)
        publisher.inventory = inventory
        heart = Heart(self._pool, link, self._run, publisher, sweeper, *shared)
        heart.summary = summary
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "beat": heart.beats,
            "publish": publisher.tell,
            "advertise": publisher.advertise,
            "sweep": sweeper.sweep,
            "probe": self._probes,
        }
        self._tasks = [
            asyncio.create_task(self._keep(name, loop), name=f"directory {name}")
            for name, loop in loops.items()
        ]

    async def close(self) -> None:
        """Leave the pool, if Redis answers within a second."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        me, self._publisher = self._membership.me, None
        self._membership.left()
        if not tasks:
            return
        try:
            if me is not None:
                words = (me.number, self._membership.record)
                await self._link.run(LEAVE, self._prefix, *words, seconds=_LEAVE_SECONDS)
        except KVStoreError as error:
            _log.info("directory_not_left", error=str(error))
        try:
            await self._link.close(seconds=_LEAVE_SECONDS)
        except KVStoreError as error:
            _log.info("directory_not_closed", error=str(error))

    @property
    def me(self) -> Member | None:
        """This node's membership; None before it has joined, and while it has lapsed."""
        return self._membership.me

    @property
    def members(self) -> Mapping[int, Member]:
        """The other members, as last heard; also where Redis is gone since."""
        return self._membership.others

    @property
    def gone(self) -> Mapping[int, Gone]:
        """Members that were there and are not any more."""
        return self._membership.gone

    async def reach(
        self,
        namespace: bytes,
        shards: int,
        hashes: Sequence[bytes],
        start: int,
        *,
        deadline: float,
    ) -> Reach:
        """How far other members hold a chain."""
        rest = hashes[start : start + MOST_HASHES]
        if not rest or (self._membership.me is not None and not self._membership.others):
            return Reach(start)
        key = tag(self._pool, namespace, hashes[0])
        try:
            live = self._membership.live
            answer = await self._look_up(key, hash_parts(rest), shards, live, deadline)
            return self._understand(answer, namespace, hashes, start)
        except KVStoreError as error:
            return Reach(start, failure=error.code)
        except Exception:  # noqa: BLE001 - the boundary: no lookup fails for what Redis says
            _log.exception("directory_answer_not_understood")
            self.statistics.failures["reach", InternalError.code] += 1
            return Reach(start, failure=InternalError.code)

    async def traces(
        self,
        namespace: bytes,
        shards: int,
        hashes: Sequence[bytes],
        start: int,
        *,
        deadline: float,
    ) -> Reach:
        """How far others hold a chain, or held it when they went."""
        rest, gone = hashes[start : start + MOST_HASHES], self._membership.gone
        if not rest or not gone:
            return Reach(start)
        key = tag(self._pool, namespace, hashes[0])
        named = self._membership.live + pack_numbers(gone)
        try:
            answer = await self._look_up(key, hash_parts(rest), shards, named, deadline)
        except KVStoreError as error:
            return Reach(start, failure=error.code)
        blocks, holders = unpack_reach(answer)
        if not 0 < blocks <= len(rest):
            return Reach(start)
        return Reach(start + blocks, tuple(holders))

    async def _look_up(
        self, key: bytes, parts: bytes, shards: int, members: bytes, deadline: float
    ) -> bytes:
        """Run the script, unless the way is closed; close it where that fails."""
        clock = asyncio.get_running_loop().time
        route = self._link.route(key) if self._publisher is not None else ""
        if self._membership.me is None or not self._gate.open(route):
            self.statistics.refused += 1
            raise Unavailable("the directory does not answer at present")
        began = clock()
        try:
            if began >= deadline:
                raise DeadlineExceeded("no time is left to ask the directory")
            async with asyncio.timeout_at(deadline):
                await self._lookups.acquire()
                try:
                    answer: bytes = await self._link.ask(REACH, key, parts, shards, members)
                finally:
                    self._lookups.release()
        except (KVStoreError, TimeoutError) as error:
            code = error.code if isinstance(error, KVStoreError) else DeadlineExceeded.code
            self.statistics.failures["reach", code] += 1
            self._gate.failed(route, key, deadline - began)
            if self._gate.closed:
                self._shut.set()
            if isinstance(error, KVStoreError):
                raise
            raise DeadlineExceeded("the directory was late") from None
        self.statistics.operations["reach"] += 1
        self.statistics.reach_seconds.observe(clock() - began)
        return answer

    def _understand(
        self, answer: bytes, namespace: bytes, hashes: Sequence[bytes], start: int
    ) -> Reach:
        blocks, holders = unpack_reach(answer)
        if not 0 < blocks <= len(hashes) - start:
            return Reach(start)
        deepest = hashes[start + blocks - 1]
        owners = []
        for shard, numbers in enumerate(holders):
            owners.append(tuple(n for n in numbers if n in self._membership.others))
            for number in numbers:
                # Who was only held up comes back under its number, and does not tell all again.
                if self._membership.dead(number) and self._sweeper.quiet:
                    self.withdraw(Place(namespace, shard, hashes[0], deepest), number)
        # A member may have died since it was asked.
        return Reach(start + blocks, tuple(owners)) if all(owners) else Reach(start)

    def stored(self, place: Place) -> None:
        """Take note that this node holds a block."""
        if self._publisher is not None:
            self._publisher.note(place, NOBODY, True)

    def removed(self, place: Place) -> None:
        """Take note that this node no longer holds a block."""
        if self._publisher is not None:
            self._publisher.note(place, NOBODY, False)

    def withdraw(self, place: Place, number: int) -> None:
        """Take note that a member does not hold a block after all."""
        if self._publisher is not None:
            self._publisher.note(place, number, False)

    async def _run(self, script: Script, key: bytes, *arguments: Any) -> Any:
        """Run a script in the background, and count it."""
        try:
            answer = await self._link.run(script, key, *arguments, seconds=self._pace.patience)
        except KVStoreError as error:
            self.statistics.failures[script.name, error.code] += 1
            if script.name not in self._failing:
                self._failing.add(script.name)
                _log.warning("directory_failed", operation=script.name, error=str(error))
            raise
        self.statistics.operations[script.name] += 1
        if script.name in self._failing:
            self._failing.remove(script.name)
            _log.info("directory_works", operation=script.name)
        return answer

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run one of the tasks, again where it fails."""
        while True:
            try:
                await loop()
            except Exception:  # noqa: BLE001 - the boundary: what Redis says ends no task
                _log.exception("directory_task_failed", task=name)
                self.statistics.failures[name, InternalError.code] += 1
            await asyncio.sleep(self._pace.heartbeat)

    async def _probes(self) -> None:
        """See whether closed ways are open again, so that nobody has to find out by waiting."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._shut.wait()
            self._shut.clear()
            while self._gate.closed:
                for probe in self._gate.probes(clock()):
                    await self._probe(probe.route, probe.tag, probe.seconds)
                await asyncio.sleep(_PROBE_SECONDS)

    async def _probe(self, route: str, key: bytes, seconds: float) -> None:
        try:
            await self._link.run(REACH, key, b"", 1, b"", seconds=seconds)
        except KVStoreError as error:
            self.statistics.failures["probe", error.code] += 1
            self._gate.probe_failed(route, asyncio.get_running_loop().time())
            return
        self.statistics.operations["probe"] += 1
        self._gate.answered(route)
