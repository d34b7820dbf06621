"""What a trace would hit at a given capacity: the node's index and policies, with no bytes moved.

For each request, as a node does: match, note the use of what is there (blocks on SSD come up to
DRAM), then reserve, make room for and commit the rest, root first. A request hits the blocks of the
longest contiguous prefix that is held when it arrives.

Two things differ from a running node, on purpose:

* Capacity is exact. A block is evicted when the tier is full and another needs its room, while a
  node that has an SSD demotes ahead of demand, between its two watermarks, and so keeps a little
  less in DRAM. A node without SSD also evicts only when full.
* Time doesn't pass: no write budget, no slow medium, no concurrent request.

``whole_prefixes=False`` lets a child outlive its parent, as simulators of plain caches do. A node
never does. It matters to FIFO alone: there a parent that waits for its children stays as long as
they are asked for, and FIFO gives what LRU gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.capacity import Capacity
from kvstore.entry import DRAM_CODE, IN_DRAM, IN_SSD, REPLICA, Entry
from kvstore.errors import ConfigError, ParentAbsent
from kvstore.feed import Feed
from kvstore.identity import ROOT_PARENT
from kvstore.index import Index
from kvstore.ssd_log import SsdLog
from kvstore.trace import BlockNames, Request
from tiers.policies import POLICIES, make_policy

REGION_BYTES = 64 << 20
"""Bytes of an SSD region, as in a node's default configuration."""


class Workload:
    """A trace made ready once for any number of simulations.

    Attributes:
        chains: the prefix hashes of each request, root first.
        input_lengths: tokens of each request.
        block_tokens: tokens of a whole block.
        unique: blocks that differ.
        accesses: blocks of all requests.
        tokens: tokens of all requests.
        seconds: from the first request to the last, by the trace's own times.
    """

    def __init__(self, requests: Iterable[Request], block_tokens: int) -> None:
        names = BlockNames()
        self.chains: list[list[bytes]] = []
        self.input_lengths: list[int] = []
        self.block_tokens = block_tokens
        times: list[float] = []
        for request in requests:
            times.append(request.timestamp)
            self.chains.append(names.chain(request.hash_ids))
            self.input_lengths.append(request.input_length)
        self.unique = len({name for chain in self.chains for name in chain})
        self.accesses = sum(map(len, self.chains))
        self.tokens = sum(self.input_lengths)
        self.seconds = (max(times) - min(times)) / 1000 if times else 0.0


@dataclass(frozen=True, slots=True)
class Configuration:
    """What to simulate; capacities in blocks.

    Attributes:
        policy: name of the order in which DRAM gives up blocks.
        dram_blocks: capacity of DRAM, at least 1; ``None`` is infinite.
        ssd_blocks: capacity of SSD; 0 is no SSD, ``None`` is infinite.
        region_blocks: blocks in one SSD region, which come and go together.
        whole_prefixes: whether a parent stays as long as its children.
    """

    policy: str
    dram_blocks: int | None
    ssd_blocks: int | None = 0
    region_blocks: int = 64
    whole_prefixes: bool = True


@dataclass(slots=True)
class Outcome:
    """What one simulation gave.

    Attributes:
        unique: unique blocks of the trace, which a share of capacity is of.
        accesses, tokens: of all requests.
        hit_blocks, hit_tokens: of the prefixes that were held, by tier.
        evicted: blocks that left the node to make room in DRAM.
        reclaimed: blocks that left the node with an SSD region.
        refused: blocks that found no room.
        written: blocks written to SSD, those that a reclaimed region wrote anew included.
    """

    policy: str
    dram_blocks: int | None
    ssd_blocks: int | None
    whole_prefixes: bool
    unique: int
    accesses: int
    tokens: int
    hit_blocks: dict[str, int] = field(default_factory=lambda: {"dram": 0, "ssd": 0})
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"dram": 0, "ssd": 0})
    evicted: int = 0
    reclaimed: int = 0
    refused: int = 0
    written: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit blocks over block accesses, 0 to 1."""
        return sum(self.hit_blocks.values()) / self.accesses if self.accesses else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens over all input tokens, 0 to 1."""
        return sum(self.hit_tokens.values()) / self.tokens if self.tokens else 0.0


def configurations(
    workload: Workload,
    *,
    policies: Sequence[str],
    dram: Sequence[Capacity],
    ssd: Sequence[Capacity] = (Capacity(blocks=0),),
    block_bytes: int,
    region_bytes: int = REGION_BYTES,
    whole_prefixes: bool = True,
) -> list[Configuration]:
    """Every combination of policies and capacities. Where DRAM is infinite, all policies are one.

    Raises:
        ConfigError: there is no such policy, or a DRAM capacity is less than one block.
    """
    found: dict[Configuration, None] = {}
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
        if not workload.unique:
            raise ConfigError("the trace has no blocks: nothing to simulate")
        for upper in dram:
            dram_blocks = upper.in_blocks(workload.unique, block_bytes)
            if dram_blocks == 0:
                raise ConfigError(f"DRAM must have room for one block: {upper} is less")
            for lower in ssd:
                ssd_blocks = lower.in_blocks(workload.unique, block_bytes)
                region = max(region_bytes // block_bytes, 1)
                key = Configuration(
                    policies[0] if dram_blocks is None else policy,
                    dram_blocks,
                    0 if dram_blocks is None else ssd_blocks,
                    region,
                    whole_prefixes,
                )
                found[key] = None
    return list(found)


def simulate(
    workload: Workload,
    configuration: Configuration,
    progress: Callable[[int], object] = int,
) -> Outcome:
    """Run all requests of a trace through one configuration.

    Args:
        workload: the trace.
        configuration: policy and capacities.
        progress: called now and then with the block accesses done since the last call.
    """
    simulation = Simulation(workload, configuration)
    done = 0
    for chain, length in zip(workload.chains, workload.input_lengths, strict=True):
        simulation.send(chain, length)
        done += len(chain)
        if done >= 4096:
            progress(done)
            done = 0
    progress(done)
    return simulation.result()


class Simulation:
    """A node without bytes: what an index holds while the requests of a trace go by.

    Args:
        workload: the trace.
        configuration: policy and capacities.
        feed: is told of blocks stored and removed.
    """

    def __init__(
        self, workload: Workload, configuration: Configuration, feed: Feed | None = None
    ) -> None:
        self.outcome = Outcome(
            policy=configuration.policy,
            dram_blocks=configuration.dram_blocks,
            ssd_blocks=configuration.ssd_blocks,
            whole_prefixes=configuration.whole_prefixes,
            unique=workload.unique,
            accesses=workload.accesses,
            tokens=workload.tokens,
        )
        dram_blocks = configuration.dram_blocks
        self._capacity = sys.maxsize if dram_blocks is None else dram_blocks
        self._index = Index(make_policy(configuration.policy, self._capacity))
        self._shard = self._index.shard(bytes(32), 0, 1)
        self._shard.feed = feed
        self._shards = [self._shard]
        self._whole_prefixes = configuration.whole_prefixes
        self._block_tokens = workload.block_tokens
        self._now = 0.0
        self._ssd: SsdLog | None = None
        if configuration.ssd_blocks != 0:
            self._ssd = SsdLog(self._index, configuration.ssd_blocks, configuration.region_blocks)

    def send(self, chain: Sequence[bytes], input_length: int) -> None:
        """Match, use what is there, store the rest."""
        held = self.use(chain, input_length)
        if held < len(chain):
            self.store(chain[held:], chain[held - 1] if held else ROOT_PARENT)

    def use(self, chain: Sequence[bytes], input_length: int) -> int:
        """Match, count what is there as hits and note its use.

        Returns:
            How many blocks are there, from the first on.
        """
        codes = self._index.match(self._shards, chain)
        if codes:
            self._count_hits(codes, input_length, whole=len(codes) == len(chain))
        self.lend(chain[: len(codes)])
        return len(codes)

    def lend(self, names: Sequence[bytes]) -> None:
        """Note the use of blocks that are held, by this node's clients or by another node."""
        self._now += 1.0
        entries = [self._shard.committed[name] for name in names]
        if not all(entry.state & IN_DRAM for entry in entries):
            self._promote(entries)
        self._index.touch(entries, self._now)

    def own(self, name: bytes) -> None:
        """Count a block that is held as no replica: no other node has it any more."""
        self._index.own([self._shard.committed[name]])

    def result(self) -> Outcome:
        """What has happened so far."""
        if self._ssd is not None:
            self.outcome.written = self._ssd.written
            self.outcome.reclaimed = self._ssd.dropped
        return self.outcome

    def _count_hits(self, codes: bytes, input_length: int, *, whole: bool) -> None:
        outcome, size = self.outcome, self._block_tokens
        in_dram = codes.count(DRAM_CODE)
        outcome.hit_blocks["dram"] += in_dram
        outcome.hit_blocks["ssd"] += len(codes) - in_dram
        outcome.hit_tokens["dram"] += in_dram * size
        outcome.hit_tokens["ssd"] += (len(codes) - in_dram) * size
        if whole:
            last = "dram" if codes[-1] == DRAM_CODE else "ssd"
            outcome.hit_tokens[last] -= len(codes) * size - input_length

    def store(self, names: Sequence[bytes], parent: bytes, *, replica: bool = False) -> int:
        """Reserve, make room for and place a chain of blocks, root first, then commit them.

        Args:
            names: the blocks, none of them held.
            parent: the block before them.
            replica: whether another node has them.

        Returns:
            How many found room.
        """
        index, shard, now, capacity = self._index, self._shard, self._now, self._capacity
        if not self._whole_prefixes:
            names, parent = self._absent(names), ROOT_PARENT
        stored: list[Entry] = []
        for name in names:
            try:
                entry = index.reserve(shard, name, parent, now, replica=replica)
            except ParentAbsent:
                break
            if shard.in_dram >= capacity and not self._make_room():
                index.abort(entry)
            if entry.gone:
                break
            index.place(entry, "dram", 0)
            stored.append(entry)
            if self._whole_prefixes:
                parent = name
        self.outcome.refused += len(names) - len(stored)
        found_room = len(stored)
        if self._ssd is not None:
            stored = [entry for entry in stored if not entry.gone]
        index.commit(stored, now)
        return found_room

    def _absent(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of ``names`` that are not held; the use of the others is noted."""
        found = self._index.lookup(self._shard, names)
        self._index.touch([entry for entry in found if entry is not None], self._now)
        return [name for name, entry in zip(names, found, strict=True) if entry is None]

    def _promote(self, entries: Sequence[Entry]) -> None:
        """Bring what only the SSD holds up to DRAM, as far as there is room. The copy stays."""
        self._index.pin(entries)
        for entry in entries:
            if entry.state & IN_DRAM:
                continue
            if self._shard.in_dram >= self._capacity and not self._make_room():
                break
            if not entry.gone:
                self._index.place(entry, "dram", 0)
        self._index.unpin(entries)

    def _make_room(self) -> bool:
        """Take one block out of DRAM: down to the SSD if there is one, else out of the node.

        A replica that has no copy on the SSD gets none.
        """
        victim = next(self._index.victims(), None)
        if victim is None:
            return False
        if self._ssd is not None:
            if not victim.state & (IN_SSD | REPLICA):
                self._copy_down(self._ssd, victim)
            if victim.state & IN_SSD and not victim.gone:
                self._index.displace(victim, "dram")
        if victim.state & IN_DRAM and not victim.gone:
            gone = self._index.drop(victim)
            self.outcome.evicted += len(gone)
            if self._ssd is not None:
                for entry in gone:
                    self._ssd.forget(entry)
        return True

    def _copy_down(self, ssd: SsdLog, entry: Entry) -> None:
        """Write a block, after those of its prefix that have no copy there, parents first."""
        path: list[Entry] = []
        step: Entry | None = entry
        while step is not None and not step.state & IN_SSD:
            path.append(step)
            step = step.parent
        ssd.make_room(len(path))
        for one in reversed(path):
            if not one.state & IN_SSD and not one.gone:
                ssd.write(one)
