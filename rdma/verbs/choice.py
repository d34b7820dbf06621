"""Which device, port and GID to use: by name, by GID, or the best there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from rdma.verbs.devices import ROCE_V2, Device, Gid, Port
from rdma.verbs.errors import DeviceError

__all__ = ["Choice", "Wish", "candidates", "choose"]

_CONTAINER_INTERFACES: Final = (
    "docker",
    "cni",
    "veth",
    "br-",
    "virbr",
    "vnet",
    "flannel",
    "cali",
    "cilium",
    "lxc",
    "lxd",
    "podman",
    "kube",
    "weave",
)
"""Interfaces whose addresses other machines usually can't reach."""

_MAPPED_LINK_LOCAL: Final = ip_network("169.254.0.0/16")
_LINK_LOCAL: Final = ip_network("fe80::/10")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user wants.

    Attributes:
        device: name of the device; empty for any.
        port: number of the port; 0 for any.
        gid: a GID, an IPv4 address, or an index in the table; empty for the best.
    """

    device: str = ""
    port: int = 0
    gid: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is used.

    Attributes:
        device: name of the device.
        port: number of the port.
        gid: entry of the port's GID table.
        mtu: the RoCE MTU of the interface; None where it isn't known.
    """

    device: str
    port: int
    gid: Gid
    mtu: int | None = None

    def __str__(self) -> str:
        return f"{self.device} port {self.port}, GID {self.gid.index} ({self.gid})"


def choose(devices: Sequence[Device], wish: Wish | None = None) -> Choice:
    """Return the best of what ``wish`` leaves.

    Only RoCE v2 GIDs on active Ethernet ports are considered. Those of bridges and virtual
    interfaces come last; before them, addresses that can be routed come before loopback, and
    that before link-local ones. Ties go to the first in the tables.

    Args:
        devices: of this machine.
        wish: what the user wants; anything, by default.

    Raises:
        DeviceError: nothing serves; the message says why each one does not.
    """
    wish = wish or Wish()
    fitting = candidates(devices, wish)
    if not fitting:
        raise DeviceError(_why_none(devices, wish))
    return fitting[0]


def candidates(devices: Sequence[Device], wish: Wish) -> list[Choice]:
    """Return all that would serve, the best first."""
    wanted = _wanted_gid(wish.gid)
    found = [
        (_rank(gid), Choice(device.name, port.number, gid, port.mtu))
        for device, port in _ports(devices, wish)
        if not _unfit_port(port)
        for gid in port.gids
        if not _unfit_gid(gid, wanted)
    ]
    return [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


def _ports(devices: Sequence[Device], wish: Wish) -> Iterator[tuple[Device, Port]]:
    for device in devices:
        if wish.device in ("", device.name):
            for port in device.ports:
                if wish.port in (0, port.number):
                    yield device, port


def _wanted_gid(text: str) -> int | IPv6Address | None:
    if not text:
        return None
    if text.isdigit():
        return int(text)
    try:
        address = ip_address(text)
    except ValueError as error:
        raise DeviceError(f"{text!r} is no GID, no IP address and no index") from error
    if isinstance(address, IPv4Address):
        return IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)
    return address


def _unfit_port(port: Port) -> str:
    """Why a port can't be used; empty if it can."""
    if port.link_layer != "Ethernet":
        return f"its link layer is {port.link_layer or 'unknown'}, not Ethernet"
    if not port.active:
        return f"it is {port.state or 'in no known state'}, not ACTIVE"
    return "" if port.gids else "its GID table is empty"


def _unfit_gid(gid: Gid, wanted: int | IPv6Address | None) -> str:
    """Why a GID can't be used; empty if it can."""
    if wanted is not None and wanted not in (gid.index, gid.address):
        return "it is not the one wanted"
    if gid.kind != ROCE_V2:
        return f"it is {gid.kind or 'of no known type'}, not {ROCE_V2}"
    return ""


def _rank(gid: Gid) -> tuple[bool, int]:
    return gid.interface.startswith(_CONTAINER_INTERFACES), _reach(gid)


def _reach(gid: Gid) -> int:
    """How far an address reaches: the lower, the farther."""
    mapped = gid.ipv4
    if mapped is not None:
        if mapped in _MAPPED_LINK_LOCAL:
            return 4
        return 2 if mapped.is_loopback else 0
    if gid.address in _LINK_LOCAL:
        return 3
    return 2 if gid.address.is_loopback else 1


def _why_none(devices: Sequence[Device], wish: Wish) -> str:
    if not devices:
        return "this machine has no RDMA device (/sys/class/infiniband is empty or missing)"
    names = [device.name for device in devices]
    if wish.device and wish.device not in names:
        return f"there is no RDMA device {wish.device!r}; there is {', '.join(names)}"
    wanted = _wanted_gid(wish.gid)
    reasons = []
    for device, port in _ports(devices, wish):
        where = f"{device.name} port {port.number}"
        unfit = _unfit_port(port)
        if unfit:
            reasons.append(f"{where}: {unfit}")
            continue
        reasons.extend(
            f"{where}, GID {gid.index} ({gid}): {_unfit_gid(gid, wanted)}" for gid in port.gids
        )
    return "no GID for RoCE v2: " + ("; ".join(reasons) or "no port fits")
