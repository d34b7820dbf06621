"""Checks of RDMA: which devices, ports and GIDs there are, and what would be used. Pure."""

import re
from collections.abc import Iterator
from typing import Final

from kvstore.config import RdmaSection
from kvstore.doctor.facts import Gpu, RdmaFacts
from kvstore.doctor.finding import Finding, State
from rdma.verbs.devices import ROCE_V2, Device, Gid, Port

_MODULES: Final = {
    "mlx5_core": "mlx5_ib",
    "mlx4_en": "mlx4_ib",
    "ice": "irdma",
    "i40e": "irdma",
    "bnxt_en": "bnxt_re",
    "qede": "qedr",
    "hns3": "hns-roce-hw-v2",
    "efa": "efa",
}
"""Drivers of network cards that can do RDMA, and the module that makes them."""

_PYVERBS: Final = (
    "apt install python3-pyverbs ibverbs-providers   # RHEL: dnf install python3-pyverbs "
    "libibverbs; for the distribution's own version of Python"
)
_GOOD_MTU: Final = 4096
_DMABUF_KERNEL: Final = (5, 12)


def check_rdma(section: RdmaSection, facts: RdmaFacts) -> Iterator[Finding]:
    """All that sessions over ``rdma`` need.

    Args:
        section: what is asked for.
        facts: what there is.
    """
    if section.mode == "off":
        yield Finding("rdma", "info", "turned off (rdma.mode = off)")
        return
    bad: State = "failure" if section.mode == "require" else "warning"
    if not facts.devices:
        yield _no_device(facts, section)
    for device in facts.devices:
        yield from _device(device, facts, bad)
    yield _pyverbs(facts, bad if facts.devices or section.mode == "require" else "info")
    if facts.devices:
        yield from _choice(facts, bad)


def _no_device(facts: RdmaFacts, section: RdmaSection) -> Finding:
    state: State = "failure" if section.mode == "require" else "info"
    for interface, driver in facts.drivers.items():
        if driver in _MODULES:
            detail = f"no device, but the card of {interface} ({driver}) can do RDMA"
            return Finding("rdma", "warning" if state == "info" else state, detail,
                           f"modprobe {_MODULES[driver]}")  # fmt: skip
    detail = "no RDMA device; blocks move over shm and tcp"
    interface = next(iter(facts.drivers), "eth0")
    software = f"modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {interface}"
    return Finding("rdma", state, detail, f"{software}   # in software: to try it, not for speed")


def _device(device: Device, facts: RdmaFacts, bad: State) -> Iterator[Finding]:
    told = [
        text for text in (device.driver, device.firmware and f"firmware {device.firmware}") if text
    ]
    detail = f"{device.name}{' (' + ', '.join(told) + ')' if told else ''}"
    file = facts.closed.get(device.name)
    if not file:
        yield Finding("rdma", "ok", detail)
    else:
        remedy = (
            f"modprobe ib_uverbs; chmod 666 {file}   # a container: docker run "
            "--device=/dev/infiniband --ulimit memlock=-1"
        )
        yield Finding("rdma", bad, f"{detail}: {file} is missing or not for this user", remedy)
    for port in device.ports:
        yield _port(device, port)
        yield from _gids(device, port, facts)


def _port(device: Device, port: Port) -> Finding:
    interface = next((gid.interface for gid in port.gids if gid.interface), "")
    where = f"{device.name} port {port.number}"
    parts = [port.state or "state unknown", port.physical_state, port.link_layer, port.rate]
    if port.interface_mtu is not None:
        parts.append(f"RoCE MTU {port.mtu} ({interface} has {port.interface_mtu})")
    detail = f"{where}: {', '.join(part for part in parts if part)}"
    if port.link_layer != "Ethernet":
        remedy = f"mlxconfig -d {device.name} set LINK_TYPE_P{port.number}=2   # if the card can"
        return Finding("rdma port", "info", f"{detail}; only RoCEv2 is spoken", remedy)
    if not port.active:
        remedy = f"ip link set {interface or 'INTERFACE'} up   # and look at the cable and switch"
        return Finding("rdma port", "warning", detail, remedy)
    if (port.mtu or _GOOD_MTU) < _GOOD_MTU:
        remedy = f"ip link set {interface} mtu 9000   # if every switch and machine agrees"
        return Finding("rdma port", "info", f"{detail}; {_GOOD_MTU} costs fewer packets", remedy)
    return Finding("rdma port", "ok", detail)


def _gids(device: Device, port: Port, facts: RdmaFacts) -> Iterator[Finding]:
    where = f"{device.name} port {port.number}"
    for gid in port.gids:
        taken = _is_taken(facts, device, port, gid)
        detail = f"{where}, GID {gid.index}: {gid}, {gid.kind or 'type unknown'}"
        if gid.interface:
            detail += f", {gid.interface}"
        yield Finding("rdma gid", "ok" if taken else "info", detail + "; taken" * taken)
    if port.link_layer != "Ethernet" or not port.active:
        return
    interface = next((gid.interface for gid in port.gids if gid.interface), "INTERFACE")
    usable = [gid for gid in port.gids if gid.kind == ROCE_V2]
    if not usable:
        yield Finding(
            "rdma gid", "warning", f"{where}: no GID of type {ROCE_V2}", _address(interface)
        )
    elif all(gid.address.is_link_local for gid in usable):
        detail = f"{where}: link-local GIDs only, which reach no other network"
        yield Finding("rdma gid", "warning", detail, _address(interface))


def _address(interface: str) -> str:
    return f"ip address add ADDRESS/PREFIX dev {interface}   # its GIDs follow by themselves"


def _is_taken(facts: RdmaFacts, device: Device, port: Port, gid: Gid) -> bool:
    choice = facts.choice
    return choice is not None and (choice.device, choice.port, choice.gid) == (
        device.name, port.number, gid,
    )  # fmt: skip


def _pyverbs(facts: RdmaFacts, bad: State) -> Finding:
    version = f"rdma-core {facts.rdma_core}" if facts.rdma_core else "no rdma-core found"
    if facts.pyverbs:
        return Finding("pyverbs", "ok", f"{facts.pyverbs}, {version}")
    return Finding(
        "pyverbs", bad, f"{facts.pyverbs_error or 'not looked for'} ({version})", _PYVERBS
    )


def _choice(facts: RdmaFacts, bad: State) -> Iterator[Finding]:
    if facts.choice is None:
        remedy = "kvstore config   # rdma.device, rdma.port and rdma.gid: leave them unset for any"
        yield Finding("rdma choice", bad, facts.choice_error, remedy)
    elif facts.opening_error:
        remedy = f"ibv_devinfo -v -d {facts.choice.device}   # apt install ibverbs-utils"
        yield Finding("rdma choice", bad, facts.opening_error, remedy)
    else:
        said = f": {facts.opened}" if facts.opened else ""
        yield Finding("rdma choice", "ok", f"{facts.choice}{said}")


def check_gpu_memory(facts: RdmaFacts) -> Iterator[Finding]:
    """Whether an RDMA device could reach GPU memory by itself (GPUDirect)."""
    gpu = facts.gpu
    if not gpu.driver:
        yield Finding("gpu memory", "info", "no NVIDIA driver")
        return
    ways = []
    if gpu.peermem:
        ways.append("nvidia-peermem is loaded")
    if _has_dmabuf(gpu):
        ways.append("dma-buf (open kernel modules)")
    if ways:
        yield Finding("gpu memory", "ok", f"GPUDirect by {' and '.join(ways)}")
    elif not facts.devices:
        yield Finding("gpu memory", "info", "GPUDirect needs an RDMA device")
    else:
        detail = "no GPUDirect: neither nvidia-peermem nor the open kernel modules"
        yield Finding("gpu memory", "warning", detail, "modprobe nvidia-peermem")


def _has_dmabuf(gpu: Gpu) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", gpu.kernel)
    recent = numbers is not None and tuple(map(int, numbers.groups())) >= _DMABUF_KERNEL
    return recent and "Open Kernel Module" in gpu.driver
