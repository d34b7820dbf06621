"""Each check of ``doctor`` against a machine that is as it should be, and one that is not."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import doctor
from kvstore.doctor import Finding
from kvstore.sources import load


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_whole_examination_changes_nothing_that_lasts(tmp_path: Path) -> None:
    config = load(
        environ={
            "KVSTORE_NODE__STATE_DIRECTORY": str(tmp_path),
            "KVSTORE_SSD__CAPACITY": "1MiB",
            "KVSTORE_SSD__DIRECTORY": str(tmp_path / "ssd"),
            "KVSTORE_DRAM__CAPACITY": "1MiB",
        }
    ).config
    findings = doctor.examine(config)
    assert {finding.check for finding in findings} == {
        "python", "platform", "memory", "huge pages", "locked memory", "state directory", "ssd",
        "socket", "clock", "extras", "rdma",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    assert all(finding.remedy for finding in findings if finding.state == "failure")


def test_platform() -> None:
    assert only(doctor.check_platform("Linux", 64)).state == "ok"
    assert only(doctor.check_platform("Darwin", 64)).state == "failure"
    assert only(doctor.check_platform("Linux", 32)).state == "failure"


@pytest.mark.parametrize(
    ("available", "state"), [("4194304 kB", "ok"), ("1024 kB", "failure"), ("", "warning")]
)
def test_memory_against_the_capacity(tmp_path: Path, available: str, state: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 8388608 kB\nMemAvailable: {available}\nodd line\n")
    config = load(environ={"KVSTORE_DRAM__CAPACITY": "1GiB"}).config
    findings = list(doctor.check_memory(config, meminfo))
    assert findings[0].state == "ok"
    assert findings[-1].state == state
    assert list(doctor.check_memory(config, tmp_path / "nowhere"))[-1].state == "warning"


@pytest.mark.parametrize(
    ("wanted", "setting", "state"),
    [
        ("auto", "always within_size [advise] never deny force", "ok"),
        ("auto", "always within_size advise [never] deny force", "warning"),
        ("require", "always within_size advise [never] deny force", "failure"),
        ("require", None, "failure"),
        ("never", None, "info"),
    ],
)
def test_huge_pages(tmp_path: Path, wanted: str, setting: str | None, state: str) -> None:
    file = tmp_path / "shmem_enabled"
    if setting is not None:
        file.write_text(setting)
    finding = only(doctor.check_huge_pages(wanted, file))
    assert finding.state == state
    assert bool(finding.remedy) == (state in ("warning", "failure"))


def test_locked_memory() -> None:
    assert only(doctor.check_locked_memory(1 << 30, resource.RLIM_INFINITY)).state == "ok"
    assert only(doctor.check_locked_memory(1 << 30, 1 << 30)).state == "ok"
    low = only(doctor.check_locked_memory(1 << 30, 8 << 20))
    assert low.state == "info"
    assert "ulimit -l unlimited" in low.remedy


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(doctor.check_state_directory(tmp_path)).state == "ok"
    assert "will be made" in only(doctor.check_state_directory(tmp_path / "a" / "b")).detail
    assert only(doctor.check_socket(tmp_path / "a.sock")).state == "ok"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    finding = only(doctor.check_state_directory(tmp_path))
    assert finding.state == "failure"
    assert finding.remedy.startswith("install -d")
    assert only(doctor.check_socket(tmp_path / "a.sock")).state == "failure"


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    assert only(doctor.check_socket(tmp_path / ("x" * 108))).state == "failure"
    assert only(doctor.check_socket(None)).state == "info"


def test_ssd_space_and_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(capacity: str) -> doctor.Config:
        return load(
            environ={
                "KVSTORE_SSD__CAPACITY": capacity,
                "KVSTORE_SSD__DIRECTORY": str(tmp_path),
                "KVSTORE_SSD__REGION": "4096",
            }
        ).config

    assert list(doctor.check_ssd(config("8192")))[-1].state == "ok"
    too_much = list(doctor.check_ssd(config("900PiB")))[-1]
    assert too_much.state == "failure"
    assert "--ssd" in too_much.remedy

    def refuse(*arguments: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.open", refuse)
    direct = next(doctor.check_ssd(config("8192")))
    assert direct.state == "failure"
    assert "tmpfs" in direct.remedy


def test_a_clock_from_the_past() -> None:
    assert only(doctor.check_clock()).state == "ok"
    past = only(doctor.check_clock(0.0))
    assert past.state == "warning"
    assert "1970-01-01" in past.detail


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    findings = list(doctor.check_extras())
    assert {finding.state for finding in findings} == {"info"}
    assert "'.[plot]'" in findings[-1].remedy
    assert all("pip install kvstore" not in finding.remedy for finding in findings)
    assert any(finding.state == "failure" for finding in doctor.check_python())


def test_rdma_devices(tmp_path: Path) -> None:
    assert only(doctor.check_rdma(tmp_path / "nowhere")).state == "info"
    assert only(doctor.check_rdma(tmp_path)).state == "info"
    (tmp_path / "rxe0").mkdir()
    assert only(doctor.check_rdma(tmp_path)) == Finding("rdma", "ok", "devices: rxe0")
