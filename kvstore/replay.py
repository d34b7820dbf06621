"""Replaying a trace against running daemons, with bytes, through the public client.

Every request is one ``match``, a ``get`` of what is there and a ``put`` of the rest, root first.
A block's bytes are made from its id, and every block that comes back is compared with them, so a
wrong byte is seen. The comparison is outside the times that are reported.

Each request goes to its home node. It hits the blocks of the longest contiguous prefix that this
node, or the pool that it is a member of, holds when the request arrives, as ``match`` tells, in the
tier that ``match`` names.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.errors import ParentAbsent, Unavailable
from kvstore.identity import ROOT_PARENT
from kvstore.latencies import Latencies
from kvstore.trace import BlockNames, Request

if TYPE_CHECKING:
    from kvstore import Client

BATCH_BYTES = 64 << 20
"""Most bytes in one get or put."""

PATIENCE = 10
"""Requests in a row that may be left unanswered before the replay gives up."""

_MASK = (1 << 64) - 1


class BlockBytes:
    """The bytes of any block, made from its id: each 8-byte word depends on id and position."""

    def __init__(self, block_bytes: int) -> None:
        words = -(-block_bytes // 8)
        self._base = np.random.default_rng(512).integers(0, _MASK, words, np.uint64, endpoint=True)
        self._scratch = np.empty(words, np.uint64)
        self.block_bytes = block_bytes

    def write(self, block: int, into: npt.NDArray[np.uint8]) -> None:
        """Fill ``into`` (``block_bytes`` long) with the bytes of block id ``block``."""
        into[:] = self._make(block)

    def matches(self, block: int, found: npt.NDArray[np.uint8]) -> bool:
        """Whether ``found`` holds exactly the bytes of block id ``block``."""
        return bool(np.array_equal(self._make(block), found))

    def _make(self, block: int) -> npt.NDArray[np.uint8]:
        np.bitwise_xor(self._base, np.uint64(_scatter(block)), out=self._scratch)
        return self._scratch.view(np.uint8)[: self.block_bytes]


def _scatter(block: int) -> int:
    """Spread an id over 64 bits, so that neighbours differ in about half of them (splitmix64)."""
    word = (block + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


@dataclass(slots=True)
class ReplayReport:
    """What a replay saw. Blocks and tokens by tier are of the prefixes that were held."""

    requests: int = 0
    accesses: int = 0
    tokens: int = 0
    hit_blocks: dict[str, int] = field(default_factory=dict)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    warm: int = 0
    """Hit blocks that this replay had not put: an earlier one, or another client, left them."""
    lost: int = 0
    """Matched blocks that ``get`` no longer found."""
    wrong: int = 0
    """Blocks that came back with other bytes than were put. Always 0, or the node is broken."""
    stored: int = 0
    held: int = 0
    """Blocks that were put and already there, or being written by somebody else."""
    refused: int = 0
    """Blocks that the node had no room for, or whose parent had gone."""
    failed: int = 0
    """Blocks whose put the node did not confirm."""
    failures: dict[str, int] = field(default_factory=dict)
    """Calls that the node did not answer, by the code of the error."""
    got_bytes: int = 0
    put_bytes: int = 0
    match: Latencies = field(default_factory=Latencies)
    get: Latencies = field(default_factory=Latencies)
    put: Latencies = field(default_factory=Latencies)

    @property
    def hits(self) -> int:
        """Blocks of the prefixes that were held, over all tiers."""
        return sum(self.hit_blocks.values())

    def summary(self) -> dict[str, object]:
        """The whole report with plain values: shares from 0 to 1, seconds, bytes, bytes/s."""
        return {
            "requests": self.requests,
            "blocks": _shares(self.accesses, self.hit_blocks),
            "tokens": _shares(self.tokens, self.hit_tokens),
            "warm": self.warm,
            "lost": self.lost,
            "wrong": self.wrong,
            "stored": self.stored,
            "held": self.held,
            "refused": self.refused,
            "failed": self.failed,
            "failures": dict(self.failures),
            "match": _timing(self.match),
            "get": _timing(self.get, self.got_bytes),
            "put": _timing(self.put, self.put_bytes),
        }


def _shares(total: int, hits: dict[str, int]) -> dict[str, object]:
    found = sum(hits.values())
    rate = found / total if total else 0.0
    return {"total": total, "hits": found, "hit_rate": rate, "hits_by_tier": dict(hits)}


def _timing(latencies: Latencies, moved: int | None = None) -> dict[str, object]:
    seconds = latencies.total
    timing: dict[str, object] = {
        "calls": len(latencies),
        "seconds": seconds,
        "p50": latencies.percentile(0.50),
        "p99": latencies.percentile(0.99),
    }
    if moved is not None:
        timing |= {"bytes": moved, "bytes_per_second": moved / seconds if seconds else 0.0}
    return timing


class Replay:
    """Sends the requests of a trace to their homes, in order, one at a time.

    Args:
        clients: each connected to a node, in a namespace whose ``block_bytes`` are the ones given.
        homes: for one request after the other, which of the clients it is for.
        block_bytes: bytes of every block.
        block_tokens: tokens of every block but the last of a request.
        batch_bytes: most bytes in one get or put; at least one block goes in any case.
        clock: seconds, only ever going forward.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        homes: Iterator[int] | None = None,
        *,
        block_bytes: int,
        block_tokens: int,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.report = ReplayReport()
        self._clients = clients
        self._homes = repeat(0) if homes is None else homes
        self._block_tokens = block_tokens
        self._bytes = BlockBytes(block_bytes)
        self._rows = np.empty((max(batch_bytes // block_bytes, 1), block_bytes), np.uint8)
        self._names = BlockNames()
        self._clock = clock
        self._unanswered = 0

    def run(self, requests: Iterable[Request], progress: Callable[[Request], None]) -> None:
        """Send ``requests``; ``progress`` is called after each.

        Raises:
            KVStoreError: the trace cannot be read, or the node answers with an error.
        """
        for request in requests:
            self.send(request)
            progress(request)

    def send(self, request: Request) -> None:
        """Match, get what is there, put the rest.

        Raises:
            Unavailable: nodes have not answered for `PATIENCE` requests.
        """
        client = self._clients[next(self._homes)]
        before = len(self._names)
        hashes = self._names.chain(request.hash_ids)
        known = len(hashes) - (len(self._names) - before)
        report = self.report
        report.requests += 1
        report.accesses += len(hashes)
        report.tokens += request.input_length
        if not hashes:
            return
        start = self._clock()
        match = client.match(hashes)
        report.match.add(self._clock() - start)
        if match.failure is not None:
            self._unanswered_request(request, match.failure)
            return
        self._unanswered = 0
        report.warm += max(match.blocks - known, 0)
        self._count_hits(request, match.tiers)
        self._get(client, request.hash_ids[: match.blocks], hashes[: match.blocks])
        self._put(client, request.hash_ids, hashes, match.blocks)

    def _unanswered_request(self, request: Request, failure: str) -> None:
        self._fail(failure)
        self._unanswered += 1
        if self._unanswered == PATIENCE:
            raise Unavailable(
                f"{PATIENCE} requests in a row have not been answered (the last is on line "
                f"{request.line} of the trace): {failure}"
            )

    def _fail(self, failure: str | None) -> None:
        if failure is not None:
            self.report.failures[failure] = self.report.failures.get(failure, 0) + 1

    def _count_hits(self, request: Request, tiers: Sequence[str]) -> None:
        blocks, tokens = self.report.hit_blocks, self.report.hit_tokens
        for tier, count in Counter(tiers).items():
            blocks[tier] = blocks.get(tier, 0) + count
            tokens[tier] = tokens.get(tier, 0) + count * self._block_tokens
        if len(tiers) == len(request.hash_ids):
            tokens[tiers[-1]] -= len(tiers) * self._block_tokens - request.input_length

    def _get(self, client: Client, ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Fetch and compare, leaf first, so that a parent is never touched before its child."""
        step = len(self._rows)
        for first in reversed(range(0, len(ids), step)):
            wanted = hashes[first : first + step]
            rows = list(self._rows[: len(wanted)])
            start = self._clock()
            found = client.get(wanted, rows)
            self.report.get.add(self._clock() - start)
            self._fail(found.failure)
            for block, row, hit in zip(ids[first:], rows, found.hits, strict=False):
                self.report.lost += not hit
                self.report.got_bytes += hit * row.nbytes
                self.report.wrong += hit and not self._bytes.matches(block, row)

    def _put(self, client: Client, ids: Sequence[int], hashes: Sequence[bytes], held: int) -> None:
        """Store the blocks after the first ``held``; stop where the node takes no more."""
        step = len(self._rows)
        for first in range(held, len(ids), step):
            batch = ids[first : first + step]
            parent = hashes[first - 1] if first else ROOT_PARENT
            if not self._put_batch(client, batch, hashes[first : first + step], parent):
                self.report.refused += len(ids) - first - len(batch)
                return

    def _put_batch(
        self, client: Client, ids: Sequence[int], hashes: Sequence[bytes], parent: bytes
    ) -> bool:
        """Store one chain; whether the node then holds all of it."""
        report = self.report
        rows = list(self._rows[: len(ids)])
        for block, row in zip(ids, rows, strict=True):
            self._bytes.write(block, row)
        start = self._clock()
        try:
            done = client.put(hashes, rows, parent=parent)
        except ParentAbsent:
            report.refused += len(ids)
            return False
        report.put.add(self._clock() - start)
        report.stored += done.stored
        report.held += done.held + done.busy
        report.refused += done.refused
        report.failed += done.failed
        report.put_bytes += done.stored * self._bytes.block_bytes
        self._fail(done.failure)
        return done.refused == done.failed == 0
