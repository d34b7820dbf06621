"""The DRAM tier: the contract, alignment, tenants, growing and shrinking."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.tier_contract import TierContract
from tiers import BadExtent, DramTier, Tier, TierConfigError

KIB = 1 << 10
MIB = 1 << 20


class TestContract(TierContract):
    def make(self, directory: Path) -> Tier:
        return DramTier(2 * MIB, segment_bytes=256 * KIB)


@pytest.fixture
def tier() -> Iterator[DramTier]:
    with DramTier(MIB, segment_bytes=256 * KIB, prefault=False) as tier:
        yield tier


def fill(tier: DramTier, owner: str, size: int) -> list[int]:
    extents: list[int] = []
    while (extent := tier.reserve(owner, size, (owner, size, len(extents)))) is not None:
        extents.append(extent)
    return extents


def test_a_view_is_the_memory_itself(tier: DramTier) -> None:
    extent = tier.reserve("a", 8192, None)
    assert extent is not None
    tier.view(extent, 8192)[:] = b"k" * 8192
    assert tier.view(extent, 8192) == b"k" * 8192
    number, offset = tier.locate(extent)
    assert tier.segment(number).view[offset : offset + 8192] == b"k" * 8192


@pytest.mark.parametrize(("size", "alignment"), [(100, 64), (64, 64), (4096, 4096), (12288, 4096)])
def test_blocks_are_aligned(tier: DramTier, size: int, alignment: int) -> None:
    for extent in fill(tier, "a", size):
        number, offset = tier.locate(extent)
        assert (tier.segment(number).address + offset) % alignment == 0


def test_tags_come_back(tier: DramTier) -> None:
    extent = tier.reserve("a", 4096, "first")
    assert extent is not None
    assert tier.tag(extent) == "first"
    tier.retag(extent, "second")
    assert tier.tag(extent) == "second"
    tier.free(extent)
    with pytest.raises(BadExtent):
        tier.tag(extent)
    with pytest.raises(BadExtent):
        tier.retag(extent, "third")


@pytest.mark.parametrize("capacity", [MIB, MIB + 1, MIB + 100 * KIB, 300 * KIB, 4096])
def test_capacity_is_used_up_and_never_exceeded(capacity: int) -> None:
    with DramTier(capacity, segment_bytes=256 * KIB, prefault=False) as tier:
        assert tier.capacity == capacity
        assert sum(segment.size for segment in tier.segments()) <= capacity
        assert len(fill(tier, "a", 4096)) == capacity // 4096
        counted = tier.statistics()
        assert counted.used + counted.free + counted.lost == capacity
        assert counted.free == 0


def test_a_block_larger_than_a_segment_never_finds_room(tier: DramTier) -> None:
    assert tier.largest_block == 256 * KIB
    assert tier.reserve("a", 256 * KIB + 1, None) is None
    assert tier.crowding("a", 256 * KIB + 1) == []
    assert tier.reserve("a", 256 * KIB, None) is not None


def test_a_block_of_no_bytes_is_the_callers_mistake(tier: DramTier) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        tier.reserve("a", 0, None)


@pytest.mark.parametrize(
    ("capacity", "segment"), [(0, 4096), (4095, 4096), (MIB, 0), (MIB, 5000), (MIB, 1 << 44)]
)
def test_impossible_sizes_are_refused(capacity: int, segment: int) -> None:
    with pytest.raises(TierConfigError):
        DramTier(capacity, segment_bytes=segment)


def test_a_tenant_never_sees_another_tenants_bytes(tier: DramTier) -> None:
    secrets = fill(tier, "a", 4096)
    for extent in secrets:
        tier.view(extent, 4096)[:] = b"secret!!" * 512
    numbers = {tier.locate(extent)[0] for extent in secrets}
    assert fill(tier, "b", 4096) == []
    for extent in secrets:
        tier.free(extent)
    taken = fill(tier, "b", 8192)
    assert len(taken) == len(secrets) // 2
    for extent in taken:
        assert bytes(tier.view(extent, 8192)) == bytes(8192)
        segment = tier.segment(tier.locate(extent)[0])
        assert segment.owner == "b"
        assert segment.number not in numbers
    for number in numbers:
        with pytest.raises(BadExtent):
            tier.segment(number)
    with pytest.raises(BadExtent):
        tier.free(secrets[0])


def test_crowding_by_another_tenant_names_its_emptiest_segment(tier: DramTier) -> None:
    extents = fill(tier, "a", 4096)
    last = tier.locate(extents[-1])[0]
    for extent in extents:
        if tier.locate(extent)[0] == last and extent != extents[-1]:
            tier.free(extent)
    assert tier.reserve("b", 64 * KIB, None) is None
    assert tier.crowding("b", 64 * KIB) == [("a", 4096, len(extents) - 1)]
    tier.free(extents[-1])
    assert tier.reserve("b", 64 * KIB, None) is not None


def test_crowding_leaves_blocks_that_may_not_move(tier: DramTier) -> None:
    fill(tier, "a", 4096)
    assert tier.crowding("b", 4096, lambda tag: False) == []
    spared = tier.crowding("b", 4096)
    other = tier.crowding("b", 4096, lambda tag: tag not in spared[:1])
    assert other
    assert not set(other) & set(spared)


def test_grows_while_running(tier: DramTier) -> None:
    before = len(fill(tier, "a", 4096))
    number = tier.add_segment()
    assert tier.capacity == MIB + 256 * KIB
    more = fill(tier, "a", 4096)
    assert len(more) == before // 4
    assert {tier.locate(extent)[0] for extent in more} == {number}


def test_shrinks_while_running(tier: DramTier) -> None:
    extents = fill(tier, "a", 4096)
    number = tier.locate(extents[0])[0]
    inside = [extent for extent in extents if tier.locate(extent)[0] == number]
    held = [tier.tag(extent) for extent in inside]
    assert sorted(map(repr, tier.retire_segment(number))) == sorted(map(repr, held))
    for extent in inside[1:]:
        tier.free(extent)
    assert tier.reserve("a", 4096, None) is None
    counted = tier.statistics()
    assert counted.used + counted.free + counted.lost == counted.capacity == MIB
    assert counted.free == 0
    tier.free(inside[0])
    assert tier.capacity == MIB - 256 * KIB
    with pytest.raises(BadExtent):
        tier.segment(number)
    with pytest.raises(BadExtent):
        tier.retire_segment(number)


def test_shrinking_by_an_empty_segment_is_at_once(tier: DramTier) -> None:
    number = tier.segments()[0].number
    assert tier.retire_segment(number) == []
    assert tier.capacity == MIB - 256 * KIB
    assert len(fill(tier, "a", 4096)) == 192


def test_memory_is_touched_ahead_of_use() -> None:
    with DramTier(32 * MIB, segment_bytes=8 * MIB) as tier:
        assert tier.wait_prefault(10)
        counted = tier.statistics()
        assert (counted.populated, counted.populating) == (32 * MIB, 0)


def test_closing_stops_the_prefault_and_opening_again_starts_empty() -> None:
    before = threading.active_count()
    tier = DramTier(256 * MIB, segment_bytes=64 * MIB)
    tier.open()
    extent = tier.reserve("a", 4096, None)
    assert extent is not None
    tier.close()
    assert threading.active_count() == before
    assert tier.capacity == 256 * MIB
    assert tier.reserve("a", 4096, None) is None
    with tier:
        assert tier.used == 0
        with pytest.raises(BadExtent):
            tier.free(extent)


def test_a_view_held_over_close_is_harmless(tier: DramTier) -> None:
    extent = tier.reserve("a", 4096, None)
    assert extent is not None
    view = tier.view(extent, 4096)
    view[:] = b"x" * 4096
    tier.close()
    assert bytes(view) == b"x" * 4096


def test_required_huge_pages_come_or_the_reason_does() -> None:
    reserved = int(Path("/proc/sys/vm/nr_hugepages").read_text())
    tier = DramTier(4 * MIB, segment_bytes=2 * MIB, huge_pages="require")
    if reserved < 2:
        with pytest.raises(TierConfigError, match="nr_hugepages"):
            tier.open()
        assert tier.segments() == []
        return
    with tier:
        extent = tier.reserve("a", 2 * MIB, None)
        assert extent is not None
        assert tier.wait_prefault(10)
        tier.free(extent)
        assert tier.reserve("b", 2 * MIB, None) is not None


def test_huge_pages_need_segments_of_whole_ones() -> None:
    with pytest.raises(TierConfigError, match="segment_bytes"):
        DramTier(4 * MIB, segment_bytes=MIB, huge_pages="require")
