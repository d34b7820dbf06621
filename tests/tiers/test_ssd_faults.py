"""The SSD tier on a medium that fails, and in a process that is killed."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.faulty_device import Fault, FaultyDevice, MemoryDevice
from tests.tiers.test_ssd_tier import PER_REGION, REGION, found, get, make, put
from tests.tiers.tier_contract import BLOCK, payload, record
from tiers.errors import MediumFailed
from tiers.ssd import SsdTier
from tiers.ssd.format import PAGE
from tiers.ssd.region import extent_page


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice(MemoryDevice())


def together(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("torn", [0, 100, PAGE, 3 * PAGE])
def test_a_failed_write_is_invisible(
    tmp_path: Path, device: FaultyDevice, error: int, torn: int
) -> None:
    with make(tmp_path, device=device) as tier:
        put(tier, 0, 1)
        device.faults = [Fault("write", error, times=1, torn=torn)]
        with pytest.raises(MediumFailed) as failure:
            put(tier, 2)
        assert isinstance(failure.value.__cause__, OSError)
        assert failure.value.__cause__.errno == error
        put(tier, 3)
        statistics = tier.statistics()
        assert (statistics.blocks, statistics.failed_writes) == (3, 1)
    with make(tmp_path, device=device) as tier:
        assert found(tier) == [0, 1, 3]


@pytest.mark.parametrize("lost", [{0}, {1, 2}, {0, 2, 3, 5}, {5}, set(range(6))])
@pytest.mark.parametrize("torn", [0, PAGE + 5])
def test_a_scan_finds_what_lies_behind_torn_records(
    tmp_path: Path, device: FaultyDevice, lost: set[int], torn: int
) -> None:
    sizes = [BLOCK, 1, 3 * PAGE, PAGE + 1, 30_000, 7]
    with make(tmp_path, device=device) as tier:
        for seed, size in enumerate(sizes):
            device.faults = [Fault("write", times=1, torn=torn, where=_is_record)] * (seed in lost)
            if seed in lost:
                with pytest.raises(MediumFailed):
                    put(tier, seed, size=size)
            else:
                put(tier, seed, size=size)
    device.faults = []
    for start in (0, 100):
        with make(tmp_path, device=device) as tier:
            # A record of one page is whole when its header and that page were written.
            whole = {seed for seed in lost if torn > PAGE and sizes[seed] <= torn - PAGE}
            expected = sorted({*range(6)} - lost | whole)
            assert found(tier) == expected + [100] * bool(start)
            put(tier, 100) if not start else None


def _is_record(offset: int) -> bool:
    return (offset // PAGE - 1) % (REGION // PAGE) != 0


def test_a_head_that_can_not_be_written_costs_one_store(
    tmp_path: Path, device: FaultyDevice
) -> None:
    with make(tmp_path, device=device) as tier:
        device.faults = [Fault("write", times=1)]
        with pytest.raises(MediumFailed):
            put(tier, 1)
        assert tier.free_regions == tier.statistics().regions
        put(tier, 2)
    with make(tmp_path, device=device) as tier:
        assert found(tier) == [2]


def test_a_summary_that_can_not_be_written_costs_a_scan(
    tmp_path: Path, device: FaultyDevice
) -> None:
    last = PAGE + REGION - 2 * PAGE
    with make(tmp_path, device=device) as tier:
        device.faults = [Fault("write", times=1, torn=PAGE, where=lambda offset: offset == last)]
        assert len(put(tier, *range(PER_REGION + 1))) == PER_REGION + 1
        assert tier.statistics().unsummarised == 1
        assert tier.victim() == 0
    device.faults = []
    with make(tmp_path, device=device) as tier:
        assert tier.statistics().scanned == 2
        assert found(tier) == list(range(PER_REGION + 1))
    with make(tmp_path, device=device) as tier:
        assert tier.statistics().scanned == 1


def test_a_seal_makes_up_for_summaries_that_failed(tmp_path: Path, device: FaultyDevice) -> None:
    with make(tmp_path, device=device) as tier:
        device.faults = [Fault("sync", times=1)]
        put(tier, *range(PER_REGION + 1))
        tier.seal()
        assert tier.statistics().unsummarised == 1
    with make(tmp_path, device=device) as tier:
        assert tier.statistics().scanned == 0
        assert found(tier) == list(range(PER_REGION + 1))


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_region_that_can_not_be_reclaimed_is_tried_last(
    tmp_path: Path, device: FaultyDevice, operation: str
) -> None:
    with make(tmp_path, device=device) as tier:
        extents = put(tier, *range(2 * PER_REGION + 1))
        for extent in extents[: 2 * PER_REGION]:
            tier.free(extent)
        assert tier.victim() == 0
        device.faults = [Fault(operation, times=1)]
        with pytest.raises(MediumFailed):
            tier.reclaim(0)
        assert tier.victim() == 1
        tier.reclaim(1)
        assert tier.victim() == 0
        tier.reclaim(0)
        assert tier.victim() is None


def test_a_read_that_fails_can_be_tried_again(tmp_path: Path, device: FaultyDevice) -> None:
    with make(tmp_path, device=device) as tier:
        (extent,) = put(tier, 1)
        device.faults = [Fault("read", times=1)]
        with pytest.raises(MediumFailed):
            get(tier, extent)
        assert get(tier, extent) == payload(1)
        assert tier.statistics().failed_reads == 1


def test_unreadable_pages_cost_only_what_lies_on_them(tmp_path: Path, device: FaultyDevice) -> None:
    with make(tmp_path, device=device) as tier:
        extents = put(tier, *range(4))
    bad = extent_page(extents[1]) * PAGE
    device.faults = [Fault("read", where=lambda offset: offset == bad)]
    # A scan reads a window that spans the page: that read has to fail as well.
    device.faults.append(Fault("read", where=lambda offset: offset == PAGE, after=1, times=1))
    device.faults.append(Fault("read", where=lambda offset: offset == 2 * PAGE, times=1))
    with make(tmp_path, device=device) as tier:
        assert found(tier) == [0, 2, 3]


@pytest.mark.parametrize("operation", ["resize", "write", "sync"])
def test_a_file_that_can_not_be_made_is_an_error_and_leaves_no_lock(
    tmp_path: Path, device: FaultyDevice, operation: str
) -> None:
    device.faults = [Fault(operation, times=1)]
    with pytest.raises(MediumFailed, match="can't be made"):
        make(tmp_path, device=device).open()
    with make(tmp_path, device=device) as tier:
        assert put(tier, 1)


def test_starts_where_nothing_can_be_written(tmp_path: Path, device: FaultyDevice) -> None:
    with make(tmp_path, device=device) as tier:
        put(tier, *range(20))
    device.faults = [Fault("write"), Fault("sync"), Fault("resize", errno.ENOSPC)]
    with make(tmp_path, device=device) as tier:
        assert found(tier) == list(range(20))
        with pytest.raises(MediumFailed):
            put(tier, 50)
        tier.seal()


def test_starts_where_nothing_can_be_read(tmp_path: Path, device: FaultyDevice) -> None:
    with make(tmp_path, device=device) as tier:
        put(tier, *range(20))
    device.faults = [Fault("read")]
    with make(tmp_path, device=device) as tier:
        assert found(tier) == []
        assert put(tier, 50)


def test_freeing_does_not_wait_for_the_medium(tmp_path: Path, device: FaultyDevice) -> None:
    waited: list[float] = []

    def free() -> None:
        time.sleep(0.1)
        start = time.monotonic()
        tier.free(extent)
        tier.victim()
        waited.append(time.monotonic() - start)

    with make(tmp_path, device=device) as tier:
        (extent,) = put(tier, 1)
        device.faults = [Fault("write", None, delay=0.6)]
        together(lambda: put(tier, 2), free)
        assert waited[0] < 0.3


def test_close_waits_for_what_is_in_flight(tmp_path: Path, device: FaultyDevice) -> None:
    stored: list[int] = []
    tier = make(tmp_path, device=device)
    tier.open()
    put(tier, 1)
    device.faults = [Fault("write", None, delay=0.3)]
    writer = threading.Thread(target=lambda: stored.extend(put(tier, 2)))
    writer.start()
    time.sleep(0.1)
    tier.close()
    device.faults = []
    writer.join()
    assert len(stored) == 1
    with make(tmp_path, device=device) as tier:
        assert found(tier) == [1, 2]


def test_no_more_io_in_flight_than_the_queue_depth(tmp_path: Path) -> None:
    device = CrowdedDevice()
    with SsdTier(tmp_path, 4 << 20, region_bytes=REGION, queue_depth=3, device=device) as tier:
        together(*(lambda seed=seed: put(tier, seed) for seed in range(12)))
        assert tier.statistics().blocks == 12
    assert device.most == 3


class CrowdedDevice(MemoryDevice):
    """Counts how many writes are in flight at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self.lock = threading.Lock()

    def write(self, data, offset):  # type: ignore[no-untyped-def]
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        super().write(data, offset)
        with self.lock:
            self.now -= 1


def test_parallel_stores_that_fail_here_and_there(tmp_path: Path, device: FaultyDevice) -> None:
    kept: dict[int, int] = {}

    def work(first: int) -> None:
        for seed in range(first, first + 40):
            try:
                (extent,) = put(tier, seed)
            except MediumFailed:
                continue
            kept[seed] = extent
            assert get(tier, extent) == payload(seed)

    with make(tmp_path, device=device) as tier:
        device.faults = [Fault("write", after=7 * n, times=1, torn=PAGE * n) for n in range(1, 12)]
        together(*(lambda first=first: work(first) for first in (0, 100, 200)))
        assert tier.statistics().blocks == len(kept)
        assert device.struck == 11
        tier.seal()
    device.faults = []
    with make(tmp_path, device=device) as tier:
        assert set(found(tier)) >= set(kept)


WRITER = """
import os, sys, threading
from pathlib import Path
from tests.tiers.test_ssd_faults import ROUNDS, killed_payload, killed_record
from tiers.ssd import SsdTier
tier = SsdTier(Path(sys.argv[1]), 8 << 20, region_bytes=512 << 10)
tier.open()
first = int(sys.argv[2])
for record, extent in tier.recovered():
    tier.set_tag(extent, (None, extent))
def say(word, seed):
    os.write(1, b"%s %d\\n" % (word, seed))
making_room = threading.Lock()
def make_room():
    with making_room:
        while not tier.free_regions and (victim := tier.victim()) is not None:
            residents = tier.residents(victim)
            if any(extent is None for _, extent in residents):
                continue
            for seed, extent in residents:
                if seed is not None:
                    say(b"freed", seed)
                tier.free(extent)
            tier.reclaim(victim)
def work(thread):
    for seed in range(first + thread, first + ROUNDS, 3):
        tag = [seed, None]
        data = killed_payload(seed)
        while (extent := tier.store(killed_record(seed), data, tag)) is None:
            make_room()
        tag[1] = extent
        say(b"stored", seed)
threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
ROUNDS = 1_000_000


def killed_payload(seed: int) -> bytes:
    return hashlib.shake_128(b"%d" % seed).digest(1 + seed * 7919 % 40_000)


def killed_record(seed: int):  # type: ignore[no-untyped-def]
    return record(seed, 1 + seed * 7919 % 40_000)


def test_kill_9_at_any_moment_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    for turn, seconds in enumerate((0.3, 0.5, 0.4)):
        first = turn * ROUNDS
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], env=dict(os.environ)
        ) as writer:
            assert writer.stdout is not None
            start = writer.stdout.readline()
            time.sleep(seconds)
            os.kill(writer.pid, signal.SIGKILL)
            said = [line.split() for line in [start, *writer.stdout.read().splitlines()]]
        stored = {int(seed) for word, seed in said if word == b"stored"}
        freed = {int(seed) for word, seed in said if word == b"freed"}
        seeds = {killed_record(s).hash: s for s in range(first, first + max(stored) % ROUNDS + 50)}
        with SsdTier(tmp_path, 8 << 20, region_bytes=512 << 10) as tier:
            served = set()
            for one, extent in tier.recovered():
                seed = seeds.get(one.hash)
                if seed is None:
                    tier.verify(extent)
                    continue
                served.add(seed)
                assert one == killed_record(seed)
                assert get(tier, extent, one.size) == killed_payload(seed)
        assert len(stored) > 20
        assert stored - freed <= served
