"""Blocks between a node's DRAM and the paged KV tensors of a model of 8 B parameters.

    python -m benchmarks.gpu.copies

16,384 tokens in blocks of 16, 32 layers of 8 KV heads of 128 in bf16: 1,024 blocks of 2 MiB, one
after the other in the arena, as a put of a long prompt leaves them, or at random places; or in
memory of the GPU. Loads layer by layer are measured in both ways. Each limit is measured in the
same run; figures are medians, rates in GB/s.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import numpy as np
import torch

from benchmarks.gpu.figures import Figures, figures
from client.paged import PagedMemory
from client.pinning import pinned_segments
from rdma.gpu_segments import GpuView
from rdma.segments import SegmentMap
from rdma.transport import SEGMENT_SHIFT

LAYERS: Final = 32
BLOCKS: Final = 1024
SHAPE: Final = (2, 16, 8, 128)
SEGMENT: Final = 256 << 20
SEGMENTS: Final = 12
TURNS: Final = 9
BY_ENGINE: Final = "by the copy engine"
WAYS: Final = ("by a kernel", BY_ENGINE)


def arena() -> tuple[SegmentMap, float]:
    """Segments, registered; and how long that took for each GiB."""
    mapped = SegmentMap()
    fds = [os.memfd_create(f"segment {number}") for number in range(SEGMENTS)]
    for number, fd in enumerate(fds):
        os.ftruncate(fd, SEGMENT)
        mapped.add(number, os.dup(fd), SEGMENT, populate=False)
    pinned_segments().wait(60)
    mapped.close()
    # Anew, with pages that are there, as a node's are once it has touched them.
    mapped = SegmentMap()
    pinned_segments()
    began = time.perf_counter()
    for number, fd in enumerate(fds):
        mapped.add(number, fd, SEGMENT, populate=False)
    assert pinned_segments().wait(60)
    return mapped, (time.perf_counter() - began) / (SEGMENT * SEGMENTS / (1 << 30))


def places(mapped: SegmentMap, size: int, *, scattered: bool) -> list[memoryview]:
    """A buffer for each block."""
    slots = [(n, at) for n in range(SEGMENTS) for at in range(0, SEGMENT - size + 1, size)]
    order = np.random.default_rng(7).permutation(len(slots)) if scattered else range(len(slots))
    chosen = [int(one) for one in order[:BLOCKS]]
    buffers = [mapped.writable((slots[n][0] << SEGMENT_SHIFT) + slots[n][1], size) for n in chosen]
    for number, buffer in enumerate(buffers):
        np.frombuffer(buffer, np.int64)[:] = number
    return buffers


def seconds(work: Callable[[], object], turns: int = TURNS) -> float:
    """Median time of something, all of the device's work included."""
    taken = []
    for _ in range(turns + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def model_step() -> Callable[[], None]:
    """Work like that of a model: products that fill the device, and reads of memory."""
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    from_, to = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))

    def step() -> None:
        for _ in range(150):
            torch.mm(a, b)
        for _ in range(30):
            to.copy_(from_)

    return step


def beside(step: Callable[[], None], work: Callable[[], object]) -> tuple[float, int]:
    """Time of a step while a thread does something else again and again, and how often it did."""
    stop, done = threading.Event(), [0]

    def again() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                work()
                done[0] += 1

    thread = threading.Thread(target=again)
    thread.start()
    taken = []
    for _ in range(TURNS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        step()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) / 1e3)
    stop.set()
    thread.join()
    return statistics.median(taken), done[0]


def measure(found: Figures) -> None:
    """All figures: rates in GB/s, times in ms."""
    torch.cuda.init()
    pinned_segments()
    mapped, registering = arena()
    found.note("register_seconds_a_gib", registering)
    pool = [
        torch.empty((2 * BLOCKS, *SHAPE), dtype=torch.bfloat16, device="cuda")
        for _ in range(LAYERS)
    ]
    memory = PagedMemory.of({str(n): one for n, one in enumerate(pool)}, 2 * BLOCKS, 16)
    size = memory.layout.block_bytes
    found.note("block_bytes", size)
    ids = np.random.default_rng(3).permutation(2 * BLOCKS)[:BLOCKS].tolist()
    buffers = places(mapped, size, scattered=False)
    rates(memory, ids, buffers, places(mapped, size, scattered=True), found)
    for way in WAYS:
        with layers_by(memory, way):
            first_layer(memory, ids, buffers, way, found)
    beside_a_model(memory, ids, buffers, found)


def rates(
    memory: PagedMemory,
    ids: list[int],
    buffers: list[memoryview],
    scattered: list[memoryview],
    found: Figures,
) -> None:
    """Rates with nothing beside them, and their limits."""
    size = memory.layout.block_bytes
    total = size * BLOCKS
    host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    near, other = (torch.empty(total, dtype=torch.uint8, device="cuda") for _ in range(2))
    on_gpu = [GpuView(near.data_ptr() + at * size, size) for at in range(BLOCKS)]
    mixed = np.random.default_rng(5).permutation(BLOCKS).tolist()
    works: dict[str, Callable[[], object]] = {
        "pinned copy to the device": lambda: near.copy_(host, non_blocking=True),
        "load": lambda: memory.scatter(buffers, ids),
        "load, scattered": lambda: memory.scatter(scattered, ids),
        "pinned copy from the device": lambda: host.copy_(near, non_blocking=True),
        "save": lambda: memory.gather(ids, buffers),
        "save, scattered": lambda: memory.gather(ids, scattered),
        "copy on the device": lambda: other.copy_(near),
        "load from a GPU": lambda: memory.scatter(on_gpu, ids),
        "load from a GPU, scattered": lambda: memory.scatter([on_gpu[at] for at in mixed], ids),
        "load from a GPU, not waited for": lambda: memory.load_layers(on_gpu, ids),
    }
    for name, work in works.items():
        found.note(name, total / seconds(work) / 1e9)
    for way in WAYS:
        with layers_by(memory, way):
            took = seconds(lambda: memory.load_layers(buffers, ids).finish())
            found.note(f"load by layers, {way}", total / took / 1e9)


@contextmanager
def layers_by(memory: PagedMemory, way: str) -> Iterator[None]:
    """Have layers loaded in one of the two ways."""
    copies = cast("Any", memory._copies)
    copies.by_engine = way == BY_ENGINE
    yield
    copies.by_engine = False


def first_layer(
    memory: PagedMemory, ids: list[int], buffers: list[memoryview], way: str, found: Figures
) -> None:
    """When the first layer is there, and how long the host takes to ask for all."""
    taken: list[float] = []
    queued = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loading = memory.load_layers(buffers, ids)
        queued.append(time.perf_counter() - began)
        loading._events[0].synchronize()
        taken.append(time.perf_counter() - began)
        loading.finish()
    found.note(f"first layer ms, {way}", statistics.median(taken) * 1e3)
    found.note(f"queueing all layers ms, {way}", statistics.median(queued) * 1e3)


def beside_a_model(
    memory: PagedMemory, ids: list[int], buffers: list[memoryview], found: Figures
) -> None:
    """How much longer a model takes while copies go on."""

    def save_some() -> None:
        time.sleep(0.018)
        memory.gather(ids[:64], buffers[:64])

    def load_layers() -> None:
        memory.load_layers(buffers, ids).finish()

    step = model_step()
    alone, _ = beside(step, lambda: time.sleep(0.01))
    works: dict[str, tuple[str, Callable[[], None]]] = {
        "save": (WAYS[0], lambda: memory.gather(ids, buffers)),
        "load": (WAYS[0], lambda: memory.scatter(buffers, ids)),
        "save of 64 blocks each 20 ms": (WAYS[0], save_some),
    }
    works |= {f"load by layers, {way}": (way, load_layers) for way in WAYS}
    for name, (way, work) in works.items():
        with layers_by(memory, way):
            slow, times = beside(step, work)
        found.note(f"model beside {name}", slow / alone)
        found.note(f"{name}: times", times)


def main() -> None:
    """Print the figures, and write them where ``$OUT`` says."""
    with figures("copies") as found:
        measure(found)


if __name__ == "__main__":
    main()
