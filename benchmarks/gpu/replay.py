"""Time to the first token of the requests of a trace, with a store and without.

    python -m benchmarks.gpu.replay [--requests N] [--scale N] [--load SHARE] [--tiny]

The first 300 requests of ``conversation.jsonl``, each with an eighth of its tokens, to a model of
8 B parameters with random weights that computes one prompt after the other. They come as in the
trace, several at a time, compressed so that computing everything takes nine tenths of the time. A
request's time runs from its arrival until its first token is known; no more tokens are computed. It
is measured three times: without a store, with one that is empty at first, and with the same again,
when it holds what these requests brought. Saving goes on in the background, HBM is in use.

The distributions are drawn into ``replay.svg`` beside the figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers import DynamicCache

import kvstore
from benchmarks.gpu.figures import Figures, figures, synchronize
from benchmarks.gpu.model import LLAMA_8B, TINY, Shape, logits, made
from benchmarks.gpu.requests import Prompt, prompts
from benchmarks.gpu.tiers import flush, settle
from benchmarks.node import node
from benchmarks.tcp import free_port
from client.transformers_memory import KVMemory
from client.transformers_paged import PagedBlocks, PagedPrefixCache
from kvstore.plot import COLOURS, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES: Final = ("without a store", "store, empty at first", "store, all seen before")
QUANTILES: Final = (50, 90, 99)
DEADLINE: Final = 20.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run goes through.

    Attributes:
        requests: how many.
        scale: every prompt has so many times fewer tokens than in the trace.
        load: part of the time that computing everything takes.
        spare: DRAM by what the requests bring.
        hbm: bytes of the node's HBM.
    """

    requests: int = 300
    scale: int = 8
    load: float = 0.9
    spare: float = 1.25
    hbm: int = 24 << 30


SMALL: Final = Sizes(12, 64, hbm=0)


@dataclass(slots=True)
class Server:
    """A model that answers one prompt after the other."""

    model: Any
    store: PagedPrefixCache

    def compute(self, ids: Any) -> int:
        """The first token, everything computed."""
        cache = DynamicCache(config=self.model.config)
        return int(logits(self.model, ids, cache, 0).argmax())

    def reuse(self, ids: Any, sources: Counter[str]) -> int:
        """The first token with what the store holds; the rest is saved behind it."""
        cache, reused = self.store.restore(ids)
        token = int(logits(self.model, ids, cache, reused.tokens).argmax())
        if not cache.finish():
            raise RuntimeError("the node was lost")
        sources.update(reused.tiers)
        self.store.store(ids, cache)
        return token


def replay(
    wanted: Sequence[Prompt], answer: Callable[[Any], int], compress: float
) -> tuple[list[float], float]:
    """Answer prompts as they arrive.

    Args:
        wanted: in the order of their arrival.
        answer: computes the first token.
        compress: seconds in which one second of the trace passes.

    Returns:
        Seconds to the first token of each, and the part of the time until the last arrival that
        answering all takes.
    """
    taken, busy = [], 0.0
    synchronize()
    began = time.perf_counter()
    for prompt in wanted:
        arrival = began + prompt.arrival * compress
        time.sleep(max(0.0, arrival - time.perf_counter()))
        started = time.perf_counter()
        answer(prompt.ids)
        ended = time.perf_counter()
        busy += ended - started
        taken.append(ended - arrival)
    return taken, busy / (wanted[-1].arrival * compress)


@contextmanager
def server(
    shape: Shape, sizes: Sizes, wanted: Sequence[Prompt], found: Figures
) -> Iterator[Server]:
    """A model and a node whose memory is in use and empty."""
    model = made(shape)
    memory = KVMemory(model, max(prompt.tokens for prompt in wanted) + 16, sequences=3)
    size = memory.paged.layout.block_bytes
    unique = _unique(wanted)
    dram = round(unique * size * sizes.spare) + (64 << 20)
    found.note("blocks that the requests bring", unique)
    found.note("of GiB", unique * size / (1 << 30))
    control = f"127.0.0.1:{free_port()}"
    values: dict[str, object] = {"dram__capacity": dram, "dram__overcommit": True}
    values |= {"hbm__capacity": sizes.hbm} if memory.gpu is not None and sizes.hbm else {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-")))
        running = stack.enter_context(node(directory, listen__control=control, **values))
        client = stack.enter_context(
            kvstore.connect(
                running.unix, memory.namespace("replay"), deadline=DEADLINE, gpu=memory.gpu
            )
        )
        store = stack.enter_context(PagedPrefixCache(client, model, memory, background=True))
        _touch(store, dram)
        flush("dram", control)
        yield Server(model, store)


def _unique(wanted: Sequence[Prompt]) -> int:
    seen: set[bytes] = set()
    for prompt in wanted:
        seen.update(kvstore.prefix_hashes(prompt.ids[0].numpy(), 16))
    return len(seen)


def _touch(store: PagedPrefixCache, dram: int) -> None:
    """Fill all of the node's memory once, so that it is mapped and registered."""
    memory = store.memory
    blocks = memory.blocks_of(0)
    for turn in range(dram // (len(blocks) * memory.paged.layout.block_bytes) + 1):
        tokens = np.full(16 * len(blocks), turn + 1, np.int64)
        source = PagedBlocks(memory.paged, blocks, memory.paged.mark())
        store.client.put(kvstore.prefix_hashes(tokens, 16), source)
        settle()


def measure(shape: Shape, sizes: Sizes, found: Figures) -> dict[str, list[float]]:
    """Times to the first token, in seconds."""
    wanted = prompts(sizes.requests, sizes.scale)
    lengths = [prompt.tokens for prompt in wanted]
    found.note("requests", len(wanted))
    found.note("tokens of all, of the longest", (sum(lengths), max(lengths)))
    with server(shape, sizes, wanted, found) as here:
        alone = _served(wanted, here.compute)
        compress = alone / sizes.load / wanted[-1].arrival
        found.note("computing everything takes about, s", alone)
        found.note("a second of the trace passes in, s", compress)
        times = {}
        times[NAMES[0]], busy = replay(wanted, here.compute, compress)
        found.note(f"{NAMES[0]}: share of the time that it works", busy)
        for name in NAMES[1:]:
            sources: Counter[str] = Counter()
            times[name], busy = replay(
                wanted,
                lambda ids: here.reuse(ids, sources),  # noqa: B023
                compress,
            )
            found.note(f"{name}: share of the time that it works", busy)
            for tier, count in sorted(sources.items()):
                found.note(f"{name}: tokens from {tier}, share", count / sum(lengths))
            _drain(here.store)
    return times


def _served(wanted: Sequence[Prompt], answer: Callable[[Any], int]) -> float:
    """Seconds for all, one behind the other; from every third.

    Kernels are prepared for each length anew: the first time of each is not counted.
    """
    for prompt in wanted:
        answer(prompt.ids)
    began = time.perf_counter()
    for prompt in wanted[::3]:
        answer(prompt.ids)
    return (time.perf_counter() - began) * len(wanted) / len(wanted[::3])


def _drain(store: PagedPrefixCache) -> None:
    """Wait until all is saved."""
    with store._freed:
        store._freed.wait_for(lambda: not store._saving, 60)


def report(times: dict[str, list[float]], found: Figures) -> None:
    """Quantiles, and by how much the store cuts them."""
    for name, taken in times.items():
        for quantile in QUANTILES:
            value = float(np.percentile(taken, quantile))
            found.note(f"{name}: P{quantile}, ms", value * 1e3)
            if name != NAMES[0]:
                before = float(np.percentile(times[NAMES[0]], quantile))
                found.note(f"{name}: P{quantile} cut by", 1 - value / before)
    found["times, s"] = times


def draw(times: dict[str, list[float]], path: Path, title: str) -> None:
    """The part of the requests whose first token came within a time."""

    def lines(figure: Figure) -> None:
        axes = figure.add_subplot()
        for (name, taken), colour in zip(times.items(), COLOURS, strict=False):
            share = np.arange(1, len(taken) + 1) / len(taken) * 100
            axes.step(np.sort(taken) * 1e3, share, where="post", label=name, color=colour)
        axes.axhline(99, color="#888888", linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel("milliseconds from arrival to the first token")
        axes.set_ylabel("requests, %")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        axes.legend()

    save(path, lines)


def main() -> None:
    """Print the figures; write them, and the plot, where ``$OUT`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true")
    usual = Sizes()
    parser.add_argument("--requests", type=int, default=usual.requests)
    parser.add_argument("--scale", type=int, default=usual.scale)
    parser.add_argument("--load", type=float, default=usual.load)
    options = parser.parse_args()
    shape, sizes = TINY, SMALL
    if not options.tiny:
        shape, sizes = LLAMA_8B, Sizes(options.requests, options.scale, options.load)
    with figures("replay") as found:
        with torch.inference_mode():
            times = measure(shape, sizes, found)
        report(times, found)
        if out := os.environ.get("OUT"):
            title = f"{sizes.requests} requests, load {sizes.load:.0%} without a store"
            draw(times, Path(out, "replay.svg"), title)


if __name__ == "__main__":
    main()
