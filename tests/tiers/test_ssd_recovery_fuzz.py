"""Whatever happens to the medium, the SSD tier starts and never gives a wrong byte.

A state machine drives a tier on a disk in memory: blocks are stored, freed, reclaimed, sealed;
writes fail or tear; the process dies at any write; the power goes, with what was not synced; bits
flip and the file is cut. After every restart, what the tier found is compared with what was stored.
"""

from __future__ import annotations

import errno
import hashlib
import random
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tiers.faulty_device import Fault, FaultyDevice, MemoryDevice, PowerCut
from tiers.errors import CorruptBlock, MediumFailed
from tiers.ssd import SsdTier
from tiers.ssd.format import PAGE, decode_record, record_pages
from tiers.ssd.region import extent_page
from tiers.tier import Extent, Record

REGION_PAGES = 16
REGIONS = 5
CAPACITY = (64 << 10) + 2 * PAGE + REGIONS * REGION_PAGES * PAGE
NAMESPACES = [hashlib.sha256(name).digest() for name in (b"one", b"two")]

sizes = st.one_of(st.integers(1, 3 * PAGE), st.sampled_from([PAGE, 2 * PAGE, 4 * PAGE, 9 * PAGE]))


@dataclass
class Block:
    record: Record
    payload: bytes
    syncs: int


class SsdMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.disk = MemoryDevice()
        self.device = FaultyDevice(self.disk)
        self.held: dict[Extent, Block] = {}
        self.payloads: dict[bytes, bytes] = {}
        self.reclaimed: set[bytes] = set()
        self.struck_heads: set[int] = set()
        self.suspect: set[Extent] = set()
        self.damaged = False
        self.seed = 0
        self.regions = REGIONS

    @initialize()
    def start(self) -> None:
        self.open()

    def open(self) -> None:
        capacity = CAPACITY - (REGIONS - self.regions) * REGION_PAGES * PAGE
        self.tier = SsdTier(
            self.directory,
            capacity,
            region_bytes=REGION_PAGES * PAGE,
            queue_depth=1,
            device=self.device,
        )
        self.tier.open()

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)

    # --- what the caller does -------------------------------------------------------------

    def new_block(self, size: int, imitation: bool) -> tuple[Record, bytes]:
        self.seed += 1
        name = hashlib.sha256(b"%d" % self.seed).digest()
        payload = random.Random(self.seed).randbytes(size)
        if imitation:
            # Stale headers and summaries in a payload must not be taken for real ones.
            start = random.Random(self.seed).randrange(0, max(1, self.disk.size - size), PAGE)
            payload = bytes(self.disk.image[start : start + size]).ljust(size, b"\0")
        self.payloads[name] = payload
        namespace = NAMESPACES[self.seed % 2]
        return Record(namespace, self.seed % 3, name, bytes(32), size), payload

    def put(self, size: int, imitation: bool = False) -> None:
        record, payload = self.new_block(size, imitation)
        extent = self.tier.store(record, payload, record.hash)
        if extent is not None:
            assert extent not in self.held
            self.held[extent] = Block(record, payload, self.disk.syncs)

    @rule(size=sizes, imitation=st.booleans())
    def store(self, size: int, imitation: bool) -> None:
        self.put(size, imitation)

    @rule(size=st.lists(sizes, min_size=3, max_size=8))
    def store_many(self, size: list[int]) -> None:
        for one in size:
            self.put(one)

    @rule(pick=st.integers(0, 1 << 16))
    @precondition(lambda self: self.held)
    def free(self, pick: int) -> None:
        extent = sorted(self.held, key=extent_page)[pick % len(self.held)]
        self.tier.free(extent)
        del self.held[extent]

    @rule()
    def reclaim(self) -> None:
        region = self.tier.victim()
        if region is None:
            return
        names = set(self.tier.residents(region))
        for extent in [e for e, block in self.held.items() if block.record.hash in names]:
            self.tier.free(extent)
            del self.held[extent]
        on_medium = self.names_in(region)
        self.tier.reclaim(region)
        self.reclaimed |= on_medium

    def names_in(self, region: int) -> set[bytes]:
        names = set()
        for page in range(1 + region * REGION_PAGES, 1 + (region + 1) * REGION_PAGES):
            found = decode_record(self.disk.image[page * PAGE : (page + 1) * PAGE])
            if found is not None and found[0].page == page:
                names.add(found[0].record.hash)
        return names

    @rule()
    def seal(self) -> None:
        self.tier.seal()

    # --- what the medium does -------------------------------------------------------------

    @rule(
        size=sizes,
        torn=st.integers(0, 10 * PAGE),
        error=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EINVAL]),
    )
    def fail_a_write(self, size: int, torn: int, error: int) -> None:
        self.device.faults = [Fault("write", error, times=1, torn=torn)]
        try:
            self.put(size)
        except MediumFailed as failure:
            assert isinstance(failure.__cause__, OSError)
        self.device.faults = []

    @rule(after=st.integers(0, 6), torn=st.integers(0, 10 * PAGE), then=st.integers(0, 3))
    def die_at_a_write(self, after: int, torn: int, then: int) -> None:
        """Also while sealing, reclaiming, or recovering from the death before."""
        self.device.faults = [Fault("write", after=after, torn=torn, cut=True)]
        try:
            for step in (self.reclaim, self.seal, self.reopen, self.seal)[then:]:
                for _ in range(3):
                    self.put(PAGE + 100)
                step()
        except PowerCut:
            assert self.device.off
        self.device.faults = []
        self.restart()

    @rule()
    def reopen(self) -> None:
        self.tier.seal()
        held = set(self.held)
        exact = not self.damaged and not self.tier.statistics().unsummarised
        self.restart()
        assert not exact or set(self.held) == held

    @rule()
    def kill(self) -> None:
        self.restart()

    @rule(regions=st.integers(2, REGIONS))
    def change_the_capacity(self, regions: int) -> None:
        self.regions = regions
        self.restart(self.touching(1 + regions * REGION_PAGES, 1 << 32))

    def touching(self, first: int, end: int) -> set[Extent]:
        """Blocks that have a page in this range."""
        return {
            extent
            for extent, block in self.held.items()
            if extent_page(extent) < end
            and first < extent_page(extent) + record_pages(block.record.size)
        }

    # --- what must hold -------------------------------------------------------------------

    def restart(self, may_be_lost: Collection[Extent] = ()) -> None:
        may_be_lost = self.suspect.union(may_be_lost)
        self.suspect.clear()
        self.tier.close()
        self.open()
        found: dict[Extent, Block] = {}
        for record, extent in self.tier.recovered():
            assert extent not in found
            payload = self.payloads[record.hash]
            assert record.hash not in self.reclaimed
            assert len(payload) == record.size
            found[extent] = Block(record, payload, self.held_syncs(extent))
            self.tier.set_tag(extent, record.hash)
        for extent, block in list(found.items()):
            if not self.is_sound(extent, block):
                assert self.damaged
                assert extent in may_be_lost or extent not in self.held
                self.tier.free(extent)
                del found[extent]
        for extent, block in self.held.items():
            if extent not in may_be_lost:
                assert found[extent].record == block.record
        self.held = found

    def held_syncs(self, extent: Extent) -> int:
        return self.held[extent].syncs if extent in self.held else self.disk.syncs

    def is_sound(self, extent: Extent, block: Block) -> bool:
        into = bytearray(block.record.size)
        try:
            self.tier.load(extent, memoryview(into))
        except (CorruptBlock, MediumFailed):
            return False
        assert into == block.payload
        return True

    @invariant()
    def counts(self) -> None:
        statistics = self.tier.statistics()
        assert statistics.blocks == len(self.held)
        assert statistics.used == sum(block.record.size for block in self.held.values())
        assert sum(len(self.tier.residents(n)) for n in range(self.regions)) == len(self.held)
        assert statistics.used + statistics.lost <= statistics.capacity
        assert statistics.free >= 0
        assert self.disk.size <= self.tier.capacity

    @invariant()
    def gives_the_right_bytes(self) -> None:
        extent = max(self.held, key=extent_page, default=None)
        if extent is not None and extent not in self.suspect:
            assert self.is_sound(extent, self.held[extent])


class DamagedSsdMachine(SsdMachine):
    """The same, on a disk that does not keep what it was given."""

    @rule(seed=st.integers(0, 1 << 32))
    def lose_power(self, seed: int) -> None:
        self.damaged = True
        self.disk.lose_power(random.Random(seed))
        lasting = self.disk.syncs
        # What was being written may be lost; a name that was stored since may also be back.
        self.restart({e for e, block in self.held.items() if block.syncs == lasting})

    @rule(
        where=st.sampled_from(["anywhere", "superblock", "head", "footer", "entries", "header"]),
        number=st.integers(0, (1 << 32) - 1),
        then=st.sampled_from(["go on", "restart", "seal and restart"]),
    )
    def flip_a_bit(self, where: str, number: int, then: str) -> None:
        bit = self.place(where, number)
        page = bit // (8 * PAGE)
        if page == 0 or (page - 1) % REGION_PAGES == 0:
            if page in self.struck_heads:
                return
            self.struck_heads.add(page)
        self.damaged = True
        self.disk.image[bit // 8] ^= 1 << bit % 8
        self.suspect |= self.touching(page, page + 1)
        if then == "seal and restart":
            self.tier.seal()
        if then != "go on":
            self.restart()

    def place(self, where: str, number: int) -> int:
        """A bit of the file, in this kind of structure."""
        page, bit = divmod(number % (8 * self.disk.size), 8 * PAGE)
        head = 1 + page % self.regions * REGION_PAGES
        headers = sorted(map(extent_page, self.held)) or [page]
        page, length = {
            "anywhere": (page, PAGE),
            "superblock": (0, 52),
            "head": (head, 60),
            "footer": (head + REGION_PAGES - 1, 52),
            "entries": (head + REGION_PAGES - 2, 256),
            "header": (headers[number % len(headers)], 160),
        }[where]
        return 8 * PAGE * page + bit % (8 * length)

    @rule(byte=st.integers(0, (1 << 32) - 1), seal=st.booleans())
    def cut_the_file(self, byte: int, seal: bool) -> None:
        if seal:
            self.tier.seal()
        end = byte % self.disk.size
        self.damaged = True
        del self.disk.image[end:]
        lost = set(self.held) if end < PAGE else self.touching(end // PAGE, 1 << 32)
        self.restart(lost)

    @rule(pages=st.integers(1, 3), start=st.integers(0, 1 << 16))
    def cannot_read(self, pages: int, start: int) -> None:
        first = 1 + start % (REGIONS * REGION_PAGES)
        if any((page - 1) % REGION_PAGES == 0 for page in range(first, first + pages)):
            return
        span = range(first * PAGE, (first + pages) * PAGE)
        self.damaged = True
        self.device.faults = [Fault("read", where=lambda offset: offset in span)]
        self.restart(self.touching(first, first + pages))
        self.device.faults = []


TestSsdRecovery = SsdMachine.TestCase
TestSsdRecoveryFromDamage = DamagedSsdMachine.TestCase
TestSsdRecovery.settings = settings(stateful_step_count=30)
TestSsdRecoveryFromDamage.settings = settings(stateful_step_count=30)
