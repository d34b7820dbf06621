from pathlib import Path

import pytest

from rdma.verbs.devices import list_devices, roce_mtu


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "infiniband"
    port = "mlx5_0/ports/1/"
    write(
        root,
        {
            "mlx5_10/node_guid": "b8ce:f603:0012:3457",
            "mlx5_0/node_guid": "b8ce:f603:0012:3456",
            "mlx5_0/fw_ver": "22.36.1010",
            port + "state": "4: ACTIVE",
            port + "phys_state": "5: LinkUp",
            port + "link_layer": "Ethernet",
            port + "rate": "100 Gb/sec (4X EDR)",
            port + "gids/0": "fe80:0000:0000:0000:bace:f6ff:fe12:3456",
            port + "gids/3": "0000:0000:0000:0000:0000:ffff:c000:0211",
            port + "gids/10": "2001:0db8:0000:0000:0000:0000:0000:0017",
            port + "gids/4": "0000:0000:0000:0000:0000:0000:0000:0000",
            port + "gid_attrs/types/0": "IB/RoCE v1",
            port + "gid_attrs/types/3": "RoCE v2",
            port + "gid_attrs/types/10": "RoCE v2",
            port + "gid_attrs/ndevs/0": "ens1f0np0",
            port + "gid_attrs/ndevs/3": "ens1f0np0",
        },
    )
    write(tmp_path / "net", {"ens1f0np0/mtu": "4200"})
    return root


def test_devices_are_read_as_sysfs_has_them(sysfs: Path) -> None:
    first, second = list_devices(sysfs)
    assert (first.name, second.name) == ("mlx5_0", "mlx5_10")
    assert first.guid == "b8ce:f603:0012:3456"
    assert first.firmware == "22.36.1010"
    assert second.ports == ()
    (port,) = first.ports
    assert port.active
    assert (port.number, port.physical_state, port.link_layer) == (1, "LinkUp", "Ethernet")
    assert port.rate == "100 Gb/sec (4X EDR)"
    assert (port.interface_mtu, port.mtu) == (4200, 4096)


def test_gids_in_use_are_listed_with_their_type_and_interface(sysfs: Path) -> None:
    (port,) = list_devices(sysfs)[0].ports
    assert [(gid.index, str(gid), gid.kind, gid.interface) for gid in port.gids] == [
        (0, "fe80::bace:f6ff:fe12:3456", "IB/RoCE v1", "ens1f0np0"),
        (3, "192.0.2.17", "RoCE v2", "ens1f0np0"),
        (10, "2001:db8::17", "RoCE v2", ""),
    ]


def test_a_kernel_without_rdma_has_no_devices(tmp_path: Path) -> None:
    assert list_devices(tmp_path / "infiniband") == []


@pytest.mark.parametrize(
    ("interface", "roce"),
    [(9000, 4096), (4200, 4096), (4159, 2048), (1500, 1024), (1280, 1024), (576, 512), (100, None)],
)
def test_roce_packets_fit_the_interface(interface: int, roce: int | None) -> None:
    assert roce_mtu(interface) == roce
