"""A node as a member of a pool: joins it, tells it what the node holds, and reads from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import structlog

from kvstore.admission import Admission
from kvstore.config import ClusterSection, Config
from kvstore.directory.address import Access
from kvstore.directory.address import Address as DirectoryAddress
from kvstore.directory.interface import NOBODY, Directory, Member
from kvstore.load import Load
from kvstore.node import Node
from kvstore.offering import Offers
from kvstore.owners import Owners
from kvstore.placement import DRAINING
from kvstore.publication import Publication
from kvstore.remote import SLOTS, Remote
from kvstore.replication import Replication
from kvstore.taking import Taking
from kvstore.tls import to_reach
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
        host: the machine it runs on, as the others are told.
        load: what the others are told of this node.
        offers: what it offers to them.
        remote: what sessions use of it.
        replication: copies to others what is stored here.
        taking: takes what others offer.
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
        self.host = config.cluster.host or machine()
        self.member = Member(
            NOBODY,
            config.node.name,
            incarnation,
            self.host,
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
            token=Admission(config.session_token, config.tenant_token_files).token_of,
            certificates=to_reach(config.tls, "other nodes") if config.tls.on else None,
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
        self.offers = Offers(self.directory, owners)
        self.replication = Replication(
            node, self.directory, self.offers, host=self.host, copies=config.cluster.replicas
        )
        self.taking = Taking(
            node, lambda: self.directory.members, owners, most_bytes=most_bytes // SLOTS
        )
        self._node = node
        self._publication = Publication(node.index, self.directory)

    async def open(self) -> None:
        """Begin to join the pool, and to tell it what comes and goes."""
        self._node.index.observe(self._publication)
        self.replication.open()
        await self.directory.open(self._publication.inventory, self._summary)

    def _summary(self) -> Mapping[str, float]:
        return {**self.load.figures(), DRAINING: float(not self._node.accepts_puts)}

    async def leave(self) -> None:
        """Leave the pool, so that nobody asks this node any more, nor it others."""
        await self.replication.close()
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
    access = Access(
        section.password_file,
        section.ca,
        section.certificate,
        section.key,
        section.sentinel_password_file,
    )
    pace = Pace(heartbeat=section.heartbeat)
    return lambda member: RedisDirectory(address, section.pool, member, access, pace)
