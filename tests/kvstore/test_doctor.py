"""Each check of ``doctor`` against a machine that is as it should be, and one that is not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import Config, DramSection
from kvstore.doctor import Finding, examine, machine, memory
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
    findings = examine(config)
    assert {finding.check for finding in findings} >= {
        "python", "platform", "memory", "huge pages", "locked memory", "state directory", "ssd",
        "socket", "clock", "extras", "rdma", "pyverbs", "gpu memory",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    assert all(finding.remedy for finding in findings if finding.state == "failure")


def test_platform() -> None:
    assert only(machine.check_platform("Linux", 64)).state == "ok"
    assert only(machine.check_platform("Darwin", 64)).state == "failure"
    assert only(machine.check_platform("Linux", 32)).state == "failure"


@pytest.mark.parametrize(
    ("available", "state"), [("4194304 kB", "ok"), ("1024 kB", "failure"), ("", "warning")]
)
def test_memory_against_the_capacity(tmp_path: Path, available: str, state: str) -> None:
    meminfo = tmp_path / "proc" / "meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text(f"MemTotal: 8388608 kB\nMemAvailable: {available}\nodd line\n")
    config = load(environ={"KVSTORE_DRAM__CAPACITY": "1GiB"}).config
    findings = list(memory.check_memory(config, tmp_path))
    assert findings[0].state == "ok"
    assert findings[-1].state == state
    assert list(memory.check_memory(config, tmp_path / "nowhere"))[-1].state == "warning"


def machine_with(
    root: Path, group: str, limit: tuple[str, str], usage: tuple[str, str], stat: str
) -> Path:
    """A machine with 4 GiB available, and this process in a control group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemAvailable: 4194304 kB\n")
    (root / "proc/self/cgroup").write_text(f"9:cpu:/else\n{group}\n")
    kinds, path = group.split(":")[1:]
    top = root / "sys/fs/cgroup" / ("memory" if kinds else "")
    place = top / path.lstrip("/")
    (place / "below").mkdir(parents=True)
    for name, value in (limit, usage, ("memory.stat", stat)):
        (place / name).write_text(value + "\n")
    return place


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    place = machine_with(
        tmp_path, "0::/pod", ("memory.max", "1073741824"), ("memory.current", "536870912"),
        "anon 5\nactive_file 1048576\ninactive_file 1048576\nshmem 99\n",
    )  # fmt: skip
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/below\n")
    finding = memory.check_capacity(DramSection(capacity=2 << 30), tmp_path)
    assert finding.state == "failure"
    assert finding.detail == (f"514 MiB available in {place}, 2 GiB wanted for the DRAM tier")
    assert finding.remedy == "kvstore serve --dram 385MiB"
    assert memory.check_capacity(DramSection(capacity=1 << 29), tmp_path).state == "ok"
    (place / "memory.max").write_text("max\n")
    assert memory.check_capacity(DramSection(capacity=2 << 30), tmp_path).state == "ok"


def test_limits_of_old_control_groups_count(tmp_path: Path) -> None:
    place = machine_with(
        tmp_path, "4:memory:/pod", ("memory.limit_in_bytes", "1073741824"),
        ("memory.usage_in_bytes", "1073741824"), "active_file 7\ntotal_active_file 4096\n",
    )  # fmt: skip
    assert list(memory.room(tmp_path)) == [(4096, place)]


def test_more_than_there_is_can_be_had_by_will(tmp_path: Path) -> None:
    machine_with(tmp_path, "0::/", ("memory.max", "1"), ("memory.current", "1"), "")
    finding = memory.check_capacity(DramSection(overcommit=True), tmp_path)
    assert finding.state == "warning"
    assert "1 GiB wanted" in finding.detail


NEVER = "always within_size advise [never] deny force"
ADVISE = "always within_size [advise] never deny force"


@pytest.mark.parametrize(
    ("shared", "large", "state"),
    [
        (ADVISE, None, "ok"),
        ("[always] within_size advise never deny force", None, "ok"),
        (NEVER, None, "warning"),
        ("always within_size advise never [deny] force", None, "warning"),
        (None, None, "warning"),
        (NEVER, "always [inherit] within_size advise never", "warning"),
        (ADVISE, "always [inherit] within_size advise never", "ok"),
        (NEVER, "always inherit within_size [advise] never", "ok"),
        (ADVISE, "always inherit within_size advise [never]", "warning"),
    ],
)
def test_transparent_huge_pages(
    tmp_path: Path, shared: str | None, large: str | None, state: str
) -> None:
    folder = tmp_path / "transparent_hugepage"
    (folder / "hugepages-2048kB").mkdir(parents=True)
    if shared is not None:
        (folder / "shmem_enabled").write_text(shared + "\n")
    if large is not None:
        (folder / "hugepages-2048kB" / "shmem_enabled").write_text(large + "\n")
    finding = only(memory.check_huge_pages(DramSection(), tmp_path))
    assert finding.state == state
    if state == "warning":
        assert "4 KiB" in finding.detail
        assert finding.remedy
    if shared == NEVER and large is None:
        assert finding.remedy.startswith(f"echo advise > {folder}/shmem_enabled")


@pytest.mark.parametrize(
    ("free", "state"), [("512", "ok"), ("511", "failure"), ("0", "failure"), (None, "failure")]
)
def test_reserved_huge_pages(tmp_path: Path, free: str | None, state: str) -> None:
    folder = tmp_path / "hugepages" / "hugepages-2048kB"
    folder.mkdir(parents=True)
    if free is not None:
        (folder / "free_hugepages").write_text(free + "\n")
    finding = only(memory.check_huge_pages(DramSection(huge_pages="require"), tmp_path))
    assert finding.state == state
    assert ("vm.nr_hugepages=512" in finding.remedy) == (state == "failure" and free is not None)


def test_huge_pages_that_are_not_wanted(tmp_path: Path) -> None:
    assert only(memory.check_huge_pages(DramSection(huge_pages="never"), tmp_path)).state == "info"


@pytest.mark.parametrize(
    ("limit", "devices", "required", "state"),
    [
        (None, True, True, "ok"),
        (2 << 30, True, True, "ok"),
        (8 << 20, False, False, "info"),
        (8 << 20, True, False, "warning"),
        (8 << 20, True, True, "failure"),
        (1 << 30, True, False, "warning"),
    ],
)
def test_locked_memory(limit: int | None, devices: bool, required: bool, state: str) -> None:
    finding = only(memory.check_locked_memory(1 << 30, limit, devices=devices, required=required))
    assert finding.state == state
    assert ("ulimit -l unlimited" in finding.remedy) == (state != "ok")


def test_who_may_lock_any_amount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (65536, 65536))
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t000001ffffffffff\n")
    assert memory.lock_limit(status) is None
    status.write_text("CapEff:\t0000000000000000\n")
    assert memory.lock_limit(status) == 65536
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    assert memory.lock_limit(status) is None


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(machine.check_state_directory(tmp_path)).state == "ok"
    assert "will be made" in only(machine.check_state_directory(tmp_path / "a" / "b")).detail
    assert only(machine.check_socket(tmp_path / "a.sock")).state == "ok"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    finding = only(machine.check_state_directory(tmp_path))
    assert finding.state == "failure"
    assert finding.remedy.startswith("install -d")
    assert only(machine.check_socket(tmp_path / "a.sock")).state == "failure"


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    assert only(machine.check_socket(tmp_path / ("x" * 108))).state == "failure"
    assert only(machine.check_socket(None)).state == "info"


def test_ssd_space_and_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(capacity: str) -> Config:
        return load(
            environ={
                "KVSTORE_SSD__CAPACITY": capacity,
                "KVSTORE_SSD__DIRECTORY": str(tmp_path),
                "KVSTORE_SSD__REGION": "4096",
            }
        ).config

    assert list(machine.check_ssd(config("8192")))[-1].state == "ok"
    too_much = list(machine.check_ssd(config("900PiB")))[-1]
    assert too_much.state == "failure"
    assert "--ssd" in too_much.remedy

    def refuse(*arguments: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.open", refuse)
    direct = next(machine.check_ssd(config("8192")))
    assert direct.state == "failure"
    assert "tmpfs" in direct.remedy


def test_a_clock_from_the_past() -> None:
    assert only(machine.check_clock()).state == "ok"
    past = only(machine.check_clock(0.0))
    assert past.state == "warning"
    assert "1970-01-01" in past.detail


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    findings = list(machine.check_extras())
    assert {finding.state for finding in findings} == {"info"}
    assert "'.[plot]'" in findings[-1].remedy
    assert all("pip install kvstore" not in finding.remedy for finding in findings)
    assert any(finding.state == "failure" for finding in machine.check_python())
