"""Which blocks of which request are loaded and saved: the bookkeeping, without any I/O.

A request's blocks are counted from its first token. Of each request the plan knows a chain of
prefix hashes and how far the store holds it, or is about to: blocks before that are never saved
again, so that what others have saved is not even offered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from client.vllm.jobs import LoadJob, SaveJob
from kvstore.identity import ROOT_PARENT

MAX_JOB_BLOCKS: Final = 256
"""Blocks of one save: a long prompt's first blocks are free again while its last are copied."""


@dataclass(slots=True)
class Tracked:
    """What is known of one request.

    Attributes:
        prompt_tokens: tokens of its prompt.
        hashes: prefix hashes of its full blocks, as far as they are known. They grow.
        planned: leading blocks that the store holds or that a save has been made for.
        load: the load under way.
        load_first: number of its first block within the request.
        failed: whether a load failed; the request is then computed, whatever the store says.
    """

    prompt_tokens: int
    hashes: list[bytes]
    planned: int = 0
    load: LoadJob | None = None
    load_first: int = 0
    failed: bool = False


class Plan:
    """The loads and saves of all requests of one engine.

    Invariants: no save names a block that a load of the same request may still be writing; the
    saves of a request follow each other without gap or overlap, except after ``orphaned``.

    Args:
        block_tokens: tokens in one block.
        save: ``all``, ``prompt`` (blocks that hold tokens of the prompt alone) or ``none``.
    """

    def __init__(self, block_tokens: int, save: str) -> None:
        self._block_tokens = block_tokens
        self._save = save
        self._requests: dict[str, Tracked] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request: str) -> Tracked:
        return self._requests[request]

    def track(self, request: str, prompt_tokens: int, hashes: list[bytes]) -> None:
        """Begin with a request.

        Args:
            request: its id.
            prompt_tokens: tokens of its prompt.
            hashes: prefix hashes of its full blocks; the list grows as the request does.
        """
        self._requests[request] = Tracked(prompt_tokens, hashes)

    def forget(self, request: str) -> None:
        """End with a request; saves already made for it go on."""
        self._requests.pop(request, None)

    def held(self, request: str, blocks: int) -> None:
        """Take note that the store holds this many leading blocks of a request."""
        tracked = self._requests[request]
        tracked.planned = max(tracked.planned, blocks)

    def load(self, request: str, blocks: Sequence[int], first: int, wait: float = 0.0) -> LoadJob:
        """Plan a load.

        Args:
            request: whose blocks.
            blocks: the engine's ids of the blocks to fill.
            first: number of the first of them within the request.
            wait: seconds to wait for blocks that are not stored yet.

        Returns:
            The job; the request is not saved from until ``loaded`` is called.

        Raises:
            ValueError: the blocks reach beyond what can be named.
        """
        tracked = self._requests[request]
        hashes = tuple(tracked.hashes[first : first + len(blocks)])
        if not blocks or len(hashes) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks from {first} of {len(tracked.hashes)}")
        tracked.load, tracked.load_first = LoadJob(request, hashes, tuple(blocks), wait), first
        return tracked.load

    def spoiled(self, blocks: Collection[int]) -> None:
        """Take note that loads failed for some of the engine's blocks: they will be computed."""
        for tracked in self._requests.values():
            if tracked.load is not None:
                self._spoil(tracked, tracked.load, blocks)

    def _spoil(self, tracked: Tracked, load: LoadJob, blocks: Collection[int]) -> None:
        bad = next((i for i, block in enumerate(load.blocks) if block in blocks), None)
        if bad is not None:
            tracked.failed = True
            tracked.planned = min(tracked.planned, tracked.load_first + bad)

    def loaded(self, request: str) -> None:
        """Take note that the load of a request is over, well or badly."""
        if request in self._requests:
            self._requests[request].load = None

    def orphaned(self, request: str) -> None:
        """Take note that the store has lost blocks of a request: all are offered again."""
        if request in self._requests:
            self._requests[request].planned = 0

    def full_blocks(self, request: str, tokens: int) -> int:
        """How many blocks of a request may be stored once ``tokens`` of it are computed."""
        if self._save == "none":
            return 0
        if self._save == "prompt":
            tokens = min(tokens, self._requests[request].prompt_tokens)
        return tokens // self._block_tokens

    def unsaved(self, request: str, tokens: int) -> int:
        """How many full blocks of a request no save has been made for."""
        tracked = self._requests[request]
        if tracked.load is not None:
            return 0
        return max(0, self.full_blocks(request, tokens) - tracked.planned)

    def saves(
        self, request: str, blocks: Sequence[int], tokens: int, room: int
    ) -> Iterator[SaveJob]:
        """Plan the saves of blocks that are full by the end of a step.

        Args:
            request: whose blocks.
            blocks: the engine's ids of all blocks of the request, in order.
            tokens: tokens of the request whose KV is there after the step, and whose ids are
                settled.
            room: how many blocks may be named; the rest stays for a later call.
        """
        tracked = self._requests[request]
        if tracked.load is not None:
            return
        full = min(self.full_blocks(request, tokens), len(tracked.hashes), len(blocks))
        full = min(full, tracked.planned + room)
        while (first := tracked.planned) < full:
            tracked.planned = last = min(full, first + MAX_JOB_BLOCKS)
            parent = tracked.hashes[first - 1] if first else ROOT_PARENT
            hashes = tuple(tracked.hashes[first:last])
            yield SaveJob(next(self._numbers), request, parent, hashes, tuple(blocks[first:last]))
