"""What a trace would hit on many nodes, in one pool or each for itself.

Each request goes to its home node. In a pool the home node asks the directory for what it lacks,
pulls it from a node that has it and keeps it as a replica, which goes before any block that no
other node has. Then it stores the rest, as a node does. Isolated nodes see the same requests with
the same room, and store what they lack.

A node is `kvstore.simulate`'s: its own index, policies and reclaim, with no bytes and no time. So
the directory is never late here: a location is withdrawn at the moment in which the block goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from kvstore.errors import ConfigError
from kvstore.homes import ROUTINGS as BLIND_ROUTINGS
from kvstore.homes import homes
from kvstore.identity import ROOT_PARENT
from kvstore.simulate import Configuration, Simulation, Workload
from kvstore.simulated_directory import Locations, Publication, bits

ROUTINGS: Final = (*BLIND_ROUTINGS, "prefix")
"""How a request gets its home: any node; each in turn; the one that has most of its prefix."""

MOST_NODES: Final = 4096
"""Nodes that can be simulated."""

OVERLOAD: Final = 1.25
"""Routing by prefix passes over a node that got more than so many times its part of the blocks."""


@dataclass(frozen=True, slots=True)
class PoolConfiguration:
    """What to simulate.

    Attributes:
        nodes: how many.
        total: policy, and the capacities of all nodes together, which are divided evenly.
        routing: one of `ROUTINGS`.
        seed: of all that is random.
        own_last: whether a node learns that all others have given up a block which it holds as a
            replica, so that it keeps the last copy like any other block.
    """

    nodes: int
    total: Configuration
    routing: str = "random"
    seed: int = 0
    own_last: bool = False

    @property
    def node(self) -> Configuration:
        """What each node gets: rounded down."""
        dram, ssd = self.total.dram_blocks, self.total.ssd_blocks
        return replace(
            self.total,
            dram_blocks=None if dram is None else dram // self.nodes,
            ssd_blocks=None if ssd is None else ssd // self.nodes,
        )


@dataclass(slots=True)
class Hits:
    """What was held when it was asked for, in one kind of pool.

    Attributes:
        local_blocks, local_tokens: at the home node.
        remote_blocks, remote_tokens: at others, and pulled from them.
        busiest: the largest number of requests that one node got.
    """

    local_blocks: int = 0
    local_tokens: int = 0
    remote_blocks: int = 0
    remote_tokens: int = 0
    busiest: int = 0

    @property
    def blocks(self) -> int:
        """Of both kinds."""
        return self.local_blocks + self.remote_blocks

    @property
    def tokens(self) -> int:
        """Of both kinds."""
        return self.local_tokens + self.remote_tokens


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """What one simulation gave.

    Attributes:
        configuration: what was simulated.
        requests, accesses, tokens, unique: of the trace.
        seconds: that the trace took.
        pooled: hits of nodes that share one pool.
        isolated: hits of nodes that don't.
        lookups: requests for which the directory was asked: not all was held at home.
        publications, withdrawals: blocks that a node got, and that a node gave up.
        batches: calls that tell the directory of them: what one request changed on one node under
            one tag, in parts of 128.
        held: blocks at the end, over all nodes.
        distinct: how many of them differ; the others are copies.
    """

    configuration: PoolConfiguration
    requests: int
    accesses: int
    tokens: int
    unique: int
    seconds: float
    pooled: Hits
    isolated: Hits
    lookups: int
    publications: int
    withdrawals: int
    batches: int
    held: int
    distinct: int

    @property
    def hit_rate(self) -> float:
        """Hit blocks of the pool over block accesses, 0 to 1."""
        return self.pooled.blocks / self.accesses if self.accesses else 0.0

    @property
    def isolated_hit_rate(self) -> float:
        """Hit blocks of isolated nodes over block accesses, 0 to 1."""
        return self.isolated.blocks / self.accesses if self.accesses else 0.0

    @property
    def gain(self) -> float | None:
        """The pool's hits for each hit of isolated nodes; None where these have none."""
        return self.pooled.blocks / self.isolated.blocks if self.isolated.blocks else None

    @property
    def operations(self) -> int:
        """What the directory was asked and told: lookups, publications and withdrawals."""
        return self.lookups + self.publications + self.withdrawals

    @property
    def operations_a_second(self) -> float | None:
        """Over the time that the trace took; None where it took none."""
        return self.operations / self.seconds if self.seconds else None

    @property
    def calls(self) -> int:
        """Scripts that the directory runs: one for a lookup, one for a batch of changes."""
        return self.lookups + self.batches

    @property
    def calls_a_second(self) -> float | None:
        """Over the time that the trace took; None where it took none."""
        return self.calls / self.seconds if self.seconds else None

    @property
    def pulled(self) -> int:
        """Blocks that went from one node to another: each remote hit is one."""
        return self.pooled.remote_blocks


def pool_configurations(
    totals: Sequence[Configuration],
    nodes: Sequence[int],
    *,
    routing: str = "random",
    seed: int = 0,
    own_last: bool = False,
) -> list[PoolConfiguration]:
    """Every combination of capacities and numbers of nodes.

    Raises:
        ConfigError: there is no such routing, a number of nodes is out of range, a node would have
            no room for one block, or a block may outlive the one before it.
    """
    if routing not in ROUTINGS:
        raise ConfigError(f"no routing is called {routing!r}; there are {', '.join(ROUTINGS)}")
    found = []
    for total in totals:
        if not total.whole_prefixes:
            raise ConfigError("nodes of a pool hold whole prefixes: there are no orphans in one")
        for number in dict.fromkeys(nodes):
            if not 1 <= number <= MOST_NODES:
                raise ConfigError(f"a pool has 1 to {MOST_NODES} nodes, not {number}")
            one = PoolConfiguration(number, total, routing, seed, own_last)
            if one.node.dram_blocks == 0:
                raise ConfigError(
                    f"{total.dram_blocks} blocks of DRAM are less than one for each of {number} "
                    "nodes"
                )
            found.append(one)
    return found


def simulate_pool(
    workload: Workload,
    configuration: PoolConfiguration,
    progress: Callable[[int], object] = int,
) -> PoolOutcome:
    """Run all requests of a trace through a pool, and through as many isolated nodes.

    Args:
        workload: the trace.
        configuration: nodes, policy, capacities and routing.
        progress: called now and then with the block accesses done since the last call; there are
            twice as many as in the trace.
    """
    pool = _run(PoolSimulation(workload, configuration, pull=True), workload, progress)
    apart = _run(PoolSimulation(workload, configuration, pull=False), workload, progress)
    locations = pool.locations
    return PoolOutcome(
        configuration=configuration,
        requests=len(workload.chains),
        accesses=workload.accesses,
        tokens=workload.tokens,
        unique=workload.unique,
        seconds=workload.seconds,
        pooled=pool.hits(),
        isolated=apart.hits(),
        lookups=pool.lookups,
        publications=locations.published,
        withdrawals=locations.withdrawn,
        batches=locations.batches,
        held=locations.published - locations.withdrawn,
        distinct=len(locations),
    )


def _run(
    simulation: PoolSimulation, workload: Workload, progress: Callable[[int], object]
) -> PoolSimulation:
    done = 0
    for chain, length in zip(workload.chains, workload.input_lengths, strict=True):
        simulation.send(chain, length)
        done += len(chain)
        if done >= 4096:
            progress(done)
            done = 0
    progress(done)
    return simulation


class Router:
    """Chooses the home of each request.

    Args:
        configuration: says how.
        locations: what each node holds.
    """

    def __init__(self, configuration: PoolConfiguration, locations: Locations) -> None:
        self.requests = [0] * configuration.nodes
        self._locations = locations
        self._homes: Iterator[int] | None = None
        if configuration.routing in BLIND_ROUTINGS:
            self._homes = homes(configuration.routing, configuration.nodes, configuration.seed)
        self._blocks = [0] * configuration.nodes

    def home(self, chain: Sequence[bytes]) -> int:
        """The node that the next request goes to."""
        home = self._with_most_of(chain) if self._homes is None else next(self._homes)
        self.requests[home] += 1
        self._blocks[home] += len(chain)
        return home

    def _with_most_of(self, chain: Sequence[bytes]) -> int:
        """The least loaded of those with the longest prefix, overloaded nodes left out."""
        load = self._blocks
        most = OVERLOAD * sum(load) / len(load)
        candidates = sum(1 << node for node, blocks in enumerate(load) if blocks <= most)
        _, holders = self._locations.reach(chain, candidates)
        return min(bits(holders or candidates), key=load.__getitem__)


class PoolSimulation:
    """Nodes without bytes, in a pool or each for itself.

    Args:
        workload: the trace.
        configuration: nodes, policy, capacities and routing.
        pull: whether a home node gets what it lacks from others.

    Attributes:
        locations: which node holds what.
        lookups: times that the directory was asked.
    """

    def __init__(self, workload: Workload, configuration: PoolConfiguration, *, pull: bool) -> None:
        self.locations = Locations(self._own if configuration.own_last else None)
        self.lookups = 0
        self._pull_remote = pull
        self._block_tokens = workload.block_tokens
        self._router = Router(configuration, self.locations)
        self._owners = Random(configuration.seed + 1)
        self._all = (1 << configuration.nodes) - 1
        self._hits = Hits()
        self._nodes = [
            Simulation(workload, configuration.node, Publication(self.locations, number))
            for number in range(configuration.nodes)
        ]

    def send(self, chain: Sequence[bytes], input_length: int) -> None:
        """Use what the home node has, pull what others have, store the rest at home."""
        self.locations.meet(chain)
        home = self._nodes[self._router.home(chain)]
        held = reach = home.use(chain, input_length)
        if self._pull_remote and held < len(chain):
            self.lookups += 1
            reach, owners = self.locations.reach(chain, self._all, held)
            held += self._pull(home, chain[:reach], held, owners)
            if held == len(chain):
                self._hits.remote_tokens -= len(chain) * self._block_tokens - input_length
        if held < len(chain) and held == reach:
            home.store(chain[held:], chain[held - 1] if held else ROOT_PARENT)
        self.locations.tell()

    def hits(self) -> Hits:
        """What has been hit so far."""
        outcomes = [node.outcome for node in self._nodes]
        return replace(
            self._hits,
            local_blocks=sum(sum(outcome.hit_blocks.values()) for outcome in outcomes),
            local_tokens=sum(sum(outcome.hit_tokens.values()) for outcome in outcomes),
            busiest=max(self._router.requests),
        )

    def _own(self, block: bytes, node: int) -> None:
        self._nodes[node].own(block)

    def _pull(self, home: Simulation, chain: Sequence[bytes], held: int, owners: int) -> int:
        """Copy the end of a chain from one of its owners, as far as there is room at home."""
        names = chain[held:]
        if not names:
            return 0
        self._nodes[self._owners.choice(list(bits(owners)))].lend(names)
        pulled = home.store(names, chain[held - 1] if held else ROOT_PARENT, replica=True)
        self._hits.remote_blocks += pulled
        self._hits.remote_tokens += pulled * self._block_tokens
        return pulled
