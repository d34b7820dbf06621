from ipaddress import IPv6Address

import pytest

from rdma.verbs.choice import Wish, candidates, choose
from rdma.verbs.devices import Device, Gid, Port
from rdma.verbs.errors import DeviceError

V1, V2 = "IB/RoCE v1", "RoCE v2"
MAC_LOCAL = "fe80::bace:f6ff:fe12:3456"


def gid(index: int, address: str, kind: str = V2, interface: str = "ens1f0np0") -> Gid:
    if "." in address and ":" not in address:
        address = f"::ffff:{address}"
    return Gid(index, IPv6Address(address), kind, interface)


def port(*gids: Gid, state: str = "ACTIVE", layer: str = "Ethernet", number: int = 1) -> Port:
    return Port(number, state, "LinkUp", layer, "100 Gb/sec (4X EDR)", 9000, gids)


def device(name: str, *ports: Port) -> Device:
    return Device(name, ports=ports)


# As `show_gids` and sysfs list them on such machines, with other addresses.
CONNECTX = device(
    "mlx5_0",
    port(
        gid(0, MAC_LOCAL, V1),
        gid(1, MAC_LOCAL),
        gid(2, "192.0.2.17", V1),
        gid(3, "192.0.2.17"),
    ),
)
CONNECTX_IPV6 = device(
    "mlx5_1",
    port(
        gid(0, MAC_LOCAL, V1),
        gid(1, MAC_LOCAL),
        gid(2, "2001:db8::17", V1),
        gid(3, "2001:db8::17"),
    ),
)
CONNECTX_VLAN = device(
    "mlx5_bond_0",
    port(
        gid(0, MAC_LOCAL, V1, "bond0"),
        gid(1, MAC_LOCAL, V2, "bond0"),
        gid(2, "fe80::1", V1, "bond0.100"),
        gid(3, "fe80::1", V2, "bond0.100"),
        gid(4, "2001:db8::5", V2, "bond0.100"),
        gid(5, "198.51.100.5", V1, "bond0.100"),
        gid(6, "198.51.100.5", V2, "bond0.100"),
    ),
)
UNADDRESSED = device("mlx5_2", port(gid(0, MAC_LOCAL, V1), gid(1, MAC_LOCAL)))
SOFT_LOOPBACK = device(
    "rxe0", port(gid(0, "fe80::200:ff:fe00:0", V2, "lo"), gid(1, "127.0.0.1", V2, "lo"))
)
SOFT_DOCKER = device(
    "rxe_docker",
    port(gid(0, "fe80::42:1ff:fe02:3", V2, "docker0"), gid(1, "172.17.0.1", V2, "docker0")),
)
PRIVATE = device("irdma0", port(gid(0, MAC_LOCAL, V2, "eno1"), gid(1, "10.1.2.3", V2, "eno1")))
AUTO_ADDRESSED = device(
    "bnxt_re0",
    port(gid(0, MAC_LOCAL, V2, "p1"), gid(1, "169.254.7.7", V2, "p1"), gid(2, "fd00::7", V2, "p1")),
)
INFINIBAND = device("mlx5_ib0", port(gid(0, "fe80::1", "IB/RoCE v1", ""), layer="InfiniBand"))
DOWN = device("mlx5_3", port(gid(3, "192.0.2.33"), state="DOWN"))
DUAL = device(
    "mlx4_0",
    port(gid(0, "192.0.2.40"), state="DOWN", number=1),
    port(gid(0, MAC_LOCAL), gid(1, "192.0.2.41"), number=2),
)
ROCE_V1_ONLY = device("mlx4_1", port(gid(0, MAC_LOCAL, V1), gid(1, "192.0.2.50", V1)))


@pytest.mark.parametrize(
    ("devices", "name", "number", "index"),
    [
        ([CONNECTX], "mlx5_0", 1, 3),
        ([CONNECTX_IPV6], "mlx5_1", 1, 3),
        ([CONNECTX_VLAN], "mlx5_bond_0", 1, 6),
        ([UNADDRESSED], "mlx5_2", 1, 1),
        ([SOFT_LOOPBACK], "rxe0", 1, 1),
        ([PRIVATE], "irdma0", 1, 1),
        ([AUTO_ADDRESSED], "bnxt_re0", 1, 2),
        ([DUAL], "mlx4_0", 2, 1),
        ([SOFT_DOCKER], "rxe_docker", 1, 1),
        # Of several: what is routable first, then what other machines reach at all.
        ([CONNECTX, CONNECTX_IPV6], "mlx5_0", 1, 3),
        ([CONNECTX_IPV6, CONNECTX], "mlx5_0", 1, 3),
        ([UNADDRESSED, SOFT_DOCKER], "mlx5_2", 1, 1),
        ([SOFT_DOCKER, SOFT_LOOPBACK], "rxe0", 1, 1),
        ([SOFT_LOOPBACK, UNADDRESSED], "rxe0", 1, 1),
        ([INFINIBAND, DOWN, ROCE_V1_ONLY, PRIVATE], "irdma0", 1, 1),
        ([DOWN, CONNECTX], "mlx5_0", 1, 3),
    ],
)
def test_the_best_gid_is_chosen(devices: list[Device], name: str, number: int, index: int) -> None:
    choice = choose(devices)
    assert (choice.device, choice.port, choice.gid.index) == (name, number, index)
    assert choice.mtu == 4096


@pytest.mark.parametrize(
    ("wish", "name", "index"),
    [
        (Wish(device="mlx5_1"), "mlx5_1", 3),
        (Wish(device="mlx5_bond_0", gid="4"), "mlx5_bond_0", 4),
        (Wish(gid="198.51.100.5"), "mlx5_bond_0", 6),
        (Wish(gid="::ffff:198.51.100.5"), "mlx5_bond_0", 6),
        (Wish(gid="2001:db8:0:0::17"), "mlx5_1", 3),
        (Wish(device="mlx5_0", port=1, gid="1"), "mlx5_0", 1),
        (Wish(device="rxe_docker"), "rxe_docker", 1),
    ],
)
def test_what_is_wished_for_is_chosen(wish: Wish, name: str, index: int) -> None:
    devices = [CONNECTX, CONNECTX_IPV6, CONNECTX_VLAN, SOFT_DOCKER]
    choice = choose(devices, wish)
    assert (choice.device, choice.gid.index) == (name, index)


@pytest.mark.parametrize(
    ("devices", "wish", "words"),
    [
        ([], Wish(), ["no RDMA device"]),
        ([CONNECTX], Wish(device="mlx5_9"), ["mlx5_9", "mlx5_0"]),
        ([INFINIBAND], Wish(), ["mlx5_ib0 port 1", "InfiniBand"]),
        ([DOWN], Wish(), ["mlx5_3 port 1", "DOWN"]),
        ([ROCE_V1_ONLY], Wish(), ["RoCE v1", "192.0.2.50"]),
        ([CONNECTX], Wish(gid="203.0.113.1"), ["not the one wanted"]),
        ([CONNECTX], Wish(gid="2"), ["RoCE v1"]),
        ([CONNECTX], Wish(gid="mlx5"), ["no GID"]),
        ([CONNECTX], Wish(port=2), ["no port fits"]),
        ([device("mlx5_4", port())], Wish(), ["GID table is empty"]),
    ],
)
def test_where_nothing_serves_the_error_says_why(
    devices: list[Device], wish: Wish, words: list[str]
) -> None:
    with pytest.raises(DeviceError) as raised:
        choose(devices, wish)
    assert all(word in str(raised.value) for word in words)


def test_candidates_come_in_the_order_of_preference() -> None:
    everything = [SOFT_DOCKER, SOFT_LOOPBACK, UNADDRESSED, AUTO_ADDRESSED, CONNECTX_VLAN]
    order = [str(choice.gid) for choice in candidates(everything, Wish())]
    assert order == [
        "198.51.100.5",
        "fd00::7",
        "2001:db8::5",
        "127.0.0.1",
        "fe80::200:ff:fe00:0",
        MAC_LOCAL,
        MAC_LOCAL,
        MAC_LOCAL,
        "fe80::1",
        "169.254.7.7",
        "172.17.0.1",
        "fe80::42:1ff:fe02:3",
    ]
