"""Whether a benchmark may put its blocks into a node."""

import pytest

from kvstore.bench_room import check_room, room
from kvstore.control.interface import NodeStatus, TenantReport, TierReport
from kvstore.errors import OutOfSpace

MIB = 1 << 20


def status(used: int, *tenants: TenantReport, lost: int = 0) -> NodeStatus:
    dram = TierReport("dram", 1000 * MIB, used * MIB, lost * MIB, blocks=1)
    ssd = TierReport("ssd", 9000 * MIB, 0, 0, blocks=0)
    return NodeStatus(
        name="node",
        incarnation="1",
        version="0",
        pid=1,
        uptime=1.0,
        state="serving",
        listens=(),
        sessions=0,
        namespaces=0,
        blocks=1,
        pins=0,
        reservations=0,
        tiers=(ssd, dram),
        tenants=tenants,
    )


@pytest.mark.parametrize(
    ("used", "lost", "expected"), [(0, 0, 900), (400, 100, 400), (900, 0, 0), (990, 10, 0)]
)
def test_a_tenth_of_dram_is_left_alone(used: int, lost: int, expected: int) -> None:
    assert room(status(used, lost=lost), "default") == expected * MIB


def test_a_quota_bounds_its_tenant() -> None:
    mine = TenantReport("mine", dram=100 * MIB, ssd=0, dram_quota=150 * MIB)
    others = TenantReport("*", dram=0, ssd=0, dram_quota=30 * MIB)
    free = TenantReport("free", dram=0, ssd=0)
    found = status(100, mine, others, free)
    assert [room(found, one) // MIB for one in ("mine", "free", "somebody")] == [50, 800, 30]


def test_a_refusal_says_what_would_fit() -> None:
    check_room(status(800), "default", 100 * MIB)
    with pytest.raises(OutOfSpace, match=r"100 MiB of DRAM .* wants 101 MiB: .*--memory 100MiB"):
        check_room(status(800), "default", 101 * MIB)
    with pytest.raises(OutOfSpace, match=r"has 0 B .*: let it drop blocks of others with --make"):
        check_room(status(1000), "default", MIB)
