"""Copies on other machines of what clients store here, made in the background.

A put that asks for copies is answered as ever; its chain is then offered to other nodes, which pull
it. What waits is bounded: where more comes than can be copied, the oldest is forgotten. Nothing is
tried for ever: a chain for which there are too few other machines is copied when it is put again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from kvstore.directory.interface import Directory, Member
from kvstore.entry import Entry, ShardIndex
from kvstore.identity import Namespace
from kvstore.metrics import CopyOutcome
from kvstore.node import Node
from kvstore.offering import Offers
from kvstore.placement import for_copies, spread_by
from kvstore.protocol.messages import FILL, HELD, Reserve

_log = structlog.get_logger(__name__)

_WORKERS: Final = 2
"""Chains copied at a time."""
_MOST_WAITING: Final = 4096
"""Chains that wait at most."""
_MOST_KNOWN: Final = 16_384
"""Chains remembered as copied."""
_MOST_ATTEMPTS: Final = 8
"""Nodes that one chain is offered to at most."""
_OFFER_SECONDS: Final = 30.0
_HELD: Final = bytes([HELD])


@dataclass(slots=True)
class _Wish:
    """What is wanted of a chain.

    Attributes:
        copies: nodes that are to hold it, this one counted.
        blocks: how many of its blocks asked for it, for the count of what came of them.
    """

    copies: int
    blocks: int


class Replication:
    """Sees to it that chains come to be held by as many machines as was asked for.

    Args:
        node: has the chains.
        directory: knows the other nodes.
        offers: asks them.
        host: this node's machine.
        copies: how many nodes are to hold a chain of which its put does not say.
        capacity: chains that wait at most.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        offers: Offers,
        *,
        host: str,
        copies: int = 1,
        capacity: int = _MOST_WAITING,
    ) -> None:
        self._node = node
        self._directory = directory
        self._offers = offers
        self._host = host
        self._copies = copies
        self._capacity = capacity
        self._waiting: OrderedDict[Entry, _Wish] = OrderedDict()
        self._known: OrderedDict[Entry, int] = OrderedDict()
        self._members: frozenset[int] = frozenset()
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Replication waiting={len(self._waiting)}>"

    @property
    def waiting(self) -> int:
        """Chains that wait to be copied."""
        return len(self._waiting)

    def wanted(self, shard: ShardIndex, request: Reserve, verdicts: bytes) -> int:
        """How many nodes are to hold the chain of a put.

        Where all of it is held already, that is asked for at once; else it is for the put to do, as
        its blocks are committed.

        Args:
            shard: of the chain.
            request: the put's.
            verdicts: what it is answered.
        """
        copies = request.copies or self._copies
        if copies > 1 and FILL not in verdicts:
            held = len(verdicts) - len(verdicts.lstrip(_HELD))
            entries = [shard.committed[block] for block in request.hashes[:held]]
            if entries:
                self.ask(entries, copies)
        return copies

    def ask(self, entries: Sequence[Entry], copies: int) -> None:
        """Take note that copies of blocks, and of all before them, are wanted. Never waits.

        Args:
            entries: committed blocks of one chain, from root to leaf.
            copies: nodes that are to hold them, this one counted.
        """
        last = entries[-1]
        self._look_at_members()
        if copies < 2 or self._known.get(last, 0) >= copies:
            return
        blocks = len(entries)
        before = self._waiting.get(last)
        if before is not None:
            before.copies = max(before.copies, copies)
            return
        # Of the parts of one put only the last has to be copied: it is all of them.
        parent = entries[0].parent
        wish = None if parent is None else self._waiting.get(parent)
        if parent is not None and wish is not None and wish.copies <= copies:
            del self._waiting[parent]
            blocks += wish.blocks
        self._waiting[last] = _Wish(copies, blocks)
        if len(self._waiting) > self._capacity:
            _, oldest = self._waiting.popitem(last=False)
            self._count("dropped", oldest)
        self._woken.set()

    def open(self) -> None:
        """Begin to copy."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._work(), name=f"replication {at}") for at in range(_WORKERS)
        ]

    async def close(self) -> None:
        """Give up what is under way, and forget what waits."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for wish in self._waiting.values():
            self._count("dropped", wish)
        self._waiting.clear()

    # --- in the background -----------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._woken.clear()
                await self._woken.wait()
            entry, wish = self._waiting.popitem(last=False)
            outcome: CopyOutcome = "short"
            try:
                outcome = await self._copy(entry, wish.copies)
            except Exception as error:  # noqa: BLE001 - boundary: copies are best effort
                self._node.metrics.internal_errors += 1
                _log.error("copying failed", exc_info=error)
            finally:
                self._count(outcome, wish)

    def _count(self, outcome: CopyOutcome, wish: _Wish) -> None:
        self._node.metrics.copies[outcome] += wish.blocks

    async def _copy(self, entry: Entry, copies: int) -> CopyOutcome:
        """Offer a chain to one node after the other until enough machines have it."""
        namespace = self._node.catalog.find(entry.shard.namespace)
        hosts: set[str] = {self._host}
        tried: set[int] = set()
        while len(hosts) < copies:
            if entry.gone or namespace is None:
                return "gone"
            member = self._next(entry, hosts, tried)
            if member is None or len(tried) == _MOST_ATTEMPTS:
                return "short"
            tried.add(member.number)
            if await self._offer(member, namespace, entry):
                hosts.add(member.host)
        self._remember(entry, copies)
        return "made"

    def _next(self, entry: Entry, hosts: set[str], tried: set[int]) -> Member | None:
        others = [one for one in self._directory.members.values() if one.host not in hosts]
        key = spread_by(entry.path())
        found = for_copies(others, key, host=self._host, count=1, avoid=tried)
        return found[0] if found else None

    async def _offer(self, member: Member, namespace: Namespace, entry: Entry) -> bool:
        hashes = [one.hash for one in entry.path()]
        deadline = asyncio.get_running_loop().time() + _OFFER_SECONDS
        answer = await self._offers.offer(
            member.number, namespace, entry.shard.number, hashes, idle=0.0, deadline=deadline
        )
        return answer.held == len(hashes)

    def _look_at_members(self) -> None:
        """Forget what was copied where members came or went: those gone may have had copies."""
        members = self._directory.members.keys()
        if members != self._members:
            self._members = frozenset(members)
            self._known.clear()

    def _remember(self, entry: Entry, copies: int) -> None:
        """Of a chain that is copied already, a put that finds it held says nothing new."""
        self._known[entry] = copies
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
