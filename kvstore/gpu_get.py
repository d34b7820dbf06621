"""Finding the blocks of a get where they lie on a GPU, or else in DRAM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.entry import Entry, ShardIndex
from kvstore.fetch import Fetch
from kvstore.gpu_session import GpuSession
from kvstore.node import Node
from kvstore.protocol.messages import ABSENT, DRAM, HBM, Get, GetAnswer
from kvstore.reply import Handled, Reply


class HandOut(Protocol):
    """Answers a get with what was found, and returns at once."""

    def __call__(self, found: list[Entry], places: list[int], tiers: bytes, /) -> Handled:
        """Answer a get.

        Args:
            found: the blocks, pinned, without those that were missed; cut to what is answered.
            places: where each lies: on a GPU where its tier is HBM, else in DRAM.
            tiers: for each block asked for the code of its tier, 0 for a miss.
        """


class GpuGet:
    """Finds blocks of one shard for a process that reads some on GPUs.

    Args:
        node: where the blocks are.
        gpu: the session's part of its GPUs.
        shard: whose blocks.
        fetch: brings to DRAM what has to be brought.
    """

    def __init__(self, node: Node, gpu: GpuSession, shard: ShardIndex, fetch: Fetch) -> None:
        self._node = node
        self._gpu = gpu
        self._shard = shard
        self._fetch = fetch

    def get(self, request: Get, deadline: float, hand_out: HandOut) -> Handled:
        """Answer a get, at once where waiting would find no more.

        Args:
            request: what is wanted.
            deadline: seconds on the event loop's clock; what has not come by then is a miss.
            hand_out: makes the answer.
        """
        entries = self._node.index.lookup(self._shard, request.hashes)
        copies = self._gpu.places(entries)
        if None in entries and (request.wait or self._fetch.reaches(request.hashes)):
            return self._get_later(request, deadline, hand_out)
        found: list[Entry] = []
        places: list[int] = []
        for entry, copy in zip(entries, copies, strict=True):
            if entry is not None:
                place = entry.dram if copy is None else copy
                if place is None:
                    return self._get_later(request, deadline, hand_out)
                found.append(entry)
                places.append(place)
        self._node.pin(found)
        self._count_absent(request.hashes, entries)
        return self._answer(hand_out, found, places, _tiers(entries, copies))

    async def _get_later(self, request: Get, deadline: float, hand_out: HandOut) -> Reply:
        """Wait for what has to be brought to DRAM."""
        entries = self._node.index.lookup(self._shard, request.hashes)
        copies = self._gpu.places(entries)
        # Pinned as they are found, so that the copies stay while the others come.
        here = [
            entry
            for entry, copy in zip(entries, copies, strict=True)
            if entry is not None and copy is not None
        ]
        others = [at for at, copy in enumerate(copies) if copy is None]
        self._node.pin(here)
        try:
            got = await self._fetch.fetch(
                [request.hashes[at] for at in others], wait=request.wait, deadline=deadline
            )
        except BaseException:
            self._node.unpin(here)
            raise
        for reason in got.misses:
            self._node.metrics.miss(reason)
        tiers = bytearray([HBM]) * len(entries)
        for at, entry, tier in zip(others, got.entries, got.tiers, strict=True):
            entries[at], tiers[at] = entry, tier
        found = [entry for entry in entries if entry is not None]
        places: list[int] = [
            entry.dram if copy is None else copy  # type: ignore[misc]
            for entry, copy in zip(entries, copies, strict=True)
            if entry is not None
        ]
        return self._answer(hand_out, found, places, bytes(tiers))

    def _answer(
        self, hand_out: HandOut, found: list[Entry], places: list[int], tiers: bytes
    ) -> Reply:
        reply = hand_out(found, places, tiers)
        # The transport is shm, which never waits.
        assert isinstance(reply, Reply)
        assert isinstance(reply.answer, GetAnswer)
        self._gpu.handed_out(reply.answer, found)
        return reply

    def _count_absent(self, hashes: Sequence[bytes], entries: Sequence[Entry | None]) -> None:
        reserved, metrics = self._shard.reserved, self._node.metrics
        for block, entry in zip(hashes, entries, strict=True):
            if entry is None:
                metrics.miss("pending" if block in reserved else "absent")


def _tiers(entries: Sequence[Entry | None], copies: Sequence[int | None]) -> bytes:
    return bytes(
        ABSENT if entry is None else DRAM if copy is None else HBM
        for entry, copy in zip(entries, copies, strict=True)
    )
