"""Time to the first token with a prefix in a node's DRAM or HBM, and without; what saving costs.

    python -m benchmarks.gpu.ttft [--tiny]

A model of 8 B parameters with random weights, a real daemon, ``client.PagedPrefixCache``. Both
sides use the same attention. Figures are medians; the first use of everything is told apart.
``--tiny`` tries all of it on the CPU with a small model; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache

import kvstore
from benchmarks.gpu.figures import Figures, figures
from benchmarks.gpu.model import LLAMA_8B, TINY, Shape, logits, made, synchronize, tokens
from benchmarks.gpu.tiers import settle, wait_for_hbm
from benchmarks.node import node
from client import transformers_attention
from client.blocking import Client
from client.transformers_memory import KVMemory
from client.transformers_paged import PagedBlocks, PagedPrefixCache

SHARED: Final = 0.95
BY_ENGINE: Final = "DRAM, by the copy engine"
OTHER_WAYS: Final = (BY_ENGINE, "HBM")
TURNS: Final = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run goes through.

    Attributes:
        lengths: of the prompts.
        arena: bytes of the node's DRAM.
        hbm: bytes of its HBM, where there is a GPU.
        fill: prompts that touch all of it once.
        each: tokens of a prompt in the measurement of saving.
        decode: tokens that follow each of these.
        prompts: how many there are of these, with saving and without.
    """

    lengths: tuple[int, ...] = (8_192, 16_384, 32_768)
    arena: int = 12 << 30
    hbm: int = 8 << 30
    fill: int = 13
    each: int = 8_192
    decode: int = 16
    prompts: int = 6


SMALL: Final = Sizes((256, 512), 64 << 20, 0, 2, 128, 4, 3)


@dataclass(slots=True)
class Bench:
    """A model, a store, and all that was found.

    ``near`` is a client that takes blocks from the node's GPU; the store's own doesn't.
    """

    shape: Shape
    sizes: Sizes
    model: Any
    store: PagedPrefixCache
    near: Client
    found: Figures

    def note(self, name: str, value: Any) -> None:
        """Keep a figure and print it."""
        self.found.note(name, value)

    def recomputed(self, ids: Any) -> float:
        """Seconds to the first token, everything computed."""
        synchronize(self.shape.device)
        began = time.perf_counter()
        cache = DynamicCache(config=self.model.config)
        int(logits(self.model, ids, cache, 0).argmax())
        return time.perf_counter() - began

    def reused(self, ids: Any, *, save: bool = False) -> float:
        """Seconds to the first token with what the store holds."""
        synchronize(self.shape.device)
        began = time.perf_counter()
        cache, reused = self.store.restore(ids)
        int(logits(self.model, ids, cache, reused.tokens).argmax())
        took = time.perf_counter() - began
        assert cache.finish()
        if save:
            self.store.store(ids, cache)
        else:
            self.store.drop(cache)
        return took

    def seconds(self, work: Callable[[], object]) -> float:
        """How long something takes, the device's work included."""
        synchronize(self.shape.device)
        began = time.perf_counter()
        work()
        synchronize(self.shape.device)
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait until all is saved and registered."""
        with self.store._freed:
            self.store._freed.wait_for(lambda: not self.store._saving, 60)
        settle()


@contextmanager
def bench(shape: Shape, sizes: Sizes, found: Figures) -> Iterator[Bench]:
    """Start a node and make a model."""
    began = time.perf_counter()
    model = made(shape)
    synchronize(shape.device)
    longest = max(sizes.lengths) + 64
    memory = KVMemory(model, longest)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        # A virtual machine may have more memory once it is asked for it.
        values: dict[str, object] = {"dram__capacity": sizes.arena, "dram__overcommit": True}
        values |= {"hbm__capacity": sizes.hbm} if memory.gpu is not None else {}
        with node(Path(directory), **values) as running:
            namespace = memory.namespace("benchmark")
            with (
                kvstore.connect(running.unix, namespace, deadline=20.0) as client,
                kvstore.connect(running.unix, namespace, deadline=20.0, gpu=memory.gpu) as near,
                PagedPrefixCache(client, model, memory, background=True) as store,
            ):
                made_in = time.perf_counter() - began
                self = Bench(shape, sizes, model, store, near, found)
                self.note("model and node are up, s", made_in)
                self.note("transport", str(client.stats().transport))
                yield self


@contextmanager
def one_kernel() -> Iterator[None]:
    """Have attention behind a prefix done by one kernel, however many the new tokens are."""
    usual = transformers_attention.JOINED_PAIRS
    transformers_attention.JOINED_PAIRS = 1 << 60  # type: ignore[misc]
    try:
        yield
    finally:
        transformers_attention.JOINED_PAIRS = usual  # type: ignore[misc]


def first_use(self: Bench) -> None:
    """What the first requests of a process cost, and the whole arena touched once."""
    each = self.sizes.each
    ids = tokens(each, 1)
    self.note("recompute, first, s", self.recomputed(ids))
    self.note("miss and save, first, s", self.reused(ids, save=True))
    began = time.perf_counter()
    self.settle()
    self.note("save and registering after it, first, s", time.perf_counter() - began)
    self.note("hit, first (kernels are compiled), s", self.reused(ids))
    self.note("hit, second, s", self.reused(ids))
    for number in range(self.sizes.fill):
        self.reused(tokens(each, 10_000 + number), save=True)
        self.settle()


def ttft(self: Bench, length: int) -> None:
    """Prompts of one length that share all but their last twentieth."""
    model, shared = self.model, int(length * SHARED)
    prefix = tokens(shared, length)
    prompts = [
        torch.cat([prefix, tokens(length - shared + 16 * turn, length + 1 + turn)], 1)
        for turn in range(TURNS)
    ]
    cache, _ = self.store.restore(prefix)
    logits(model, prefix, cache, 0)
    kept = _copied(cache, shared // 16 * 16)
    saved = self.store.store(prefix, cache).result()
    assert saved is not None
    assert saved.stored + saved.held == shared // 16, saved
    self.settle()
    name = f"{length} tokens"
    # Kernels are prepared for each length anew, so the first time of each is told apart.
    for time_ in ("first of their lengths", "again"):
        whole = statistics.median(map(self.recomputed, prompts))
        hit = statistics.median(map(self.reused, prompts))
        self.note(f"{name}, {time_}: recompute, ms", whole * 1e3)
        self.note(f"{name}, {time_}: {SHARED:.0%} from DRAM, ms", hit * 1e3)
        self.note(f"{name}, {time_}: times faster", whole / hit)
    with one_kernel():
        hit = statistics.median([self.reused(ids) for ids in prompts * 2][TURNS:])
        self.note(f"{name}: from DRAM, attention by one kernel, ms", hit * 1e3)
    _parts(self, f"{name} from DRAM", prompts)
    for source in OTHER_WAYS if self.store.memory.gpu is not None else ():
        with loaded_by(self, source, kvstore.prefix_hashes(prefix[0].numpy(), 16)):
            hit = statistics.median([self.reused(ids) for ids in prompts * 2][TURNS:])
            self.note(f"{name}, again: {SHARED:.0%} from {source}, ms", hit * 1e3)
            self.note(f"{name}, again: times faster from {source}", whole / hit)
            _parts(self, f"{name} from {source}", prompts)
    _generated(self, name, prompts)
    _same(self, name, prompts[0], kept)


@contextmanager
def loaded_by(self: Bench, source: str, names: Sequence[bytes]) -> Iterator[None]:
    """Have hits loaded from another tier or in another way."""
    store, copies = self.store, self.store.memory.paged._copies
    with ExitStack() as undo:
        if source == BY_ENGINE:
            copies.by_engine = True  # type: ignore[attr-defined]
            undo.callback(setattr, copies, "by_engine", False)
        else:
            undo.callback(setattr, store, "client", store.client)
            store.client = self.near
            promoted = wait_for_hbm(self.near, names)
            self.note(f"{len(names)} blocks are copied to HBM after, ms", promoted * 1e3)
        yield


def _copied(cache: Any, count: int) -> list[tuple[Any, Any]]:
    return [
        (layer.keys[:, :, :count].clone(), layer.values[:, :, :count].clone())
        for layer in cache.layers
    ]


def _parts(self: Bench, name: str, prompts: list[Any]) -> None:
    """Where the time of a hit goes."""
    with profiled(name):
        self.reused(prompts[0])
    asked, queued, loaded, alone = [], [], [], []
    for ids in prompts:
        synchronize(self.shape.device)
        began = time.perf_counter()
        cache, reused = self.store.restore(ids)
        asked.append(time.perf_counter() - began)
        cache.finish()
        loaded.append(time.perf_counter() - began)
        began = time.perf_counter()
        scores = logits(self.model, ids, cache, reused.tokens)
        queued.append(time.perf_counter() - began)
        int(scores.argmax())
        alone.append(time.perf_counter() - began)
        self.store.drop(cache)
    size = reused.tokens * self.shape.token_bytes
    self.note(f"{name}: restore returns after, ms", statistics.median(asked) * 1e3)
    self.note(f"{name}: all is loaded after, ms", statistics.median(loaded) * 1e3)
    self.note(f"{name}: loaded with, GB/s", size / statistics.median(loaded) / 1e9)
    self.note(f"{name}: the rest is queued in, ms", statistics.median(queued) * 1e3)
    self.note(f"{name}: the rest is computed in, ms", statistics.median(alone) * 1e3)


@contextmanager
def profiled(name: str) -> Iterator[None]:
    """Print what the host does."""
    profile = cProfile.Profile()
    profile.enable()
    yield
    profile.disable()
    with open(os.path.join(os.environ.get("OUT", "/tmp"), "profile.txt"), "a") as file:
        file.write(f"{name}\n")
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(40)


def _generated(self: Bench, name: str, prompts: list[Any]) -> None:
    """The same through ``generate`` of the model and of the store."""
    options = {"max_new_tokens": 1, "do_sample": False}

    def plain(ids: Any) -> None:
        self.model.generate(ids.to(self.model.device), **options)

    def ours(ids: Any) -> None:
        assert self.store.generate(ids.to(self.model.device), **options).reused.tokens

    plain(prompts[0])
    again = statistics.median(self.seconds(partial(plain, ids)) for ids in prompts[1:4])
    hits = []
    for ids in prompts[1:4]:
        self.settle()
        hits.append(self.seconds(partial(ours, ids)))
    self.note(f"{name}: generate, recompute, ms", again * 1e3)
    self.note(f"{name}: generate, from DRAM, ms", statistics.median(hits) * 1e3)
    self.settle()


def _same(self: Bench, name: str, ids: Any, kept: list[tuple[Any, Any]]) -> None:
    """Whether the scores are those behind the very KV that was saved, bit for bit."""
    held = kept[0][0].shape[2]
    cache = DynamicCache(ddp_cache_data=kept, config=self.model.config)
    expected = logits(self.model, ids, cache, held)
    cache, reused = self.store.restore(ids[:, : held + 1])
    assert reused.tokens == held
    loaded = [
        torch.equal(ours, theirs)
        for layer, pair in zip(cache.layers, kept, strict=True)
        for ours, theirs in ((layer.keys, pair[0]), (layer.values, pair[1]))
        if cache.finish()
    ]
    got = logits(self.model, ids, cache, held)
    self.note(f"{name}: KV loaded is KV saved", all(loaded) and len(loaded) == 2 * len(kept))
    self.note(f"{name}: scores are equal", torch.equal(got, expected))
    self.store.drop(cache)


def saving(self: Bench) -> None:
    """Prompts that nobody has seen, prefill and a few tokens each: all saved, or nothing."""
    taken: dict[str, list[tuple[float, float]]] = {"nothing saved": [], "all saved": []}
    for number in range(2 * self.sizes.prompts + 2):
        save = number % 4 in (2, 3)
        ids = tokens(self.sizes.each, 50_000 + number)
        began = time.perf_counter()
        cache, _ = self.store.restore(ids)
        token = logits(self.model, ids, cache, 0).argmax()
        int(token)
        prefilled = time.perf_counter()
        for _ in range(self.sizes.decode):
            token = self.model(token.view(1, 1), past_key_values=cache).logits[0, -1].argmax()
            int(token)
        ended = time.perf_counter()
        # A prompt is slowed by the saving of the one before it.
        if number % 2:
            taken["all saved" if save else "nothing saved"].append(
                (prefilled - began, ended - prefilled)
            )
        if save:
            self.store.store(ids, cache)
        else:
            self.store.drop(cache)
            self.settle()
    medians = {}
    for name, pairs in taken.items():
        prefill, decode = (statistics.median(column) for column in zip(*pairs, strict=True))
        medians[name] = (prefill, decode)
        self.note(f"{name}: prefill of {self.sizes.each} tokens, ms", prefill * 1e3)
        self.note(f"{name}: {self.sizes.decode} tokens after it, ms", decode * 1e3)
    for part, name in enumerate(("prefill", "decode")):
        ratio = medians["all saved"][part] / medians["nothing saved"][part]
        self.note(f"{name} while the prompt before is saved, times as long", ratio)


def rate_of_saving(self: Bench) -> None:
    """One long prompt saved with nothing beside it."""
    length = max(self.sizes.lengths)
    memory, rates = self.store.memory, []
    for turn in range(3):
        names = kvstore.prefix_hashes(tokens(length, 70_000 + turn)[0].numpy(), memory.block_tokens)
        blocks = PagedBlocks(memory.paged, memory.blocks_of(0)[: len(names)], memory.paged.mark())
        began = time.perf_counter()
        if turn < 2:
            saved = self.store.client.put(names, blocks, deadline=20.0)
            rates.append(length * self.shape.token_bytes / (time.perf_counter() - began) / 1e9)
        else:
            with profiled("save"):
                saved = self.store.client.put(names, blocks, deadline=20.0)
        assert saved.stored == len(names)
    self.note(f"save of {length} tokens through the node, GB/s", max(rates))


def main() -> None:
    """Print the figures; write them where ``$OUT`` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape, sizes = (TINY, SMALL) if options.tiny else (LLAMA_8B, Sizes())
    with (
        figures("ttft") as found,
        bench(shape, sizes, found) as running,
        torch.inference_mode(),
    ):
        first_use(running)
        for length in reversed(sizes.lengths):
            ttft(running, length)
        saving(running)
        rate_of_saving(running)


if __name__ == "__main__":
    main()
