"""The scheduler's side of the connector: what to look up, load and save, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol
from uuid import uuid4

from client.results import Match, tier_counts
from client.vllm.counts import Counts
from client.vllm.jobs import LoadJob, SaveJob
from client.vllm.keys import PrefixChain, extra_keys_of
from client.vllm.link import Link
from client.vllm.pins import BlockPool, Pins
from client.vllm.plan import Plan
from client.vllm.progress import Finished
from client.vllm.settings import Settings
from client.vllm.weights import Adapters
from kvstore.identity import ROOT_PARENT, ExtraKey

logger = logging.getLogger("kvstore.client.vllm")

FRESH: Final = 0.25
"""Seconds for which an answer of the store is good for a request that could not be admitted."""

PARAMS: Final = "kvstore"
"""Our key in a request's ``kv_transfer_params``."""


class MatchClient(Protocol):
    """The calls of the blocking client that the scheduler's side makes."""

    def match(
        self, hashes: Sequence[bytes], *, prefetch: bool = False, deadline: float | None = None
    ) -> Match:
        """Say how far a prefix reaches."""


class Request(Protocol):
    """What is used of vLLM's ``Request``."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    kv_transfer_params: Mapping[str, Any] | None
    lora_request: Any


class Listener(Protocol):
    """Who wants to know what the store holds."""

    def held(self, request: Any, first: int, hashes: Sequence[bytes], parent: bytes) -> None:
        """Take note that the store holds blocks of a request.

        Args:
            request: vLLM's own object.
            first: number of the first block in the request.
            hashes: of the blocks.
            parent: prefix hash of the block before the first.
        """


@dataclass(frozen=True, slots=True)
class Node:
    """A session with the store and whether it is worth calling.

    Attributes:
        client: of one namespace.
        link: keeps it connected.
    """

    client: MatchClient
    link: Link

    def match(self, hashes: Sequence[bytes], deadline: float) -> Match | None:
        """Say how far a prefix reaches; ``None`` where no answer is to be had in time."""
        if not self.link.up:
            return None
        match = self.client.match(hashes, prefetch=True, deadline=deadline)
        if match.failure is None:
            return match
        self.link.failed()
        return None


@dataclass(slots=True)
class Watched:
    """A request that is in the engine.

    Attributes:
        request: vLLM's own object.
        chain: hashes of its full blocks.
        until: when its prompt's blocks need no longer be waited for, on the clock; used once.
        codes: where each leading block lies, as the store said last.
        asked: when it said so, on the clock.
        computed: tokens that the engine held itself at the last lookup.
        scheduled: whether the engine has computed some of it since the last lookup.
        patient: until when the store is asked again after it gave no answer.
    """

    request: Request
    chain: PrefixChain
    until: float = float("-inf")
    codes: bytes = b""
    asked: float = float("-inf")
    computed: int = 0
    scheduled: bool = False
    patient: float | None = None


@dataclass(slots=True)
class Saving:
    """A save under way that the listener will be told of.

    Attributes:
        request: whose blocks.
        job: the save.
        first: number of its first block in the request.
        held: how many leading blocks of it the store holds, by what every worker has said so far.
    """

    request: Request
    job: SaveJob
    first: int
    held: int


@dataclass(slots=True)
class Step:
    """What the workers are to do in one step.

    Attributes:
        loads: in the order of admission.
        saves: after the step's forward.
        cancelled: requests that wait for blocks no longer.
        pause: whether a lookup was put off to the next step because a node did not answer.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    pause: bool = False


class SchedulerSide:
    """Decides for each request what comes from the store and what goes there.

    A lookup waits for each node no longer than the lookup deadline, and none begins in a step whose
    lookups have taken that long together: so much, and one more lookup, is what the store can cost
    a step.

    Args:
        settings: of the connector.
        block_tokens: tokens in one block.
        nodes: one for each namespace that a block of the engine is made of.
        workers: how many workers take part in each save.
        loads: whether anything is loaded.
        saves: whether anything is saved.
        counts: what was done.
        listener: told of blocks that the store holds, as far as it can be known here.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        block_tokens: int,
        nodes: Sequence[Node],
        workers: int,
        loads: bool,
        saves: bool,
        counts: Counts,
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._nodes = nodes
        self._workers = workers
        self._loads = loads
        self._counts = counts
        self._clock = clock
        self._plan = Plan(block_tokens, settings.save if saves else "none")
        self._watched: dict[str, Watched] = {}
        self._pins: Pins | None = None
        self._step = Step()
        self._spent = 0.0
        self._listener = listener
        self._saving: dict[int, Saving] = {}
        self._adapters = Adapters()
        self._generation: tuple[ExtraKey, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether saves are under way, whose end the engine has to hear of."""
        return bool(self._pins)

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's blocks, which saves pin."""
        self._pins = Pins(pool, self._settings.pinned_share, self._workers)

    # --- a request's way -------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Begin with a request that the engine has queued."""
        revision = self._adapters.revision(request.lora_request)
        if revision is None:
            return
        keys = extra_keys_of(request, self._block_tokens, adapter_revision=revision)
        if keys is None:
            return
        keys = replace(keys, always=keys.always + self._generation)
        chain = PrefixChain(self._block_tokens, keys)
        # From here on, not from admission: requests that queue up behind others that wait in vain
        # are not to wait in vain one after the other.
        until = self._clock() + wait if (wait := self._wait_of(request)) else float("-inf")
        self._watched[request.request_id] = Watched(request, chain, until)
        self._plan.track(request.request_id, request.num_prompt_tokens, chain.hashes)

    def begin_anew(self) -> None:
        """Never use again what has been stored so far, as the model's weights have changed.

        What is stored from now on is for this engine alone, until it is started again: nobody can
        say which other engines have the same weights. Requests that hold blocks by then, computed
        or being loaded, go on without the store: what they add depends on those.
        """
        self._generation = (ExtraKey.cache_salt(f"reset {uuid4()}"),)
        for watched in list(self._watched.values()):
            request = watched.request
            self._plan.forget(request.request_id)
            del self._watched[request.request_id]
            if not request.num_computed_tokens:
                self.begin(request)

    def lookup(self, request_id: str, computed: int) -> int | None:
        """How many tokens of a request can come from the store.

        Args:
            request_id: of the request.
            computed: tokens that the engine holds itself; a multiple of the block.

        Returns:
            Tokens beyond those; ``None`` where it is to be asked again in the next step.
        """
        watched = self._watched.get(request_id)
        if watched is None:
            return 0
        watched.computed, watched.scheduled = computed, False
        if not self._loads or self._plan[request_id].failed:
            return 0
        hashes = watched.chain.extend(watched.request.all_token_ids)
        if len(hashes) * self._block_tokens <= computed:
            return 0
        if self._clock() < watched.until and all(node.link.up for node in self._nodes):
            held = watched.request.num_prompt_tokens // self._block_tokens
        elif not self._look_up(watched, hashes):
            return None
        else:
            held = len(watched.codes)
        tokens = max(0, held * self._block_tokens - computed)
        return tokens if tokens >= self._settings.min_load_tokens else 0

    def allocated(self, request_id: str, blocks: Sequence[int], external: int) -> None:
        """Take note that a request was admitted.

        Args:
            request_id: of the request.
            blocks: the engine's ids of its blocks.
            external: tokens that are to come from the store.

        Raises:
            KeyError: nothing is known of the request; what waits for the load is to be abandoned.
            ValueError: its blocks don't fit the tokens, or can't be named; likewise.
        """
        if not external:
            return
        watched = self._watched[request_id]
        first = watched.computed // self._block_tokens
        last = first + external // self._block_tokens
        ours = blocks[first:last]
        if len(ours) * self._block_tokens != external:
            raise ValueError(f"{external} tokens are to come into {len(ours)} blocks")
        self._plan.held(request_id, last)
        wait = max(0.0, watched.until - self._clock())
        load = self._plan.load(request_id, ours, first, wait)
        self._counts.add(waits=int(wait > 0))
        watched.until = watched.asked = float("-inf")
        self._step.loads.append(load)

    def abandon(self, request_id: str, blocks: Sequence[int]) -> None:
        """Have the load that the engine waits for fail; the request goes on without the store.

        Args:
            request_id: of the request.
            blocks: the engine's ids of its blocks; none of them counts as loaded.
        """
        self._watched.pop(request_id, None)
        self._plan.forget(request_id)
        self._step.loads.append(LoadJob(request_id, (), tuple(blocks)))

    def sources(self, request_id: str, external: int) -> dict[str, int]:
        """Which tiers the tokens taken from the store lie in, as far as the store has said."""
        watched = self._watched.get(request_id)
        if watched is None:
            return {}
        first = watched.computed // self._block_tokens
        codes = watched.codes[first : first + external // self._block_tokens]
        return {tier: count * self._block_tokens for tier, count in tier_counts(codes).items()}

    def finished(self, request: Request, blocks: Sequence[int]) -> None:
        """End with a request, before the engine frees its blocks.

        Args:
            request: vLLM's own object.
            blocks: the engine's ids of its computed blocks.
        """
        watched = self._watched.pop(request.request_id, None)
        if watched is None:
            return
        # Until a request is scheduled, tokens may be counted as computed that another connector (of
        # a MultiConnector) still loads.
        if watched.scheduled:
            tokens = min(request.num_computed_tokens, request.num_tokens)
            self._save(watched, tokens, lambda _: blocks)
            left = self._plan.unsaved(request.request_id, tokens)
            self._counts.add(skipped_save_blocks=left)
        if (load := self._plan[request.request_id].load) is not None and load.wait:
            # The engine keeps the blocks of a request that was aborted until its load is over.
            self._step.cancelled.append(request.request_id)
        self._plan.forget(request.request_id)

    # --- steps -----------------------------------------------------------------------------------

    def plan_saves(
        self, scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]
    ) -> None:
        """Save the blocks that will be full after the step that the engine has put together.

        Args:
            scheduled: tokens to be computed, by request.
            blocks_of: the engine's ids of a request's blocks.
        """
        for request_id, tokens in scheduled.items():
            watched = self._watched.get(request_id)
            if watched is None:
                continue
            if watched.scheduled or not self._is_loaded_by_another(watched):
                self._save(watched, watched.request.num_computed_tokens + tokens, blocks_of)
            watched.scheduled = True

    def take_step(self) -> Step:
        """What the workers are to do now; the next step begins with nothing."""
        step, self._step = self._step, Step()
        self._spent = 0.0
        return step

    def update(self, finished: Finished, workers: Mapping[int, int]) -> None:
        """Take note of what the workers have finished.

        Args:
            finished: by all of them together.
            workers: how many were done with each save.
        """
        if finished.failed_blocks:
            self._plan.spoiled(finished.failed_blocks)
        for request_id in finished.loaded:
            self._plan.loaded(request_id)
        for request_id in finished.orphaned:
            self._plan.orphaned(request_id)
        if self._pins is None:
            return
        over = [number for number, done in workers.items() if self._pins.done(number, done)]
        self._tell(finished.saved, over)

    def _tell(self, saved: Mapping[int, int], over: Sequence[int]) -> None:
        """Tell the listener of saves that all workers are done with."""
        if self._listener is None:
            return
        for number, held in saved.items():
            self._saving[number].held = min(held, self._saving[number].held)
        for number in over:
            saving = self._saving.pop(number)
            if saving.held:
                hashes = saving.job.hashes[: saving.held]
                self._listener.held(saving.request, saving.first, hashes, saving.job.parent)

    def close(self) -> None:
        """Close the sessions."""
        for node in self._nodes:
            node.link.close()

    # --- inside ----------------------------------------------------------------------------------

    def _look_up(self, watched: Watched, hashes: Sequence[bytes]) -> bool:
        """Ask the store, unless that is to be done in a later step; says whether it was done."""
        began = self._clock()
        if began - watched.asked < FRESH:
            return True
        if self._spent >= self._settings.lookup_deadline:
            self._counts.add(lookups_deferred=1)
            return False
        up = all(node.link.up for node in self._nodes)
        codes = self._ask(hashes) if up else None
        now = self._clock()
        self._spent += now - began
        if codes is None and self._is_worth_waiting(watched, up, now):
            self._step.pause = True
            return False
        watched.patient = None
        self._found(watched, hashes, codes, began)
        return True

    def _is_worth_waiting(self, watched: Watched, up: bool, now: float) -> bool:
        """Whether a node that gave no answer is asked again in a later step.

        Only of a node that seemed well when the request came: one that is known to be gone must
        not cost each request its patience.
        """
        if watched.patient is None:
            watched.patient = now + self._settings.lookup_patience if up else now
        return now < watched.patient

    def _found(
        self, watched: Watched, hashes: Sequence[bytes], codes: bytes | None, began: float
    ) -> None:
        """Take note of what the store said of a request; ``None`` where it said nothing."""
        watched.asked, watched.codes = began, codes or b""
        asked = len(hashes) * self._block_tokens - watched.computed
        matched = max(0, len(watched.codes) * self._block_tokens - watched.computed)
        self._counts.add(lookups=1, asked_tokens=asked, matched_tokens=matched)
        if codes is None:
            self._counts.add(lookup_timeouts=1)
            for node in self._nodes:
                if not node.link.up:
                    node.link.went_without()
        self._plan.held(watched.request.request_id, len(watched.codes))
        if self._listener is not None and watched.codes:
            found = hashes[: len(watched.codes)]
            self._listener.held(watched.request, 0, found, ROOT_PARENT)

    def _ask(self, hashes: Sequence[bytes]) -> bytes | None:
        """Where each leading block lies that all nodes hold; ``None`` if one does not answer."""
        codes: bytes | None = None
        for node in self._nodes:
            match = node.match(hashes, self._settings.lookup_deadline)
            if match is None:
                return None
            codes = match.codes if codes is None else min(codes, match.codes, key=len)
        return codes

    def _is_loaded_by_another(self, watched: Watched) -> bool:
        """Whether a request starts with blocks that neither the engine nor this connector had.

        Another connector (of a MultiConnector) has them loaded in this very step, perhaps, and
        whether that worked is known after it only.
        """
        known = self._plan[watched.request.request_id].planned * self._block_tokens
        return watched.request.num_computed_tokens > max(watched.computed, known)

    def _save(
        self, watched: Watched, tokens: int, blocks_of: Callable[[str], Sequence[int]]
    ) -> None:
        """Plan and pin the saves of a request whose first ``tokens`` tokens are computed."""
        request_id, pins = watched.request.request_id, self._pins
        tokens = min(tokens, watched.request.num_tokens)
        planned = self._plan[request_id].planned
        # Listing the blocks of every request, for nothing, would cost each step some milliseconds.
        if pins is None or not pins.room:
            return
        if self._plan.full_blocks(request_id, tokens) <= planned:
            return
        watched.chain.extend(watched.request.all_token_ids)
        for job in self._plan.saves(request_id, blocks_of(request_id), tokens, pins.room):
            pins.pin(job)
            self._step.saves.append(job)
            if self._listener is not None:
                first = self._plan[request_id].planned - len(job.hashes)
                self._saving[job.number] = Saving(watched.request, job, first, len(job.hashes))

    def _wait_of(self, request: Request) -> float:
        """Seconds that a request wants to wait for blocks which another engine is computing."""
        params = request.kv_transfer_params or {}
        ours = params.get(PARAMS)
        wait = ours.get("wait", 0) if isinstance(ours, Mapping) else 0
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0:
            # It is the client's, of any length.
            logger.warning("request %s: wait must be seconds, not %.80r", request.request_id, wait)
            return 0.0
        return float(min(wait, self._settings.max_wait))
