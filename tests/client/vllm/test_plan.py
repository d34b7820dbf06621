"""The scheduler's bookkeeping against a model of an engine that preempts, aborts and fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from client.vllm.jobs import SaveJob
from client.vllm.pins import Pins
from client.vllm.plan import MAX_JOB_BLOCKS, Plan
from kvstore.identity import ROOT_PARENT

TOKENS = 4


def hashes(count: int, salt: int = 0) -> list[bytes]:
    return [bytes([salt]) + number.to_bytes(31, "big") for number in range(1, count + 1)]


def planned(plan: Plan, request: str, blocks: int, tokens: int, room: int = 1000) -> list[SaveJob]:
    return list(plan.saves(request, range(100, 100 + blocks), tokens, room))


def test_saves_follow_each_other_without_gap() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 10, hashes(5))
    (first,) = planned(plan, "r", 3, tokens=10)
    (second,) = planned(plan, "r", 5, tokens=20)
    assert (first.parent, first.hashes, first.blocks) == (
        ROOT_PARENT,
        tuple(hashes(2)),
        (100, 101),
    )
    assert (second.parent, second.hashes, second.blocks) == (
        hashes(2)[-1],
        tuple(hashes(5)[2:]),
        (102, 103, 104),
    )
    assert planned(plan, "r", 5, tokens=20) == []


def test_a_block_that_is_not_full_is_not_saved() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 10, hashes(5))
    assert planned(plan, "r", 5, tokens=TOKENS - 1) == []


def test_only_prompt_blocks_are_saved_where_that_is_asked_for() -> None:
    plan = Plan(TOKENS, "prompt")
    plan.track("r", 10, hashes(5))
    (job,) = planned(plan, "r", 5, tokens=20)
    assert len(job.hashes) == 2


def test_nothing_is_saved_where_that_is_asked_for() -> None:
    plan = Plan(TOKENS, "none")
    plan.track("r", 10, hashes(5))
    assert planned(plan, "r", 5, tokens=20) == []


def test_what_the_store_holds_is_not_offered() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 20, hashes(5))
    plan.held("r", 3)
    (job,) = planned(plan, "r", 5, tokens=20)
    assert (job.parent, len(job.hashes)) == (hashes(3)[-1], 2)


def test_what_finds_no_room_is_saved_later() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 20, hashes(5))
    assert planned(plan, "r", 5, tokens=20, room=0) == []
    (first,) = planned(plan, "r", 5, tokens=20, room=2)
    (second,) = planned(plan, "r", 5, tokens=20)
    assert (len(first.hashes), len(second.hashes)) == (2, 3)


def test_a_long_prompt_is_saved_in_parts() -> None:
    plan = Plan(1, "all")
    plan.track("r", 600, hashes(600))
    jobs = list(plan.saves("r", range(600), 600, 1000))
    assert [len(job.hashes) for job in jobs] == [MAX_JOB_BLOCKS, MAX_JOB_BLOCKS, 88]
    assert [job.parent for job in jobs[1:]] == [job.hashes[-1] for job in jobs[:-1]]
    assert len({job.number for job in jobs}) == 3


def test_nothing_is_saved_under_a_load() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 20, hashes(5))
    plan.load("r", [100, 101], 0)
    assert planned(plan, "r", 5, tokens=20) == []
    plan.loaded("r")
    assert planned(plan, "r", 5, tokens=20)


def test_blocks_that_could_not_be_loaded_are_offered_again() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 20, hashes(5))
    plan.held("r", 4)
    plan.load("r", [101, 102, 103], 1)
    plan.spoiled({103})
    plan.loaded("r")
    assert plan["r"].failed
    (job,) = planned(plan, "r", 5, tokens=20)
    assert job.hashes == tuple(hashes(5)[3:])


def test_failed_blocks_of_others_change_nothing() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 20, hashes(5))
    plan.held("r", 3)
    plan.load("r", [101, 102], 1)
    plan.spoiled({7})
    plan.loaded("r")
    assert not plan["r"].failed
    assert plan["r"].planned == 3


def test_an_orphaned_request_begins_again() -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 20, hashes(5))
    plan.held("r", 4)
    plan.orphaned("r")
    (job,) = planned(plan, "r", 5, tokens=20)
    assert (job.parent, len(job.hashes)) == (ROOT_PARENT, 5)


@pytest.mark.parametrize("blocks", [[], [1, 2, 3]])
def test_a_load_that_cannot_be_named_is_refused(blocks: list[int]) -> None:
    plan = Plan(TOKENS, "all")
    plan.track("r", 20, hashes(5))
    with pytest.raises(ValueError, match="of 5"):
        plan.load("r", blocks, 3)


def test_news_of_requests_that_are_gone_are_ignored() -> None:
    plan = Plan(TOKENS, "all")
    plan.loaded("gone")
    plan.orphaned("gone")
    plan.forget("gone")
    assert len(plan) == 0


@dataclass(eq=False)
class Block:
    """A block of the engine: how many use it, and what its bytes are."""

    number: int
    users: int = 0
    content: bytes | None = None


class Pool:
    """The engine's blocks; one without users is overwritten at once, the worst that can happen."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.users += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            assert block.users > 0
            block.users -= 1
            if not block.users:
                block.content = None

    def allocate(self) -> Block | None:
        free = [block for block in self.blocks if not block.users]
        if not free:
            return None
        free[0].users = 1
        return free[0]


@dataclass
class EngineRequest:
    """A request of the model engine."""

    name: str
    hashes: list[bytes]
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0


class Engine(RuleBasedStateMachine):
    """Requests run, are preempted, loaded, aborted; saves end in any order or late.

    What has to hold: a save only ever reads the bytes that its hashes name, and after everything
    the engine's blocks are all free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(24)
        self.plan = Plan(TOKENS, "all")
        self.pins = Pins(self.pool, share=0.5, workers=1)
        self.requests: dict[str, EngineRequest] = {}
        self.saves: list[SaveJob] = []
        self.store: set[bytes] = set()
        self.loads: list[str] = []
        self.serial = 0

    @rule(blocks=st.integers(1, 6), salt=st.integers(0, 2))
    def begin(self, blocks: int, salt: int) -> None:
        name = f"r{self.serial}"
        self.serial += 1
        request = self.requests[name] = EngineRequest(name, hashes(blocks, salt))
        self.plan.track(name, blocks * TOKENS, request.hashes)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        waiting = [r for r in self.requests.values() if not r.blocks and r.name not in self.loads]
        if not waiting:
            return
        request = data.draw(st.sampled_from(waiting))
        held = 0
        while held < len(request.hashes) and request.hashes[held] in self.store:
            held += 1
        for _ in range(len(request.hashes)):
            block = self.pool.allocate()
            if block is None:
                self.pool.free_blocks(request.blocks)
                request.blocks = []
                return
            request.blocks.append(block)
        if held and not self.plan[request.name].failed:
            self.plan.held(request.name, held)
            self.plan.load(request.name, [b.number for b in request.blocks[:held]], 0)
            self.loads.append(request.name)

    @rule(data=st.data(), fails=st.booleans())
    def load_ends(self, data: st.DataObject, fails: bool) -> None:
        if not self.loads:
            return
        name = data.draw(st.sampled_from(self.loads))
        self.loads.remove(name)
        load = self.plan[name].load
        assert load is not None
        request = self.requests[name]
        good = data.draw(st.integers(0, len(load.hashes) - 1)) if fails else len(load.hashes)
        for block, content in zip(request.blocks, load.hashes[:good], strict=False):
            block.content = content
        if fails:
            self.plan.spoiled(load.blocks[good:])
        self.plan.loaded(name)
        request.computed = good

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        running = [r for r in self.requests.values() if r.blocks and r.name not in self.loads]
        if not running:
            return
        request = data.draw(st.sampled_from(running))
        if request.computed < len(request.hashes):
            request.blocks[request.computed].content = request.hashes[request.computed]
            request.computed += 1
        self.save(request)

    def save(self, request: EngineRequest) -> None:
        ids = [block.number for block in request.blocks]
        tokens = request.computed * TOKENS
        for job in self.plan.saves(request.name, ids, tokens, self.pins.room):
            self.pins.pin(job)
            self.saves.append(job)

    @rule(data=st.data(), orphaned=st.booleans())
    def save_ends(self, data: st.DataObject, orphaned: bool) -> None:
        if not self.saves:
            return
        job = data.draw(st.sampled_from(self.saves))
        self.saves.remove(job)
        for number, name in zip(job.blocks, job.hashes, strict=True):
            assert self.pool.blocks[number].content == name
        if orphaned:
            self.plan.orphaned(job.request)
        else:
            self.store.update(job.hashes)
        assert self.pins.done(job.number)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if self.store:
            self.store.discard(data.draw(st.sampled_from(sorted(self.store))))

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = [r for r in self.requests.values() if r.blocks and r.name not in self.loads]
        if running:
            self.free(data.draw(st.sampled_from(running)))

    def free(self, request: EngineRequest) -> None:
        self.pool.free_blocks(request.blocks)
        request.blocks, request.computed = [], 0

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        done = [r for r in self.requests.values() if r.name not in self.loads]
        if done:
            request = data.draw(st.sampled_from(done))
            self.save(request)
            self.free(request)
            self.plan.forget(request.name)
            del self.requests[request.name]

    @invariant()
    def pins_are_bounded(self) -> None:
        assert 0 <= self.pins.room <= 12
        pinned = {block for job in self.saves for block in job.blocks}
        assert len(pinned) == 12 - self.pins.room
        assert len(self.pins) == len(self.saves)

    def teardown(self) -> None:
        for job in self.saves:
            self.pins.done(job.number)
        for request in self.requests.values():
            self.free(request)
        assert not any(block.users for block in self.pool.blocks)


TestEngine = Engine.TestCase


def test_blocks_are_free_when_the_last_worker_is_done() -> None:
    pool = Pool(8)
    pins = Pins(pool, share=0.5, workers=2)
    job = SaveJob(1, "r", ROOT_PARENT, tuple(hashes(2)), (3, 4))
    pins.pin(job)
    assert pins.room == 2
    assert not pins.done(1)
    assert pool.blocks[3].users == 1
    assert pins.done(1)
    assert pins.room == 4
    assert not any(block.users for block in pool.blocks)


def test_a_block_of_several_requests_takes_room_once() -> None:
    pool = Pool(8)
    pins = Pins(pool, share=0.5, workers=1)
    for number in (1, 2, 3):
        pins.pin(SaveJob(number, f"r{number}", ROOT_PARENT, (b"a", b"b"), (3, 4)))
    assert pins.room == 2
    assert pins.done(1)
    assert pins.done(3)
    assert pins.room == 2
    assert pool.blocks[3].users == 1
    assert pins.done(2)
    assert pins.room == 4
    assert not any(block.users for block in pool.blocks)
