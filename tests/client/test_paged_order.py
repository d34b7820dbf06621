"""Copies on a GPU in their order: every byte is right, however late the device does what."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client import paged
from client.paged import PagedMemory
from client.paged_sources import Source
from client.pinning import PinnedSegments
from kvstore.errors import InvalidRequest, NamespaceMismatch
from rdma.gpu_segments import GpuView
from rdma.region import address_of
from tests.client.cuda_stand_in import Event, Gpu, cuda_copies
from tests.client.test_paged import Engine, moves, storage_of, torch
from tests.client.test_pinning import Registrar

ROOM = 1 << 16
ENGINE = Engine("LBHNC", layers=4, blocks=8, inner=(2, 4, 16), dtype="float16")
IN_ORDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@dataclass
class Bench:
    """KV tensors that a stand-in for a GPU copies, and memory to copy from and to."""

    gpu: Gpu
    memory: PagedMemory
    tensors: dict[str, Any]
    registered: memoryview
    unknown: memoryview
    copies: Any

    def blocks(self, seed: int, size: int, kinds: Sequence[str]) -> tuple[list[Source], bytes]:
        """Blocks of random bytes in memory of some kinds, every second behind the one before."""
        random = np.random.default_rng(seed)
        step = len(self.registered) // (len(kinds) or 1) // 64 * 64
        blocks: list[Source] = []
        data = b""
        for number, kind in enumerate(kinds):
            at = number // 2 * 2 * step + number % 2 * size
            where = self.unknown if kind == "unknown" else self.registered
            found = where[at : at + size]
            found[:] = random.bytes(size)
            data += bytes(found)
            blocks.append(GpuView(address_of(found), size) if kind == "gpu" else found)
        return blocks, data

    def overwrite(self) -> None:
        """As a node does with memory that nobody reads any more."""
        self.registered[:] = b"\xee" * len(self.registered)
        self.unknown[:] = b"\xdd" * len(self.unknown)


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with cuda_copies() as module:
        yield module


@pytest.fixture
def made(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Engine, int, bool], Bench]:
    def bench(engine: Engine, seed: int, by_engine: bool = False, stage: int = 150) -> Bench:
        gpu, pinned = Gpu(seed), PinnedSegments(Registrar())
        registered, unknown = (memoryview(bytearray(ROOM)) for _ in range(2))
        pinned.mapped(address_of(registered), ROOM)
        assert pinned.wait(10)

        def direct(tensors: Any, groups: Any, room: int, staged: Any) -> Any:
            return kernels.CudaCopies(gpu, tensors, groups, pinned, staged, room)

        monkeypatch.setattr(paged, "_without_the_cpu", direct)
        tensors = engine.tensors()
        memory = engine.memory(tensors, staged=True, stage_bytes=stage)
        copies: Any = memory._copies
        copies.by_engine = by_engine
        copies._device = SimpleNamespace(index=3)
        return Bench(gpu, memory, tensors, registered, unknown, copies)

    return bench


KINDS = st.lists(st.sampled_from(["gpu", "registered", "registered", "unknown"]), min_size=8)


@IN_ORDER
@given(moves(), KINDS, st.integers(0, 1 << 30), st.booleans())
def test_bytes_are_those_of_the_cpu(
    made: Callable[..., Bench],
    move: tuple[Engine, dict[str, Any], list[int], tuple[int, int]],
    kinds: list[str],
    seed: int,
    by_engine: bool,
) -> None:
    engine, _, ids, layers = move
    bench, here = made(engine, seed, by_engine), engine.tensors()
    cpu, size = engine.memory(here), bench.memory.layout.layer_range(*layers)[1]
    blocks, data = bench.blocks(seed, size, kinds[: len(ids)])
    bench.memory.scatter(blocks, ids, layers=layers, after=bench.memory.mark())
    bench.overwrite()
    cpu.scatter(cut(data, size), ids, layers=layers)
    assert equal(bench.tensors, here)
    whole = bench.memory.layout.block_bytes
    blocks, data = bench.blocks(seed + 1, whole, kinds[: len(ids)])
    loading = bench.memory.load_layers(blocks, ids, after=bench.memory.mark())
    loading.finish()
    bench.overwrite()
    cpu.scatter(cut(data, whole), ids)
    assert equal(bench.tensors, here)
    bench.gpu.finish()
    assert equal(bench.tensors, here), "something went on after the end"


@IN_ORDER
@given(KINDS, st.integers(0, 1 << 30), st.booleans())
def test_layers_come_behind_the_mark_and_before_their_model(
    made: Callable[..., Bench], kinds: list[str], seed: int, by_engine: bool
) -> None:
    bench = made(ENGINE, seed, by_engine, 1100)
    names, ids = list(bench.tensors), list(range(8))
    known = ["registered" if kind == "unknown" else kind for kind in kinds[:8]]
    size = bench.memory.layout.block_bytes
    blocks, _ = bench.blocks(seed + 1, size, known)
    bench.memory.load_layers(blocks, ids).finish()  # tables and staging are there from now on
    bench.gpu.finish()
    blocks, data = bench.blocks(seed, size, known)
    before = [bench.tensors[name].clone() for name in names]
    seen_before, seen = [], []

    def look(into: list[Any], name: str) -> None:
        bench.gpu.current.ask(lambda: into.append(bench.tensors[name].clone()))

    for name in names:
        look(seen_before, name)
    loading = bench.memory.load_layers(blocks, ids, after=bench.memory.mark())
    assert not loading.done, "the host waited"
    for number, name in enumerate(names):
        loading.wait(number)
        look(seen, name)
    bench.gpu.finish()
    assert loading.done
    assert all(map(same, seen_before, before)), "what the model still read was overwritten"
    here = ENGINE.tensors()
    ENGINE.memory(here).scatter(cut(data, size), ids)
    assert all(same(got, here[name]) for got, name in zip(seen, names, strict=True))


@pytest.mark.parametrize("by_engine", [False, True])
def test_the_host_waits_for_nothing_even_at_the_first_time(
    made: Callable[..., Bench], by_engine: bool
) -> None:
    bench = made(ENGINE, 1, by_engine, 1100)
    size = bench.memory.layout.block_bytes
    blocks, data = bench.blocks(1, size, ["registered"] * 6 + ["gpu"] * 2)
    engine = Event(bench.gpu)
    bench.gpu.current.wait_event(engine)
    loading = bench.memory.load_layers(blocks, range(8), after=bench.memory.mark())
    assert not loading.done
    engine.set()
    loading.finish()
    here = ENGINE.tensors()
    ENGINE.memory(here).scatter(cut(data, size), range(8))
    assert equal(bench.tensors, here)


@IN_ORDER
@given(st.integers(0, 1 << 30), st.integers(1, 8))
def test_blocks_are_saved_behind_the_mark(
    made: Callable[..., Bench], seed: int, count: int
) -> None:
    bench = made(ENGINE, seed, stage=4000)
    ids, size = list(range(count)), bench.memory.layout.block_bytes
    blocks, _ = bench.blocks(seed, size, ["registered"] * count)
    tensor = bench.tensors["layer 1"]
    bench.gpu.current.ask(lambda: tensor.fill_(1.5))
    into = [block for block in blocks if isinstance(block, memoryview)]
    bench.memory.gather(ids, into, after=bench.memory.mark())
    expected = [memoryview(bytearray(size)) for _ in ids]
    ENGINE.memory(bench.tensors).gather(ids, expected)
    assert list(map(bytes, into)) == list(map(bytes, expected))


def test_the_copy_engine_fetches_neighbours_and_the_kernel_the_rest(
    made: Callable[..., Bench], kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = made(ENGINE, 1, True)
    size = bench.memory.layout.block_bytes
    blocks, _ = bench.blocks(1, size, ["registered"] * 8)
    bench.memory.load_layers(blocks, range(8)).finish()
    assert bench.gpu.rows == 8 * ENGINE.layers
    by_layer = sys.modules["client.paged_by_layer"]
    monkeypatch.setattr(by_layer, "MOST_PIECES", 3)
    bench.memory.load_layers(blocks, range(8)).finish()
    assert bench.gpu.rows == 8 * ENGINE.layers


def test_what_lies_on_a_gpu_is_read_by_one_kernel_that_is_waited_for(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = made(ENGINE, 1)
    blocks, _ = bench.blocks(1, bench.memory.layout.block_bytes, ["gpu"] * 8)
    bench.memory.scatter(blocks, range(8))
    assert bench.gpu.kernels == 1
    found = bench.memory.layout.block_bytes

    def fails(*_: object) -> None:
        raise OSError("no copies")

    host = [*blocks[:2], memoryview(bytearray(found))]
    for name, call in (("scatter", "scatter"), ("scatter_layers", "load_layers")):
        monkeypatch.setattr(bench.copies, name, fails)
        with pytest.raises(OSError, match="no copies"):
            getattr(bench.memory, call)(host, range(3))
        assert not bench.copies._near.work, "it goes on reading what the caller lets go of"


def test_a_gpu_is_not_read_without_one() -> None:
    for options in ({}, {"staged": True}):
        memory = ENGINE.memory(ENGINE.tensors(), **options)
        assert memory.gpu is None
        view = GpuView(1 << 40, memory.layout.block_bytes)
        for call in (memory.scatter, memory.load_layers):
            with pytest.raises(InvalidRequest, match="on a GPU"):
                call([view], [0])


def test_a_block_on_a_gpu_has_the_size_of_a_block(made: Callable[..., Bench]) -> None:
    bench = made(ENGINE, 1)
    assert bench.memory.gpu == 3
    size = bench.memory.layout.block_bytes
    with pytest.raises(NamespaceMismatch, match=f"{size - 2} bytes"):
        bench.memory.scatter([GpuView(1 << 40, size - 2)], [0])


def cut(data: bytes, size: int) -> list[memoryview]:
    return [memoryview(data)[at : at + size] for at in range(0, len(data), size)]


def same(one: Any, other: Any) -> bool:
    raw = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*raw))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool((storage_of(one) == storage_of(other)).all())
