"""Simulation: the table of the issue, and agreement with simulators written in another way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.capacity import Capacity
from kvstore.errors import ConfigError
from kvstore.simulate import Configuration, Outcome, Simulation, Workload, configurations, simulate
from kvstore.trace import Request, Trace
from tests.kvstore.trace_files import EXCERPT, shared_trace

TOKENS = 512

Chains = list[list[int]]


def workload(chains: Sequence[Sequence[int]], partial: int = TOKENS) -> Workload:
    requests = (
        Request(0, max(len(ids) - 1, 0) * TOKENS + (partial if ids else 0), 1, tuple(ids), 1, 1)
        for ids in chains
    )
    return Workload(requests, TOKENS)


@st.composite
def chain_lists(draw: st.DrawFn) -> Chains:
    """Requests as paths down one random forest, so that an id has one parent."""
    parents = draw(st.lists(st.integers(-1, 30), min_size=1, max_size=40))
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]
    chains = []
    for leaf in draw(st.lists(st.integers(0, len(parents) - 1), max_size=40)):
        chain = [leaf]
        while parents[chain[-1]] >= 0:
            chain.append(parents[chain[-1]])
        chains.append(chain[::-1])
    return chains


def cache_hits(chains: Chains, capacity: int, *, touch: bool) -> int:
    """A plain cache, LRU or FIFO: insert leaf to root, then evict down to the capacity."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        held = next((n for n, block in enumerate(chain) if block not in order), len(chain))
        hits += held
        for block in reversed(chain):
            if block not in order:
                order[block] = None
            elif touch:
                order.move_to_end(block)
        while len(order) > capacity:
            order.popitem(last=False)
    return hits


TABLE = {
    "conversation.jsonl": (36.6, 19.6, 27.9, 35.3, 21.2, 28.4, 24.8),
    "synthetic.jsonl": (64.0, 15.7, 26.2, 44.4, 16.2, 26.5, 24.8),
}
COLUMNS = (
    ("lru", "infinite", True),
    ("lru", "5%", True),
    ("lru", "10%", True),
    ("lru", "25%", True),
    ("arc", "5%", True),
    ("arc", "10%", True),
    # The table's FIFO lets a child outlive its parent. A node's FIFO gives 27.9 and 26.2 here: a
    # parent waits for its children, so prefixes that are asked for stay, as with LRU.
    ("fifo", "10%", False),
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", TABLE)
def test_the_published_traces_give_the_table_of_the_issue(name: str) -> None:
    work = Workload(Trace(shared_trace(name)), TOKENS)
    rates = []
    for policy, capacity, whole_prefixes in COLUMNS:
        [configuration] = configurations(
            work,
            policies=[policy],
            dram=[Capacity.parse(capacity)],
            block_bytes=1 << 20,
            whole_prefixes=whole_prefixes,
        )
        rates.append(100 * simulate(work, configuration).hit_rate)
    assert rates == pytest.approx(list(TABLE[name]), abs=0.3)


@given(chain_lists(), st.integers(0, 20))
def test_lru_hits_what_a_plain_lru_cache_hits(chains: Chains, spare: int) -> None:
    capacity = max(map(len, chains), default=0) + spare + 1
    work = workload(chains)
    for whole_prefixes in (True, False):
        outcome = simulate(work, Configuration("lru", capacity, whole_prefixes=whole_prefixes))
        assert outcome.hit_blocks == {"dram": cache_hits(chains, capacity, touch=True), "ssd": 0}


@given(
    chain_lists(), st.integers(1, 30), st.integers(0, 30), st.sampled_from(["lru", "arc", "fifo"])
)
def test_capacities_hold_and_accesses_add_up(
    chains: Chains, dram: int, ssd: int, policy: str
) -> None:
    work = workload(chains, partial=7)
    simulation = Simulation(work, Configuration(policy, dram, ssd, region_blocks=4))
    for chain, length in zip(work.chains, work.input_lengths, strict=True):
        simulation.send(chain, length)
        shard = simulation._shard
        assert shard.in_dram <= dram
        assert shard.in_ssd <= ssd
        assert not shard.reserved
        for entry in shard.committed.values():
            assert entry.state & 3
            assert entry.parent is None or entry.parent.hash in shard.committed
    outcome = simulation.result()
    present = len(simulation._shard.committed)
    hits = sum(outcome.hit_blocks.values())
    gone = outcome.evicted + outcome.reclaimed
    assert outcome.accesses == hits + outcome.refused + present + gone
    assert 0 <= sum(outcome.hit_tokens.values()) <= outcome.tokens


@given(chain_lists())
def test_enough_room_anywhere_hits_all_that_the_trace_allows(chains: Chains) -> None:
    work = workload(chains)
    best = work.accesses - work.unique
    longest = max(map(len, chains), default=0) + 1
    for configuration in (
        Configuration("lru", None),
        Configuration("fifo", work.unique + 1),
        Configuration("arc", longest, None, region_blocks=2),
        Configuration("lru", longest, 1000, region_blocks=4),
    ):
        outcome = simulate(work, configuration)
        assert sum(outcome.hit_blocks.values()) == best


def test_tokens_of_a_partial_last_block_count_as_they_are() -> None:
    outcome = simulate(workload([[1, 2], [1, 2], [1, 3]], partial=10), Configuration("lru", None))
    assert (outcome.hit_blocks["dram"], outcome.hit_tokens["dram"]) == (3, 522 + 512)
    assert outcome.token_hit_rate == pytest.approx((522 + 512) / (3 * 522))


def test_an_empty_trace_is_no_division_by_zero() -> None:
    outcome = simulate(workload([[]]), Configuration("lru", 1))
    assert (outcome.hit_rate, outcome.token_hit_rate) == (0.0, 0.0)


def test_progress_adds_up_to_the_accesses() -> None:
    steps: list[int] = []
    work = Workload(Trace(EXCERPT), TOKENS)
    simulate(work, Configuration("lru", 600), steps.append)
    assert (sum(steps), len(steps)) == (7539, 2)


def test_a_lower_tier_serves_what_dram_gave_up() -> None:
    work = Workload(Trace(EXCERPT), TOKENS)
    alone = simulate(work, Configuration("lru", 600))
    both = simulate(work, Configuration("lru", 600, 3000, region_blocks=64))
    assert both.hit_blocks["ssd"] > 0
    assert both.hit_rate > alone.hit_rate
    assert both.written > 0


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("5%", 50),
        ("2.5 %", 25),
        (".15%", 1),
        ("7", 7),
        ("7 blocks", 7),
        ("1 block", 1),
        ("8KiB", 2),
        ("infinite", None),
        (" INF ", None),
    ],
)
def test_capacities_are_read_in_every_unit(text: str, blocks: int | None) -> None:
    assert Capacity.parse(text).in_blocks(1000, 4096) == blocks


@pytest.mark.parametrize("text", ["", "%", "-5%", "5 % %", "many", "-1", "8 QiB", "1e3"])
def test_other_capacities_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a capacity such as"):
        Capacity.parse(text)


def test_combinations_leave_out_what_would_be_the_same() -> None:
    work = workload([list(range(100))])
    found = configurations(
        work,
        policies=["lru", "arc"],
        dram=[Capacity.parse("10%"), Capacity.parse("10"), Capacity.parse("infinite")],
        ssd=[Capacity.parse("0"), Capacity.parse("50%")],
        block_bytes=1 << 20,
    )
    assert [(one.policy, one.dram_blocks, one.ssd_blocks) for one in found] == [
        ("lru", 10, 0),
        ("lru", 10, 50),
        ("lru", None, 0),
        ("arc", 10, 0),
        ("arc", 10, 50),
    ]


def test_impossible_configurations_are_refused() -> None:
    work = workload([[1, 2, 3]])
    with pytest.raises(ConfigError, match="no policy is called 'mru'; there are lru"):
        configurations(work, policies=["mru"], dram=[Capacity()], block_bytes=1)
    with pytest.raises(ConfigError, match="room for one block"):
        configurations(work, policies=["lru"], dram=[Capacity.parse("10%")], block_bytes=1)


def test_an_outcome_says_what_was_simulated() -> None:
    outcome = simulate(workload([[1]]), Configuration("arc", 5, 9, whole_prefixes=False))
    assert isinstance(outcome, Outcome)
    assert (outcome.policy, outcome.dram_blocks, outcome.ssd_blocks) == ("arc", 5, 9)
    assert (outcome.whole_prefixes, outcome.unique) == (False, 1)
