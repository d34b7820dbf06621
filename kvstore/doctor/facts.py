"""What this machine has of RDMA, gathered for the checks to judge."""

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.config import RdmaSection
from rdma.errors import TransportError
from rdma.verbs.adapter import Adapter
from rdma.verbs.binding import load, rdma_core_version
from rdma.verbs.choice import Choice, Wish, choose
from rdma.verbs.devices import Device, list_devices

_LIBRARIES: Final = (
    "usr/lib/*/libibverbs.so.*",
    "usr/lib64/libibverbs.so.*",
    "usr/lib/libibverbs.so.*",
)
_VERSION: Final = re.compile(r"libibverbs\.so\.\d+\.\d+\.(\d+\.\d+)$")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the kernel has for NVIDIA's GPUs.

    Attributes:
        driver: what the driver says of itself; empty where there is none.
        peermem: whether the module ``nvidia_peermem`` is loaded.
        kernel: release of the kernel, such as ``6.1.0-49-amd64``.
    """

    driver: str = ""
    peermem: bool = False
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class RdmaFacts:
    """What this machine has of RDMA.

    Attributes:
        devices: as sysfs lists them.
        drivers: kernel drivers of its network interfaces, by interface.
        closed: device files that this process may not open, or that are missing, by device.
        pyverbs: where pyverbs was found; empty where it can't be imported.
        pyverbs_error: why it can't be.
        rdma_core: version of the libibverbs in use, or else installed; empty where there is none.
        choice: what a node would use; None for nothing.
        choice_error: why nothing.
        opened: what the device chosen said when it was opened; empty where it wasn't.
        opening_error: why it could not be opened.
        gpu: what the kernel has for GPUs.
    """

    devices: tuple[Device, ...] = ()
    drivers: dict[str, str] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    pyverbs: str = ""
    pyverbs_error: str = ""
    rdma_core: str = ""
    choice: Choice | None = None
    choice_error: str = ""
    opened: str = ""
    opening_error: str = ""
    gpu: Gpu = Gpu()


def gather(section: RdmaSection, root: Path = Path("/")) -> RdmaFacts:
    """Look at this machine. Opens the device that a node would use, and closes it again.

    Args:
        section: which device a node would use.
        root: where ``sys``, ``proc``, ``dev`` and ``usr`` are.
    """
    devices = tuple(list_devices(root / "sys/class/infiniband"))
    pyverbs, pyverbs_error = _pyverbs()
    choice, choice_error = _choice(devices, section)
    opened, opening_error = "", ""
    if choice is not None and pyverbs:
        opened, opening_error = _open(choice)
    return RdmaFacts(
        devices=devices,
        drivers=dict(_drivers(root / "sys/class/net")),
        closed=dict(_closed(root)),
        pyverbs=pyverbs,
        pyverbs_error=pyverbs_error,
        rdma_core=(rdma_core_version() if pyverbs else None) or _installed(root),
        choice=choice,
        choice_error=choice_error,
        opened=opened,
        opening_error=opening_error,
        gpu=_gpu(root),
    )


def _pyverbs() -> tuple[str, str]:
    try:
        return str(load().path), ""
    except TransportError as error:
        return "", str(error)


def _choice(devices: tuple[Device, ...], section: RdmaSection) -> tuple[Choice | None, str]:
    try:
        return choose(devices, Wish(section.device, section.port, section.gid)), ""
    except TransportError as error:
        return None, str(error)


def _open(choice: Choice) -> tuple[str, str]:
    try:
        adapter = Adapter(choice)
    except TransportError as error:
        return "", str(error)
    limits = adapter.limits
    said = (
        f"RoCE MTU {adapter.mtu}, {limits.works} work requests, {limits.reads_in} reads, "
        f"max_mr_size {limits.region}"
    )
    adapter.close()
    return said, ""


def _drivers(net: Path) -> Iterator[tuple[str, str]]:
    for interface in sorted(net.iterdir()) if net.is_dir() else ():
        driver = interface / "device" / "driver"
        if driver.exists():
            yield interface.name, driver.resolve().name


def _closed(root: Path) -> Iterator[tuple[str, str]]:
    """The devices whose device file can't be opened, with that file."""
    known = root / "sys/class/infiniband_verbs"
    for entry in sorted(known.glob("uverbs*")) if known.is_dir() else ():
        file = root / "dev/infiniband" / entry.name
        if not os.access(file, os.R_OK | os.W_OK):
            yield _line(entry / "ibdev"), f"/dev/infiniband/{entry.name}"


def _installed(root: Path) -> str:
    """The version of the libibverbs that is installed."""
    for pattern in _LIBRARIES:
        for path in sorted(root.glob(pattern)):
            if found := _VERSION.search(path.name):
                return found.group(1)
    return ""


def _gpu(root: Path) -> Gpu:
    return Gpu(
        _line(root / "proc/driver/nvidia/version"),
        (root / "sys/module/nvidia_peermem").is_dir(),
        platform.release(),
    )


def _line(path: Path) -> str:
    """The first line of a file; nothing where there is none."""
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""
