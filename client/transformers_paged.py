"""Prefix caching for Hugging Face Transformers without a copy by the CPU: for models on a GPU.

The model keeps its KV in memory that the store reads and writes by itself. A prefix is on its way
while the model runs already, each layer behind its own part of it; what is new is saved while the
next request is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from client.buffers import PutBlocks
from client.paged import PagedMemory
from client.paged_sources import SourceViews
from client.prefix import PrefixMatch, check_layout
from client.results import PutResult, tier_counts
from client.transformers import CacheCounts, Generation, can_serve
from client.transformers_memory import KVMemory
from kvstore.errors import InvalidRequest, KVStoreError, MissingExtra, ParentAbsent
from kvstore.identity import ROOT_PARENT, ExtraKey, Namespace, prefix_hashes

logger = logging.getLogger("kvstore.client.transformers")


class PagedClient(Protocol):
    """The calls of the blocking client that the cache makes."""

    namespace: Namespace
    deadline: float

    def view(
        self, hashes: Sequence[bytes], *, device: bool, deadline: float | None = None
    ) -> AbstractContextManager[SourceViews]:
        """Show blocks without copying them, on a GPU where they lie there."""

    def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        deadline: float | None = None,
    ) -> PutResult:
        """Store blocks."""


@dataclass(frozen=True, slots=True)
class _Room:
    """A sequence of the memory that is free.

    Attributes:
        sequence: its number.
        mark: what to wait for before its memory is written; ``None`` where nothing uses it.
    """

    sequence: int
    mark: object | None = None


@dataclass(slots=True)
class PagedPrefixCache:
    """Reuses the KV of prompt prefixes across requests and processes, by way of ``KVMemory``.

    The store can only make a request faster: where it fails or is slow, the model computes. Calls
    come from one thread, on one stream. The model's attention becomes one that is fast behind a
    long prefix, where it was ``sdpa``.

    Args:
        client: a blocking client whose namespace is that of ``memory``; made with ``memory.gpu``,
            it takes blocks from the node's GPUs, too.
        model: the causal language model.
        memory: where its KV lies.
        extra_keys: what else shapes the KV, such as a LoRA adapter.
        deadline: seconds that loading, and again saving, may take; the client's own where left
            out.
        background: whether ``store`` and ``generate`` return before all is saved. ``close`` waits.

    Raises:
        NamespaceMismatch: the client's namespace is of another layout.
        MissingExtra: torch or transformers is not installed.
    """

    client: PagedClient
    model: Any
    memory: KVMemory
    extra_keys: Sequence[ExtraKey] = ()
    deadline: float | None = None
    background: bool = False
    counts: CacheCounts = field(default_factory=CacheCounts)
    _cache_type: Any = field(init=False)
    _arriving_type: Any = field(init=False)
    _saver: ThreadPoolExecutor = field(init=False)
    _free: deque[_Room] = field(init=False)
    _freed: threading.Condition = field(init=False)
    _saving: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        check_layout(self.client.namespace, self.memory.paged.layout)
        try:
            sequences = import_module("client.transformers_sequence")
            attention = import_module("client.transformers_attention")
        except ImportError as error:
            raise MissingExtra.named("transformers", "the Transformers prefix cache") from error
        self._cache_type, self._arriving_type = sequences.SequenceCache, sequences.Arriving
        attention.register()
        if self.model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
            self.model.set_attn_implementation(attention.ATTENTION)
        self._saver = ThreadPoolExecutor(1, "kvstore-saver")
        mark = self.memory.paged.mark()
        self._free = deque(_Room(number, mark) for number in range(self.memory.sequences))
        self._freed = threading.Condition()

    def generate(self, input_ids: Any, **options: Any) -> Generation:
        """Call ``model.generate`` with what the store holds of the prompt, then save the rest.

        Args:
            input_ids: the whole prompt, ``[1, tokens]``. Batches, padded prompts, beam search and
                prompts longer than the memory are generated without the store; so are all where
                no sequence of the memory gets free in time.
            options: everything else ``model.generate`` takes.
        """
        self.counts.requests += 1
        fits = input_ids.shape[1] <= self.memory.tokens
        room = self._take() if fits and can_serve(self.model, input_ids, options) else None
        if room is None:
            self.counts.bypassed += 1
            return Generation(self.model.generate(input_ids, **options), PrefixMatch(0, {}), None)
        cache, reused = self._restore(input_ids, room)
        try:
            output, sound = self._generate(input_ids, cache, options)
        except BaseException:
            self.drop(cache)
            raise
        reused = reused if sound else PrefixMatch(0, {}, reused.failure)
        self.counts.prompt_tokens += input_ids.shape[1]
        self.counts.reused_tokens += reused.tokens
        saving = self.store(getattr(output, "sequences", output), cache)
        return Generation(output, reused, None if self.background else saving.result())

    def restore(self, input_ids: Any) -> tuple[Any, PrefixMatch]:
        """A cache with the KV of the longest prefix held, shorter than the prompt.

        On a GPU the KV is still on its way when this returns, and each layer of the model waits
        for its own. Give the cache back with ``store`` or ``drop``, and use nothing computed with
        it before ``cache.finish()`` has said that it was right.

        Args:
            input_ids: the whole prompt, ``[1, tokens]``; on the CPU, or this waits for the device.

        Returns:
            A ``SequenceCache`` for ``past_key_values`` and what it holds.

        Raises:
            InvalidRequest: the prompt does not fit, or all sequences of the memory are in use.
        """
        tokens = input_ids.shape[1]
        if tokens > self.memory.tokens:
            raise InvalidRequest(f"{tokens} tokens don't fit into memory for {self.memory.tokens}")
        room = self._take()
        if room is None:
            raise InvalidRequest("all sequences of the memory are in use")
        return self._restore(input_ids, room)

    def store(self, sequences: Any, cache: Any) -> Future[PutResult | None]:
        """Save the full blocks that a cache holds and the store does not; the cache is used up.

        Args:
            sequences: prompt and output, ``[1, tokens]``.
            cache: from ``restore``, filled by the model.

        Returns:
            What became of the blocks, once that is known; ``None`` where the store failed.
        """
        if not cache.finish():
            self.drop(cache)
            done: Future[PutResult | None] = Future()
            done.set_result(None)
            return done
        mark = self.memory.paged.mark()
        token_ids = sequences[0, : cache.kept].cpu()
        with self._freed:
            self._saving += 1
        saving = self._saver.submit(self._save, token_ids, cache.hashes, cache.sequence, mark)
        saving.add_done_callback(_tell)
        if not self.background:
            saving.exception()
        return saving

    def drop(self, cache: Any) -> None:
        """Give a cache back without saving it."""
        cache.finish()
        self._give_back(_Room(cache.sequence, self.memory.paged.mark()))

    def close(self) -> None:
        """Wait until all is saved. The client stays open."""
        self._saver.shutdown()

    def __enter__(self) -> PagedPrefixCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- loading ---------------------------------------------------------------------------------

    def _generate(self, input_ids: Any, cache: Any, options: dict[str, Any]) -> tuple[Any, bool]:
        """The output, and whether what was loaded took part in it."""
        # What has been shown to somebody can't be taken back.
        sound = not options.get("streamer") or cache.finish()
        if sound:
            output = self.model.generate(input_ids, past_key_values=cache, **options)
            if cache.finish():
                return output, True
        self.counts.errors += 1
        logger.warning("the node was lost while a prefix was loaded: it is computed")
        cache.forget()
        return self.model.generate(input_ids, past_key_values=cache, **options), False

    def _restore(self, input_ids: Any, room: _Room) -> tuple[Any, PrefixMatch]:
        with ExitStack() as undo:
            undo.callback(self._give_back, room)
            cache, reused = self._load(self._hashes(input_ids[0, :-1]), room)
            undo.pop_all()
        if cache.arrived and not cache.finish():
            cache.forget()
            reused = PrefixMatch(0, {}, reused.failure)
        return cache, reused

    def _load(self, hashes: Sequence[bytes], room: _Room) -> tuple[Any, PrefixMatch]:
        """Queue the copies of as many blocks as are held."""
        rows, size = self.memory.rows_of(room.sequence), self.memory.block_tokens
        with ExitStack() as held:
            try:
                views = held.enter_context(
                    self.client.view(
                        hashes, device=self.memory.gpu is not None, deadline=self.deadline
                    )
                )
            except KVStoreError as error:
                self._note(error)
                return self._cache_type(rows, room.sequence), PrefixMatch(0, {}, error.code)
            count = views.prefix
            found = [view for view in views[:count] if view is not None]
            ids = self.memory.blocks_of(room.sequence)[:count]
            layers = self.memory.paged.load_layers(found, ids, after=room.mark)
            tiers = {name: n * size for name, n in tier_counts(views.codes[:count]).items()}
            reused = PrefixMatch(count * size, tiers, views.failure)
            arriving = self._arriving_type(layers, _closing(views, held.pop_all().close))
        cache = self._cache_type(rows, room.sequence, hashes[:count], count * size, arriving)
        return cache, reused

    def _hashes(self, token_ids: Any) -> list[bytes]:
        token_ids = np.ascontiguousarray(token_ids.cpu().numpy())
        return prefix_hashes(token_ids, self.memory.block_tokens, self.extra_keys)

    # --- saving ----------------------------------------------------------------------------------

    def _save(
        self, token_ids: Any, known: Sequence[bytes], sequence: int, mark: object | None
    ) -> PutResult | None:
        try:
            return self._put(self._hashes(token_ids), len(known), sequence, mark)
        except KVStoreError as error:
            self._note(error)
            return None
        finally:
            with self._freed:
                self._saving -= 1
                self._give_back(_Room(sequence))

    def _put(
        self, hashes: Sequence[bytes], known: int, sequence: int, mark: object | None
    ) -> PutResult:
        """Offer the blocks behind those that were loaded; all, where these are gone meanwhile."""
        ids = self.memory.blocks_of(sequence)

        def put(first: int) -> PutResult:
            blocks = PagedBlocks(self.memory.paged, ids[first : len(hashes)], mark)
            parent = hashes[first - 1] if first else ROOT_PARENT
            return self.client.put(hashes[first:], blocks, parent=parent, deadline=self.deadline)

        try:
            saved = put(known)
        except ParentAbsent:
            saved = put(0)
        self.counts.stored_blocks += saved.stored
        return saved

    # --- the sequences of the memory -------------------------------------------------------------

    def _take(self) -> _Room | None:
        """A sequence, waiting for those that are being saved; ``None`` where none gets free."""
        end = time.monotonic() + (self.client.deadline if self.deadline is None else self.deadline)
        with self._freed:
            while not self._free:
                left = end - time.monotonic()
                if not self._saving or left <= 0:
                    return None
                self._freed.wait(left)
            return self._free.popleft()

    def _give_back(self, room: _Room) -> None:
        with self._freed:
            self._free.append(room)
            self._freed.notify()

    def _note(self, error: KVStoreError) -> None:
        with self._freed:
            self.counts.errors += 1
        logger.warning("the store could not help: %s (%s)", error, error.code)


class PagedBlocks:
    """Blocks of KV memory as a ``BlockSource``: only those that the node wants are copied.

    Args:
        memory: where they are.
        block_ids: their ids.
        after: wait for what was asked of the device before this mark.

    Attributes:
        write_bytes: what a GPU copies at once without waiting between pieces.
    """

    write_bytes = 64 << 20

    def __init__(self, memory: PagedMemory, block_ids: Sequence[int], after: object | None) -> None:
        self._memory = memory
        self._ids = block_ids
        self._after = after

    def __len__(self) -> int:
        return len(self._ids)

    def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy blocks out of the memory; see ``BlockSource.write``."""
        self._memory.gather([self._ids[at] for at in positions], into, after=self._after)


def _tell(saving: Future[PutResult | None]) -> None:
    """Log what nobody may ask the result for."""
    if (error := saving.exception()) is not None:
        logger.error("blocks could not be saved: %r", error)


def _closing(views: SourceViews, close: Callable[[], object]) -> Callable[[], bool]:
    def closed() -> bool:
        sound = views.valid
        close()
        return sound

    return closed
