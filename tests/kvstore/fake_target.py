"""An in-memory ``ControlTarget`` for the tests of the control plane and the CLI; not a node."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

from kvstore.control import interface
from kvstore.errors import InvalidRequest, OutOfSpace
from kvstore.identity import ROOT_PARENT, Namespace, prefix_hashes

NAMESPACE = Namespace(
    model="acme/llama-8b", dtype="bfloat16", layout="NHD", block_tokens=4, block_bytes=1 << 20
)
OTHER = Namespace(
    model="acme/llama-8b",
    revision="0123456789abcdef0123456789abcdef01234567",
    dtype="float16",
    layout="NHD",
    block_tokens=4,
    block_bytes=1 << 20,
)
TOKENS = list(range(40))
HASHES = prefix_hashes(TOKENS, NAMESPACE.block_tokens)
HELD = 6


def block(index: int, *, shard: int = 0) -> interface.BlockReport:
    return interface.BlockReport(
        namespace=NAMESPACE.fingerprint,
        shard=shard,
        hash=HASHES[index],
        parent=HASHES[index - 1] if index else ROOT_PARENT,
        state="committed",
        tiers=("dram", "ssd") if index < 3 else ("ssd",),
        size=NAMESPACE.block_bytes,
        children=int(index + 1 < HELD),
        age=3700.0 + index,
        idle=1.5,
        pins=0,
        checksum=0xDEADBEEF if index else None,
    )


class FakeTarget:
    """Holds the first ``HELD`` blocks of ``TOKENS``; what was asked of it is in ``asked``."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.pinned: dict[bytes, interface.PinReport] = {}
        self.failure: Exception | None = None
        self.explanation: interface.Explanation | None = None
        self.corrupt = 0
        self.verifying = 0
        self.verify_steps = 3
        self.verify_pause = 0.0
        self.clock = 100.0
        self.lookups = 0
        self.extra_blocks = 0

    def _note(self, *what: object) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure

    def _tiers(self) -> tuple[interface.TierReport, ...]:
        return (
            interface.TierReport("dram", 8 << 30, 6 << 30, 1 << 20, 3, details={"policy": "lru"}),
            interface.TierReport("ssd", 100 << 30, 6 << 20, 0, 6, state="failing: EIO"),
        )

    async def status(self) -> interface.NodeStatus:
        self._note("status")
        return interface.NodeStatus(
            name="node-a",
            incarnation="5f3e",
            version="0.1.0",
            pid=4242,
            uptime=11520.0,
            state="serving",
            listens=("unix:///run/kvstore.sock",),
            sessions=2,
            namespaces=2,
            blocks=HELD,
            pins=1,
            reservations=0,
            tiers=self._tiers(),
            transports={"shm": 1, "tcp": 1, "rdma": 0},
            rdma="rdma is off in this node's configuration",
            tenants=(
                interface.TenantReport("search", 3 << 30, 0, 4 << 30, None, 2),
                interface.TenantReport("*", 1 << 30, 6 << 20),
            ),
        )

    async def snapshot(self) -> interface.Snapshot:
        self._note("snapshot")
        self.clock += 1.0
        self.lookups += 100
        return interface.Snapshot(
            clock=self.clock,
            lookups=self.lookups,
            hits={"dram": self.lookups * 3 // 4},
            misses={"absent": self.lookups // 4},
            puts={"stored": 10},
            moved_bytes={"shm out": self.lookups << 20},
            evictions={"dram capacity": 3},
            demotions=4,
            promotions=5,
            sessions=2,
            pins=1,
            reservations=0,
            latencies={"match": interface.Latency(10, 1e-5, 1e-4)},
            tiers=self._tiers(),
            matched={"held": self.lookups // 5, "absent": self.lookups * 4 // 5},
        )

    async def namespaces(self) -> Sequence[interface.NamespaceReport]:
        self._note("namespaces")
        return [
            interface.NamespaceReport(
                NAMESPACE.fingerprint, NAMESPACE.describe(), HELD, HELD << 20, (0,), 1
            ),
            interface.NamespaceReport(OTHER.fingerprint, OTHER.describe(), 1, 1 << 20, (0,)),
        ]

    async def find(
        self, beginning: str, namespace: bytes | None, limit: int
    ) -> Sequence[interface.BlockName]:
        self._note("find", beginning, namespace, limit)
        names = [interface.BlockName(NAMESPACE.fingerprint, one) for one in HASHES[:HELD]]
        return [
            name
            for name in names
            if name.hash.hex().startswith(beginning) and namespace in (None, name.namespace)
        ][:limit]

    async def list_blocks(self, query: interface.BlockQuery) -> interface.BlockPage:
        self._note("list_blocks", query)
        try:
            start = int(query.cursor or b"0")
        except ValueError as error:
            raise InvalidRequest("the cursor is none of this node's") from error
        stop = min(start + query.limit, HELD)
        cursor = str(stop).encode() if stop < HELD else b""
        return interface.BlockPage(tuple(block(index) for index in range(start, stop)), cursor)

    async def inspect(
        self, namespace: bytes, hash: bytes, *, prefix: bool, limit: int
    ) -> Sequence[interface.BlockReport]:
        self._note("inspect", namespace, hash, prefix, limit)
        if hash not in HASHES[:HELD] or namespace != NAMESPACE.fingerprint:
            return []
        end = HASHES.index(hash)
        return [block(index) for index in range(0 if prefix else end, end + 1)][-limit:]

    async def match(self, namespace: bytes, hashes: Sequence[bytes]) -> interface.MatchReport:
        self._note("match", namespace, list(hashes))
        held = 0
        if namespace == NAMESPACE.fingerprint:
            while held < min(len(hashes), HELD) and hashes[held] == HASHES[held]:
                held += 1
        return interface.MatchReport(len(hashes), tuple(block(i).tiers[0] for i in range(held)))

    async def explain(self, namespace: bytes, hashes: Sequence[bytes]) -> interface.Explanation:
        report = await self.match(namespace, hashes)
        if self.explanation is not None:
            return self.explanation
        if report.blocks == len(hashes):
            return interface.Explanation(len(hashes), report.blocks, interface.Ending.COMPLETE)
        return interface.Explanation(
            len(hashes),
            report.blocks,
            interface.Ending.DEPARTED,
            hash=hashes[report.blocks],
            tier="dram",
            reason="capacity",
            ago=61.0,
        )

    async def pin(
        self, namespace: bytes, hash: bytes, seconds: float | None
    ) -> interface.PinReport:
        self._note("pin", namespace, hash, seconds)
        if hash not in HASHES[:HELD]:
            raise InvalidRequest("the node does not hold the block")
        blocks = HASHES.index(hash) + 1
        if blocks > 5:
            raise OutOfSpace("too much would be pinned")
        self.pinned[hash] = interface.PinReport(namespace, hash, blocks, blocks << 20, seconds)
        return self.pinned[hash]

    async def pins(self) -> Sequence[interface.PinReport]:
        self._note("pins")
        return list(self.pinned.values())

    async def unpin(self, namespace: bytes, hash: bytes) -> interface.Removal:
        self._note("unpin", namespace, hash)
        gone = self.pinned.pop(hash, None)
        return interface.Removal(gone.blocks, gone.bytes) if gone else interface.Removal(0, 0)

    async def evict(self, namespace: bytes, hash: bytes | None) -> interface.Removal:
        self._note("evict", namespace, hash)
        return interface.Removal(blocks=4, bytes=4 << 20, kept=1)

    async def flush(self, tier: str) -> interface.Removal:
        self._note("flush", tier)
        if tier == "hbm":
            raise InvalidRequest("the node has no hbm tier")
        return interface.Removal(blocks=3, bytes=3 << 20, moved=2)

    async def verify(
        self, namespace: bytes | None, tier: str | None
    ) -> AsyncIterator[interface.VerifyProgress]:
        self._note("verify", namespace, tier)
        self.verifying += 1
        try:
            for step in range(1, self.verify_steps + 1):
                last = step == self.verify_steps
                names = (interface.BlockName(NAMESPACE.fingerprint, HASHES[0]),)
                yield interface.VerifyProgress(
                    checked=step * 2,
                    total=self.verify_steps * 2,
                    bytes=step << 21,
                    corrupt=self.corrupt if last else 0,
                    names=names if last and self.corrupt else (),
                    finished=last,
                )
                await asyncio.sleep(self.verify_pause)
        finally:
            self.verifying -= 1


def unknown_hash() -> bytes:
    return hashlib.sha256(b"nobody stored this").digest()
