"""Blocks through a real daemon and a real client: saved, and loaded from each of its tiers.

    python -m benchmarks.gpu.through_node [--tiny]

16,384 tokens of a model of 8 B parameters: 1,024 blocks of 2 MiB, from and to paged KV tensors. A
load is the whole of it: the client asks, the blocks are copied, the client lets go of them. The
limits (a pinned copy, a copy on the device, the disk by itself) are measured in the same run. Every
load is compared with what was saved. ``--tiny`` tries all but HBM on the CPU; its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import kvstore
from benchmarks.gpu.disk import Disk
from benchmarks.gpu.figures import Figures, figures, median_seconds, seconds
from benchmarks.gpu.tiers import HBM, flush, settle, wait_for_hbm
from benchmarks.node import node
from benchmarks.tcp import free_port
from client.blocking import Client
from client.paged import PagedMemory
from client.transformers_paged import PagedBlocks
from kvstore.identity import ROOT_PARENT, Namespace

TURNS: Final = 5
DEADLINE: Final = 30.0
DEPTH: Final = 8
DRAM: Final = 2
SSD: Final = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run goes through.

    Attributes:
        layers, blocks, shape: of the KV tensors; each prompt has half of the blocks.
        prompts: that fill the node's DRAM.
        device: where the tensors are.
    """

    layers: int = 32
    blocks: int = 2048
    shape: tuple[int, ...] = (2, 16, 8, 128)
    prompts: int = 5
    device: str = "cuda"


TINY: Final = Sizes(4, 64, (2, 16, 2, 32), 3, "cpu")


@dataclass(slots=True)
class Bench:
    """KV tensors, and the prompts that a node was given."""

    sizes: Sizes
    pool: list[Any]
    memory: PagedMemory
    found: Figures
    expected: list[Any] = field(default_factory=list)
    prompts: int = 0

    @property
    def count(self) -> int:
        """Blocks of a prompt."""
        return self.sizes.blocks // 2

    @property
    def nbytes(self) -> int:
        """Bytes of a prompt."""
        return self.count * self.memory.layout.block_bytes

    @property
    def ids(self) -> list[int]:
        """Blocks of the tensors that are saved; in no order, as an engine's are."""
        return self._order()[: self.count]

    @property
    def others(self) -> list[int]:
        """Those that are loaded into."""
        return self._order()[self.count :]

    def _order(self) -> list[int]:
        order: list[int] = np.random.default_rng(3).permutation(self.sizes.blocks).tolist()
        return order

    def namespace(self) -> Namespace:
        """Of the blocks."""
        layout = self.memory.layout
        return Namespace("benchmark", layout.dtype, layout.name, 16, layout.block_bytes)

    def names(self) -> list[bytes]:
        """A prompt that nobody has stored."""
        self.prompts += 1
        tokens = np.full(16 * self.count, self.prompts, np.int64)
        return kvstore.prefix_hashes(tokens, 16)

    def rate(self, took: float) -> float:
        """GB/s of a prompt."""
        return self.nbytes / took / 1e9

    def save(self, client: Client, names: list[bytes]) -> float:
        """Save a prompt; GB/s."""
        blocks = PagedBlocks(self.memory, self.ids, self.memory.mark())
        began = time.perf_counter()
        saved = client.put(names, blocks, parent=ROOT_PARENT)
        took = time.perf_counter() - began
        if saved.stored != self.count:
            raise RuntimeError(f"{saved.stored} of {self.count} blocks were stored")
        return self.rate(took)

    def load(self, client: Client, names: list[bytes], tier: int) -> float:
        """Load a prompt and compare it; seconds.

        Raises:
            RuntimeError: it was not all in that tier, or not what was saved.
        """

        def work() -> None:
            with client.view(names, device=True) as views:
                if views.codes != bytes([tier]) * len(names):
                    raise RuntimeError(f"not in tier {tier}: {sorted(set(views.codes))}")
                self.memory.scatter([view for view in views if view is not None], self.others)
                if not views.valid:
                    raise RuntimeError("the session was lost")

        for layer in self.pool:
            layer[self.others] = 0
        took = seconds(work)
        if not all(torch.equal(layer[self.others], layer[self.ids]) for layer in self.pool):
            raise RuntimeError("what was loaded is not what was saved")
        return took


def made(sizes: Sizes, found: Figures) -> Bench:
    """Tensors of random content."""
    pool = [
        torch.randn((sizes.blocks, *sizes.shape), dtype=torch.bfloat16, device=sizes.device)
        for _ in range(sizes.layers)
    ]
    memory = PagedMemory.of({str(n): one for n, one in enumerate(pool)}, sizes.blocks, 16)
    return Bench(sizes, pool, memory, found)


@contextmanager
def running(bench: Bench, **values: object) -> Iterator[tuple[Client, Client, str]]:
    """A node; a client that computes on the GPU, one that doesn't, and the control address."""
    control = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-")))
        values |= {"ssd__directory": directory / "ssd"} if "ssd__capacity" in values else {}
        dram = round(1.25 * bench.sizes.prompts * bench.nbytes)
        daemon = stack.enter_context(
            node(
                directory,
                listen__control=control,
                dram__capacity=dram,
                dram__overcommit=True,
                **values,
            )
        )
        near, far = (
            stack.enter_context(
                kvstore.connect(daemon.unix, bench.namespace(), deadline=DEADLINE, gpu=gpu)
            )
            for gpu in (bench.memory.gpu, None)
        )
        yield near, far, control


def limits(bench: Bench) -> None:
    """Plain copies of the same bytes."""
    if bench.sizes.device == "cpu":
        return
    host = torch.empty(bench.nbytes, dtype=torch.uint8, pin_memory=True)
    near, other = (torch.empty(bench.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    for name, to, source in (
        ("pinned copy to the device", near, host),
        ("pinned copy from the device", host, near),
        ("copy on the device", other, near),
    ):

        def copy(to: Any = to, source: Any = source) -> None:
            to.copy_(source, non_blocking=True)

        bench.found.note(name, bench.rate(median_seconds(copy, 9)))


def memory_tiers(bench: Bench) -> None:
    """Saves, and loads from DRAM and HBM."""
    hbm = {"hbm__capacity": 4 * bench.nbytes} if bench.memory.gpu is not None else {}
    with running(bench, **hbm) as (near, far, control):
        for _ in range(2 * bench.sizes.prompts):
            bench.save(far, bench.names())
            settle()
        flush("dram", control)
        for name in ("there is room", "blocks are evicted for it"):
            rates = []
            for _ in range(bench.sizes.prompts):
                names = bench.names()
                rates.append(bench.save(far, names))
            bench.found.note(f"save while {name}, GB/s", statistics.median(rates))
        dram = [bench.load(far, names, DRAM) for _ in range(TURNS)]
        bench.found.note("load from DRAM, GB/s", bench.rate(statistics.median(dram)))
        if hbm:
            promoted = wait_for_hbm(near, names)
            bench.found.note("copied up in the background after, ms", promoted * 1e3)
            taken = [bench.load(near, names, HBM) for _ in range(TURNS + 1)][1:]
            bench.found.note("load from HBM, GB/s", bench.rate(statistics.median(taken)))
            parts_of_hbm(bench, near, names)


def parts_of_hbm(bench: Bench, client: Client, names: list[bytes]) -> None:
    """Where the time of a load from HBM goes."""
    asked, copied, let_go = [], [], []
    for _ in range(TURNS):
        began = time.perf_counter()
        with client.view(names, device=True) as views:
            asked.append(time.perf_counter() - began)
            blocks = [view for view in views if view is not None]
            copied.append(seconds(lambda: bench.memory.scatter(blocks, bench.others)))  # noqa: B023
            began = time.perf_counter()
        let_go.append(time.perf_counter() - began)
    for name, taken in (("asked for", asked), ("copied", copied), ("let go of", let_go)):
        bench.found.note(f"from HBM, all blocks are {name} in, ms", statistics.median(taken) * 1e3)
    rate = bench.rate(statistics.median(copied))
    bench.found.note("load from HBM, the copy alone, GB/s", rate)


def disk_tier(bench: Bench) -> None:
    """Loads from SSD, and the disk by itself, by turns."""
    capacity = 2 * (TURNS + 1) * bench.nbytes
    with (
        tempfile.TemporaryDirectory(prefix="kvbench-") as directory,
        running(bench, ssd__capacity=capacity, ssd__queue_depth=DEPTH) as (_, far, control),
    ):
        size = max(bench.nbytes, 8 << 20)
        disk = Disk(Path(directory, "file"), size, DEPTH)
        prompts = []
        for _ in range(bench.sizes.prompts - 1):
            prompts.append(bench.names())
            bench.save(far, prompts[-1])
            settle()
        flush("dram", control)
        loads, reads = [], []
        for names in prompts:
            reads.append(disk.rate() / 1e9)
            loads.append(bench.rate(bench.load(far, names, SSD)))
        disk.close()
        bench.found.note("the disk by itself, GB/s", statistics.median(reads))
        bench.found.note("load from SSD, GB/s", statistics.median(loads))
        ratio = statistics.median(a / b for a, b in zip(loads, reads, strict=True))
        bench.found.note("load from SSD by the disk's own rate", ratio)


def main() -> None:
    """Print the figures; write them where ``$OUT`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true")
    sizes = TINY if parser.parse_args().tiny else Sizes()
    os.environ.pop("KVSTORE_CONFIG", None)
    failed: list[Exception] = []
    with figures("through_node") as found:
        bench = made(sizes, found)
        limits(bench)
        for part in (memory_tiers, disk_tier):
            try:
                part(bench)
            except (OSError, RuntimeError, kvstore.KVStoreError) as error:
                found.note(f"{part.__name__}: failed", f"{type(error).__name__}: {error}")
                failed.append(error)
    if failed:
        raise failed[0]


if __name__ == "__main__":
    main()
