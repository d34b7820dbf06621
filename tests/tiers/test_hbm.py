"""The HBM tier on a stand-in for a GPU: the contract, copies under way, tenants, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.tiers.cpu_device import CpuDevice
from tests.tiers.tier_contract import TierContract, payload, record
from tiers import BadExtent, HbmTier, MediumFailed, Tier, TierConfigError
from tiers.hbm import _joined

KIB = 1 << 10
MIB = 1 << 20
SEGMENT = 64 * KIB
SEGMENTS = 4
CAPACITY = SEGMENTS * SEGMENT
BLOCK = 16 * KIB
FEW = SEGMENT // BLOCK


def tier_on(device: CpuDevice, capacity: int = CAPACITY) -> HbmTier:
    return HbmTier(capacity, device=device, segment_bytes=SEGMENT, lanes=2, buffer_bytes=5000)


class TestContract(TierContract):
    def make(self, directory: Path) -> Tier:
        device = CpuDevice(8 * MIB)
        return HbmTier(
            2 * MIB, device=device, segment_bytes=256 * KIB, lanes=2, buffer_bytes=8 * KIB
        )


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(4 * CAPACITY)


@pytest.fixture
def tier(device: CpuDevice) -> Iterator[HbmTier]:
    with tier_on(device) as tier:
        yield tier


@pytest.fixture
def stream(tier: HbmTier, device: CpuDevice) -> int:
    """A caller's stream, which does nothing before it is told to."""
    return device.stream()


def put(tier: HbmTier, seed: int, owner: str = "a") -> int:
    extent = tier.store(record(seed, BLOCK), payload(seed, BLOCK), seed, owner=owner)
    assert extent is not None
    return extent


def get(tier: HbmTier, extent: int) -> bytes:
    into = bytearray(b"\xaa" * BLOCK)
    tier.load(extent, memoryview(into))
    return bytes(into)


def fill(tier: HbmTier, owner: str = "a", size: int = BLOCK) -> list[int]:
    extents: list[int] = []
    while (extent := tier.reserve(owner, size, (owner, len(extents)))) is not None:
        extents.append(extent)
    return extents


def counted(tier: HbmTier) -> tuple[int, int, int]:
    """Blocks held, bytes that wait for copies, bytes that wait for other processes."""
    found = tier.statistics()
    assert found.used == tier.used
    assert found.used + found.free + found.lost == found.capacity == tier.capacity
    return found.blocks, found.departing, found.withdrawn


# Taking the memory.


def test_more_than_the_card_has_free_is_refused_at_once() -> None:
    device = CpuDevice(CAPACITY)
    taken = device.allocate(4096)
    tier = tier_on(device)
    with pytest.raises(TierConfigError, match=f"{CAPACITY - 4096} bytes free"):
        tier.open()
    assert set(device.live) == {taken}
    device.release(taken)
    with tier:
        assert sum(device.live.values()) == CAPACITY
    assert not device.live


def test_memory_that_goes_while_it_is_taken_is_given_back(device: CpuDevice) -> None:
    asked = iter(range(100))
    honest = device.free_bytes
    device.free_bytes = lambda: honest() if next(asked) < 3 else 0  # type: ignore[method-assign]
    with pytest.raises(TierConfigError, match="left on the GPU"):
        tier_on(device).open()
    assert not device.live
    assert not device.host
    assert not device.streams


@pytest.mark.parametrize("step", ["stream", "allocate_host", "allocate", "zero", "wait"])
def test_a_card_that_fails_at_the_start_is_said_to(device: CpuDevice, step: str) -> None:
    tier = tier_on(device)
    device.refused.add(step)
    with pytest.raises(MediumFailed, match="refused"):
        tier.open()
    assert not device.live
    assert not device.host
    assert not device.streams
    assert tier.segments() == []


def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(TierConfigError, match="there is no GPU"):
        HbmTier(4 * MIB, device=1000, segment_bytes=2 * MIB).open()


@pytest.mark.parametrize(("capacity", "segment"), [(4 * MIB, MIB), (MIB, 2 * MIB), (0, 2 * MIB)])
def test_sizes_that_a_gpu_can_not_share_apart_are_refused(capacity: int, segment: int) -> None:
    with pytest.raises(TierConfigError):
        HbmTier(capacity, segment_bytes=segment)


@pytest.mark.parametrize(("lanes", "size"), [(0, 1), (1, 0)])
def test_copies_need_a_lane(lanes: int, size: int) -> None:
    with pytest.raises(TierConfigError, match="copy"):
        HbmTier(4 * MIB, lanes=lanes, buffer_bytes=size)


def test_closing_gives_everything_back(device: CpuDevice) -> None:
    tier = tier_on(device)
    memory = np.zeros(BLOCK, np.uint8)
    with tier:
        assert len(tier.uuid()) == 16
        tier.pin(memory.ctypes.data, BLOCK)
        put(tier, 1)
    assert (device.live, device.host, device.registered, device.streams) == ({}, {}, {}, [])
    assert tier.capacity == CAPACITY
    for use in (tier.uuid, lambda: tier.pin(memory.ctypes.data, BLOCK)):
        with pytest.raises(MediumFailed, match="not open"):
            use()
    with tier:
        assert counted(tier) == (0, 0, 0)
        tier.open()
        assert len(fill(tier)) == CAPACITY // BLOCK


def test_closing_waits_for_copies_under_way(device: CpuDevice) -> None:
    tier = tier_on(device)
    tier.open()
    stream, there = device.stream(), device.allocate(BLOCK)
    tier.copy_out([(put(tier, 1), there)], BLOCK, stream)
    tier.close()
    assert device.read(there, BLOCK) == payload(1, BLOCK)


# Host memory.


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_memory_is_copied_as_it_is(tier: HbmTier, device: CpuDevice, pinned: bool) -> None:
    memory = np.frombuffer(bytearray(payload(3, 3 * BLOCK)), np.uint8)
    start = memory.ctypes.data
    if pinned:
        tier.pin(start, memory.nbytes)
    middle = memory[BLOCK : 2 * BLOCK]
    device.copies.clear()
    extent = tier.store(record(1, BLOCK), middle.data, None)
    assert extent is not None
    sent = middle.tobytes()
    middle[:] = 0
    tier.load(extent, memoryview(middle))
    assert middle.tobytes() == sent
    far = [
        address for to, source, _ in device.copies for address in (to, source) if start <= address
    ]
    near = [address for address in far if address < start + memory.nbytes]
    assert near == ([start + BLOCK] * 2 if pinned else [])
    assert len(device.copies) == (2 if pinned else 8)
    tier.unpin(start)
    tier.unpin(start)
    assert not device.registered
    assert get(tier, extent) == sent


def test_memory_only_partly_pinned_goes_by_a_buffer(tier: HbmTier, device: CpuDevice) -> None:
    memory = np.frombuffer(bytearray(payload(3, 2 * BLOCK)), np.uint8)
    tier.pin(memory.ctypes.data, BLOCK)
    across = memory[BLOCK // 2 : BLOCK // 2 + BLOCK]
    extent = tier.store(record(1, BLOCK), across.data, None)
    assert extent is not None
    assert get(tier, extent) == across.tobytes()


def test_memory_that_can_not_be_pinned_is_said_to(tier: HbmTier, device: CpuDevice) -> None:
    device.refused.add("register")
    with pytest.raises(MediumFailed, match="register refused"):
        tier.pin(0, 4096)


@pytest.mark.parametrize("step", ["copy", "wait"])
def test_a_store_that_fails_stores_nothing(tier: HbmTier, device: CpuDevice, step: str) -> None:
    device.refused.add(step)
    with pytest.raises(MediumFailed, match="refused"):
        tier.store(record(1, BLOCK), payload(1, BLOCK), None)
    device.refused.clear()
    assert counted(tier)[0] == 0
    assert get(tier, put(tier, 2)) == payload(2, BLOCK)


def test_a_load_that_fails_is_said_to(tier: HbmTier, device: CpuDevice) -> None:
    extent = put(tier, 1)
    device.refused.add("copy")
    with pytest.raises(MediumFailed, match="refused"):
        get(tier, extent)
    device.refused.clear()
    assert get(tier, extent) == payload(1, BLOCK)


# Copies in the caller's stream.


def test_a_block_is_not_reused_before_its_copy_has_ended(
    tier: HbmTier, device: CpuDevice, stream: int
) -> None:
    there = device.allocate(BLOCK)
    gone = put(tier, 1)
    end = tier.copy_out([(gone, there)], BLOCK, stream)
    others = fill(tier)
    tier.free(gone)
    assert not end.done()
    assert tier.reserve("a", BLOCK, None) is None
    assert counted(tier) == (len(others), BLOCK, 0)
    for use in (
        lambda: tier.free(gone),
        lambda: tier.tag(gone),
        lambda: tier.retag(gone, 1),
        lambda: get(tier, gone),
        lambda: tier.copy_out([(gone, there)], BLOCK, stream),
        lambda: tier.lease([gone], end),
    ):
        with pytest.raises(BadExtent):
            use()
    device.run(stream)
    assert end.done()
    assert device.read(there, BLOCK) == payload(1, BLOCK)
    assert tier.reserve("a", BLOCK, None) == gone
    assert counted(tier) == (len(others) + 1, 0, 0)


def test_a_block_waits_for_every_copy_of_it(tier: HbmTier, device: CpuDevice, stream: int) -> None:
    there, other = device.allocate(BLOCK), device.stream()
    extent = put(tier, 1)
    for each in (stream, other, stream):
        tier.copy_out([(extent, there), (extent, there)], BLOCK, each)
    tier.free(extent)
    for each in (other, stream):
        tier.settle()
        assert counted(tier)[1] == BLOCK
        device.run(each)
    tier.settle()
    assert counted(tier) == (0, 0, 0)


def test_copies_take_ranges_of_blocks(tier: HbmTier, device: CpuDevice, stream: int) -> None:
    there = device.allocate(8 * KIB)
    extents = [put(tier, seed) for seed in range(4)]
    tier.copy_out([(e, there + n * 1000) for n, e in enumerate(extents)], 1000, stream, 500)
    device.run(stream)
    expected = b"".join(payload(seed, BLOCK)[500:1500] for seed in range(4))
    assert device.read(there, 4000) == expected
    end = tier.copy_in([(extents[3], there)], 1000, stream, BLOCK - 1000)
    end.wait()
    assert get(tier, extents[3]) == payload(3, BLOCK)[:-1000] + expected[:1000]


@pytest.mark.parametrize("pinned", [True, False])
def test_neighbours_in_pinned_memory_go_as_one_copy(
    tier: HbmTier, device: CpuDevice, stream: int, pinned: bool
) -> None:
    there = device.allocate(8 * BLOCK)
    if pinned:
        tier.pin(there, 8 * BLOCK)
    extents = [put(tier, seed) for seed in range(4)]
    assert [extent - extents[0] for extent in extents] == [n * BLOCK for n in range(4)]
    device.copies.clear()
    order = [0, 1, 3, 2]
    moves = [(extents[seed], there + n * BLOCK) for n, seed in enumerate(order)]
    tier.copy_out(moves, BLOCK, stream)
    gap = there + 5 * BLOCK
    tier.copy_out([(extents[0], gap), (extents[1], gap + 2 * BLOCK)], BLOCK, stream)
    device.run(stream)
    lengths = [length // BLOCK for _, _, length in device.copies]
    assert lengths == ([2, 1, 1, 1, 1] if pinned else [1] * 6)
    expected = b"".join(payload(seed, BLOCK) for seed in order)
    assert device.read(there, 4 * BLOCK) == expected
    tier.copy_out([], BLOCK, stream).wait()


def test_no_copy_goes_on_from_one_allocation_to_the_next(
    tier: HbmTier, device: CpuDevice, stream: int
) -> None:
    there = device.allocate(4 * BLOCK)
    for half in (there, there + 2 * BLOCK):
        tier.pin(half, 2 * BLOCK)
    extents = [put(tier, seed) for seed in range(4)]
    device.copies.clear()
    tier.copy_out([(e, there + n * BLOCK) for n, e in enumerate(extents)], BLOCK, stream)
    device.run(stream)
    assert device.copies[0][0] == there
    assert [length // BLOCK for _, _, length in device.copies] == [2, 2]
    places = [(1, 0), (1, 0), (2, 0), (2, 0)]
    touching = [(n * 10, 1000 + n * 10) for n in range(4)]
    assert list(_joined(touching, 10, places)) == [(0, 1000, 20), (20, 1020, 20)]


def test_blocks_move_in_numbers_on_the_tiers_own_streams(tier: HbmTier, device: CpuDevice) -> None:
    data = b"".join(payload(seed, BLOCK) for seed in range(FEW))
    memory = np.frombuffer(bytearray(data), np.uint8)
    tier.pin(memory.ctypes.data, memory.nbytes)
    extents = [tier.reserve("a", BLOCK, seed) for seed in range(FEW)]
    moves = [(e, memory.ctypes.data + n * BLOCK) for n, e in enumerate(extents) if e is not None]
    assert len(moves) == FEW
    coming = tier.copy_in(moves, BLOCK)
    assert not coming.done()
    coming.wait()
    memory[:] = 0xA5
    going = tier.copy_out(moves, BLOCK)
    assert not going.done()
    for extent, _ in moves:
        tier.free(extent)
    assert counted(tier)[1] == FEW * BLOCK
    going.wait()
    assert memory.tobytes() == data
    assert counted(tier)[1] == 0


def test_a_tier_that_is_not_open_copies_nothing(device: CpuDevice) -> None:
    with pytest.raises(MediumFailed, match="not open"):
        tier_on(device).copy_out([], BLOCK)


@pytest.mark.parametrize(("size", "offset"), [(BLOCK + 1, 0), (BLOCK, 1), (1, BLOCK), (2, -1)])
def test_copies_beyond_a_block_are_refused(
    tier: HbmTier, device: CpuDevice, stream: int, size: int, offset: int
) -> None:
    good, there = put(tier, 1), device.allocate(2 * BLOCK)
    device.copies.clear()
    for copy in (tier.copy_out, tier.copy_in):
        with pytest.raises(BadExtent):
            copy([(good, there), (good, there)], size, stream, offset)
    device.run(stream)
    assert device.copies == []


def test_copies_queued_before_one_that_fails_are_leased(
    tier: HbmTier, device: CpuDevice, stream: int
) -> None:
    there = device.allocate(BLOCK)
    extents = [put(tier, seed) for seed in range(2)]
    honest = device.copy

    def second_fails(to: int, source: int, size: int, stream: int) -> None:
        honest(to, source, size, stream)
        device.refused.add("copy")

    device.copy = second_fails  # type: ignore[method-assign]
    with pytest.raises(MediumFailed, match="copy refused"):
        tier.copy_out([(extent, there) for extent in extents], BLOCK, stream)
    tier.free(extents[0])
    assert counted(tier)[1] == BLOCK
    device.run(stream)
    assert counted(tier)[1] == 0


def test_a_lease_ends_with_a_card_that_has_failed(
    tier: HbmTier, device: CpuDevice, stream: int
) -> None:
    extent = put(tier, 1)
    tier.copy_out([(extent, device.allocate(BLOCK))], BLOCK, stream)
    tier.free(extent)
    device.refused.add("done")
    assert counted(tier) == (0, 0, 0)


class Ending:
    """Of a process that uses blocks."""

    def __init__(self) -> None:
        self.come = False

    def done(self) -> bool:
        return self.come


def test_blocks_wait_for_a_process_that_may_write_to_them(tier: HbmTier) -> None:
    extent, end = put(tier, 1), Ending()
    tier.lease([extent], end)
    tier.free(extent)
    assert len(fill(tier)) == CAPACITY // BLOCK - 1
    end.come = True
    assert fill(tier) == [extent]


def test_closing_does_not_wait_for_a_process(device: CpuDevice) -> None:
    with tier_on(device) as tier:
        tier.lease([put(tier, 1)], Ending())
    assert not device.live


def test_no_room_is_expected_of_a_block_that_is_freed_already(tier: HbmTier) -> None:
    extents, end = fill(tier), Ending()
    tier.lease(extents, end)
    for extent in extents[:-FEW]:
        tier.free(extent)
    named = tier.crowding("b", BLOCK)
    assert sorted(map(str, named)) == sorted(str(tier.tag(e)) for e in extents[-FEW:])
    assert tier.crowding("b", BLOCK, lambda tag: tag != named[0]) == []
    assert tier.reserve("b", BLOCK, None) is None
    end.come = True
    assert tier.reserve("b", BLOCK, None) is not None


def test_shrinking_waits_for_copies_and_names_no_block_twice(tier: HbmTier) -> None:
    extents, end = fill(tier), Ending()
    number = tier.locate(extents[0])[0]
    inside = [extent for extent in extents if tier.locate(extent)[0] == number]
    tier.lease(inside[:1], end)
    tier.free(inside[0])
    held = [tier.tag(extent) for extent in inside[1:]]
    assert sorted(map(str, tier.retire_segment(number))) == sorted(map(str, held))
    for extent in inside[1:]:
        tier.free(extent)
    assert tier.capacity == CAPACITY
    end.come = True
    tier.settle()
    assert tier.capacity == CAPACITY - SEGMENT


# Tenants, and other processes.


def contents(tier: HbmTier, device: CpuDevice) -> dict[int, bytes]:
    return {one.number: device.read(one.address, one.size) for one in tier.segments()}


def test_memory_is_cleared_before_a_tenant_has_it(tier: HbmTier, device: CpuDevice) -> None:
    assert set(contents(tier, device).values()) == {bytes(SEGMENT)}


@pytest.mark.parametrize("shared", [True, False])
def test_a_tenant_never_sees_anothers_bytes(tier: HbmTier, device: CpuDevice, shared: bool) -> None:
    secrets = [put(tier, seed) for seed in range(CAPACITY // BLOCK)]
    before = {segment.number: segment.address for segment in tier.segments()}
    if shared:
        for number in before:
            tier.share(number, "a")
            tier.unshare(number)
    assert fill(tier, "b") == []
    for extent in secrets:
        tier.free(extent)
    assert len(fill(tier, "b")) == CAPACITY // BLOCK
    after = {segment.number: segment.address for segment in tier.segments()}
    assert not set(before) & set(after)
    assert set(contents(tier, device).values()) == {bytes(SEGMENT)}
    # What a process of "a" could still map is not what "b" has.
    assert (set(before.values()) & set(after.values()) == set()) == shared
    assert sum(device.live.values()) == CAPACITY
    for number in before:
        with pytest.raises(BadExtent):
            tier.segment(number)


def test_a_handle_is_for_the_tenant_alone(tier: HbmTier, device: CpuDevice) -> None:
    number = tier.locate(put(tier, 1, "a"))[0]
    address = tier.segment(number).address
    assert tier.share(number, "a") == device.handle(address)
    for other, owner in ((number, "b"), (number, ""), (999, "a")):
        with pytest.raises(BadExtent):
            tier.share(other, owner)
    tier.unshare(number)
    for other in (number, 999):
        with pytest.raises(BadExtent, match="segment"):
            tier.unshare(other)


def test_a_segment_is_not_given_away_while_a_process_has_it_mapped(
    tier: HbmTier, device: CpuDevice
) -> None:
    released: list[int] = []
    tier.on_release = released.append
    extents = fill(tier, "a")
    numbers = {tier.locate(extent)[0] for extent in extents}
    for number in numbers:
        tier.share(number, "a")
        tier.share(number, "a")
    for extent in extents:
        tier.free(extent)
    assert tier.reserve("b", BLOCK, None) is None
    for number in numbers:
        tier.unshare(number)
    assert tier.reserve("b", BLOCK, None) is None
    assert counted(tier) == (0, 0, 0)
    assert released == []
    for extent in fill(tier, "a"):
        tier.free(extent)
    for number in numbers:
        tier.unshare(number)
    assert len(fill(tier, "b")) == CAPACITY // BLOCK
    assert set(released) == numbers
    assert set(contents(tier, device).values()) == {bytes(SEGMENT)}
    assert sum(device.live.values()) == CAPACITY


def test_a_segment_that_is_retired_goes_when_nobody_has_it_mapped(
    tier: HbmTier, device: CpuDevice
) -> None:
    extent = put(tier, 1)
    number = tier.locate(extent)[0]
    tier.share(number, "a")
    assert tier.retire_segment(number) == [1]
    tier.free(extent)
    assert tier.capacity == CAPACITY
    assert counted(tier)[2] == SEGMENT
    tier.unshare(number)
    assert tier.capacity == sum(device.live.values()) == CAPACITY - SEGMENT
    assert counted(tier)[2] == 0


def test_memory_that_does_not_come_back_is_capacity_lost(
    tier: HbmTier, device: CpuDevice, caplog: pytest.LogCaptureFixture
) -> None:
    extent = put(tier, 1, "a")
    number = tier.locate(extent)[0]
    fill(tier, "c")
    tier.share(number, "a")
    tier.unshare(number)
    tier.free(extent)
    device.refused.add("allocate")
    assert tier.reserve("b", BLOCK, None) is None
    assert "capacity falls" in caplog.text
    assert tier.capacity == CAPACITY - SEGMENT


def test_grows_while_running(tier: HbmTier, device: CpuDevice) -> None:
    tier.add_segment()
    assert tier.capacity == sum(device.live.values()) == CAPACITY + SEGMENT
    taken = device.allocate(device.free_bytes())
    with pytest.raises(TierConfigError, match="left on the GPU"):
        tier.add_segment()
    assert tier.capacity == CAPACITY + SEGMENT
    device.release(taken)
