"""The HBM tier by itself: blocks of 2 MiB to and from a DRAM tier, and out in an engine's stream.

    python -m benchmarks.gpu.hbm_tier

1,024 blocks, as 16,384 tokens of a model of 8 B parameters. Each limit is measured in the same run;
figures are the best of some turns, in GB/s of payload. ``store`` and ``load`` take a block a call.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from tiers import DramTier, HbmTier, Record
from tiers.cuda import CudaDevice

BLOCK: Final = 2 << 20
BLOCKS: Final = 1024
SIZE: Final = BLOCK * BLOCKS
SEGMENT: Final = 256 << 20
TURNS: Final = 5
NAMES: Final = Record(bytes(32), 0, bytes(32), bytes(32), BLOCK)


def rate(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """GB/s of the best turn."""
    best = float("inf")
    for _ in range(TURNS):
        before()
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return round(SIZE / best / 1e9, 1)


def seconds(work: Callable[[], object]) -> float:
    """How long something takes once."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def reserved(tier: DramTier | HbmTier) -> list[int]:
    """Room for all blocks."""
    extents = [tier.reserve("a", BLOCK, None) for _ in range(BLOCKS)]
    return [extent for extent in extents if extent is not None]


def one_by_one(dram: DramTier, hbm: HbmTier, threads: int) -> dict[str, float]:
    """Rates of ``store`` and ``load`` by some threads; the HBM tier is empty before and after."""
    places, held = reserved(dram), list[int]()
    views = [dram.view(place, BLOCK) for place in places]

    def store(view: memoryview) -> None:
        extent = hbm.store(NAMES, view, None, owner="a")
        assert extent is not None
        held.append(extent)

    def empty() -> None:
        while held:
            hbm.free(held.pop())

    with ThreadPoolExecutor(threads) as pool:
        stored = rate(lambda: list(pool.map(store, views)), empty)
        loaded = rate(lambda: list(pool.map(hbm.load, held, views)))
    empty()
    for place, view in zip(places, views, strict=True):
        view.release()
        dram.free(place)
    return {f"store, {threads} threads": stored, f"load, {threads} threads": loaded}


def in_numbers(device: CudaDevice, dram: DramTier, hbm: HbmTier) -> dict[str, float]:
    """Rates of copies of all blocks at once, and of plain copies of segments."""
    stream, there = device.stream(), device.allocate(SIZE)
    host, near = dram.segments()[0].address, hbm.segments()[0].address

    def plain(source: int) -> None:
        device.copy_all([(there + at, source, SEGMENT) for at in range(0, SIZE, SEGMENT)], stream)
        device.record(stream).wait()

    held = reserved(hbm)
    down = []
    for extent, place in zip(held, reserved(dram), strict=True):
        number, offset = dram.locate(place)
        down.append((extent, dram.segment(number).address + offset))
    moves = [(extent, there + n * BLOCK) for n, extent in enumerate(held)]
    found = {
        "plain copies over the bus": rate(partial(plain, host)),
        "copy_in from the DRAM tier": rate(lambda: hbm.copy_in(down, BLOCK).wait()),
        "copy_out to the DRAM tier": rate(lambda: hbm.copy_out(down, BLOCK).wait()),
        "plain copies on the device": rate(partial(plain, near)),
        "copy_out on the device": rate(lambda: hbm.copy_out(moves, BLOCK, stream).wait()),
    }
    device.end_stream(stream)
    device.release(there)
    return found


def main() -> None:
    """Print the figures, and write them where ``$OUT`` says."""
    device = CudaDevice(0)
    device.open()
    found: dict[str, float] = {}
    with (
        HbmTier(2 * SIZE, device=device, segment_bytes=SEGMENT, lanes=8) as hbm,
        DramTier(SIZE, segment_bytes=SEGMENT) as dram,
    ):
        dram.wait_prefault()
        for segment in dram.segments():
            took = seconds(partial(hbm.pin, segment.address, segment.size))
            found["seconds to pin a GiB"] = took / segment.size * 2**30
        dram.on_release = lambda number: hbm.unpin(dram.segment(number).address)
        for threads in (1, 2, 4):
            found |= one_by_one(dram, hbm, threads)
        found |= in_numbers(device, dram, hbm)
    print(json.dumps(found, indent=1))
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "hbm_tier.json"), "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
