"""Handing over to other nodes what this one holds, the blocks of most worth first.

Chains are offered, and the others pull them. A block goes where the one before it went, save where
many chains part, and what another node holds already is only made that node's own. A node that has
no room for blocks of some worth is not waited for: the next is asked, and then the blocks are left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from kvstore.directory.interface import Directory, Member
from kvstore.entry import Entry
from kvstore.node import Node
from kvstore.offering import Offers
from kvstore.placement import branches, drains, for_move, spread_by
from kvstore.worth import Runs, by_worth

_log = structlog.get_logger(__name__)

_AT_ONCE: Final = 4
"""Offers under way."""
_RUN_BYTES: Final = 32 << 20
"""Bytes of one offer at most."""
_RUN_BLOCKS: Final = 1024
_RATE_SECONDS: Final = 1.0
"""Of a rate, in one offer: it goes out at once, whatever its size."""
_OFFER_SECONDS: Final = 30.0
_MOST_ASKED: Final = 4
"""Nodes that one run is offered to at most."""
_REFUSALS: Final = 8
"""How often a node may have no room before it is offered nothing that it does not hold already:
what comes later is worth less."""
_LOOKUP_SECONDS: Final = 0.5
_PASSES: Final = 3
"""How often to look for blocks that came meanwhile: of puts that had begun before."""
_NO_ROOM_SECONDS: Final = 10.0
"""How long a node with room on its SSD is waited for, to move blocks down there."""
_RETRY_SECONDS: Final = 0.25
_AGAIN_SECONDS: Final = 1.0
"""How long to wait before asking once more where nobody answered."""
_SETTLE_SECONDS: Final = 5.0
"""How long to wait at the end for the directory to know the new owners."""


@dataclass(slots=True)
class Tally:
    """How far a handover has come, in blocks.

    Attributes:
        total: to be handed over, as far as is known.
        held: others had them already.
        moved: others have taken them.
        left: nobody has.
        bytes: of those that were moved.
    """

    total: int = 0
    held: int = 0
    moved: int = 0
    left: int = 0
    bytes: int = 0


class Handover:
    """One handover.

    Args:
        node: hands over.
        directory: knows the others.
        offers: asks them.
        host: this node's machine.
        deadline: seconds on the event loop's clock, after which no more is offered.
        rate: bytes a second at most; None for no limit.

    Attributes:
        tally: how far it has come.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        offers: Offers,
        *,
        host: str,
        deadline: float,
        rate: float | None = None,
    ) -> None:
        self.tally = Tally()
        self._node = node
        self._directory = directory
        self._offers = offers
        self._host = host
        self._deadline = deadline
        self._rate = rate
        self._runs = Runs()
        self._targets: dict[Entry, int] = {}
        self._last: dict[int, Sequence[Entry]] = {}
        self._taken: dict[int, Tally] = {}
        self._refusals: Counter[int] = Counter()
        self._next_at = 0.0
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Hand over all that the node holds, as far as that can be done before the deadline."""
        for _ in range(_PASSES):
            before = len(self._runs)
            await self._pass()
            if not self._take_back() and len(self._runs) == before:
                break
        tally = self.tally
        tally.total = max(tally.total, len(self._runs))
        tally.left = tally.total - tally.held - tally.moved
        await self._settle()

    async def _pass(self) -> None:
        entries = [entry for shard in self._node.index.shards for entry in shard.committed.values()]
        self.tally.total = max(self.tally.total, len(entries))
        ordered = await asyncio.to_thread(by_worth, entries)
        tasks: set[asyncio.Task[None]] = set()
        try:
            for run in self._runs.of(ordered, _RUN_BLOCKS):
                for part in self._parts(run):
                    if self._clock() >= self._deadline:
                        break
                    if len(tasks) >= _AT_ONCE:
                        done, tasks = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
                        for task in done:
                            task.result()
                    tasks.add(await self._begin(part))
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_back(self) -> bool:
        """Have what was taken by nodes that are gone since offered anew; whether there is any."""
        members = self._directory.members
        gone = {number for number in self._taken if number not in members}
        if not gone:
            return False
        self._runs.forget(entry for entry, number in self._targets.items() if number in gone)
        for number in gone:
            taken = self._taken.pop(number)
            self._last.pop(number, None)
            self.tally.held -= taken.held
            self.tally.moved -= taken.moved
            self.tally.bytes -= taken.bytes
        return True

    def _parts(self, run: Sequence[Entry]) -> list[Sequence[Entry]]:
        most = _RUN_BYTES if self._rate is None else min(_RUN_BYTES, self._rate * _RATE_SECONDS)
        step = max(1, int(most // run[0].shard.block_bytes))
        return [run[at : at + step] for at in range(0, len(run), step)]

    async def _begin(self, run: Sequence[Entry]) -> asyncio.Task[None]:
        """Decide where a run goes, when its turn has come, and begin to offer it."""
        await self._wait_for_turn(run)
        path = run[-1].path()
        targets, holder = await self._choose(run, path)
        for entry in run:
            self._targets[entry] = targets[0] if targets else 0
        return asyncio.get_running_loop().create_task(self._offer(run, path, targets, holder))

    async def _wait_for_turn(self, run: Sequence[Entry]) -> None:
        if self._rate is None:
            return
        pause = self._next_at - self._clock()
        if pause > 0:
            await asyncio.sleep(min(pause, max(self._deadline - self._clock(), 0.0)))
        size = len(run) * run[0].shard.block_bytes
        self._next_at = max(self._next_at, self._clock()) + size / self._rate

    async def _choose(
        self, run: Sequence[Entry], path: Sequence[Entry]
    ) -> tuple[list[int], int | None]:
        """Whom to offer a run to, one after the other; and who holds all of it already, if any."""
        members = self._directory.members
        order: list[int] = []
        holder = next(
            (
                one
                for one in await self._holders(path)
                if one in members and not drains(members[one])
            ),
            None,
        )
        if holder is not None:
            order.append(holder)
        parent = run[0].parent
        if parent is not None and not branches(parent):
            order.append(self._targets.get(parent, 0))
        order += [
            one.number for one in for_move(members.values(), spread_by(path), host=self._host)
        ]
        able = [
            number
            for number in dict.fromkeys(order)
            if number in members and (number == holder or self._refusals[number] < _REFUSALS)
        ]
        return able[:_MOST_ASKED], holder

    async def _holders(self, path: Sequence[Entry]) -> Sequence[int]:
        """Members that hold a whole chain, as far as the directory knows."""
        shard = path[-1].shard
        namespace = self._node.catalog.find(shard.namespace)
        if namespace is None:
            return ()
        reach = await self._directory.reach(
            shard.namespace,
            namespace.shards,
            [entry.hash for entry in path],
            0,
            deadline=self._clock() + _LOOKUP_SECONDS,
        )
        if reach.blocks < len(path) or shard.number >= len(reach.owners):
            return ()
        return reach.owners[shard.number]

    # --- one run ---------------------------------------------------------------------------------

    async def _offer(
        self,
        run: Sequence[Entry],
        path: Sequence[Entry],
        targets: Sequence[int],
        holder: int | None,
    ) -> None:
        """Offer a run to one after the other until one has taken it."""
        begin = len(path) - len(run)
        best, most = await self._find_taker(path, targets)
        if most <= begin and targets and not any(self._refusals[number] for number in targets):
            # Nobody answered, which may be for the moment.
            await asyncio.sleep(_AGAIN_SECONDS)
            best, most = await self._find_taker(path, targets)
        taken = max(most - begin, 0)
        self.tally.left += len(run) - taken
        if not taken:
            return
        self._last[best] = path[:most]
        self._targets.update(dict.fromkeys(run, best))
        for tally in (self.tally, self._taken.setdefault(best, Tally())):
            if holder == best:
                tally.held += taken
            else:
                tally.moved += taken
                tally.bytes += taken * run[0].shard.block_bytes

    async def _find_taker(self, path: Sequence[Entry], targets: Sequence[int]) -> tuple[int, int]:
        """Offer a chain to one after the other; who has most of it then, and how much."""
        best, most = 0, 0
        for number in targets:
            held = await self._offer_to(number, path)
            if held > most:
                best, most = number, held
            if most == len(path):
                break
        return best, most

    async def _offer_to(self, number: int, path: Sequence[Entry]) -> int:
        """Offer a chain to one node.

        Returns:
            How many of its leading blocks that node holds now.
        """
        shard, last = path[-1].shard, path[-1]
        namespace = self._node.catalog.find(shard.namespace)
        patience = self._clock() + _NO_ROOM_SECONDS
        while namespace is not None and not last.gone and self._clock() < self._deadline:
            answer = await self._offers.offer(
                number,
                namespace,
                shard.number,
                [entry.hash for entry in path],
                idle=self._node.clock() - last.last_use,
                deadline=min(self._clock() + _OFFER_SECONDS, self._deadline),
            )
            member = self._directory.members.get(number)
            makes_room = answer.why_not_more == "no_space" and member and _has_room_below(member)
            if not makes_room or self._clock() > patience:
                self._refusals[number] += answer.why_not_more in ("no_space", "refused")
                return answer.held
            await asyncio.sleep(_RETRY_SECONDS)
        return 0

    # --- the end ---------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Wait until the directory knows of the new owners, so that nothing is a miss between."""
        end = min(self._clock() + _SETTLE_SECONDS, self._deadline)
        for path in self._last.values():
            while self._clock() < end and not await self._holders(path):
                await asyncio.sleep(_RETRY_SECONDS / 5)


def _has_room_below(member: Member) -> bool:
    """Whether blocks can move from a member's DRAM to its SSD."""
    summary = member.summary or {}
    capacity = summary.get("ssd_capacity", 0.0)
    return summary.get("ssd_used", 0.0) < 0.9 * capacity
