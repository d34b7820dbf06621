"""What `doctor` says of the GPUs of an HBM tier."""

from __future__ import annotations

import pytest

from kvstore.config import HbmSection
from kvstore.doctor.hbm import check_hbm
from tests.tiers.cpu_device import CpuDevice

SECTION = HbmSection(capacity=1 << 20, segment=1 << 20, gpus=(0, 3))


def test_nothing_is_said_where_the_tier_is_off() -> None:
    assert list(check_hbm(HbmSection())) == []


def test_a_machine_without_a_gpu_is_named_as_such() -> None:
    for finding in check_hbm(SECTION):
        assert (finding.check, finding.state) == ("hbm", "failure")
        assert "there is no GPU" in finding.detail
        assert finding.remedy


@pytest.mark.parametrize(
    ("total", "state", "says"),
    [(1 << 20, "ok", "has 1 MiB free of 1 MiB wanted"), (1 << 19, "warning", "less than 1 MiB")],
)
def test_each_gpu_is_looked_at(total: int, state: str, says: str) -> None:
    found = list(check_hbm(SECTION, lambda _: CpuDevice(total)))
    assert [finding.state for finding in found] == [state] * 2
    assert says in found[0].detail
    assert [finding.detail[:5] for finding in found] == ["GPU 0", "GPU 3"]


def test_a_gpu_that_refuses_is_a_finding() -> None:
    device = CpuDevice(1 << 20)
    device.refused.add("open")
    (finding,) = check_hbm(HbmSection(capacity=1 << 20), lambda _: device)
    assert finding.state == "failure"
    assert "open refused" in finding.detail
