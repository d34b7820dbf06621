"""The SSD tier on a real file: contract, restart, making room, sealing, sizes."""

from __future__ import annotations

import mmap
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from tests.tiers.faulty_device import MemoryDevice
from tests.tiers.tier_contract import BLOCK, TierContract, payload, record
from tiers.errors import BadExtent, CorruptBlock, MediumFailed, TierConfigError
from tiers.ssd import Device, SsdTier
from tiers.ssd import format as fmt
from tiers.ssd.format import PAGE, record_pages
from tiers.ssd.region import Region, extent_page
from tiers.ssd.space import Space
from tiers.tier import Extent, Tier

REGION = 256 << 10
CAPACITY = 4 << 20
PER_REGION = (REGION // PAGE - 3) // record_pages(BLOCK)


def make(directory: Path, capacity: int = CAPACITY, device: Device | None = None) -> SsdTier:
    return SsdTier(directory, capacity, region_bytes=REGION, device=device)


def put(tier: Tier, *seeds: int, size: int = BLOCK) -> list[Extent]:
    extents = [tier.store(record(seed, size), payload(seed, size), seed) for seed in seeds]
    return [extent for extent in extents if extent is not None]


def get(tier: Tier, extent: Extent, size: int = BLOCK) -> bytes:
    into = bytearray(size)
    tier.load(extent, memoryview(into))
    return bytes(into)


def found(tier: SsdTier) -> list[int]:
    """Seeds of the blocks that a start has found; their bytes are checked."""
    seeds = {record(seed).hash: seed for seed in range(1000)}
    result = []
    for one, extent in tier.recovered():
        seed = seeds[one.hash]
        assert one == record(seed, one.size)
        assert get(tier, extent, one.size) == payload(seed, one.size)
        tier.set_tag(extent, seed)
        result.append(seed)
    return result


class TestSsdTier(TierContract):
    def make(self, directory: Path) -> Tier:
        return make(directory)

    def make_room(self, tier: Tier) -> None:
        assert isinstance(tier, SsdTier)
        while (region := tier.victim()) is not None and not tier.residents(region):
            tier.reclaim(region)


class TestRestart:
    def test_after_a_seal_reads_summaries_and_no_payload(self, tmp_path: Path) -> None:
        device = CountingDevice()
        with make(tmp_path, device=device) as tier:
            put(tier, *range(40))
            tier.seal()
        device.read_bytes = 0
        with make(tmp_path, device=device) as tier:
            assert device.read_bytes < 40 * BLOCK // 4
            statistics = tier.statistics()
            assert (statistics.recovered, statistics.scanned) == (40, 0)
            assert found(tier) == list(range(40))

    def test_after_a_kill_scans_the_region_that_was_open(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            put(tier, *range(40))
        with make(tmp_path) as tier:
            assert tier.statistics().scanned == 1
            assert found(tier) == list(range(40))
        with make(tmp_path) as tier:
            assert found(tier) == list(range(40))

    def test_writes_on_in_the_region_that_was_open(self, tmp_path: Path) -> None:
        for start in range(6):
            with make(tmp_path) as tier:
                assert tier.free_regions == tier.statistics().regions - (start > 0)
                assert found(tier) == list(range(start))
                put(tier, start)
                if start % 2:
                    tier.seal()

    def test_what_was_freed_stays_away_after_a_seal(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            extents = put(tier, *range(30))
            for extent in extents[::2]:
                tier.free(extent)
            tier.seal()
            for extent in extents[1::4]:
                tier.free(extent)
            tier.seal()
        with make(tmp_path) as tier:
            assert found(tier) == list(range(3, 30, 4))

    def test_what_was_reclaimed_stays_away_after_a_kill(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            extents = dict(enumerate(put(tier, *range(3 * PER_REGION))))
            victim = tier.victim()
            assert victim is not None
            gone = [seed for seed in tier.residents(victim) if isinstance(seed, int)]
            for seed in gone:
                tier.free(extents[seed])
            tier.reclaim(victim)
        with make(tmp_path) as tier:
            assert gone == list(range(PER_REGION))
            assert found(tier) == list(range(PER_REGION, 3 * PER_REGION))

    def test_a_damaged_summary_is_not_replaced_by_an_empty_one(self, tmp_path: Path) -> None:
        device = MemoryDevice()
        with make(tmp_path, device=device) as tier:
            extents = put(tier, *range(PER_REGION + 1))
            device.image[PAGE + REGION - 1 - PAGE + 8] ^= 1
            tier.free(extents[0])
            tier.seal()
            assert tier.statistics().unsummarised == 1
        with make(tmp_path, device=device) as tier:
            assert found(tier) == list(range(PER_REGION + 1))

    def test_sealed_blocks_survive_a_power_cut(self, tmp_path: Path) -> None:
        device = MemoryDevice()
        with make(tmp_path, device=device) as tier:
            put(tier, *range(20))
            tier.seal()
            put(tier, *range(20, 25))
        device.lose_power(random.Random(1))
        with make(tmp_path, device=device) as tier:
            assert set(found(tier)) >= set(range(20))

    def test_of_blocks_gone_through_nothing_is_kept(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            put(tier, 1, 2)
        with make(tmp_path) as tier:
            assert found(tier) == [1, 2]
            assert found(tier) == []
            assert tier.statistics().blocks == 2


class TestMakingRoom:
    def test_the_victim_has_the_fewest_live_bytes_then_is_the_oldest(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            assert tier.victim() is None
            extents = put(tier, *range(4 * PER_REGION))
            assert tier.victim() == 0
            tier.free(extents[PER_REGION])
            assert tier.victim() == 1
            tier.free(extents[0])
            assert tier.victim() == 0

    def test_a_region_in_use_is_not_reclaimed(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            put(tier, *range(PER_REGION + 1))
            assert tier.residents(0) == list(range(PER_REGION))
            for region in (0, 1, 2):
                with pytest.raises(ValueError, match=f"region {region} is"):
                    tier.reclaim(region)
            assert tier.statistics().blocks == PER_REGION + 1

    def test_pressure_grows_to_one(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            assert tier.pressure() == 0
            seed = 0
            while put(tier, seed):
                seed += 1
            assert tier.pressure() == 1
            assert tier.free_regions == 0
            assert put(tier, seed) == []

    def test_stale_extents_of_a_reclaimed_region_are_refused(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            extents = put(tier, *range(PER_REGION + 1))
            for extent in extents[:-1]:
                tier.free(extent)
            tier.reclaim(0)
            for extent in extents[:-1]:
                with pytest.raises(BadExtent):
                    get(tier, extent)

    def test_stale_extents_do_not_give_the_blocks_that_took_their_place(
        self, tmp_path: Path
    ) -> None:
        with make(tmp_path, 3 * REGION) as tier:
            stale = put(tier, *range(PER_REGION + 1))
            for extent in stale[:-1]:
                tier.free(extent)
            tier.reclaim(0)
            fresh = put(tier, *range(100, 100 + 2 * PER_REGION - 1))
            assert {extent_page(e) for e in stale} < {extent_page(e) for e in fresh} | {
                extent_page(stale[-1])
            }
            for extent in stale[:-1]:
                with pytest.raises(BadExtent):
                    get(tier, extent)
                with pytest.raises(BadExtent):
                    tier.free(extent)


class TestBlocks:
    def test_tells_a_blocks_names_and_checksum(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            (extent,) = put(tier, 5)
            assert tier.record(extent) == record(5)
            first = tier.checksum(extent)
        with make(tmp_path) as tier:
            assert tier.checksum(extent) == first

    def test_aligned_memory_is_read_and_written_in_place(self, tmp_path: Path) -> None:
        device = CountingDevice()
        memory = memoryview(mmap.mmap(-1, 4 * PAGE))
        memory[:] = payload(1)
        with make(tmp_path, device=device) as tier:
            extent = tier.store(record(1), memory, 1)
            assert extent is not None
            assert [len(view) for view in device.last] == [PAGE, 4 * PAGE]
            assert device.last[1].obj is memory.obj
            tier.load(extent, memory)
            assert device.last[1].obj is memory.obj
            assert memory == payload(1)

    def test_a_misplaced_record_is_not_taken_for_the_right_one(self, tmp_path: Path) -> None:
        device = MemoryDevice()
        with make(tmp_path, device=device) as tier:
            first, second = put(tier, 1, 2)
            to, start = extent_page(first) * PAGE, extent_page(second) * PAGE
            length = record_pages(BLOCK) * PAGE
            moved = device.image[start : start + length]
            device.image[to : to + length] = moved
            for check in (tier.verify, tier.record):
                with pytest.raises(CorruptBlock, match="header"):
                    check(first)
            assert tier.statistics().corrupt == 2
            assert get(tier, second) == payload(2)

    def test_a_damaged_payload_is_noticed_in_partial_reads_too(self, tmp_path: Path) -> None:
        device = MemoryDevice()
        with make(tmp_path, device=device) as tier:
            (extent,) = put(tier, 1)
            device.image[(extent_page(extent) + 4) * PAGE + 9] ^= 4
            into = memoryview(bytearray(100))
            with pytest.raises(CorruptBlock, match="payload"):
                tier.load(extent, into, 50)
            assert into == bytes(100)

    def test_refuses_what_is_no_block(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            with pytest.raises(ValueError, match="10 bytes for a block of"):
                tier.store(record(1), bytes(10), 1)
            with pytest.raises(ValueError, match="0 bytes"):
                tier.store(record(1, 0), b"", 1)
            with pytest.raises(ValueError, match="contiguous"):
                tier.store(record(1, 5), memoryview(bytes(10))[::2], 1)
            with pytest.raises(TierConfigError, match="raise the region size"):
                put(tier, 1, size=REGION)
            assert tier.statistics().blocks == 0

    def test_when_closed_everything_fails_softly(self, tmp_path: Path) -> None:
        tier = make(tmp_path)
        with tier:
            (extent,) = put(tier, 1)
        for call in (lambda: put(tier, 2), lambda: get(tier, extent), tier.seal):
            with pytest.raises(MediumFailed, match="closed"):
                call()


class TestSizes:
    def test_the_files_never_take_more_than_the_capacity(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            seed = 0
            while put(tier, seed, size=1 + seed * 997 % 20_000):
                seed += 1
            os.sync()
            taken = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
            assert tier.statistics().occupied <= taken <= CAPACITY
            assert taken > CAPACITY * 0.9

    def test_shrinks_and_grows_with_the_capacity(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            put(tier, *range(5 * PER_REGION))
            tier.seal()
        with make(tmp_path, CAPACITY // 2) as tier:
            assert tier.statistics().occupied <= CAPACITY // 2
            assert found(tier) == list(range(5 * PER_REGION))
        with make(tmp_path, 3 * REGION) as tier:
            assert found(tier) == list(range(2 * PER_REGION))
        with make(tmp_path) as tier:
            assert found(tier) == list(range(2 * PER_REGION))
            assert tier.statistics().regions == 15
            put(tier, *range(100, 150))
        with make(tmp_path) as tier:
            assert len(found(tier)) == 2 * PER_REGION + 50

    @pytest.mark.parametrize("change", ["region size", "version", "garbage", "empty"])
    def test_starts_empty_where_it_can_not_keep_the_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        with make(tmp_path) as tier:
            put(tier, *range(10))
        if change == "version":
            monkeypatch.setattr(fmt, "FORMAT_VERSION", fmt.FORMAT_VERSION + 1)
        if change == "garbage":
            (tmp_path / "regions").write_bytes(os.urandom(3 * CAPACITY))
        if change == "empty":
            (tmp_path / "regions").write_bytes(b"")
        region = 2 * REGION if change == "region size" else REGION
        for expected in ([], [1, 2, 3]):
            with SsdTier(tmp_path, CAPACITY, region_bytes=region) as tier:
                assert found(tier) == expected
                assert tier.statistics().occupied <= CAPACITY
                if not expected:
                    put(tier, 1, 2, 3)

    def test_says_when_the_file_system_is_too_small(self, tmp_path: Path) -> None:
        tier = make(tmp_path, 8 << 40)
        with pytest.raises(TierConfigError, match=r"needs [\d.]+ GiB .* has room for [\d.]+ GiB"):
            tier.open()
        assert (tmp_path / "regions").stat().st_size == 0
        with make(tmp_path):
            pass

    def test_growing_beyond_the_file_system_loses_nothing(self, tmp_path: Path) -> None:
        with make(tmp_path) as tier:
            put(tier, 1, 2)
        with pytest.raises(TierConfigError, match="room for"):
            make(tmp_path, 8 << 40).open()
        with make(tmp_path) as tier:
            assert found(tier) == [1, 2]

    def test_a_cut_file_on_a_full_disk_serves_what_is_left(self, tmp_path: Path) -> None:
        device = MemoryDevice()
        with make(tmp_path, device=device) as tier:
            put(tier, *range(3 * PER_REGION))
        del device.image[2 * REGION + 100 :]
        device.limit = len(device.image)
        with make(tmp_path, device=device) as tier:
            assert tier.statistics().regions == 1
            assert found(tier) == list(range(PER_REGION))
            assert put(tier, 500) == []

    @pytest.mark.parametrize(
        ("capacity", "region", "depth", "message"),
        [
            (100 << 10, REGION, 1, "holds no region"),
            (CAPACITY, 100_000, 1, "multiple of 4096"),
            (CAPACITY, 4 * PAGE, 1, "from 20480"),
            (1 << 40, 1 << 33, 1, "to 4294967296"),
            (1 << 60, REGION, 1, "at most 17592186044416"),
            (CAPACITY, REGION, 0, "queue depth"),
        ],
    )
    def test_refuses_impossible_settings(
        self, tmp_path: Path, capacity: int, region: int, depth: int, message: str
    ) -> None:
        with pytest.raises(TierConfigError, match=message):
            SsdTier(tmp_path, capacity, region_bytes=region, queue_depth=depth)

    def test_says_when_the_directory_can_not_be_used(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(TierConfigError, match="ssd directory"):
            make(tmp_path / "file").open()

    def test_needs_little_memory_for_a_block(self) -> None:
        blocks, pages = 20_000, 1 << 16
        one = record(1, PAGE)
        tags = [object()] * blocks
        tracemalloc.start()
        space = Space(blocks * 2 // pages + 2, pages)
        for tag in tags:
            while (slot := space.allocate(one, 1)) is None:
                region = space.take_free()
                assert isinstance(region, Region)
                space.install(region, 7, 1)
            space.commit(slot, tag)
        space.close_region()
        for region in space.due():
            space.sealed(region, summarised=True)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert space.blocks == blocks
        assert used / blocks < 40


class CountingDevice(MemoryDevice):
    """Remembers how much was read, and what the last transfer was from or to."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        self.last: list[memoryview] = []

    def read(self, into, offset):  # type: ignore[no-untyped-def]
        super().read(into, offset)
        self.read_bytes += sum(map(len, into))
        self.last = list(into)

    def write(self, data, offset):  # type: ignore[no-untyped-def]
        super().write(data, offset)
        self.last = list(data)
