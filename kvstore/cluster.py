"""A node as a member of a pool: joins it, tells it what the node holds, and reads from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from kvstore.config import ClusterSection, Config
from kvstore.directory.address import Access
from kvstore.directory.address import Address as DirectoryAddress
from kvstore.directory.interface import NOBODY, Directory, Member
from kvstore.load import Load
from kvstore.node import Node
from kvstore.owners import Owners
from kvstore.publication import Publication
from kvstore.remote import SLOTS, Remote
from kvstore.transports import to_pull
from kvstore.units import Address
from kvstore.verbs import VerbsDevice

_log = structlog.get_logger(__name__)

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")

MakeDirectory = Callable[[Member], Directory]
"""Makes a node's view of the directory; the member has no number yet."""


class Cluster:
    """The pool that a node is a member of.

    Args:
        config: of the node.
        node: its blocks.
        verbs: its RDMA device.
        incarnation: of this start.
        data: where its data path listens.
        control: where its control plane listens, if it has one.
        make_directory: makes its view of the directory.

    Attributes:
        member: this node, without a number.
        directory: the view.
        load: what the others are told of this node.
        remote: what sessions use of it.
    """

    def __init__(
        self,
        config: Config,
        node: Node,
        verbs: VerbsDevice,
        incarnation: str,
        *,
        data: Address,
        control: Address | None,
        make_directory: MakeDirectory,
    ) -> None:
        data = config.cluster.advertise or data
        if control is not None and control.unspecified:
            control = Address(data.host, control.port)
        self.member = Member(
            NOBODY,
            config.node.name,
            incarnation,
            machine(),
            str(data),
            "" if control is None else str(control),
        )
        self.directory = make_directory(self.member)
        self.load = Load(node)
        most_bytes = int(config.limits.session_pinned * config.dram.capacity)
        owners = Owners(
            node,
            lambda: self.directory.members,
            lambda: to_pull(verbs),
            token=config.session_token,
            name=config.node.name,
            most_bytes=most_bytes // SLOTS,
        )
        self.remote = Remote(
            node,
            self.directory,
            owners,
            lookup_deadline=config.cluster.lookup_deadline,
            most_bytes=most_bytes,
        )
        self._node = node
        self._publication = Publication(node.index, self.directory)

    async def open(self) -> None:
        """Begin to join the pool, and to tell it what comes and goes."""
        self._node.index.observe(self._publication)
        await self.directory.open(self._publication.inventory, self.load.figures)

    async def leave(self) -> None:
        """Leave the pool, so that nobody asks this node any more; it still reads from others."""
        self._node.index.leave(self._publication)
        await self.directory.close()

    async def close(self) -> None:
        """Leave the pool, and end what is under way."""
        await self.leave()
        await self.remote.close()


def machine() -> str:
    """Names the machine, for copies to be kept on others: the same in all its containers."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "unknown"


def redis_directory(section: ClusterSection) -> MakeDirectory:
    """Makes views of a directory in Redis.

    Raises:
        ConfigError: the section makes no sense.
    """
    from kvstore.directory.pace import Pace
    from kvstore.directory.redis import RedisDirectory

    address = DirectoryAddress.parse(section.directory)
    access = Access(section.password_file, section.ca, section.certificate, section.key)
    pace = Pace(heartbeat=section.heartbeat)
    return lambda member: RedisDirectory(address, section.pool, member, access, pace)
