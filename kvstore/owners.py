"""Ways to the other nodes of the pool: made when they are needed, closed when they are idle.

A way leads to one start of one node, for one shard. What a later start of that node answers is not
taken for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import structlog

from kvstore.directory.interface import Member
from kvstore.identity import Namespace
from kvstore.node import Node
from kvstore.peer import MakeHalves
from kvstore.peer_session import Greeting
from kvstore.pull import Puller
from kvstore.units import parse_address
from rdma.certificates import Certificates

_log = structlog.get_logger(__name__)

_IDLE_SECONDS: Final = 60.0
_MOST_WAYS: Final = 512
"""Connections to other nodes at most; those unused for longest are closed for others."""

_Name: TypeAlias = tuple[int, bytes, int]
"""Number of a member, fingerprint of a namespace, number of a shard."""


@dataclass(slots=True)
class _Way:
    puller: Puller
    used: float
    tenant: str
    token: str | None = field(repr=False)


class Owners:
    """The other members, as those who hold blocks that this node wants.

    Args:
        node: where the blocks are wanted.
        members: the live members by number, as they are now.
        transports: makes this node's halves of the transports for one session.
        token: what the others want to see of sessions of a tenant, if anything.
        certificates: of this node, where the nodes of the pool speak TLS.
        name: what their logs call this node.
        most_bytes: bytes that one pull may hold reserved at once.
    """

    def __init__(
        self,
        node: Node,
        members: Callable[[], Mapping[int, Member]],
        transports: MakeHalves,
        *,
        token: Callable[[str], str | None],
        certificates: Certificates | None = None,
        name: str,
        most_bytes: int,
    ) -> None:
        self._node = node
        self._members = members
        self._transports = transports
        self._token = token
        self._certificates = certificates
        self._name = name
        self._most_bytes = most_bytes
        self._ways: dict[_Name, _Way] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Owners ways={len(self._ways)}>"

    def usable(self, number: int, namespace: Namespace, shard: int) -> bool:
        """Whether a member is there, and has not failed since it answered last."""
        if number not in self._members():
            return False
        way = self._ways.get((number, namespace.fingerprint, shard))
        if way is None:
            return True
        # As long as somebody wants to know, its failure is not forgotten.
        way.used = self._node.clock()
        return not way.puller.peer.doubtful

    def puller(self, number: int, namespace: Namespace, shard: int) -> Puller | None:
        """The way to a member; None where there is no such member."""
        member = self._members().get(number)
        if member is None:
            return None
        name = (number, namespace.fingerprint, shard)
        way = self._ways.get(name)
        if way is None:
            token = self._token(namespace.tenant)
            made = self._make(member, namespace, shard, token)
            if made is None:
                return None
            if len(self._ways) >= _MOST_WAYS:
                self._close(min(self._ways, key=lambda one: self._ways[one].used))
            way = self._ways[name] = _Way(made, 0.0, namespace.tenant, token)
        way.used = self._node.clock()
        return way.puller

    def _make(
        self, member: Member, namespace: Namespace, shard: int, token: str | None
    ) -> Puller | None:
        try:
            address = parse_address(member.data)
        except ValueError as error:
            _log.warning("member without an address", node=member.node, error=str(error))
            return None
        greeting = Greeting(
            address.host,
            address.port,
            namespace,
            shard,
            token=token,
            name=self._name,
            incarnation=member.incarnation,
            certificates=self._certificates,
        )
        return Puller(self._node, greeting, self._transports, most_bytes=self._most_bytes)

    def sweep(self) -> None:
        """Close the ways to members that are gone, and those that have not been used lately.

        Those whose tenant has another token now, too: a session that ends could not be opened anew.
        """
        members, now = self._members(), self._node.clock()
        tokens = {tenant: self._token(tenant) for tenant in {w.tenant for w in self._ways.values()}}
        for name, way in list(self._ways.items()):
            is_idle = now - way.used > _IDLE_SECONDS
            if name[0] not in members or is_idle or way.token != tokens[way.tenant]:
                self._close(name)

    def _close(self, name: _Name) -> None:
        puller = self._ways.pop(name).puller
        task = asyncio.get_running_loop().create_task(puller.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all ways; when this returns nothing of what was pulled is under way."""
        for name in list(self._ways):
            self._close(name)
        await asyncio.gather(*self._closing)
