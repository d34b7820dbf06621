"""What operators see of a node's pool, as that node knows it: a ``PoolTarget``."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvstore.cluster import Cluster
from kvstore.control.pool import (
    MAX_PULLS,
    DirectoryReport,
    GoneReport,
    LoadReport,
    MemberReport,
    PoolReport,
    PullReport,
)
from kvstore.directory.interface import Directory, Member
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.node import Node


class PoolInspection:
    """The pool of one node.

    Args:
        node: its blocks.
        pool: name of the pool; empty where the node is to be in none.

    Attributes:
        cluster: set when the node begins to join.
    """

    def __init__(self, node: Node, pool: str) -> None:
        self.cluster: Cluster | None = None
        self._node = node
        self._pool = pool

    async def pool(self) -> PoolReport:
        """See ``PoolTarget.pool``."""
        cluster = self._joined()
        directory = cluster.directory
        mine = replace(cluster.member, summary=cluster.load.figures())
        if directory.me is not None:
            mine = replace(mine, number=directory.me.number)
        now = asyncio.get_running_loop().time()
        others = [_member(one, asked=False) for one in directory.members.values()]
        members = sorted([_member(mine, asked=True), *others], key=lambda one: one.number)
        gone = [
            GoneReport(one.member.number, one.member.node, max(now - one.when, 0.0))
            for one in directory.gone.values()
        ]
        return PoolReport(self._pool, tuple(members), tuple(gone[::-1]), _directory(directory, now))

    async def load(self) -> LoadReport:
        """See ``PoolTarget.load``."""
        cluster, metrics = self._joined(), self._node.metrics
        pulls = [
            PullReport(name, metrics.pulled_blocks[name], size)
            for name, size in metrics.pulled_bytes.most_common(MAX_PULLS)
        ]
        member = cluster.member
        return LoadReport(member.node, member.incarnation, cluster.load.figures(), tuple(pulls))

    def _joined(self) -> Cluster:
        if self.cluster is not None:
            return self.cluster
        if self._pool:
            raise Unavailable("the node is starting and has not begun to join its pool")
        raise InvalidRequest(
            "the node is in no pool: `kvstore serve --directory redis://HOST` joins one"
        )


def _member(member: Member, *, asked: bool) -> MemberReport:
    return MemberReport(
        member.number,
        member.node,
        member.incarnation,
        member.host,
        member.data,
        member.control,
        asked,
        dict(member.summary or {}),
    )


def _directory(directory: Directory, now: float) -> DirectoryReport:
    seen = directory.statistics

    def ago(when: float | None) -> float | None:
        return None if when is None else max(now - when, 0.0)

    return DirectoryReport(
        directory.name,
        seen.failing_since is None,
        ago(seen.heard_at),
        ago(seen.failing_since),
        dict(seen.operations),
        {f"{kind} {code}": count for (kind, code), count in seen.failures.items()},
        seen.refused,
        seen.queued,
        seen.joins,
    )
