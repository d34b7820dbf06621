"""What a node does about blocks that others hold: asks the directory who, and brings them here.

All of it is best effort within the deadline of whoever asks: a directory or an owner that is late,
gone or wrong makes misses of blocks, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import structlog

from kvstore.chains import Chain, Chains
from kvstore.directory.interface import Directory, Reach
from kvstore.identity import Namespace
from kvstore.node import Node
from kvstore.owners import Owners
from kvstore.transfer import Transfer

_log = structlog.get_logger(__name__)

_MOST_NAMESPACES: Final = 64
"""Namespaces whose chains are remembered; the one not asked about for longest goes first."""
_MOST_AHEAD: Final = 64
"""Transfers under way at which no more are begun that nobody waits for."""
_AHEAD_SECONDS: Final = 30.0
"""How long a transfer may take that nobody waits for."""
_SWEEP_SECONDS: Final = 5.0

SLOTS: Final = 16
"""Transfers that have memory reserved at a time."""


class Remote:
    """The rest of the pool, as one node uses it for its clients.

    Args:
        node: where blocks are wanted.
        directory: knows who may hold them.
        owners: ways there.
        lookup_deadline: seconds that the directory is waited for at most.
        most_bytes: bytes that all transfers together may hold reserved.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        owners: Owners,
        *,
        lookup_deadline: float,
        most_bytes: int,
    ) -> None:
        self._node = node
        self._directory = directory
        self._owners = owners
        self._lookup_deadline = lookup_deadline
        self._most_bytes = most_bytes // SLOTS
        self._slots = asyncio.Semaphore(SLOTS)
        self._chains: OrderedDict[bytes, Chains] = OrderedDict()
        self._transfers: dict[tuple[Chain, int], Transfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep)

    def __repr__(self) -> str:
        return f"<Remote transfers={len(self._transfers)} {self._owners!r}>"

    # --- who holds what ------------------------------------------------------------------------

    async def reach(
        self, namespace: Namespace, hashes: Sequence[bytes], start: int, deadline: float
    ) -> int:
        """How far a chain is held, here and by others that can be asked.

        Args:
            namespace: of the chain.
            hashes: the chain from its first block on.
            start: how many leading blocks all shards have here.
            deadline: seconds on the event loop's clock.

        Returns:
            The number of leading blocks that every shard has somewhere; at least ``start``.
        """
        now = asyncio.get_running_loop().time()
        reach = await self._directory.reach(
            namespace.fingerprint,
            namespace.shards,
            hashes,
            start,
            deadline=min(deadline, now + self._lookup_deadline),
        )
        owners = self._usable(namespace, reach)
        if reach.blocks <= start or not all(owners):
            return start
        self._chains_of(namespace).remember(hashes[: reach.blocks], owners)
        return reach.blocks

    def _usable(self, namespace: Namespace, reach: Reach) -> list[list[int]]:
        usable = self._owners.usable
        return [
            [number for number in numbers if usable(number, namespace, shard)]
            for shard, numbers in enumerate(reach.owners)
        ]

    def _chains_of(self, namespace: Namespace) -> Chains:
        chains = self._chains.get(namespace.fingerprint)
        if chains is None:
            chains = self._chains[namespace.fingerprint] = Chains()
        self._chains.move_to_end(namespace.fingerprint)
        if len(self._chains) > _MOST_NAMESPACES:
            self._chains.popitem(last=False)
        return chains

    def find(self, namespace: Namespace, block: bytes) -> Chain | None:
        """The chain that a block is part of, if others were found to hold it."""
        chains = self._chains.get(namespace.fingerprint)
        return None if chains is None else chains.find(block)

    # --- bringing it here ----------------------------------------------------------------------

    def transfer(
        self, namespace: Namespace, shard: int, chain: Chain, blocks: int, deadline: float
    ) -> Transfer:
        """Bring a chain here; what is on its way already goes on.

        Args:
            namespace: of the chain.
            shard: number of the shard.
            chain: as ``find`` said.
            blocks: how many leading blocks are wanted.
            deadline: until when, in seconds on the event loop's clock.
        """
        transfer = self._transfers.get((chain, shard))
        if transfer is not None and not transfer.over:
            transfer.want(blocks, deadline)
            return transfer
        transfer = Transfer(
            self._node,
            self._directory,
            self._owners,
            namespace,
            shard,
            chain,
            slots=self._slots,
            lookup_deadline=self._lookup_deadline,
            most_bytes=self._most_bytes,
        )
        transfer.want(blocks, deadline)
        if self._closed:
            transfer.over = True
            return transfer
        self._transfers[chain, shard] = transfer
        task = asyncio.get_running_loop().create_task(transfer.run())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, (chain, shard), transfer))
        return transfer

    def _ended(self, task: asyncio.Task[None], name: tuple[Chain, int], transfer: Transfer) -> None:
        self._tasks.discard(task)
        if self._transfers.get(name) is transfer:
            del self._transfers[name]

    def prefetch(self, namespace: Namespace, hashes: Sequence[bytes]) -> None:
        """Begin to bring a chain here, all its shards that have sessions here; nobody waits."""
        chain = self.find(namespace, hashes[-1]) if hashes else None
        deadline = asyncio.get_running_loop().time() + _AHEAD_SECONDS
        for shard in range(namespace.shards if chain is not None else 0):
            if len(self._transfers) >= _MOST_AHEAD:
                return
            if self._node.index.known_shard(namespace.fingerprint, shard) is not None:
                self.transfer(namespace, shard, chain, len(hashes), deadline)  # type: ignore[arg-type]

    # --- the end -------------------------------------------------------------------------------

    def _sweep(self) -> None:
        self._owners.sweep()
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep)

    async def close(self) -> None:
        """End all transfers; when this returns they have freed what they reserved."""
        self._closed = True
        self._sweeping.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._owners.close()
