"""What operators do to a node: pin, evict, flush and verify."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from kvstore.control.interface import (
    MAX_PAGE,
    BlockName,
    PinReport,
    Removal,
    VerifyProgress,
)
from kvstore.departures import DepartureReason
from kvstore.entry import IN_HBM, Entry
from kvstore.errors import InvalidRequest, OutOfSpace
from kvstore.gpus import Gpus
from kvstore.movement import Movement
from kvstore.node import Node
from tiers.errors import CorruptBlock, TierError

PINNABLE_SHARE: Final = 0.5
"""Share of the DRAM capacity that administrators may pin."""

_VERIFY_BATCH: Final = 8


@dataclass(slots=True)
class _Pin:
    entries: list[Entry]
    expires: float | None
    timer: asyncio.TimerHandle | None


class Administration:
    """The acting half of the control plane.

    Args:
        node: what is acted on.
        movement: moves blocks to SSD; None where there is no SSD.
    """

    def __init__(self, node: Node, movement: Movement | None) -> None:
        self._node = node
        self._movement = movement
        self._pins: dict[BlockName, _Pin] = {}

    def close(self) -> None:
        """End all pins."""
        for name in list(self._pins):
            self._end_pin(name)

    # --- pins ----------------------------------------------------------------------------------

    async def pin(self, namespace: bytes, hash: bytes, seconds: float | None) -> PinReport:
        """See ``ControlTarget.pin``."""
        name = BlockName(namespace, hash)
        entries = [entry for last in self._blocks(namespace, hash) for entry in last.path()]
        if not entries:
            raise InvalidRequest(f"the node does not hold block {hash.hex()}")
        size = _bytes(entries)
        others = sum(_bytes(pin.entries) for key, pin in self._pins.items() if key != name)
        if size + others > PINNABLE_SHARE * self._node.dram.capacity:
            raise OutOfSpace(
                f"{size} bytes more would pin over {PINNABLE_SHARE:.0%} of the DRAM tier"
            )
        self._node.pin(entries)
        self._end_pin(name)
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self._end_pin, name)
        expires = None if seconds is None else self._node.clock() + seconds
        self._pins[name] = _Pin(entries, expires, timer)
        return self._pin_report(name)

    def _blocks(self, namespace: bytes, hash: bytes) -> list[Entry]:
        return [
            entry for entry in self._node.index.find(hash) if entry.shard.namespace == namespace
        ]

    def _pin_report(self, name: BlockName) -> PinReport:
        pin = self._pins[name]
        left = None if pin.expires is None else max(pin.expires - self._node.clock(), 0.0)
        return PinReport(name.namespace, name.hash, len(pin.entries), _bytes(pin.entries), left)

    def _end_pin(self, name: BlockName) -> list[Entry]:
        pin = self._pins.pop(name, None)
        if pin is None:
            return []
        if pin.timer is not None:
            pin.timer.cancel()
        self._node.unpin(pin.entries)
        return pin.entries

    async def pins(self) -> Sequence[PinReport]:
        """See ``ControlTarget.pins``."""
        return [self._pin_report(name) for name in list(self._pins)[:MAX_PAGE]]

    async def unpin(self, namespace: bytes, hash: bytes) -> Removal:
        """See ``ControlTarget.unpin``."""
        entries = self._end_pin(BlockName(namespace, hash))
        return Removal(len(entries), _bytes(entries))

    # --- evict and flush -----------------------------------------------------------------------

    async def evict(self, namespace: bytes, hash: bytes | None) -> Removal:
        """See ``ControlTarget.evict``."""
        if hash is not None:
            entries = [one for top in self._blocks(namespace, hash) for one in top.subtree()]
        else:
            entries = [
                entry
                for shard in self._node.index.shards
                if shard.namespace == namespace
                for entry in shard.committed.values()
            ]
        return self._drop_all(entries, "dram")

    def _drop_all(self, entries: Sequence[Entry], tier: str) -> Removal:
        """Drop blocks, given parents first, but for those that are pinned or come before such."""
        blocks = size = 0
        for entry in reversed(entries):
            if entry.pins or entry.first_child is not None:
                continue
            lost_from = tier if entry.dram is not None else "ssd"
            blocks += self._node.drop(entry, lost_from, DepartureReason.ADMIN)
            size += entry.shard.block_bytes
        return Removal(blocks, size, kept=len(entries) - blocks)

    async def flush(self, tier: str) -> Removal:
        """See ``ControlTarget.flush``."""
        self._check_tier(tier)
        if tier == "ssd":
            return self._flush_ssd()
        if tier == "hbm" and self._node.gpus is not None:
            return self._flush_hbm(self._node.gpus)
        return await self._flush_dram()

    def _check_tier(self, tier: str | None) -> None:
        has = {"dram"}
        has |= {"ssd"} if self._node.ssd is not None else set()
        has |= {"hbm"} if self._node.gpus is not None else set()
        if tier is not None and tier not in has:
            raise InvalidRequest(f"this node has no {tier} tier")

    async def _flush_dram(self) -> Removal:
        moved = 0
        if self._movement is not None:
            moved = await self._movement.flush(float("inf"))
        resident = [entry for entry in self._committed() if entry.dram is not None]
        leaving = [entry for entry in resident if entry.ssd is not None and not entry.pins]
        for entry in leaving:
            self._node.evict(entry, DepartureReason.ADMIN)
        rest = [entry for entry in resident if entry.dram is not None]
        dropped = self._drop_all(rest, "dram")
        return Removal(
            len(leaving) + dropped.blocks, _bytes(leaving) + dropped.bytes, moved, dropped.kept
        )

    def _flush_ssd(self) -> Removal:
        resident = [entry for entry in self._committed() if entry.ssd is not None]
        dropped = self._drop_all([entry for entry in resident if entry.dram is None], "ssd")
        leaving = [entry for entry in resident if entry.dram is not None and not entry.pins]
        for entry in leaving:
            self._node.forget_ssd(entry, DepartureReason.ADMIN)
        kept = len(resident) - dropped.blocks - len(leaving)
        return Removal(dropped.blocks + len(leaving), dropped.bytes + _bytes(leaving), kept=kept)

    def _flush_hbm(self, gpus: Gpus) -> Removal:
        copied = [entry for entry in self._committed() if entry.state & IN_HBM]
        leaving = [entry for entry in copied if gpus.evict(entry, DepartureReason.ADMIN)]
        return Removal(len(leaving), _bytes(leaving), kept=len(copied) - len(leaving))

    def _committed(self) -> list[Entry]:
        """All committed blocks, every parent before its children: the order of their commits."""
        return [entry for shard in self._node.index.shards for entry in shard.committed.values()]

    # --- verify --------------------------------------------------------------------------------

    async def verify(
        self, namespace: bytes | None, tier: str | None
    ) -> AsyncIterator[VerifyProgress]:
        """See ``ControlTarget.verify``."""
        self._check_tier(tier)
        entries = [
            entry
            for entry in self._committed()
            if namespace in (None, entry.shard.namespace) and tier in (None, *entry.tiers)
        ]
        checked = size = corrupt = unreadable = left = 0
        for start in range(0, len(entries), _VERIFY_BATCH):
            batch = entries[start : start + _VERIFY_BATCH]
            found = await asyncio.gather(*(self._verify_one(entry, tier) for entry in batch))
            looked_at = [
                entry for entry, verdict in zip(batch, found, strict=True) if verdict != "gone"
            ]
            checked += len(looked_at)
            left += len(batch) - len(looked_at)
            size += _bytes(looked_at)
            names = tuple(
                BlockName(entry.shard.namespace, entry.hash)
                for entry, verdict in zip(batch, found, strict=True)
                if verdict == "corrupt"
            )
            corrupt += len(names)
            unreadable += found.count("unreadable")
            total = len(entries) - left
            yield VerifyProgress(checked, total, size, corrupt, unreadable, names)
        yield VerifyProgress(checked, checked, size, corrupt, unreadable, finished=True)

    async def _verify_one(self, entry: Entry, tier: str | None) -> str:
        """What is found of a block: ``gone`` where it has left the tier, or the node, meanwhile."""
        if entry.gone or tier not in (None, *entry.tiers):
            return "gone"
        self._node.pin((entry,))
        try:
            for name, verify in (
                ("ssd", self._verify_ssd),
                ("dram", self._verify_dram),
                ("hbm", self._verify_hbm),
            ):
                verdict = await verify(entry) if tier in (None, name) else "sound"
                if verdict == "corrupt" and self._node.holds(entry):
                    self._node.drop(entry, name, DepartureReason.CORRUPT)
                if verdict != "sound":
                    return verdict
        finally:
            self._node.unpin((entry,))
        return "sound"

    async def _verify_ssd(self, entry: Entry) -> str:
        """Check the copy on the SSD of a pinned block."""
        ssd = self._node.ssd
        while ssd is not None and (extent := entry.ssd) is not None:
            verdict = "sound"
            try:
                await asyncio.to_thread(ssd.verify, extent)
            except CorruptBlock:
                verdict = "corrupt"
            except TierError:
                verdict = "unreadable"
            if entry.ssd == extent:
                return verdict
            # Reclaim has moved the block to another region meanwhile.
        return "sound"

    async def _verify_dram(self, entry: Entry) -> str:
        """Check the copy in memory of a pinned block, where its checksum is known."""
        expected, extent = self._node.checksum(entry), entry.dram
        if expected is None or extent is None:
            return "sound"
        view = self._node.dram.view(extent, entry.shard.block_bytes)
        return "sound" if await asyncio.to_thread(crc32c, view) == expected else "corrupt"

    async def _verify_hbm(self, entry: Entry) -> str:
        """Check the copy on a GPU of a pinned block, where its checksum is known."""
        expected, gpus = self._node.checksum(entry), self._node.gpus
        if expected is None or gpus is None or not entry.state & IN_HBM:
            return "sound"
        try:
            found = await asyncio.to_thread(gpus.read, entry)
        except TierError:
            return "unreadable"
        if found is None or await asyncio.to_thread(crc32c, found) == expected:
            return "sound"
        return "corrupt"


def _bytes(entries: Iterable[Entry]) -> int:
    return sum(entry.shard.block_bytes for entry in entries)
