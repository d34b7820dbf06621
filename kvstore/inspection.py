"""What operators see of a node: the reading half of the control plane, and what it is made of."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import zip_longest
from typing import Literal

from kvstore.administration import Administration
from kvstore.config import Config
from kvstore.control.interface import (
    MAX_NAMESPACES,
    BlockName,
    BlockPage,
    BlockQuery,
    BlockReport,
    Explanation,
    MatchReport,
    NamespaceReport,
    NodeStatus,
    Snapshot,
    TenantReport,
    TierReport,
)
from kvstore.control.snapshot import take
from kvstore.elsewhere import Elsewhere
from kvstore.entry import Entry, ShardIndex
from kvstore.errors import InvalidRequest
from kvstore.explanation import explain
from kvstore.metrics import Occupancy
from kvstore.movement import Movement
from kvstore.node import Node
from kvstore.server import Server
from kvstore.verbs import VerbsDevice
from tiers.tier import TierStatistics

_TIER_NAMES = ("absent", "hbm", "dram", "ssd")


class Inspection(Administration):
    """A node as its operators see it: a ``ControlTarget``.

    Args:
        node: what is looked at.
        movement: moves blocks to and from SSD; None where there is no SSD.
        server: has the sessions.
        verbs: the RDMA device.
        config: of the daemon.
        incarnation: names this start of the node.

    Attributes:
        urls: where the node listens.
        elsewhere: the rest of the pool; None where there is none.
    """

    def __init__(
        self,
        node: Node,
        movement: Movement | None,
        server: Server,
        verbs: VerbsDevice,
        config: Config,
        incarnation: str,
    ) -> None:
        super().__init__(node, movement)
        self.urls: tuple[str, ...] = ()
        self.elsewhere: Elsewhere | None = None
        self._server = server
        self._verbs = verbs
        self._config = config
        self._incarnation = incarnation
        self._started = node.clock()

    # --- totals --------------------------------------------------------------------------------

    async def status(self) -> NodeStatus:
        """See ``ControlTarget.status``."""
        node, metrics = self._node, self._node.metrics
        return NodeStatus(
            name=self._config.node.name,
            incarnation=self._incarnation,
            version=version("tiered-kvstore"),
            pid=os.getpid(),
            uptime=node.clock() - self._started,
            state=self._state(),
            listens=self.urls,
            sessions=metrics.sessions,
            namespaces=len({shard.namespace for shard in node.index.shards}),
            blocks=len(node.index),
            pins=metrics.pins,
            reservations=metrics.reservations,
            transports=dict(metrics.transports),
            rdma=str(self._verbs),
            tiers=tuple(self._tier_reports()),
            tenants=tuple(self._tenant_reports()),
        )

    def _tenant_reports(self) -> Iterator[TenantReport]:
        accounts = self._node.index.accounts
        sessions = Counter(
            accounts.of(one.namespace.tenant).name for one in self._server.sessions()
        )
        for one in accounts:
            quota = one.quota
            yield TenantReport(
                one.name, one.dram, one.ssd, quota.dram, quota.ssd, sessions[one.name]
            )

    def _state(self) -> Literal["serving", "draining", "stopping"]:
        if self._server.stopping:
            return "stopping"
        return "serving" if self._node.accepts_puts else "draining"

    async def snapshot(self) -> Snapshot:
        """See ``ControlTarget.snapshot``."""
        return take(self._node.metrics, self._node.clock(), list(self._tier_reports()))

    def _tier_reports(self) -> Iterator[TierReport]:
        gpus = self._node.gpus
        if gpus is not None:
            details = {
                "policy": self._config.policy.hbm,
                "GPUs": ", ".join(map(str, self._config.hbm.gpus)),
            }
            if failed := gpus.failed():
                details["out of use"] = ", ".join(str(self._config.hbm.gpus[n]) for n in failed)
            yield self._tier_report("hbm", gpus.statistics(), details)
        dram = self._node.dram.statistics()
        yield self._tier_report(
            "dram",
            dram,
            {
                "policy": self._config.policy.dram,
                "segments": str(dram.segments),
                "huge pages": self._config.dram.huge_pages,
            },
        )
        if self._node.ssd is not None:
            details = {"directory": str(self._config.ssd.directory)}
            yield self._tier_report("ssd", self._node.ssd.statistics(), details)

    @staticmethod
    def _tier_report(name: str, found: TierStatistics, details: dict[str, str]) -> TierReport:
        return TierReport(
            name, found.capacity, found.used, found.lost, found.blocks, details=details
        )

    def refresh(self) -> None:
        """Bring the occupancy and the device in the metrics up to date, before they are read."""
        self._node.metrics.rdma = self._verbs.state()
        if (gpus := self._node.gpus) is not None:
            failed = gpus.failed()
            self._node.metrics.gpus = {
                str(device): number not in failed
                for number, device in enumerate(self._config.hbm.gpus)
            }
        self._node.metrics.tenants = tuple(self._node.index.accounts)
        for report in self._tier_reports():
            self._node.metrics.occupancy[report.name] = Occupancy(
                report.capacity, report.used, report.lost, report.blocks
            )

    async def namespaces(self) -> Sequence[NamespaceReport]:
        """See ``ControlTarget.namespaces``."""
        node = self._node
        by_namespace: dict[bytes, list[ShardIndex]] = {
            namespace.fingerprint: [] for namespace in node.catalog
        }
        for shard in node.index.shards:
            by_namespace.setdefault(shard.namespace, []).append(shard)
        sessions = Counter(one.namespace.fingerprint for one in self._server.sessions())
        reports = [
            self._namespace_report(fingerprint, shards, sessions[fingerprint])
            for fingerprint, shards in by_namespace.items()
        ]
        reports.sort(key=lambda report: report.bytes, reverse=True)
        return reports[:MAX_NAMESPACES]

    def _namespace_report(
        self, fingerprint: bytes, shards: Iterable[ShardIndex], sessions: int
    ) -> NamespaceReport:
        known = self._node.catalog.find(fingerprint)
        holding = [shard for shard in shards if shard.committed]
        return NamespaceReport(
            fingerprint,
            known.describe() if known is not None else {},
            blocks=sum(len(shard.committed) for shard in holding),
            bytes=sum(len(shard.committed) * shard.block_bytes for shard in holding),
            shards=tuple(sorted(shard.number for shard in holding)),
            sessions=sessions,
        )

    # --- blocks --------------------------------------------------------------------------------

    async def find(
        self, beginning: str, namespace: bytes | None, limit: int
    ) -> Sequence[BlockName]:
        """See ``ControlTarget.find``."""
        found: dict[BlockName, None] = {}
        prefix = bytes.fromhex(beginning[: len(beginning) // 2 * 2])
        for shard in self._shards(namespace):
            for block in shard.committed:
                if block.startswith(prefix) and block.hex().startswith(beginning):
                    found[BlockName(shard.namespace, block)] = None
                    if len(found) == limit:
                        return list(found)
        return list(found)

    def _shards(self, namespace: bytes | None) -> list[ShardIndex]:
        return [
            shard
            for shard in self._node.index.shards
            if namespace is None or shard.namespace == namespace
        ]

    async def list_blocks(self, query: BlockQuery) -> BlockPage:
        """See ``ControlTarget.list_blocks``. The cursor is a shard's name and a hash."""
        shards = sorted(
            (
                shard
                for shard in self._shards(query.namespace)
                if query.shard is None or shard.number == query.shard
            ),
            key=lambda shard: _cursor(shard.namespace, shard.number),
        )
        after, last = query.cursor[:36], query.cursor[36:]
        if query.cursor and (len(after) != 36 or len(last) != 32):
            raise InvalidRequest("the cursor is not one of this node's")
        reports: list[BlockReport] = []
        for shard in shards:
            name = _cursor(shard.namespace, shard.number)
            if name < after:
                continue
            start = last if name == after else b""
            # One more than fits tells whether there is another page.
            for entry in self._page(shard, query, start, query.limit + 1 - len(reports)):
                if len(reports) == query.limit:
                    end = reports[-1]
                    return BlockPage(tuple(reports), _cursor(end.namespace, end.shard, end.hash))
                reports.append(self._report(entry))
        return BlockPage(tuple(reports))

    def _page(self, shard: ShardIndex, query: BlockQuery, after: bytes, limit: int) -> list[Entry]:
        if query.tier is None:
            return shard.page(limit, after)
        tier = query.tier
        page: list[Entry] = []
        while len(page) < limit:
            some = shard.page(1000, after)
            if not some:
                break
            page += [entry for entry in some if tier in entry.tiers]
            after = some[-1].hash
        return page[:limit]

    async def inspect(
        self, namespace: bytes, hash: bytes, *, prefix: bool, limit: int
    ) -> Sequence[BlockReport]:
        """See ``ControlTarget.inspect``."""
        found = [
            entry for shard in self._shards(namespace) if (entry := shard.get(hash)) is not None
        ]
        found.sort(key=lambda entry: entry.shard.number)
        if prefix:
            # Shards need not agree on the parents: what a hash stands for is the clients' word.
            levels = zip_longest(*(entry.path() for entry in found))
            found = [entry for level in levels for entry in level if entry is not None]
        return [self._report(entry) for entry in found[-limit:]]

    def _report(self, entry: Entry) -> BlockReport:
        now = self._node.clock()
        return BlockReport(
            namespace=entry.shard.namespace,
            shard=entry.shard.number,
            hash=entry.hash,
            parent=entry.parent_hash,
            state="committed" if entry.committed else "reserved",
            tiers=entry.tiers,
            size=entry.shard.block_bytes,
            children=sum(1 for _ in entry.children()),
            age=now - entry.created,
            idle=now - entry.last_use,
            pins=entry.pins,
            checksum=self._node.checksum(entry),
        )

    async def match(self, namespace: bytes, hashes: Sequence[bytes]) -> MatchReport:
        """See ``ControlTarget.match``."""
        here = self._match(namespace, hashes)
        if self.elsewhere is None:
            return here
        return await self.elsewhere.match(here, namespace, hashes)

    def _match(self, namespace: bytes, hashes: Sequence[bytes]) -> MatchReport:
        known = self._node.catalog.find(namespace)
        shards = self._shards(namespace)
        if not shards or (known is not None and len(shards) < known.shards):
            return MatchReport(len(hashes), ())
        codes = self._node.index.match(shards, hashes)
        return MatchReport(len(hashes), tuple(_TIER_NAMES[code] for code in codes))

    async def explain(self, namespace: bytes, hashes: Sequence[bytes]) -> Explanation:
        """See ``ControlTarget.explain``."""
        here = explain(self._node, namespace, hashes)
        if self.elsewhere is None:
            return here
        return await self.elsewhere.explain(here, namespace, hashes)


def _cursor(namespace: bytes, shard: int, hash: bytes = b"") -> bytes:
    return namespace + shard.to_bytes(4, "big") + hash
