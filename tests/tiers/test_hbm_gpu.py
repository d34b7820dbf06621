"""The HBM tier on a GPU: the contract, other processes, copies under way, a killed engine.

Run by hand where there is one: `scripts/gpu test_hbm_gpu`; without what the other tests need, by
`python3 -m pytest -c /dev/null --rootdir . --noconftest tests/tiers/test_hbm_gpu.py`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.process_end import ProcessEnd
from tests.real_gpu import NEEDS_GPU
from tests.tiers.hbm_engine import digest
from tests.tiers.tier_contract import TierContract, payload, record
from tiers import BadExtent, DramTier, HbmTier, Tier, TierConfigError
from tiers.cuda import CudaDevice

MIB = 1 << 20
BLOCK = 2 * MIB
SEGMENT = 32 * MIB
SEGMENTS = 4
CHECKOUT = Path(__file__).parents[2]


pytestmark = NEEDS_GPU


class TestContract(TierContract):
    def make(self, directory: Path) -> Tier:
        return HbmTier(16 * MIB, segment_bytes=4 * MIB, buffer_bytes=10_000)

    @pytest.fixture(autouse=True)
    def _context(self, tmp_path: Path) -> None:
        """What the process has of CUDA's once it has used it, which stays."""
        with self.make(tmp_path) as tier:
            self.get(tier, self.put(tier, 1))


@pytest.fixture
def device() -> CudaDevice:
    device = CudaDevice(0)
    device.open()
    return device


@pytest.fixture
def tier(device: CudaDevice) -> Iterator[HbmTier]:
    with HbmTier(SEGMENTS * SEGMENT, device=device, segment_bytes=SEGMENT) as tier:
        yield tier


@pytest.fixture
def stream(device: CudaDevice) -> Iterator[int]:
    stream = device.stream()
    yield stream
    device.record(stream).wait()
    device.end_stream(stream)


class Elsewhere:
    """Memory of the GPU outside the tier."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        self.device = device
        self.size = size
        self.address = device.allocate(size)
        self._stream = device.stream()
        self._host = device.allocate_host(size)

    def host(self) -> np.ndarray:  # type: ignore[type-arg]
        pointer = (ctypes.c_uint8 * self.size).from_address(self._host)
        return np.ctypeslib.as_array(pointer)

    def write(self, byte: int) -> None:
        self.host()[:] = byte
        self._move(self.address, self._host)

    def read(self, start: int = 0, size: int | None = None) -> bytes:
        self._move(self._host, self.address)
        return self.host()[start:][:size].tobytes()

    def _move(self, to: int, source: int) -> None:
        self.device.copy(to, source, self.size, self._stream)
        self.device.record(self._stream).wait()

    def close(self) -> None:
        self.device.end_stream(self._stream)
        self.device.release_host(self._host)
        self.device.release(self.address)


@pytest.fixture
def elsewhere(device: CudaDevice) -> Iterator[Elsewhere]:
    memory = Elsewhere(device, 16 * BLOCK)
    memory.write(0xA5)
    yield memory
    memory.close()


@contextmanager
def kept_busy(device: CudaDevice, stream: int, turns: int = 400) -> Iterator[None]:
    """A stream that has about a millisecond a turn to do before what is queued next."""
    size = 2 << 30
    memory = device.allocate(2 * size)
    for _ in range(turns):
        device.copy(memory, memory + size, size, stream)
    yield
    device.record(stream).wait()
    device.release(memory)


def put(tier: HbmTier, seed: int, owner: str = "a") -> int:
    extent = tier.store(record(seed, BLOCK), payload(seed, BLOCK), seed, owner=owner)
    assert extent is not None
    return extent


def get(tier: HbmTier, extent: int) -> bytes:
    into = bytearray(b"\xa5" * BLOCK)
    tier.load(extent, memoryview(into))
    return bytes(into)


def test_more_than_the_card_has_free_is_refused(device: CudaDevice) -> None:
    free = device.free_bytes()
    with pytest.raises(TierConfigError, match="bytes free"):
        HbmTier(free + (1 << 30), device=device).open()
    assert device.free_bytes() >= free - SEGMENT


def test_closing_gives_the_memory_back(device: CudaDevice) -> None:
    before = device.free_bytes()
    with HbmTier(2 << 30, device=device, segment_bytes=256 * MIB):
        assert device.free_bytes() <= before - (2 << 30)
    assert device.free_bytes() >= before - SEGMENT


def test_blocks_move_between_it_and_the_dram_tier(tier: HbmTier) -> None:
    with DramTier(2 * SEGMENT, segment_bytes=SEGMENT, prefault=False) as dram:
        for segment in dram.segments():
            tier.pin(segment.address, segment.size)
        dram.on_release = lambda number: tier.unpin(dram.segment(number).address)
        there, back = (dram.reserve("a", BLOCK, None) for _ in range(2))
        assert there is not None
        assert back is not None
        dram.view(there, BLOCK)[:] = payload(1, BLOCK)
        dram.view(back, BLOCK)[:] = b"\xa5" * BLOCK
        extent = tier.store(record(1, BLOCK), dram.view(there, BLOCK), None, owner="a")
        assert extent is not None
        tier.load(extent, dram.view(back, BLOCK))
        assert dram.view(back, BLOCK) == payload(1, BLOCK)


def test_blocks_move_in_numbers_on_streams_of_the_tier(tier: HbmTier) -> None:
    with DramTier(2 * SEGMENT, segment_bytes=SEGMENT, prefault=False) as dram:
        for segment in dram.segments():
            tier.pin(segment.address, segment.size)
        dram.on_release = lambda number: tier.unpin(dram.segment(number).address)
        moves: list[tuple[int, int]] = []
        views: list[memoryview] = []
        for seed in range(2 * SEGMENT // BLOCK):
            place, extent = dram.reserve("a", BLOCK, None), tier.reserve("a", BLOCK, None)
            assert place is not None
            assert extent is not None
            number, offset = dram.locate(place)
            moves.append((extent, dram.segment(number).address + offset))
            views.append(dram.view(place, BLOCK))
            views[-1][:] = payload(seed, BLOCK)
        tier.copy_in(moves, BLOCK).wait()
        for view in views:
            view[:] = b"\xa5" * BLOCK
        end = tier.copy_out(moves[::-1], BLOCK)
        for extent, _ in moves:
            tier.free(extent)
        end.wait()
        assert [bytes(v) for v in views] == [payload(s, BLOCK) for s in range(len(views))]
        for view in views:
            view.release()
    tier.settle()
    assert tier.statistics().departing == 0


def test_nothing_waits_for_the_device(tier: HbmTier, device: CudaDevice, stream: int) -> None:
    extent = put(tier, 1)
    with kept_busy(device, stream):
        end = device.record(stream)
        assert get(tier, extent) == payload(1, BLOCK)
        tier.free(put(tier, 2))
        assert not end.done(), "somebody waited for a stream that is not theirs"


def test_copies_under_way_keep_their_blocks_in_a_storm(
    tier: HbmTier, device: CudaDevice, stream: int, elsewhere: Elsewhere
) -> None:
    """Blocks are freed as soon as their copies are queued, while others want the room."""
    wrong: list[int] = []
    late: list[int] = []
    over = threading.Event()

    def storm(first: int) -> None:
        data = [payload(first + n, BLOCK) for n in range(4)]
        while not over.is_set():
            for n, sent in enumerate(data):
                extent = tier.store(record(first + n, BLOCK), sent, None, owner="a")
                if extent is not None:
                    if get(tier, extent) != sent:
                        wrong.append(first + n)
                    tier.free(extent)

    threads = [threading.Thread(target=storm, args=(n * 1000,)) for n in range(1, 4)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(3):
            elsewhere.write(0xA5)
            extents = [put(tier, turn * 16 + n) for n in range(16)]
            with kept_busy(device, stream, turns=1000):
                moves = [(e, elsewhere.address + n * BLOCK) for n, e in enumerate(extents)]
                end = tier.copy_out(moves, BLOCK, stream)
                for extent in extents:
                    tier.free(extent)
                departing = tier.statistics().departing
                if not end.done():
                    late.append(departing)
            assert end.done()
            for n in range(16):
                assert elsewhere.read(n * BLOCK, BLOCK) == payload(turn * 16 + n, BLOCK)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert set(late) == {16 * BLOCK}, "no copy was late, or a block was let go of too early"
    tier.settle()
    assert tier.used == 0


def test_copies_in_arrive(tier: HbmTier, stream: int, elsewhere: Elsewhere) -> None:
    elsewhere.write(0x17)
    extents = [tier.reserve("a", BLOCK, None) for _ in range(16)]
    moves = [(e, elsewhere.address + n * BLOCK) for n, e in enumerate(extents) if e is not None]
    assert len(moves) == 16
    tier.copy_in(moves, BLOCK, stream).wait()
    assert {get(tier, extent) for extent, _ in moves} == {b"\x17" * BLOCK}


def test_copies_in_a_stream_of_torch(tier: HbmTier) -> None:
    torch = pytest.importorskip("torch")
    extent = put(tier, 1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.full((BLOCK,), 0xA5, dtype=torch.uint8, device="cuda")
        tier.copy_out([(extent, tensor.data_ptr())], BLOCK, side.cuda_stream)
        copy = tensor.clone()
    assert copy.cpu().numpy().tobytes() == payload(1, BLOCK)


class Engine:
    """Another process that has a segment mapped."""

    def __init__(self, tier: HbmTier, number: int) -> None:
        command = [sys.executable, "-m", "tests.tiers.hbm_engine", tier.uuid().hex()]
        command += [tier.share(number, "a").hex(), str(tier.segment(number).size)]
        self.process = subprocess.Popen(
            command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.mapped = self._answer()

    def ask(self, *what: object) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_another_process_maps_one_segment_and_no_more(tier: HbmTier) -> None:
    extents = [put(tier, seed) for seed in range(2)]
    reserved = tier.reserve("a", BLOCK, None)
    assert reserved is not None
    number = tier.locate(reserved)[0]
    engine = Engine(tier, number)
    try:
        assert engine.mapped == tier.segment(number).size
        for seed, extent in enumerate(extents):
            assert tier.locate(extent)[0] == number
            place = tier.locate(extent)[1]
            assert engine.ask("digest", place, BLOCK) == digest(payload(seed, BLOCK))
        engine.ask("write", tier.locate(reserved)[1], payload(7, 5000).hex())
        assert get(tier, reserved)[:5000] == payload(7, 5000)
        assert get(tier, extents[1]) == payload(1, BLOCK)
        engine.ask("close")
        tier.unshare(number)
        for extent in (*extents, reserved):
            tier.free(extent)
        others = [put(tier, seed, "b") for seed in range(SEGMENTS * SEGMENT // BLOCK)]
        assert [get(tier, extent) for extent in others[:2]] == [payload(s, BLOCK) for s in (0, 1)]
        with pytest.raises(BadExtent):
            tier.share(number, "a")
    finally:
        engine.close()


def test_an_engine_that_is_killed_while_it_writes_harms_nothing(
    tier: HbmTier, device: CudaDevice
) -> None:
    kept, reserved = put(tier, 1), tier.reserve("a", BLOCK, None)
    assert reserved is not None
    number, place = tier.locate(reserved)
    engine = Engine(tier, number)
    end = ProcessEnd(os.pidfd_open(engine.process.pid))
    try:
        assert engine.ask("write for ever", place, BLOCK) == "writing"
        tier.lease([reserved], end)
        tier.free(reserved)
        assert tier.statistics().departing == BLOCK
    finally:
        engine.close()
    deadline = time.monotonic() + 20
    while tier.statistics().departing and time.monotonic() < deadline:
        time.sleep(0.01)
    tier.unshare(number)
    assert tier.statistics().departing == 0
    assert tier.reserve("a", BLOCK, None) == reserved
    tier.fill(reserved, np.frombuffer(payload(2, BLOCK), np.uint8))
    for _ in range(20):
        assert get(tier, reserved) == payload(2, BLOCK)
        assert get(tier, kept) == payload(1, BLOCK)
    for extent in (kept, reserved):
        tier.free(extent)
    others = [put(tier, seed, "b") for seed in range(SEGMENTS * SEGMENT // BLOCK)]
    assert tier.capacity == SEGMENTS * SEGMENT
    assert get(tier, others[-1]) == payload(len(others) - 1, BLOCK)
