"""Copies between a GPU's KV tensors and registered memory: every byte, in order, and nothing else.

Run by hand where there is a GPU: `scripts/gpu`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from client.paged import PagedMemory
from client.paged_sources import Source
from rdma.gpu_segments import GpuView
from rdma.segments import SEGMENT_SHIFT, SegmentMap
from tests.client.test_paged import Engine, moves, storage_of, torch
from tests.client.test_paged_gpu import KV, busy, on_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

SEGMENT = 64 << 20
SEGMENTS = 6


@pytest.fixture(scope="module")
def arena() -> Iterator[SegmentMap]:
    """Segments as a node shares them, registered."""
    from client.pinning import pinned_segments

    pinned = pinned_segments()
    mapped = SegmentMap()
    for number in range(SEGMENTS):
        fd = os.memfd_create("arena")
        os.ftruncate(fd, SEGMENT)
        mapped.add(number, fd, SEGMENT, populate=False)
    assert pinned.wait(30)
    yield mapped
    assert mapped.close() == 0


def places(arena: SegmentMap, size: int, count: int, seed: int = 0) -> list[memoryview]:
    """Poisoned buffers in the arena, in no order, every second one behind the one before."""
    step = max(2 * size, 1 << 16)
    slots = [(n, at) for n in range(SEGMENTS) for at in range(0, SEGMENT - step + 1, step)]
    chosen = np.random.default_rng(seed).permutation(len(slots))[: (count + 1) // 2].tolist()
    starts = [(slots[n][0] << SEGMENT_SHIFT) + slots[n][1] for n in chosen]
    both = [start + behind for start in starts for behind in (0, size)]
    buffers = [arena.writable(start, size) for start in both[:count]]
    for number, buffer in enumerate(buffers):
        np.frombuffer(buffer, np.uint8)[:] = 0xA5 ^ (number & 0xF)
    return buffers


def random_bytes(buffers: list[memoryview], seed: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    for buffer in buffers:
        buffer[:] = random.bytes(len(buffer))
    return [bytes(buffer) for buffer in buffers]


def on_a_gpu(buffers: list[memoryview], keep: list[Any]) -> list[Source]:
    """Every second buffer as it lies in memory of the GPU, which ``keep`` keeps."""
    shown: list[Source] = []
    for number, buffer in enumerate(buffers):
        if number % 2:
            keep.append(torch.frombuffer(bytearray(buffer), dtype=torch.uint8).cuda())
            shown.append(GpuView(keep[-1].data_ptr(), len(buffer)))
        else:
            shown.append(buffer)
    return shown


def bytes_of(tensors: dict[str, Any]) -> Any:
    """All bytes of the storage on the GPU, those between and behind the blocks included."""
    storage = next(iter(tensors.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).cpu()


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(moves(), st.integers(0, 1 << 20), st.booleans(), st.booleans())
def test_bytes_are_those_of_the_cpu(
    arena: SegmentMap,
    move: tuple[Engine, dict[str, Any], list[int], tuple[int, int]],
    seed: int,
    near: bool,
    by_engine: bool,
) -> None:
    engine, _, ids, layers = move
    here = engine.tensors()
    there = on_gpu(here)
    cpu, gpu = engine.memory(here), engine.memory(there, stage_bytes=150)
    gpu._copies.by_engine = by_engine  # type: ignore[attr-defined]
    keep: list[Any] = []
    size = gpu.layout.layer_range(*layers)[1]
    found = places(arena, size, len(ids), seed)
    expected = [memoryview(bytearray(size)) for _ in ids]
    cpu.gather(ids, expected, layers=layers)
    gpu.gather(ids, found, layers=layers, after=gpu.mark())
    assert list(map(bytes, found)) == list(map(bytes, expected))
    blocks = random_bytes(found, seed)
    cpu.scatter([memoryview(one) for one in blocks], ids, layers=layers)
    shown = on_a_gpu(found, keep) if near else list(found)
    gpu.scatter(shown, ids, layers=layers, after=gpu.mark())
    assert torch.equal(bytes_of(there), storage_of(here))
    whole = places(arena, gpu.layout.block_bytes, len(ids), seed)
    blocks = random_bytes(whole, seed + 1)
    cpu.scatter([memoryview(one) for one in blocks], ids)
    shown = on_a_gpu(whole, keep) if near else list(whole)
    loading = gpu.load_layers(shown, ids, after=gpu.mark())
    for layer in range(engine.layers):
        loading.wait(layer)
    assert torch.equal(bytes_of(there), storage_of(here))
    loading.finish()


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return on_gpu(KV.tensors())


@pytest.fixture(scope="module")
def memory(tensors: dict[str, Any]) -> PagedMemory:
    return KV.memory(tensors, stage_bytes=8 << 20)


def test_nothing_goes_by_way_of_the_cpu(
    memory: PagedMemory, arena: SegmentMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("copied by the CPU")

    staged = memory._copies._otherwise  # type: ignore[attr-defined]
    monkeypatch.setattr(staged, "gather", fail)
    monkeypatch.setattr(staged, "scatter", fail)
    blocks = places(arena, memory.layout.block_bytes, 16)
    memory.gather(range(16), blocks)
    memory.scatter(blocks, range(16))
    memory.load_layers(blocks, range(16)).finish()


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("near", [False, True])
def test_layers_are_waited_for_by_the_stream_and_not_by_the_host(
    memory: PagedMemory,
    tensors: dict[str, Any],
    arena: SegmentMap,
    near: bool,
    by_engine: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory._copies, "by_engine", by_engine)
    layers = list(tensors.values())
    blocks = places(arena, memory.layout.block_bytes, 64)
    warm: list[Any] = []
    memory.load_layers(on_a_gpu(blocks, warm) if near else list(blocks), range(64)).finish()
    for turn in range(3):
        sent = random_bytes(blocks, turn)
        keep: list[Any] = []
        shown = on_a_gpu(blocks, keep) if near else list(blocks)
        torch.cuda.synchronize()
        busy()
        mark = memory.mark()
        loading = memory.load_layers(shown, range(64), after=mark)
        assert not loading.done, "the load did not wait for its mark"
        copies = []
        for number, layer in enumerate(layers):
            loading.wait(number)
            copies.append(layer[:64].contiguous())
        assert not loading.done, "the host waited"
        loading.finish()
        torch.cuda.synchronize()
        size = memory.layout.layer_bytes[0]
        for number, copy in enumerate(copies):
            got = copy.view(torch.uint8).reshape(64, -1).cpu().numpy()
            for block, expected in zip(got, sent, strict=True):
                assert block.tobytes() == expected[number * size : (number + 1) * size]


def test_the_copy_engine_fetches_layers_without_a_kernel_on_the_bus(
    memory: PagedMemory, arena: SegmentMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("read over the bus by a kernel")

    copies: Any = memory._copies
    monkeypatch.setattr(copies, "by_engine", True)
    monkeypatch.setattr(copies._layers, "queue", fail)
    blocks = places(arena, memory.layout.block_bytes, 32)
    sent = random_bytes(blocks, 5)
    memory.load_layers(blocks, range(32)).finish()
    found = [memoryview(bytearray(memory.layout.block_bytes)) for _ in range(32)]
    memory.gather(range(32), found)
    assert list(map(bytes, found)) == sent


def test_a_gather_waits_for_nothing_that_was_asked_after_its_mark(
    memory: PagedMemory, arena: SegmentMap
) -> None:
    blocks = places(arena, memory.layout.block_bytes, 8)
    torch.cuda.synchronize()
    mark, later = memory.mark(), torch.cuda.Event()
    busy()
    later.record()
    memory.gather(range(8), blocks, after=mark)
    memory.scatter(blocks, range(8), after=mark)
    assert not later.query(), "it waited for the whole device"
    torch.cuda.synchronize()


def test_a_segment_goes_when_the_load_from_it_has_ended(memory: PagedMemory) -> None:
    from client.pinning import pinned_segments

    mapped = SegmentMap()
    fd = os.memfd_create("gone")
    os.ftruncate(fd, SEGMENT)
    mapped.add(0, fd, SEGMENT, populate=False)
    assert pinned_segments().wait(30)
    block = mapped.writable(0, memory.layout.block_bytes)
    block[:] = b"\x17" * len(block)
    busy()
    loading = memory.load_layers([block], [3], after=memory.mark())
    block.release()
    closing = threading.Thread(target=mapped.close)
    closing.start()
    closing.join(0.01)
    assert closing.is_alive()
    loading.finish()
    closing.join(10)
    assert not closing.is_alive()
    found = [memoryview(bytearray(memory.layout.block_bytes))]
    memory.gather([3], found)
    assert found[0] == b"\x17" * len(found[0])


def test_streams_at_once(memory: PagedMemory, arena: SegmentMap) -> None:
    size = memory.layout.block_bytes
    buffers = places(arena, size, 96)
    sound: list[int] = []

    def move(first: int) -> None:
        mine = buffers[first : first + 12]
        ids = list(range(first, first + 12))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(12):
                sent = random_bytes(mine, first * 100 + turn)
                if turn % 2:
                    memory.scatter(mine, ids, after=memory.mark())
                else:
                    memory.load_layers(mine, ids, after=memory.mark()).finish()
                for buffer in mine:
                    np.frombuffer(buffer, np.uint8)[:] = 0xEE
                memory.gather(ids, mine, after=memory.mark())
                if list(map(bytes, mine)) == sent:
                    sound.append(first)

    threads = [threading.Thread(target=move, args=(first,)) for first in range(0, 96, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sound) == 8 * 12
