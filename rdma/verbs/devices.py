"""What RDMA devices this machine has, as sysfs tells it; pyverbs is not needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from rdma.verbs.settings import MTUS

__all__ = ["ROCE_V2", "Device", "Gid", "Port", "list_devices", "roce_mtu"]

SYSFS: Final = Path("/sys/class/infiniband")
ROCE_V2: Final = "RoCE v2"

_HEADERS: Final = 64
"""Bytes that IPv6, UDP and the largest InfiniBand headers of a transfer take of a packet."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table.

    Attributes:
        index: its place in the table.
        address: the GID itself.
        kind: ``RoCE v2``, ``IB/RoCE v1``, as sysfs has it.
        interface: the network interface it belongs to, if any.
    """

    index: int
    address: IPv6Address
    kind: str
    interface: str = ""

    @property
    def ipv4(self) -> IPv4Address | None:
        """The IPv4 address that it maps, if it maps one."""
        return self.address.ipv4_mapped

    def __str__(self) -> str:
        return str(self.ipv4 or self.address)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device.

    Attributes:
        number: counted from 1.
        state: ``ACTIVE``, ``DOWN``, ….
        physical_state: ``LinkUp``, ``Disabled``, ….
        link_layer: ``Ethernet`` or ``InfiniBand``.
        rate: as sysfs has it, such as ``100 Gb/sec (4X EDR)``.
        interface_mtu: of the network interface, in bytes; None where there is none.
        gids: the entries in use of the GID table.
    """

    number: int
    state: str
    physical_state: str
    link_layer: str
    rate: str = ""
    interface_mtu: int | None = None
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool:
        """Whether packets can pass."""
        return self.state == "ACTIVE"

    @property
    def mtu(self) -> int | None:
        """The RoCE MTU that goes with the interface's."""
        return None if self.interface_mtu is None else roce_mtu(self.interface_mtu)


@dataclass(frozen=True, slots=True)
class Device:
    """An RDMA device.

    Attributes:
        name: such as ``mlx5_0`` or ``rxe0``.
        guid: of the node, as sysfs has it.
        firmware: its version, if it has one.
        driver: the kernel's driver for it, if it stands on a bus.
        ports: all of them.
    """

    name: str
    guid: str = ""
    firmware: str = ""
    driver: str = ""
    ports: tuple[Port, ...] = field(default=())


def roce_mtu(interface_mtu: int) -> int | None:
    """Return the largest RoCE MTU that fits an interface's; None where none does."""
    fitting = [mtu for mtu in MTUS if mtu + _HEADERS <= interface_mtu]
    return max(fitting, default=None)


def list_devices(sysfs: Path = SYSFS) -> list[Device]:
    """Return the devices of this machine, by name; none where the kernel knows no RDMA.

    Args:
        sysfs: the folder that has one for each device.
    """
    if not sysfs.is_dir():
        return []
    net = sysfs.parent / "net"
    return [_device(path, net) for path in sorted(sysfs.iterdir(), key=_natural)]


def _natural(path: Path) -> tuple[str, int]:
    """Sort mlx5_10 behind mlx5_9."""
    stem = path.name.rstrip("0123456789")
    digits = path.name[len(stem) :]
    return stem, int(digits) if digits else -1


def _device(path: Path, net: Path) -> Device:
    ports = path / "ports"
    numbers = sorted(int(entry.name) for entry in ports.iterdir()) if ports.is_dir() else []
    driver = path / "device" / "driver"
    return Device(
        path.name,
        guid=_read(path / "node_guid"),
        firmware=_read(path / "fw_ver"),
        driver=driver.resolve().name if driver.exists() else "",
        ports=tuple(_port(ports / str(number), net) for number in numbers),
    )


def _port(path: Path, net: Path) -> Port:
    gids = tuple(_gids(path))
    mtus = [_read(net / gid.interface / "mtu") for gid in gids if gid.interface]
    return Port(
        int(path.name),
        state=_word(_read(path / "state")),
        physical_state=_word(_read(path / "phys_state")),
        link_layer=_read(path / "link_layer"),
        rate=_read(path / "rate"),
        interface_mtu=min((int(mtu) for mtu in mtus if mtu.isdigit()), default=None),
        gids=gids,
    )


def _gids(path: Path) -> Iterator[Gid]:
    table = path / "gids"
    names = [entry.name for entry in table.iterdir()] if table.is_dir() else []
    for index in sorted(map(int, names)):
        value = _read(table / str(index))
        if not value or not int(value.replace(":", ""), 16):
            continue
        attributes = path / "gid_attrs"
        yield Gid(
            index,
            IPv6Address(value),
            _read(attributes / "types" / str(index)),
            _read(attributes / "ndevs" / str(index)),
        )


def _word(state: str) -> str:
    """Make ``4: ACTIVE`` into ``ACTIVE``."""
    return state.rpartition(":")[2].strip()


def _read(path: Path) -> str:
    """Return what a file of sysfs says; nothing where it is missing or has nothing to say.

    The kernel answers EINVAL for the attributes of entries that are not in use, and a device may
    go while it is read.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return ""
