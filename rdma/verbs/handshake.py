"""What the two ends of a session tell each other of their queue pairs; pure."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import AddressValueError, IPv6Address
from typing import Final, NamedTuple

from rdma.verbs.errors import HandshakeError
from rdma.verbs.settings import MTUS

__all__ = ["Endpoint", "describe", "joint_mtu", "parse"]

_MOST_24: Final = (1 << 24) - 1
_MOST_32: Final = (1 << 32) - 1
_MOST_64: Final = (1 << 64) - 1
_LEAST_QUEUE: Final = 2
"""0 and 1 are the numbers of the management queue pairs."""


class Endpoint(NamedTuple):
    """One end of a connection.

    Attributes:
        queue: number of the queue pair.
        psn: packet sequence number that it starts with.
        gid: of its port.
        mtu: in bytes, at most.
        reads: RDMA READs that it can have under way (the active end) or serve (the passive).
        proof: address and key of a byte to be read for :func:`rdma.verbs.plan.proof`, where
            what is written may not be read.
    """

    queue: int
    psn: int
    gid: IPv6Address
    mtu: int
    reads: int
    proof: tuple[int, int] | None = None


def describe(endpoint: Endpoint) -> dict[str, object]:
    """Return what to tell the peer of an end."""
    told: dict[str, object] = {
        "queue": endpoint.queue,
        "psn": endpoint.psn,
        "gid": endpoint.gid.packed,
        "mtu": endpoint.mtu,
        "reads": endpoint.reads,
    }
    if endpoint.proof is not None:
        told["proof"] = list(endpoint.proof)
    return told


def parse(details: Mapping[str, object]) -> Endpoint:
    """Return the end that a peer told of.

    Args:
        details: as :func:`describe` made them; what is not known is ignored.

    Raises:
        HandshakeError: something is missing or makes no sense.
    """
    mtu = _number(details, "mtu", min(MTUS), max(MTUS))
    if mtu not in MTUS:
        raise HandshakeError(f"the peer's MTU is {mtu}, which is none of RoCE's")
    return Endpoint(
        queue=_number(details, "queue", _LEAST_QUEUE, _MOST_24),
        psn=_number(details, "psn", 0, _MOST_24),
        gid=_gid(details.get("gid")),
        mtu=mtu,
        reads=_number(details, "reads", 0, 255),
        proof=_proof(details.get("proof")),
    )


def joint_mtu(one: Endpoint, other: Endpoint) -> int:
    """Return the MTU that both ends carry."""
    return min(one.mtu, other.mtu)


def _number(details: Mapping[str, object], name: str, least: int, most: int) -> int:
    value = details.get(name)
    if type(value) is not int or not least <= value <= most:
        raise HandshakeError(f"the peer's {name} is {value!r}, not within {least} and {most}")
    return value


def _proof(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise HandshakeError("the peer's proof is not an address and a key")
    named = {"address": value[0], "key": value[1]}
    return _number(named, "address", 0, _MOST_64), _number(named, "key", 0, _MOST_32)


def _gid(value: object) -> IPv6Address:
    try:
        if not isinstance(value, bytes):
            raise AddressValueError
        gid = IPv6Address(value)
    except AddressValueError:
        raise HandshakeError("the peer's GID is not 16 bytes") from None
    if gid.is_unspecified or gid.is_multicast:
        raise HandshakeError(f"the peer's GID is {gid}, where nobody is")
    return gid
