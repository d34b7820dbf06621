"""What every tier must do, whatever its medium.

A tier's test module inherits ``TierContract`` in a class called ``Test...``, and says how its tier
is made. Bytes, accounting and behaviour under threads are then tested here.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers import BadExtent, Extent, Record, Tier

BLOCK = 16 << 10
"""Payload bytes of most blocks here; a tier under test has room for at least eight."""


def payload(seed: int, size: int = BLOCK) -> bytes:
    """Bytes that no other seed gives."""
    return random.Random(seed).randbytes(size)


def record(seed: int, size: int = BLOCK) -> Record:
    """A block's names, different for every seed."""
    return Record(
        namespace=hashlib.sha256(b"namespace").digest(),
        shard=0,
        hash=hashlib.sha256(b"block %d" % seed).digest(),
        parent=bytes(32),
        size=size,
    )


class TierContract(ABC):
    """Inherit, and implement ``make``."""

    @abstractmethod
    def make(self, directory: Path) -> Tier:
        """A tier, not opened yet, of 1 to 16 MiB. ``directory`` is empty and on a disk."""

    def make_room(self, tier: Tier) -> None:  # noqa: B027 (most tiers need no telling)
        """Let the tier reuse what was freed, where it needs telling."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with self.make(tmp_path) as tier:
            yield tier

    def put(self, tier: Tier, seed: int, size: int = BLOCK) -> Extent:
        extent = tier.store(record(seed, size), payload(seed, size), seed)
        assert extent is not None
        return extent

    def get(self, tier: Tier, extent: Extent, size: int = BLOCK, offset: int = 0) -> bytes:
        into = bytearray(size)
        tier.load(extent, memoryview(into), offset)
        return bytes(into)

    def test_gives_back_what_was_stored(self, tier: Tier) -> None:
        extents = [self.put(tier, seed) for seed in range(8)]
        assert len(set(extents)) == 8
        for seed, extent in enumerate(extents):
            assert self.get(tier, extent) == payload(seed)

    @pytest.mark.parametrize("size", [1, 63, 64, 65, 4095, 4096, 4097, 100_000])
    def test_takes_any_size(self, tier: Tier, size: int) -> None:
        extents = [self.put(tier, seed, size) for seed in range(3)]
        for seed, extent in enumerate(extents):
            assert self.get(tier, extent, size) == payload(seed, size)
        assert tier.used == 3 * size

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_takes_any_buffer(self, tier: Tier, kind: type) -> None:
        extent = tier.store(record(1), kind(payload(1)), None)
        assert extent is not None
        assert self.get(tier, extent) == payload(1)

    @pytest.mark.parametrize(
        ("offset", "size"),
        [(0, 1), (1, 4096), (4096, 4096), (5000, 3000), (BLOCK - 1, 1), (0, BLOCK)],
    )
    def test_reads_byte_ranges(self, tier: Tier, offset: int, size: int) -> None:
        self.put(tier, 1)
        extent = self.put(tier, 2)
        assert self.get(tier, extent, size, offset) == payload(2)[offset : offset + size]

    def test_reads_into_the_middle_of_a_buffer_and_nowhere_else(self, tier: Tier) -> None:
        extent = self.put(tier, 1)
        into = bytearray(b"\xaa" * (BLOCK + 200))
        tier.load(extent, memoryview(into)[100 : 100 + BLOCK])
        assert into[100 : 100 + BLOCK] == payload(1)
        assert into[:100] == into[-100:] == b"\xaa" * 100

    @pytest.mark.parametrize(("offset", "size"), [(0, BLOCK + 1), (1, BLOCK), (BLOCK + 1, 1)])
    def test_refuses_a_range_beyond_the_block(self, tier: Tier, offset: int, size: int) -> None:
        self.put(tier, 1)
        extent = self.put(tier, 2)
        self.put(tier, 3)
        with pytest.raises(BadExtent):
            self.get(tier, extent, size, offset)

    def test_refuses_an_extent_that_was_freed(self, tier: Tier) -> None:
        kept, gone = self.put(tier, 1), self.put(tier, 2)
        tier.free(gone)
        with pytest.raises(BadExtent):
            tier.free(gone)
        with pytest.raises(BadExtent):
            self.get(tier, gone)
        assert self.get(tier, kept) == payload(1)

    def test_counts_what_it_holds(self, tier: Tier) -> None:
        empty = tier.statistics()
        assert (empty.used, empty.blocks) == (0, 0)
        extents = [self.put(tier, seed) for seed in range(8)]
        full = tier.statistics()
        assert (full.used, full.blocks) == (8 * BLOCK, 8)
        assert full.used == tier.used
        assert full.capacity == tier.capacity
        assert full.lost >= 0
        assert full.free >= 0
        for extent in extents:
            tier.free(extent)
        assert tier.used == tier.statistics().used == 0

    def test_fills_up_without_going_over_its_capacity(self, tier: Tier) -> None:
        held: dict[int, Extent] = {}
        while (extent := tier.store(record(len(held)), payload(len(held)), None)) is not None:
            held[len(held)] = extent
            assert tier.used + tier.statistics().lost <= tier.capacity
        assert len(held) * BLOCK >= tier.capacity // 2
        for seed, extent in held.items():
            assert self.get(tier, extent) == payload(seed)

    def test_room_that_was_freed_is_used_again(self, tier: Tier) -> None:
        rounds = 3 * tier.capacity // BLOCK
        held: list[tuple[int, Extent]] = []
        for seed in range(rounds):
            extent = tier.store(record(seed), payload(seed), None)
            if extent is None:
                for _, old in held:
                    tier.free(old)
                held.clear()
                self.make_room(tier)
                extent = self.put(tier, seed)
            held.append((seed, extent))
        for seed, extent in held:
            assert self.get(tier, extent) == payload(seed)

    def test_stores_and_loads_from_many_threads(self, tier: Tier) -> None:
        wrong: list[str] = []

        def work(first: int) -> None:
            for seed in range(first, first + 30):
                extent = tier.store(record(seed), payload(seed), None)
                if extent is not None and self.get(tier, extent) != payload(seed):
                    wrong.append(f"block {seed}")
                if extent is not None:
                    tier.free(extent)
            done.append(first)

        done: list[int] = []
        threads = [threading.Thread(target=work, args=(n * 1000,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(done) == 4
        assert tier.used == 0

    def test_close_leaves_nothing_behind(self, tmp_path: Path) -> None:
        before = set(os.listdir("/proc/self/fd")), threading.active_count()
        tier = self.make(tmp_path)
        tier.open()
        self.put(tier, 1)
        tier.close()
        tier.close()
        assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before

    def test_close_without_open_does_nothing(self, tmp_path: Path) -> None:
        self.make(tmp_path).close()
