"""Directories within one process: of several nodes that share an object, and of one node alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvstore.directory.interface import (
    MOST_HASHES,
    MOST_OWNERS,
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
from kvstore.directory.statistics import Statistics

_Location = tuple[bytes, int, bytes]


@dataclass(slots=True)
class MemoryPool:
    """What the nodes of one process share.

    Attributes:
        members: by number.
        owners: of each block, by namespace, shard and hash.
        gone: members that have left, by number.
        last: the number given last.
        failure: the code of an error that every lookup shall fail with, and changes be lost;
            ``None`` where all is well.
    """

    members: dict[int, Member] = field(default_factory=dict)
    owners: dict[_Location, list[int]] = field(default_factory=dict)
    gone: dict[int, Gone] = field(default_factory=dict)
    last: int = 0
    failure: str | None = None

    def join(self, member: Member) -> Member:
        """Let a node in under a number of its own."""
        self.last += 1
        joined = replace(member, number=self.last)
        self.members[joined.number] = joined
        return joined

    def leave(self, number: int, now: float = 0.0) -> None:
        """Let a member go; what it held names nobody from now on."""
        member = self.members.pop(number, None)
        if member is not None:
            self.gone[number] = Gone(member, now)

    def add(self, place: Place, number: int) -> None:
        """Note that a member holds a block."""
        if self.failure is not None:
            return
        owners = self.owners.setdefault((place.namespace, place.shard, place.hash), [])
        owners[:] = [owner for owner in owners if owner in self.members]
        if number not in owners and len(owners) < MOST_OWNERS:
            owners.append(number)

    def take(self, place: Place, number: int) -> None:
        """Note that a member does not hold a block."""
        location = (place.namespace, place.shard, place.hash)
        owners = self.owners.get(location)
        if self.failure is not None or owners is None or number not in owners:
            return
        owners.remove(number)
        if not owners:
            del self.owners[location]

    def holders(self, location: _Location, asking: int) -> tuple[int, ...]:
        """Live members that hold a block, without the one that asks."""
        owners = self.owners.get(location, ())
        return tuple(owner for owner in owners if owner in self.members and owner != asking)

    def traces(self, location: _Location, asking: int) -> tuple[int, ...]:
        """The same, with members that are gone."""
        return tuple(owner for owner in self.owners.get(location, ()) if owner != asking)


class MemoryDirectory(Directory):
    """One node's view of a pool within its process; every change is seen at once.

    Args:
        pool: shared with the other nodes.
        member: this node, without a number.
    """

    name: ClassVar[str] = "memory"

    def __init__(self, pool: MemoryPool, member: Member) -> None:
        self.statistics = Statistics()
        self._pool = pool
        self._member = member
        self._me: Member | None = None

    def __repr__(self) -> str:
        return f"<MemoryDirectory of {self._member.node}>"

    async def open(
        self, inventory: Inventory = hold_nothing, summary: Summary = say_nothing
    ) -> None:
        """Join, and tell all that the node holds."""
        self._me = self._pool.join(replace(self._member, summary=summary()))
        self.statistics.joins += 1
        self.statistics.advertisements += 1
        for page in inventory():
            for place in page:
                self.stored(place)

    async def close(self) -> None:
        """Leave."""
        if self._me is not None:
            self._pool.leave(self._me.number, asyncio.get_running_loop().time())
            self._me = None

    @property
    def me(self) -> Member | None:
        """This node's membership; None before ``open``, after ``close``, and once thrown out."""
        return self._me if self._me and self._me.number in self._pool.members else None

    @property
    def gone(self) -> Mapping[int, Gone]:
        """Members that have left."""
        return self._pool.gone

    @property
    def members(self) -> Mapping[int, Member]:
        """The other members."""
        mine = self._me.number if self._me else None
        return {n: member for n, member in self._pool.members.items() if n != mine}

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
        # Others run meanwhile, as they do with a directory that takes its time.
        await asyncio.sleep(0)
        if self._pool.failure is not None:
            self.statistics.failures["reach", self._pool.failure] += 1
            return Reach(start, failure=self._pool.failure)
        self.statistics.operations["reach"] += 1
        return self._deepest(self._pool.holders, namespace, shards, hashes, start)

    def _deepest(
        self,
        holders: Callable[[_Location, int], tuple[int, ...]],
        namespace: bytes,
        shards: int,
        hashes: Sequence[bytes],
        start: int,
    ) -> Reach:
        asking = self._me.number if self._me else 0
        deepest = Reach(start)
        for number in range(start, min(len(hashes), start + MOST_HASHES)):
            owners = tuple(
                holders((namespace, shard, hashes[number]), asking) for shard in range(shards)
            )
            if not all(owners):
                break
            deepest = Reach(number + 1, owners)
        return deepest

    async def traces(
        self,
        namespace: bytes,
        shards: int,
        hashes: Sequence[bytes],
        start: int,
        *,
        deadline: float,
    ) -> Reach:
        """How far others hold a chain, or held it when they left."""
        return self._deepest(self._pool.traces, namespace, shards, hashes, start)

    def stored(self, place: Place) -> None:
        """Take note that this node holds a block."""
        if (me := self.me) is not None:
            self._pool.add(place, me.number)
            self.statistics.published += 1

    def removed(self, place: Place) -> None:
        """Take note that this node no longer holds a block."""
        if self._me is not None:
            self._pool.take(place, self._me.number)
            self.statistics.published += 1

    def withdraw(self, place: Place, number: int) -> None:
        """Take note that a member does not hold a block after all."""
        self._pool.take(place, number)
        self.statistics.withdrawn += 1
