"""A node with stand-ins for GPUs, for tests of its HBM tier."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from kvstore.catalog import Catalog
from kvstore.departures import Departures
from kvstore.entry import Entry, ShardIndex
from kvstore.gpus import OFFSET_BITS, SEGMENT_BITS, Gpus
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.index import Index
from kvstore.metrics import Metrics
from kvstore.node import Node
from tests.tiers.cpu_device import CpuDevice
from tiers.dram import DramTier
from tiers.hbm import HbmTier
from tiers.policies import make_policy

BLOCK = 4096
HBM_SEGMENT = 8 * BLOCK
SEGMENT = 16 * BLOCK


class Card(CpuDevice):
    """One of several GPUs of a process, which share what is pinned."""

    def __init__(self, number: int, total: int = 1 << 20) -> None:
        super().__init__(total)
        self.number = number

    def uuid(self) -> bytes:
        return bytes([self.number + 1]) * 16


def cards(count: int) -> list[Card]:
    made = [Card(number) for number in range(count)]
    for card in made:
        card.registered = made[0].registered
    return made


class Below:
    """As much of an SSD tier as a node needs to let blocks go: counts what it holds."""

    def __init__(self) -> None:
        self.extents: set[int] = set()
        self._numbers = itertools.count(1)

    def store(self) -> int:
        extent = next(self._numbers)
        self.extents.add(extent)
        return extent

    def free(self, extent: int) -> None:
        self.extents.remove(extent)

    def checksum(self, extent: int) -> int | None:
        return None


def content(entry: Entry) -> bytes:
    return entry.hash * (entry.shard.block_bytes // len(entry.hash))


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Let the event loop go on until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.001)


def namespace(tenant: str, block_bytes: int = BLOCK) -> Namespace:
    return Namespace("m", "float32", "test", 16, block_bytes, tenant=tenant)


class GpuNode:
    """A node with the given GPUs, whose blocks hold what `content` says.

    Args:
        devices: the GPUs.
        segments: of each, of `hbm_segment` bytes.
        policy: of the HBM tier.
        promote_after: see `Gpus`.
        dram_segments: of `SEGMENT` bytes.
    """

    def __init__(
        self,
        devices: Sequence[Card],
        segments: int = 2,
        policy: str = "lru",
        promote_after: int = 2,
        hbm_segment: int = HBM_SEGMENT,
        dram_segments: int = 2,
    ) -> None:
        self.devices = devices
        self.below = Below()
        self.dram = DramTier(dram_segments * SEGMENT, segment_bytes=SEGMENT, prefault=False)
        self.dram.open()
        self.tiers = [
            HbmTier(
                segments * hbm_segment,
                device=device,
                segment_bytes=hbm_segment,
                lanes=1,
                buffer_bytes=BLOCK,
            )
            for device in devices
        ]
        for tier in self.tiers:
            tier.open()
        self.node = Node(
            index=Index(make_policy("lru", 32)),
            dram=self.dram,
            ssd=self.below,  # type: ignore[arg-type]
            catalog=Catalog(None),
            departures=Departures(1000),
            metrics=Metrics(),
            clock=iter(range(10**9)).__next__,  # type: ignore[arg-type]
        )
        self.gpus = Gpus(
            self.node.index,
            self.tiers,
            [make_policy(policy, 16) for _ in devices],
            self.node.metrics,
            promote_after=promote_after,
        )
        self.node.gpus = self.gpus

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
        self.dram.close()

    def shard(self, tenant: str, block_bytes: int = BLOCK) -> ShardIndex:
        return self.node.shard(namespace(tenant, block_bytes), 0)

    def put(
        self, shard: ShardIndex, hashes: Sequence[bytes], parent: bytes = ROOT_PARENT
    ) -> list[Entry]:
        """Store a chain, as far as there is room; what is held of it then."""
        assert shard.tenant is not None
        _, reservation = self.node.reserve(
            shard, shard.tenant, parent, hashes, number=1, most=len(hashes)
        )
        if reservation is not None:
            for entry in reservation.blocks.values():
                assert entry.dram is not None
                self.dram.view(entry.dram, shard.block_bytes)[:] = content(entry)
            self.node.commit(reservation, list(reservation.blocks))
        return [shard.committed[one] for one in hashes if one in shard.committed]

    def copy_down(self, entry: Entry) -> None:
        """Give a block a copy on the SSD."""
        self.node.index.place(entry, "ssd", self.below.store())

    def at(self, place: int, size: int) -> bytes:
        """What lies at a place as the wire says it."""
        number, offset = place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)
        gpu, segment = number >> SEGMENT_BITS, number & ((1 << SEGMENT_BITS) - 1)
        address = self.tiers[gpu].segment(segment).address
        return self.devices[gpu].read(address + offset, size)
