"""Pools of simulated nodes: small ones computed by hand, and what holds of any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.capacity import Capacity
from kvstore.errors import ConfigError
from kvstore.simulate import Configuration, configurations, simulate
from kvstore.simulate_pool import (
    ROUTINGS,
    PoolConfiguration,
    PoolOutcome,
    PoolSimulation,
    Router,
    pool_configurations,
    simulate_pool,
)
from kvstore.simulated_directory import Locations, bits
from kvstore.trace import Trace
from tests.kvstore.test_simulate import TOKENS, Chains, Workload, chain_lists, workload
from tests.kvstore.trace_files import EXCERPT, shared_trace


def in_turn(
    chains: Sequence[Sequence[int]], total: int | None, *, own_last: bool = False, partial: int = 1
) -> PoolOutcome:
    """Two nodes that get the requests in turn."""
    configuration = PoolConfiguration(2, Configuration("lru", total), "round-robin", 0, own_last)
    return simulate_pool(workload(chains, partial), configuration)


def test_what_one_node_stored_is_a_hit_on_the_other() -> None:
    outcome = in_turn([[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]], 8)
    assert (outcome.pooled.local_blocks, outcome.pooled.remote_blocks) == (2 + 3, 2 + 1)
    assert (outcome.isolated.local_blocks, outcome.isolated.remote_blocks) == (2 + 3, 0)
    assert (outcome.hit_rate, outcome.isolated_hit_rate) == (8 / 11, 5 / 11)
    assert outcome.gain == 8 / 5
    assert (outcome.lookups, outcome.publications, outcome.withdrawals) == (3, 2 + 3 + 1, 0)
    assert (outcome.pulled, outcome.held, outcome.distinct) == (3, 6, 3)
    assert (outcome.pooled.busiest, outcome.isolated.busiest) == (2, 2)


def test_a_replica_goes_before_a_block_that_no_other_node_has() -> None:
    # The third request leaves a replica of 2 on the first node, and the fifth needs its room.
    outcome = in_turn([[1], [2], [2], [2], [3], [1]], 4)
    assert (outcome.pooled.local_blocks, outcome.pooled.remote_blocks) == (1, 2)
    assert (outcome.publications, outcome.withdrawals) == (5, 1)
    assert (outcome.held, outcome.distinct) == (4, 3)


def test_a_replica_waits_for_the_block_that_follows_it_and_then_goes_first() -> None:
    # On the second node 1 is a replica that 2 follows, used later than both 2 and 8. The room for
    # 5 is that of 2, as nothing else may go first; the room for 6 is that of the replica.
    chains = [[1], [1, 2], [9], [8], [9], [1], [9], [5], [9], [6], [9], [8]]
    outcome = in_turn(chains, 6)
    assert (outcome.pooled.local_blocks, outcome.pooled.remote_blocks) == (6, 1)
    assert (outcome.withdrawals, outcome.held, outcome.distinct) == (2, 5, 5)


@pytest.mark.parametrize(("own_last", "local"), [(False, 0), (True, 1)])
def test_the_last_copy_stays_where_its_node_learns_that_it_is(own_last: bool, local: int) -> None:
    chains = [[1], [1], [2], [5], [3], [6], [7], [1]]
    outcome = in_turn(chains, 4, own_last=own_last)
    assert (outcome.pooled.local_blocks, outcome.pooled.remote_blocks) == (local, 1)


def test_a_node_takes_of_a_chain_what_it_has_room_for() -> None:
    outcome = in_turn([[1, 2], [1, 2]], 2)
    assert (outcome.pooled.local_blocks, outcome.pooled.remote_blocks) == (0, 1)
    assert (outcome.held, outcome.distinct) == (2, 1)


def test_tokens_of_a_partial_last_block_count_as_they_are() -> None:
    outcome = in_turn([[1, 2], [1, 2], [1, 2], [1, 3]], None, partial=10)
    assert (outcome.pooled.remote_tokens, outcome.pooled.local_tokens) == (522, 522 + 512)
    assert (outcome.isolated.tokens, outcome.pooled.tokens) == (522 + 512, 2 * 522 + 512)


def test_operations_are_counted_over_the_time_of_the_trace() -> None:
    work = workload([[1, 2], [1, 2, 3]])
    work.seconds = 2.0
    outcome = simulate_pool(work, PoolConfiguration(2, Configuration("lru", 8), "round-robin"))
    assert (outcome.operations, outcome.operations_a_second) == (2 + 5, 3.5)
    assert (outcome.batches, outcome.calls, outcome.calls_a_second) == (2, 4, 2.0)
    assert in_turn([[1]], 2).operations_a_second is None


def test_a_workload_knows_how_long_it_took() -> None:
    assert Workload(Trace(shared_trace("conversation.jsonl")), TOKENS).seconds == 3536.999
    assert workload([]).seconds == 0.0


def test_nothing_to_hit_is_no_division_by_zero() -> None:
    outcome = in_turn([[]], 2)
    assert (outcome.hit_rate, outcome.isolated_hit_rate, outcome.gain) == (0.0, 0.0, None)


pools = st.builds(
    PoolConfiguration,
    st.integers(1, 5),
    st.builds(
        Configuration,
        st.sampled_from(["lru", "arc", "fifo"]),
        st.integers(5, 40),
        st.sampled_from([0, 0, 60]),
        st.just(2),
    ),
    st.sampled_from(ROUTINGS),
    st.integers(0, 9),
    st.booleans(),
)


@settings(max_examples=60)
@given(chain_lists(), pools, st.booleans())
def test_the_directory_is_right_and_room_is_kept(
    chains: Chains, configuration: PoolConfiguration, pull: bool
) -> None:
    work = workload(chains)
    simulation = PoolSimulation(work, configuration, pull=pull)
    node = configuration.node
    for chain, length in zip(work.chains, work.input_lengths, strict=True):
        simulation.send(chain, length)
        holders: dict[bytes, int] = {}
        for number, one in enumerate(simulation._nodes):
            assert one._shard.in_dram <= (node.dram_blocks or 0)
            assert not one._shard.reserved
            for block, entry in one._shard.committed.items():
                holders[block] = holders.get(block, 0) | 1 << number
                assert entry.parent is None or entry.parent.hash in one._shard.committed
                assert pull or not entry.replica
        assert holders == simulation.locations._holders
    locations, hits = simulation.locations, simulation.hits()
    assert locations.published - locations.withdrawn == sum(
        map(int.bit_count, holders_of(locations))
    )
    assert hits.blocks <= work.accesses - work.unique
    assert 0 <= hits.tokens <= work.tokens
    assert sum(simulation._router.requests) == len(chains)
    assert pull or (hits.remote_blocks, simulation.lookups) == (0, 0)


def holders_of(locations: Locations) -> list[int]:
    return list(locations._holders.values())


@given(chain_lists(), st.sampled_from(["lru", "arc", "fifo"]), st.integers(1, 30))
def test_a_pool_of_one_hits_what_a_node_does(chains: Chains, policy: str, capacity: int) -> None:
    work, one = workload(chains), Configuration(policy, capacity)
    outcome = simulate_pool(work, PoolConfiguration(1, one))
    assert outcome.pooled == outcome.isolated
    assert outcome.pooled.local_blocks == simulate(work, one).hit_blocks["dram"]


@given(chain_lists(), st.integers(1, 5), st.sampled_from(ROUTINGS), st.integers(0, 9))
def test_a_pool_with_room_hits_all_that_the_trace_allows(
    chains: Chains, nodes: int, routing: str, seed: int
) -> None:
    """So no isolated nodes hit more. Where room is short that need not be: copies take some."""
    work = workload(chains)
    for total in (None, nodes * (work.unique + 1)):
        pool = PoolConfiguration(nodes, Configuration("lru", total), routing, seed)
        outcome = simulate_pool(work, pool)
        assert (
            outcome.pooled.blocks == work.accesses - work.unique == outcome.pooled.tokens // TOKENS
        )
        assert outcome.isolated.blocks <= outcome.pooled.blocks
        assert outcome.withdrawals == 0
        assert outcome.distinct == work.unique
        assert outcome.publications == work.unique + outcome.pulled


def test_the_seed_chooses_the_homes() -> None:
    work = Workload(Trace(EXCERPT), TOKENS)
    total = Configuration("lru", 1200)
    first, again, other = (
        simulate_pool(work, PoolConfiguration(4, total, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.pooled != other.pooled


def test_routing_by_prefix_goes_to_the_longest_unless_that_node_is_overloaded() -> None:
    locations = Locations()
    router = Router(PoolConfiguration(2, Configuration("lru", 8), "prefix"), locations)
    homes = []
    for number, length in ((1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (2, 4)):
        chain = [bytes([number, depth]) for depth in range(length)]
        homes.append(router.home(chain))
        if homes[-1] == number - 1:
            locations.publish(chain[-1], number - 1)
    assert homes == [0, 1, 0, 1, 1, 0]
    assert router.requests == [3, 3]


def test_reach_looks_only_among_the_nodes_that_matter() -> None:
    locations = Locations()
    chain = [bytes([number]) for number in range(4)]
    for node, length in ((0, 1), (2, 3), (5, 3)):
        for block in chain[:length]:
            locations.publish(block, node)
    everybody = (1 << 6) - 1
    assert locations.reach(chain, everybody) == (3, 1 << 2 | 1 << 5)
    assert locations.reach(chain, 1 << 0) == (1, 1 << 0)
    assert locations.reach(chain, 1 << 1) == (0, 0)
    assert locations.reach(chain, everybody, 3) == (3, 0)
    assert list(bits(1 << 2 | 1 << 5)) == [2, 5]


@pytest.mark.timeout(180)
def test_four_nodes_gain_on_a_published_trace_what_the_literature_reports() -> None:
    work = Workload(Trace(shared_trace("conversation.jsonl")), TOKENS)
    [total] = configurations(
        work, policies=["lru"], dram=[Capacity.parse("10%")], block_bytes=1 << 20
    )
    outcome = simulate_pool(work, PoolConfiguration(4, total))
    assert outcome.gain is not None
    assert 2.2 <= outcome.gain <= 2.4
    assert 100 * outcome.hit_rate == pytest.approx(26.1, abs=0.3)
    assert 100 * outcome.isolated_hit_rate == pytest.approx(11.5, abs=0.3)


def test_what_one_request_changed_is_told_in_one_call_for_each_node_and_tag() -> None:
    locations = Locations()
    long, short = ([bytes([tag, *number.to_bytes(2)]) for number in range(129)] for tag in (1, 2))
    for chain in (long, short[:1]):
        locations.meet(chain)
    for block in long[:128]:
        locations.publish(block, 0)
    locations.tell()
    assert locations.batches == 1
    locations.tell()
    assert locations.batches == 1
    for block in (*long, short[0]):
        locations.publish(block, 1)
    locations.withdraw(long[0], 0)
    locations.tell()
    assert locations.batches == 1 + 2 + 1 + 1


def test_progress_adds_up_to_both_runs() -> None:
    steps: list[int] = []
    work = Workload(Trace(EXCERPT), TOKENS)
    simulate_pool(work, PoolConfiguration(2, Configuration("lru", 600)), steps.append)
    assert sum(steps) == 2 * work.accesses


def test_combinations_divide_the_capacity_evenly() -> None:
    totals = [Configuration("lru", 10, 5), Configuration("lru", None)]
    found = pool_configurations(totals, [1, 4, 4], routing="prefix", seed=3)
    nodes = [(one.nodes, one.node.dram_blocks, one.node.ssd_blocks) for one in found]
    assert nodes == [(1, 10, 5), (4, 2, 1), (1, None, 0), (4, None, 0)]
    assert {(one.routing, one.seed) for one in found} == {("prefix", 3)}


@pytest.mark.parametrize(
    ("total", "nodes", "routing", "said"),
    [
        (Configuration("lru", 9), 1, "best", "no routing is called 'best'; there are random"),
        (Configuration("lru", 9), 0, "random", "1 to 4096 nodes, not 0"),
        (Configuration("lru", 9), 4097, "random", "1 to 4096 nodes, not 4097"),
        (Configuration("lru", 9), 10, "random", "less than one for each of 10 nodes"),
        (Configuration("lru", 9, whole_prefixes=False), 1, "random", "no orphans"),
    ],
)
def test_impossible_pools_are_refused(
    total: Configuration, nodes: int, routing: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        pool_configurations([total], [nodes], routing=routing)
