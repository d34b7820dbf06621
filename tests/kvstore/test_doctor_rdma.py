"""What ``doctor`` says of RDMA, on machines with real GID tables and on those without any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import RdmaSection
from kvstore.doctor import Finding
from kvstore.doctor.facts import Gpu, RdmaFacts, gather
from kvstore.doctor.rdma import check_gpu_memory, check_rdma
from rdma.errors import TransportError
from rdma.verbs.choice import choose
from rdma.verbs.devices import Device
from tests.rdma.test_verbs_choice import (
    CONNECTX,
    CONNECTX_VLAN,
    DOWN,
    DUAL,
    INFINIBAND,
    ROCE_V1_ONLY,
    SOFT_LOOPBACK,
    UNADDRESSED,
)

PYVERBS = "/usr/lib/python3/dist-packages/pyverbs"
ANY = RdmaSection()
REQUIRED = RdmaSection(mode="require")


def facts(*devices: Device, **more: Any) -> RdmaFacts:
    """A machine with these devices and pyverbs."""
    found: dict[str, Any] = {"pyverbs": PYVERBS, "rdma_core": "44.0", "devices": devices}
    try:
        found["choice"] = choose(devices)
    except TransportError as error:
        found["choice_error"] = str(error)
    return RdmaFacts(**found | more)


def said(found: RdmaFacts, section: RdmaSection = ANY) -> list[Finding]:
    return list(check_rdma(section, found))


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [one for one in findings if one.check == check]


def test_a_card_that_is_as_it_should_be() -> None:
    findings = said(facts(CONNECTX, opened="RoCE MTU 4096"))
    assert {one.state for one in findings} == {"ok", "info"}
    (port,) = of(findings, "rdma port")
    assert port.state == "ok"
    assert port.detail == (
        "mlx5_0 port 1: ACTIVE, LinkUp, Ethernet, 100 Gb/sec (4X EDR), "
        "RoCE MTU 4096 (ens1f0np0 has 9000)"
    )
    gids = of(findings, "rdma gid")
    assert [one.detail.endswith("; taken") for one in gids] == [False, False, False, True]
    assert gids[2].detail == "mlx5_0 port 1, GID 2: 192.0.2.17, IB/RoCE v1, ens1f0np0"
    assert of(findings, "pyverbs") == [Finding("pyverbs", "ok", f"{PYVERBS}, rdma-core 44.0")]
    (choice,) = of(findings, "rdma choice")
    assert choice.detail == "mlx5_0 port 1, GID 3 (192.0.2.17): RoCE MTU 4096"


@pytest.mark.parametrize(
    ("device", "check", "state", "detail", "remedy"),
    [
        (
            UNADDRESSED,
            "rdma gid",
            "warning",
            "link-local",
            "ip address add ADDRESS/PREFIX dev ens1",
        ),
        (ROCE_V1_ONLY, "rdma gid", "warning", "no GID of type RoCE v2", "ip address add"),
        (DOWN, "rdma port", "warning", "DOWN", "ip link set ens1f0np0 up"),
        (DUAL, "rdma port", "warning", "port 1: DOWN", "ip link set ens1f0np0 up"),
        (
            INFINIBAND,
            "rdma port",
            "info",
            "only RoCEv2",
            "mlxconfig -d mlx5_ib0 set LINK_TYPE_P1=2",
        ),
        (DOWN, "rdma choice", "warning", "not ACTIVE", "kvstore config"),
        (INFINIBAND, "rdma choice", "warning", "not Ethernet", "kvstore config"),
    ],
)
def test_what_is_wrong_comes_with_what_mends_it(
    device: Device, check: str, state: str, detail: str, remedy: str
) -> None:
    wrong = [one for one in of(said(facts(device)), check) if detail in one.detail]
    assert [one.state for one in wrong] == [state]
    assert wrong[0].remedy.startswith(remedy)


def test_an_mtu_that_is_small_is_named() -> None:
    port = replace(CONNECTX.ports[0], interface_mtu=1500)
    (found,) = of(said(facts(replace(CONNECTX, ports=(port,)))), "rdma port")
    assert found.state == "info"
    assert "RoCE MTU 1024 (ens1f0np0 has 1500)" in found.detail
    assert found.remedy.startswith("ip link set ens1f0np0 mtu 9000")


def test_all_that_is_wrong_is_a_failure_only_where_rdma_is_required() -> None:
    broken = facts(DOWN, pyverbs="", pyverbs_error="it is not installed", rdma_core="")
    assert {one.state for one in said(broken)} == {"ok", "info", "warning"}
    failures = [one for one in said(broken, REQUIRED) if one.state == "failure"]
    assert {one.check for one in failures} == {"pyverbs", "rdma choice"}
    assert all(one.remedy for one in failures)
    (pyverbs,) = of(failures, "pyverbs")
    assert pyverbs.detail == "it is not installed (no rdma-core found)"
    assert "apt install python3-pyverbs" in pyverbs.remedy
    assert "dnf install" in pyverbs.remedy


def test_a_device_that_is_not_for_this_user_or_container() -> None:
    closed = facts(CONNECTX, closed={"mlx5_0": "/dev/infiniband/uverbs0"})
    (device,) = of(said(closed), "rdma")
    assert device.state == "warning"
    assert "/dev/infiniband/uverbs0" in device.detail
    assert "--device=/dev/infiniband" in device.remedy


def test_a_device_that_cannot_be_opened() -> None:
    (choice,) = of(said(facts(CONNECTX, opening_error="mlx5_0 cannot be opened")), "rdma choice")
    assert choice.state == "warning"
    assert "mlx5_0" in choice.remedy


def test_the_entry_that_would_be_taken_is_marked_among_many() -> None:
    gids = of(said(facts(SOFT_LOOPBACK, CONNECTX_VLAN)), "rdma gid")
    taken = [one.detail for one in gids if one.state == "ok"]
    assert taken == ["mlx5_bond_0 port 1, GID 6: 198.51.100.5, RoCE v2, bond0.100; taken"]


# --- without RDMA ---------------------------------------------------------------------------------


def test_a_machine_without_rdma() -> None:
    bare = facts(pyverbs="", pyverbs_error="it is not installed", rdma_core="")
    findings = said(bare)
    assert [(one.check, one.state) for one in findings] == [("rdma", "info"), ("pyverbs", "info")]
    assert "rdma link add rxe0 type rxe netdev eth0" in findings[0].remedy
    assert {one.state for one in said(bare, REQUIRED)} == {"failure"}
    assert [one.detail for one in said(bare, RdmaSection(mode="off"))] == [
        "turned off (rdma.mode = off)"
    ]


@pytest.mark.parametrize(
    ("driver", "module"),
    [("mlx5_core", "mlx5_ib"), ("ice", "irdma"), ("bnxt_en", "bnxt_re"), ("mlx4_en", "mlx4_ib")],
)
def test_a_card_whose_module_is_not_loaded(driver: str, module: str) -> None:
    drivers = {"eth0": "virtio_net", "ens1f0": driver}
    (rdma,) = of(said(facts(drivers=drivers)), "rdma")
    assert (rdma.state, rdma.remedy) == ("warning", f"modprobe {module}")
    assert "ens1f0" in rdma.detail
    (rdma,) = of(said(facts(drivers=drivers), REQUIRED), "rdma")
    assert rdma.state == "failure"


# --- GPU memory -----------------------------------------------------------------------------------

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024"


@pytest.mark.parametrize(
    ("gpu", "devices", "state", "detail"),
    [
        (Gpu(), (CONNECTX,), "info", "no NVIDIA driver"),
        (Gpu(CLOSED, True, "5.4.0-100-generic"), (CONNECTX,), "ok", "nvidia-peermem is loaded"),
        (Gpu(OPEN, False, "6.1.0-49-amd64"), (CONNECTX,), "ok", "dma-buf"),
        (Gpu(OPEN, True, "6.8.0-31-generic"), (CONNECTX,), "ok", "is loaded and dma-buf"),
        (Gpu(OPEN, False, "5.10.0-9-amd64"), (CONNECTX,), "warning", "no GPUDirect"),
        (Gpu(CLOSED, False, "6.1.0-49-amd64"), (CONNECTX,), "warning", "no GPUDirect"),
        (Gpu(CLOSED, False, "6.1.0-49-amd64"), (), "info", "needs an RDMA device"),
        (Gpu(CLOSED, False, "odd"), (CONNECTX,), "warning", "no GPUDirect"),
    ],
)
def test_gpu_memory(gpu: Gpu, devices: tuple[Device, ...], state: str, detail: str) -> None:
    (found,) = check_gpu_memory(facts(*devices, gpu=gpu))
    assert found.state == state
    assert detail in found.detail
    assert (found.remedy == "modprobe nvidia-peermem") == (state == "warning")


# --- probing --------------------------------------------------------------------------------------


def test_a_machine_is_probed_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise TransportError("not here")

    monkeypatch.setattr("kvstore.doctor.facts.load", refuse)
    for path, text in {
        "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet",
        "sys/class/infiniband/mlx5_0/ports/1/gids/0": "fe80:0000:0000:0000:bace:f6ff:fe12:3456",
        "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0",
        "sys/class/infiniband_verbs/uverbs1/ibdev": "mlx5_1",
        "sys/module/nvidia_peermem/version": "1",
        "sys/bus/pci/drivers/mlx5_core/uevent": "",
        "proc/driver/nvidia/version": OPEN + "\nGCC version: 12.2.0",
        "dev/infiniband/uverbs1": "",
        "usr/lib/x86_64-linux-gnu/libibverbs.so.1": "",
        "usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0": "",
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    card = tmp_path / "sys/class/net/ens1/device"
    card.mkdir(parents=True)
    (card / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers/mlx5_core")
    (tmp_path / "sys/class/net/lo").mkdir()
    found = gather(ANY, tmp_path)
    assert [device.name for device in found.devices] == ["mlx5_0"]
    assert found.drivers == {"ens1": "mlx5_core"}
    assert found.closed == {"mlx5_0": "/dev/infiniband/uverbs0"}
    assert (found.pyverbs, found.pyverbs_error, found.rdma_core) == ("", "not here", "44.0")
    assert found.choice is None
    assert "DOWN" in found.choice_error
    assert (found.gpu.driver, found.gpu.peermem) == (OPEN, True)


def test_a_machine_with_nothing_is_probed_all_the_same(tmp_path: Path) -> None:
    found = gather(ANY, tmp_path)
    assert (found.devices, found.drivers, found.closed, found.gpu.driver) == ((), {}, {}, "")
    assert "no RDMA device" in found.choice_error
