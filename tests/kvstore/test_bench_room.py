"""Whether a benchmark may put its blocks into a node."""

import pytest

from kvstore.bench_room import check_most, check_own, check_room, most, room
from kvstore.control.interface import NodeStatus, TenantReport, TierReport
from kvstore.errors import ConfigError, OutOfSpace

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


def test_no_more_fits_than_dram_holds_with_everything_else_gone() -> None:
    small = TenantReport("small", dram=0, ssd=0, dram_quota=150 * MIB)
    assert [most(status(used, lost=100), "default") // MIB for used in (0, 700)] == [800, 800]
    # Beyond its quota a tenant's own blocks leave first, as soon as DRAM is full.
    assert [most(status(used, small), "small") // MIB for used in (100, 800)] == [800, 150]


def test_more_than_dram_holds_is_refused_whatever_may_be_dropped() -> None:
    check_most(status(900), "default", 900 * MIB)
    with pytest.raises(OutOfSpace, match=r"900 MiB at most, .* wants 901 MiB: .*--memory 900MiB$"):
        check_most(status(900), "default", 901 * MIB)
    with pytest.raises(OutOfSpace, match=r"wants 901 MiB: take less with --memory 100MiB$"):
        check_room(status(800), "default", 901 * MIB)


def test_the_benchmark_wants_memory_of_its_own() -> None:
    check_own((100 * MIB, ""), 80 * MIB, 10 * MIB)
    check_own(None, 80 * MIB, 10 * MIB)
    with pytest.raises(ConfigError, match=r"101 MiB .* 100 MiB available in /g: .*--memory 80MiB$"):
        check_own((100 * MIB, " in /g"), 81 * MIB, 10 * MIB)
    with pytest.raises(ConfigError, match="smaller blocks or batches$"):
        check_own((15 * MIB, ""), 10 * MIB, 10 * MIB)
