"""``kvstore doctor`` where there is RDMA, and where what it needs is taken away."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main
from kvstore.config import RdmaSection
from kvstore.doctor.facts import gather
from kvstore.doctor.rdma import check_rdma

Findings = list[dict[str, Any]]


@pytest.fixture
def doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setenv("KVSTORE_NODE__STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("KVSTORE_CONTROL", "127.0.0.1:1")

    def run(*arguments: str) -> tuple[int, str]:
        status = main.main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run


def of(findings: Findings, check: str) -> Findings:
    return [one for one in findings if one["check"] == check]


def test_what_the_guest_has_is_found(doctor: Any) -> None:
    status, out = doctor("--json")
    found: Findings = json.loads(out)
    assert status == 0
    (device,) = [one for one in of(found, "rdma") if one["detail"].startswith("rxe0")]
    assert device["state"] == "ok"
    (port,) = [one for one in of(found, "rdma port") if one["detail"].startswith("rxe0")]
    assert "ACTIVE, LinkUp, Ethernet" in port["detail"]
    assert "RoCE MTU 4096" in port["detail"]
    (taken,) = [one for one in of(found, "rdma gid") if one["detail"].endswith("; taken")]
    assert taken["detail"] == "rxe0 port 1, GID 1: 127.0.0.1, RoCE v2, lo; taken"
    (pyverbs,) = of(found, "pyverbs")
    assert pyverbs["state"] == "ok"
    assert "rdma-core 44.0" in pyverbs["detail"]
    (choice,) = of(found, "rdma choice")
    assert choice["state"] == "ok"
    assert choice["detail"].startswith("rxe0 port 1, GID 1 (127.0.0.1): RoCE MTU 4096")
    assert of(found, "gpu memory")[0]["detail"] == "no NVIDIA driver"


def test_people_are_shown_the_same(doctor: Any) -> None:
    status, out = doctor()
    assert status == 0
    assert "rxe0" in out
    assert "RoCE v2" in out


def test_a_device_that_is_configured_and_not_there() -> None:
    section = RdmaSection(mode="require", device="mlx5_0")
    findings = list(check_rdma(section, gather(section)))
    (choice,) = [one for one in findings if one.check == "rdma choice"]
    assert choice.state == "failure"
    assert "there is rxe0" in choice.detail
    assert "rdma.device" in choice.remedy


UNPRIVILEGED = """
import encodings.ascii, os, resource
from kvstore.config import RdmaSection
from kvstore.doctor import memory, rdma
from kvstore.doctor.facts import gather
from rdma.verbs.binding import load
load()  # now: that user can read neither the interpreter's library nor the checkout
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setresuid(65534, 65534, 65534)
for one in memory.check_locked_memory(1 << 30, memory.lock_limit(), devices=True, required=True):
    print(one)
for one in rdma.check_rdma(RdmaSection(), gather(RdmaSection())):
    print(one)
"""


def test_a_user_who_may_not_lock_memory_or_open_the_device() -> None:
    file = "/dev/infiniband/uverbs0"
    mode = os.stat(file).st_mode
    os.chmod(file, 0o600)
    try:
        done = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
    finally:
        os.chmod(file, mode)
    assert done.returncode == 0, done.stderr
    assert "64 KiB may be locked" in done.stdout
    assert f"{file} is missing or not for this user" in done.stdout
    assert "ulimit -l unlimited" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) != (65536, 65536)
