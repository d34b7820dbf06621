"""Blocks stored, lost and wanted anywhere in a pool, in any order, with hints right and wrong."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.protocol.messages import Get, Match
from tests.kvstore.peer import Peer, content
from tests.kvstore.pooled import REMOTE, PooledNode, pool
from tests.kvstore.watched import connected, name

NODES = 3
SECONDS = 5.0
WHO = st.integers(0, NODES - 1)
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def chain(path: tuple[int, ...]) -> list[bytes]:
    return [name("machine", *path[: end + 1]) for end in range(len(path))]


class PoolMachine(RuleBasedStateMachine):
    """Three nodes beside what their indexes and the directory say."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="kvs-"))
        self._stack = ExitStack()
        self.pool = self._stack.enter_context(pool(self._directory, NODES))
        self.peers: list[Peer] = [
            self._stack.enter_context(connected(node)) for node in self.pool.nodes
        ]
        self.away: set[int] = set()

    def teardown(self) -> None:
        self._stack.close()
        shutil.rmtree(self._directory)

    def holds(self, node: PooledNode, block: bytes) -> bool:
        return bool(node.call(node.daemon.node.index.find, block))

    def told(self, hashes: list[bytes], who: int) -> int:
        """How far the directory and the node say that a chain is held."""
        node, held = self.pool.nodes[who], 0
        while held < len(hashes) and self.holds(node, hashes[held]):
            held += 1
        while held < len(hashes):
            holders = set(self.pool.holders(hashes[held])) - {node.number}
            if not holders:
                break
            held += 1
        return held

    def match(self, who: int, hashes: list[bytes]) -> bytes:
        began = time.monotonic()
        tiers: bytes = self.peers[who].ask(Match(hashes))[0].tiers
        assert time.monotonic() - began < 2
        return tiers

    def read(self, who: int, hashes: list[bytes]) -> bytes:
        """Get blocks; every byte is compared."""
        began = time.monotonic()
        answer, payload = self.peers[who].ask(Get(hashes), deadline_ms=int(SECONDS * 1000))
        assert time.monotonic() - began < SECONDS + 1
        found = [block for block, tier in zip(hashes, answer.tiers, strict=True) if tier]
        assert payload == b"".join(map(content, found))
        tiers: bytes = answer.tiers
        return tiers

    @rule(who=WHO, path=PATHS)
    def put(self, who: int, path: tuple[int, ...]) -> None:
        self.peers[who].put(chain(path))
        assert all(self.holds(self.pool.nodes[who], block) for block in chain(path))

    @rule(who=WHO, path=PATHS, quietly=st.booleans())
    def lose(self, who: int, path: tuple[int, ...], quietly: bool) -> None:
        self.pool.nodes[who].drop(chain(path)[-1], quietly=quietly)

    @rule(who=WHO, path=PATHS)
    def match_says_what_is_known(self, who: int, path: tuple[int, ...]) -> None:
        assert len(self.match(who, chain(path))) == self.told(chain(path), who)

    @rule(who=WHO, path=PATHS)
    def get_without_a_match(self, who: int, path: tuple[int, ...]) -> None:
        self.read(who, chain(path))

    @rule(who=WHO, path=PATHS, ahead=st.booleans())
    def match_and_get(self, who: int, path: tuple[int, ...], ahead: bool) -> None:
        hashes, node = chain(path), self.pool.nodes[who]
        if ahead:
            self.peers[who].ask(Match(hashes, True))
        tiers = self.match(who, hashes)
        whole = bool(tiers) and all(
            any(self.holds(one, block) for one in self.pool.nodes) for block in hashes[: len(tiers)]
        )
        last = hashes[len(tiers) - 1] if tiers else b""
        owners = set(self.pool.holders(last)) if tiers else set()
        right = any(one.number in owners and self.holds(one, last) for one in self.pool.nodes)
        got = self.read(who, hashes[: len(tiers)])
        assert b"\0" not in got.rstrip(b"\0"), "what is there of a chain has no holes"
        if whole and right:
            assert 0 not in got, "a live owner holds all of it, and is known"
        if not ahead:
            assert all(
                tier == there or there == REMOTE[0] for tier, there in zip(got, tiers, strict=True)
            )
        assert all(
            self.holds(node, block) for block, tier in zip(hashes, got, strict=False) if tier
        )

    @rule(who=WHO, path=PATHS)
    def hints_get_better(self, who: int, path: tuple[int, ...]) -> None:
        hashes = chain(path)
        for _ in range(NODES):
            tiers = self.match(who, hashes)
            got = self.read(who, hashes[: len(tiers)])
            if 0 not in got:
                return
        raise AssertionError("what is wrong was not withdrawn")

    @invariant()
    def what_is_held_is_right(self) -> None:
        for node in self.pool.nodes:
            node.call(_check, node)


def _check(node: PooledNode) -> None:
    inside = node.daemon.node
    for shard in inside.index.shards:
        for block, entry in shard.committed.items():
            assert entry.dram is not None
            size = shard.block_bytes
            assert bytes(inside.dram.view(entry.dram, size)) == content(block, size)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=25, stateful_step_count=25)
