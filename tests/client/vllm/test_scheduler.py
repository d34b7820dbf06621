"""The scheduler's side with a node that answers, stalls, forgets and is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from client.results import GetResult, Match
from client.vllm.counts import Counts
from client.vllm.jobs import LoadJob
from client.vllm.link import Link
from client.vllm.progress import Finished
from client.vllm.scheduler import FRESH, Node, SchedulerSide
from client.vllm.settings import Settings
from kvstore.identity import ROOT_PARENT, prefix_hashes
from kvstore.protocol.messages import DRAM, SSD
from tests.client.vllm.test_plan import Pool

TOKENS = 4
DEADLINE = 0.005


@dataclass
class Request:
    """What is used of vLLM's request."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def names(self) -> list[bytes]:
        return prefix_hashes(self.all_token_ids, TOKENS)


class Store:
    """A node: holds hashes, takes its time, fails when told to."""

    def __init__(self, clock: Clock) -> None:
        self.held: dict[bytes, int] = {}
        self.asked: list[tuple[int, float | None]] = []
        self.takes = 0.0
        self.fails = False
        self._clock = clock

    def match(
        self, hashes: Sequence[bytes], *, prefetch: bool = False, deadline: float | None = None
    ) -> Match:
        self.asked.append((len(hashes), deadline))
        self._clock.now += self.takes
        if self.fails:
            return Match(b"", "deadline_exceeded")
        codes = bytearray()
        for each in hashes:
            if each not in self.held:
                break
            codes.append(self.held[each])
        return Match(bytes(codes))

    def open(self) -> None:
        """Part of what a link needs."""

    def exists(self, hashes: Sequence[bytes]) -> GetResult:
        """Part of what a link needs."""
        return GetResult(bytes(len(hashes)))

    def close(self) -> None:
        """Part of what a link needs."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A scheduler's side over some nodes and a pool of blocks."""

    def __init__(self, nodes: int = 1, workers: int = 1, **options: Any) -> None:
        self.clock, self.counts = Clock(), Counts()
        self.stores = [Store(self.clock) for _ in range(nodes)]
        self.links = [Link(store, "a node") for store in self.stores]
        for link in self.links:
            link.up = True
        self.pool = Pool(64)
        self.told: list[tuple[str, int, int, bytes]] = []
        loads, saves = options.pop("loads", True), options.pop("saves", True)
        settings = Settings.read({"url": "unix:///x", "pinned_share": 1, **options}, {})
        self.side = SchedulerSide(
            settings,
            block_tokens=TOKENS,
            nodes=[Node(s, link) for s, link in zip(self.stores, self.links, strict=True)],
            workers=workers,
            loads=loads,
            saves=saves,
            counts=self.counts,
            listener=self,
            clock=self.clock,
        )
        self.side.bind(self.pool)

    def held(self, request: Any, first: int, hashes: Sequence[bytes], parent: bytes) -> None:
        """Take note of what routers are to be told."""
        names = request.names()
        assert list(hashes) == names[first : first + len(hashes)]
        assert parent == (names[first - 1] if first else ROOT_PARENT)
        self.told.append((request.request_id, first, len(hashes), parent))

    def begin(self, tokens: int = 20, name: str = "r", **params: Any) -> Request:
        request = Request(name, list(range(1, tokens + 1)), kv_transfer_params=params or None)
        self.side.begin(request)
        return request

    def holds(self, names: Sequence[bytes], tier: int = DRAM) -> None:
        for store in self.stores:
            store.held.update(dict.fromkeys(names, tier))

    def computes(self, request: Request, tokens: int) -> Any:
        self.side.plan_saves({request.request_id: tokens}, lambda _: range(10, 20))
        request.num_computed_tokens += tokens
        return self.side.take_step()


def test_what_the_store_holds_beyond_the_engine_is_loaded() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:3])
    assert bench.side.lookup("r", TOKENS) == 2 * TOKENS
    bench.side.allocated("r", [10, 11, 12], 2 * TOKENS)
    step = bench.side.take_step()
    assert step.loads == [LoadJob("r", tuple(request.names()[1:3]), (11, 12))]
    assert bench.side.take_step().loads == []


def test_the_whole_of_a_prompt_may_be_loaded() -> None:
    bench = Bench()
    request = bench.begin(tokens=20)
    bench.holds(request.names())
    assert bench.side.lookup("r", 0) == 20


@pytest.mark.parametrize(("tokens", "computed"), [(3, 0), (20, 20), (7, 4)])
def test_the_store_is_not_asked_where_it_can_have_nothing(tokens: int, computed: int) -> None:
    bench = Bench()
    bench.begin(tokens)
    assert bench.side.lookup("r", computed) == 0
    assert not bench.stores[0].asked


def test_what_the_engine_holds_longer_is_not_loaded() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:2])
    assert bench.side.lookup("r", 3 * TOKENS) == 0


def test_little_is_not_worth_a_load() -> None:
    bench = Bench(min_load_tokens=9)
    request = bench.begin()
    bench.holds(request.names()[:2])
    assert bench.side.lookup("r", 0) == 0
    bench.holds(request.names()[:3])
    bench.clock.now += FRESH
    assert bench.side.lookup("r", 0) == 12


def test_a_request_that_waits_for_room_asks_again_only_after_a_while() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:2])
    assert [bench.side.lookup("r", 0) for _ in range(3)] == [8, 8, 8]
    assert len(bench.stores[0].asked) == 1
    bench.clock.now += FRESH
    assert bench.side.lookup("r", 0) == 8
    assert len(bench.stores[0].asked) == 2


def test_after_an_admission_the_store_is_asked_again() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:2])
    assert bench.side.lookup("r", 0) == 8
    bench.side.allocated("r", [10, 11], 8)
    bench.side.update(Finished(loaded={"r"}), {})
    assert bench.side.lookup("r", 0) == 8
    assert len(bench.stores[0].asked) == 2


def test_lookups_of_one_step_share_its_time() -> None:
    bench = Bench()
    bench.stores[0].takes = 2 * DEADLINE
    for name in ("a", "b"):
        bench.begin(name=name)
    assert bench.side.lookup("a", 0) == 0
    assert bench.side.lookup("b", 0) is None
    bench.side.take_step()
    assert bench.side.lookup("b", 0) == 0
    assert bench.counts.take()["lookups_deferred"] == 1


def test_a_node_that_gives_no_answer_is_left_alone_until_it_is_back() -> None:
    bench = Bench(lookup_patience=0)
    bench.stores[0].fails = True
    first, second = bench.begin(name="a"), bench.begin(name="b")
    bench.holds(first.names())
    assert bench.side.lookup("a", 0) == 0
    assert not bench.links[0].up
    assert bench.side.lookup("b", 0) == 0
    assert bench.stores[0].asked == [(5, DEADLINE)]
    assert bench.counts.take()["lookup_timeouts"] == 2
    assert bench.links[0]._without == 2
    bench.stores[0].fails, bench.links[0].up = False, True
    bench.clock.now += FRESH
    assert bench.side.lookup("b", 0) == second.num_tokens


def test_a_request_waits_a_moment_for_a_node_that_has_just_stopped_answering() -> None:
    bench = Bench(lookup_patience=1)
    request = bench.begin()
    bench.holds(request.names())
    bench.stores[0].fails = True
    assert bench.side.lookup("r", 0) is None
    assert bench.side.take_step().pause
    assert bench.side.lookup("r", 0) is None
    assert len(bench.stores[0].asked) == 1
    bench.stores[0].fails, bench.links[0].up = False, True
    bench.clock.now += 0.5
    assert bench.side.lookup("r", 0) == 20
    assert "lookup_timeouts" not in bench.counts.take()


def test_its_patience_ends() -> None:
    bench = Bench(lookup_patience=1)
    bench.begin()
    bench.stores[0].fails = True
    assert bench.side.lookup("r", 0) is None
    bench.clock.now += 1
    assert bench.side.lookup("r", 0) == 0
    assert bench.counts.take()["lookup_timeouts"] == 1


def test_no_request_waits_for_a_node_that_is_known_to_be_gone() -> None:
    bench = Bench(lookup_patience=1)
    bench.begin()
    bench.links[0].up = False
    assert bench.side.lookup("r", 0) == 0
    assert not bench.stores[0].asked
    assert not bench.side.take_step().pause


def test_a_prefix_reaches_as_far_as_every_stage_holds_it() -> None:
    bench = Bench(nodes=2)
    request = bench.begin()
    bench.holds(request.names()[:4])
    del bench.stores[1].held[request.names()[2]]
    assert bench.side.lookup("r", 0) == 8
    bench.stores[1].fails = True
    bench.clock.now += FRESH
    assert bench.side.lookup("r", 0) is None
    bench.clock.now += 1
    assert bench.side.lookup("r", 0) == 0


def test_a_producer_loads_nothing_and_a_consumer_saves_nothing() -> None:
    producer, consumer = Bench(loads=False), Bench(saves=False)
    producer.holds(producer.begin().names())
    assert producer.side.lookup("r", 0) == 0
    assert consumer.computes(consumer.begin(), 20).saves == []


def test_the_tiers_of_what_is_loaded_are_told() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:2])
    bench.holds(request.names()[2:4], SSD)
    assert bench.side.lookup("r", TOKENS) == 12
    assert bench.side.sources("r", 12) == {"dram": 4, "ssd": 8}


def test_full_blocks_are_saved_with_the_step_that_fills_them() -> None:
    bench = Bench()
    request = bench.begin(tokens=10)
    (job,) = bench.computes(request, 10).saves
    assert (job.parent, job.hashes) == (ROOT_PARENT, tuple(request.names()))
    assert [block.users for block in bench.pool.blocks[10:13]] == [1, 1, 0]
    request.all_token_ids += [11, 12]
    assert [each.hashes for each in bench.computes(request, 1).saves] == []
    assert [each.hashes for each in bench.computes(request, 1).saves] == [
        tuple(request.names()[2:])
    ]


def test_tokens_that_are_not_settled_are_not_saved() -> None:
    bench = Bench()
    request = bench.begin(tokens=10)
    (job,) = bench.computes(request, 14).saves
    assert len(job.hashes) == 2


def test_the_last_blocks_are_saved_when_a_request_ends() -> None:
    bench = Bench()
    request = bench.begin(tokens=7)
    assert len(bench.computes(request, 7).saves) == 1
    request.all_token_ids += [8, 9]
    request.num_computed_tokens = 8
    bench.side.finished(request, [10, 11])
    (job,) = bench.side.take_step().saves
    assert job.hashes == tuple(request.names()[1:])
    assert bench.side.busy


def test_a_request_aborted_under_a_load_saves_nothing() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:3])
    assert bench.side.lookup("r", 0) == 12
    bench.side.allocated("r", [10, 11, 12], 12)
    request.num_computed_tokens = 12
    bench.side.finished(request, [10, 11, 12])
    assert bench.side.take_step().saves == []
    bench.side.update(Finished(loaded={"r"}, failed_blocks={10}), {})


def test_what_another_connector_still_loads_is_not_saved() -> None:
    bench = Bench()
    request = bench.begin()
    assert bench.side.lookup("r", TOKENS) == 0
    request.num_computed_tokens = 4 * TOKENS
    bench.side.finished(request, [10, 11, 12, 13])
    assert bench.side.take_step().saves == []
    assert bench.counts.take().get("skipped_save_blocks", 0) == 0


def test_what_another_connector_has_loaded_is_saved_a_step_later() -> None:
    bench = Bench()
    request = bench.begin()
    assert bench.side.lookup("r", TOKENS) == 0
    request.num_computed_tokens = 4 * TOKENS
    # That load may be a part of this step, and fail.
    assert bench.computes(request, 2).saves == []
    (job,) = bench.computes(request, 1).saves
    assert job.hashes == tuple(request.names()[:4])


def test_what_another_connector_loads_after_a_preemption_is_not_saved() -> None:
    bench = Bench()
    request = bench.begin()
    assert len(bench.computes(request, TOKENS).saves) == 1
    request.num_computed_tokens = 0
    assert bench.side.lookup("r", 0) == 0
    request.num_computed_tokens = 4 * TOKENS
    bench.side.finished(request, [10, 11, 12, 13])
    assert bench.side.take_step().saves == []


def test_what_the_engine_held_is_saved_at_once() -> None:
    bench = Bench()
    request = bench.begin()
    assert bench.side.lookup("r", 4 * TOKENS) == 0
    request.num_computed_tokens = 4 * TOKENS
    (job,) = bench.computes(request, 4).saves
    assert job.hashes == tuple(request.names())


def test_after_a_failed_load_the_request_is_computed_and_saved() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:3])
    assert bench.side.lookup("r", 0) == 12
    bench.side.allocated("r", [10, 11, 12], 12)
    bench.side.take_step()
    bench.side.update(Finished(loaded={"r"}, failed_blocks={11, 12}), {})
    assert bench.side.lookup("r", 0) == 0
    (job,) = bench.computes(request, 20).saves
    assert job.hashes == tuple(request.names()[1:])


def test_pins_go_when_every_worker_is_done() -> None:
    bench = Bench(workers=2)
    (job,) = bench.computes(bench.begin(), 20).saves
    bench.side.update(Finished(), {job.number: 1})
    assert bench.side.busy
    bench.side.update(Finished(), {job.number: 1})
    assert not bench.side.busy
    assert not any(block.users for block in bench.pool.blocks)


def test_saves_that_find_no_room_to_pin_come_later() -> None:
    bench = Bench(pinned_share=3 / 64)
    request = bench.begin()
    (first,) = bench.computes(request, 20).saves
    assert len(first.hashes) == 3
    assert bench.computes(request, 0).saves == []
    bench.side.update(Finished(), {first.number: 1})
    (second,) = bench.computes(request, 0).saves
    assert second.hashes == tuple(request.names()[3:])


def test_without_room_to_pin_no_blocks_are_listed() -> None:
    bench = Bench(pinned_share=3 / 64)
    bench.computes(bench.begin(), 20)

    def blocks_of(request: str) -> Sequence[int]:
        raise AssertionError(request)

    bench.side.plan_saves({"r": 0}, blocks_of)


def test_what_ends_without_room_is_counted() -> None:
    bench = Bench(pinned_share=3 / 64)
    request = bench.begin()
    bench.computes(request, 20)
    bench.side.finished(request, range(10, 20))
    assert bench.counts.take()["skipped_save_blocks"] == 2


def test_an_orphaned_request_is_offered_from_its_first_block() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:3])
    assert bench.side.lookup("r", 3 * TOKENS) == 0
    (job,) = bench.computes(request, 16).saves
    bench.side.update(Finished(orphaned={"r"}), {job.number: 1})
    (job,) = bench.computes(request, 4).saves
    assert (job.parent, len(job.hashes)) == (ROOT_PARENT, 5)


# --- routers --------------------------------------------------------------------------------------


def test_routers_are_told_of_what_a_lookup_finds() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names()[:2])
    bench.side.lookup("r", 4)
    assert bench.told == [("r", 0, 2, ROOT_PARENT)]


def test_routers_are_told_of_saves_when_all_workers_are_done() -> None:
    bench = Bench(workers=2)
    request = bench.begin()
    bench.holds(request.names()[:1])
    bench.side.lookup("r", 4)
    bench.told.clear()
    (job,) = bench.computes(request, 20).saves
    bench.side.update(Finished(saved={job.number: 4}), {job.number: 1})
    assert bench.told == []
    bench.side.update(Finished(saved={job.number: 3}), {job.number: 1})
    assert bench.told == [("r", 1, 3, request.names()[0])]


def test_routers_are_not_told_of_saves_that_failed() -> None:
    bench = Bench()
    (job,) = bench.computes(bench.begin(), 20).saves
    bench.side.update(Finished(saved={job.number: 0}), {job.number: 1})
    assert bench.told == []


# --- errors and changes of weights ---------------------------------------------------------------


def test_an_abandoned_load_fails_all_blocks() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names())
    assert bench.side.lookup("r", 0) == 20
    with pytest.raises(ValueError, match="20 tokens are to come into 2 blocks"):
        bench.side.allocated("r", [10, 11], 20)
    bench.side.abandon("r", [10, 11])
    assert bench.side.take_step().loads == [LoadJob("r", (), (10, 11))]
    bench.side.update(Finished(loaded={"r"}, failed_blocks={10, 11}), {})
    # It would only be abandoned again.
    assert bench.side.lookup("r", 0) == 0
    assert bench.computes(request, 20).saves == []
    bench.side.finished(request, range(10, 20))


def test_an_admission_that_nothing_is_known_of_is_not_passed_over() -> None:
    with pytest.raises(KeyError):
        Bench().side.allocated("r", [10, 11], 8)


def test_a_request_without_a_name_is_left_alone() -> None:
    bench = Bench()
    request = Request("r", list(range(20)))
    request.prompt_embeds = object()  # type: ignore[attr-defined]
    bench.side.begin(request)
    assert bench.side.lookup("r", 0) == 0
    assert bench.computes(request, 20).saves == []
    bench.side.finished(request, [])


def test_an_adapter_whose_weights_are_not_known_is_left_alone() -> None:
    bench = Bench()
    adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="org/on-the-hub")
    request = Request("r", list(range(1, 21)), lora_request=adapter)
    bench.side.begin(request)
    assert bench.side.lookup("r", 0) == 0
    bench.side.plan_saves({"r": 20}, lambda _: list(range(5)))
    assert bench.side.take_step().saves == []
    bench.side.finished(request, list(range(5)))
    assert bench.stores[0].asked == []


def test_after_a_change_of_weights_nothing_old_is_used() -> None:
    bench = Bench()
    request = bench.begin()
    bench.holds(request.names())
    bench.side.begin_anew()
    assert bench.side.lookup("r", 0) == 0
    later = bench.begin(name="later")
    assert bench.side.lookup("later", 0) == 0
    (job,) = bench.computes(later, 20).saves
    assert not set(job.hashes) & set(request.names())


def test_what_was_begun_with_the_weights_before_is_not_stored() -> None:
    bench = Bench()
    computing, loading = bench.begin(name="computing"), bench.begin(name="loading")
    bench.computes(computing, 8)
    bench.holds(loading.names()[:3])
    assert bench.side.lookup("loading", 0) == 12
    bench.side.allocated("loading", [10, 11, 12], 12)
    loading.num_computed_tokens = 12
    bench.side.begin_anew()
    bench.side.update(Finished(loaded={"loading"}), {})
    assert bench.computes(computing, 12).saves == []
    assert bench.computes(loading, 8).saves == []
    for request in (computing, loading):
        request.num_computed_tokens = 0
        assert bench.side.lookup(request.request_id, 0) == 0
        bench.side.finished(request, range(10, 20))
    assert bench.side.take_step().saves == []
