"""Which transport a session gets: decided once, when it opens, and never switched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import structlog

from kvstore.errors import InvalidRequest
from kvstore.node import Node
from kvstore.verbs import VerbsDevice
from rdma.errors import TransportError
from rdma.shm import ShmNodeTransport
from rdma.tcp import TcpClientTransport, TcpNodeTransport
from rdma.transport import ClientTransport, NodeTransport

_log = structlog.get_logger(__name__)


class Chosen(NamedTuple):
    """A session's transport.

    Attributes:
        transport: the node's half of it.
        why: why those that the client liked more were not taken; empty where none was.
    """

    transport: NodeTransport
    why: str


def choose(
    node: Node,
    verbs: VerbsDevice,
    offered: Sequence[str],
    offers: Mapping[str, object],
    *,
    local: bool,
) -> Chosen:
    """Take the first transport that the client offers and the node can serve.

    Args:
        node: whose memory is to be moved.
        verbs: its RDMA device.
        offered: names, the one that the client likes most first.
        offers: what the client says of its end, by the transport's name.
        local: whether it came over the Unix socket.

    Raises:
        InvalidRequest: none can be served; the message says why each one can't.
    """
    reasons: list[str] = []
    for name in offered:
        if name == "tcp":
            return Chosen(TcpNodeTransport(node.dram), "; ".join(reasons))
        if name == "shm" and local:
            return Chosen(ShmNodeTransport(), "; ".join(reasons))
        if name == "rdma":
            try:
                return Chosen(verbs.transport(_mapping(offers.get(name))), "; ".join(reasons))
            except TransportError as error:
                reasons.append(f"rdma: {error}")
        elif name == "shm":
            reasons.append("shm: only over the Unix socket")
        else:
            reasons.append(f"{name[:64]!r}: not a transport of this node")
    raise InvalidRequest(f"no transport in common: {'; '.join(reasons)}")


def to_pull(verbs: VerbsDevice) -> dict[str, ClientTransport]:
    """This node's halves of the transports by which it can pull from another, the best first.

    Args:
        verbs: this node's RDMA device.
    """
    halves: dict[str, ClientTransport] = {}
    try:
        halves["rdma"] = verbs.pulling()
    except TransportError as error:
        _log.debug("no pull over rdma", reason=str(error))
    halves["tcp"] = TcpClientTransport()
    return halves


def _mapping(offer: object) -> Mapping[str, object]:
    if not isinstance(offer, dict):
        raise TransportError("the client did not say how to reach its end")
    return offer
