"""What the guest's makers decide without a guest: a run that proves nothing must not look green."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rdma.guest import suite
from tests.rdma.guest.boot import Wish
from tests.rdma.guest.capture import read_capture
from tests.rdma.guest.errors import GuestError
from tests.rdma.guest.initramfs import find_kernel

PASSED = "<testcase/>"
OTHERS = {
    "failed": "<testcase><failure/></testcase>",
    "broken": "<testcase><error/></testcase>",
    "skipped": "<testcase><skipped/></testcase>",
}


class ScriptedRun:
    """Stands for the guest: leaves what a run of pytest there would leave."""

    def __init__(self, status: int, cases: str | None) -> None:
        self.status = status
        self.cases = cases
        self.wishes: list[Wish] = []

    def __call__(self, wish: Wish) -> int:
        self.wishes.append(wish)
        if self.cases is not None:
            assert wish.results is not None
            text = f"<testsuites><testsuite>{self.cases}</testsuite></testsuites>"
            (wish.results / "report.xml").write_text(text)
        return self.status


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedRun]:
    class Installed(ScriptedRun):
        def __init__(self, status: int, cases: str | None) -> None:
            super().__init__(status, cases)
            monkeypatch.setattr(suite, "run", self)
            monkeypatch.setattr(suite, "_compile", lambda: None)

    return Installed


def test_all_passed(scripted: type[ScriptedRun], capsys: pytest.CaptureFixture[str]) -> None:
    run = scripted(0, PASSED * 3)
    assert suite.main([]) == 0
    assert [wish.pair for wish in run.wishes] == [False, True]
    assert "test-rdma: 6 passed over RoCEv2" in capsys.readouterr().out


@pytest.mark.parametrize("kind", OTHERS)
def test_a_test_that_did_not_pass_fails_the_run(scripted: type[ScriptedRun], kind: str) -> None:
    scripted(0, PASSED + OTHERS[kind])
    assert suite.main([]) == 1


@pytest.mark.parametrize(
    ("status", "cases"), [(125, None), (0, None), (0, ""), (5, ""), (3, PASSED)]
)
def test_a_run_that_proves_nothing_fails(
    scripted: type[ScriptedRun], status: int, cases: str | None
) -> None:
    scripted(status, cases)
    assert suite.main([]) == 1


@pytest.mark.parametrize("error", [GuestError("no qemu"), TimeoutError()])
def test_a_guest_that_cannot_run_fails(
    monkeypatch: pytest.MonkeyPatch, scripted: type[ScriptedRun], error: Exception
) -> None:
    def run(wish: Wish) -> int:
        raise error

    scripted(0, PASSED)
    monkeypatch.setattr(suite, "run", run)
    assert suite.main([]) == 1


@pytest.mark.parametrize(
    ("selected", "pairs"),
    [
        (["tests/rdma/verbs/test_guest.py"], [False]),
        (["tests/rdma/lan"], [True]),
        (["tests/tiers"], []),
    ],
)
def test_a_selection_boots_only_what_it_needs(
    scripted: type[ScriptedRun], selected: Sequence[str], pairs: list[bool]
) -> None:
    run = scripted(0, PASSED)
    assert suite.main(selected) == (0 if pairs else 1)
    assert [wish.pair for wish in run.wishes] == pairs


def test_no_kernel_with_rxe_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "vmlinuz-0.0.1-none").touch()
    with pytest.raises(GuestError, match=r"vmlinuz-0\.0\.1-none"):
        find_kernel(tmp_path)


def test_a_capture_tells_roce_from_tcp(tmp_path: Path) -> None:
    write = struct.pack(">HHHH", 50000, 4791, 8 + 4000, 0)
    other = struct.pack(">HHHH", 50000, 53, 8 + 30, 0)
    stream = struct.pack(">HHIIBBHHH", 9400, 40000, 0, 0, 8 << 4, 0x18, 0, 0, 0)
    frames = [
        (_frame(17, write, 8 + 4000, traffic_class=104), 14 + 28 + 4000),
        (_frame(17, write, 8 + 4000, traffic_class=104), 14 + 28 + 4000),
        (_frame(17, other, 8 + 30), 14 + 28 + 30),
        (_frame(6, stream, 32 + 500), 14 + 20 + 32 + 500),
        (b"\xff" * 12 + b"\x08\x06" + bytes(28), 42),
    ]
    capture = tmp_path / "lan.pcap"
    capture.write_bytes(
        struct.pack("<IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 128, 1)
        + b"".join(struct.pack("<IIII", 0, 0, len(f), length) + f for f, length in frames)
        + struct.pack("<IIII", 0, 0, 100, 100)
        + b"torn"
    )
    traffic = read_capture(capture)
    ends = ("198.51.100.1", "198.51.100.2")
    assert traffic.roce == {ends: 8000}
    assert traffic.tcp == {ends: 500}
    assert traffic.dscp == {26: 2}


def _frame(protocol: int, inner: bytes, length: int, traffic_class: int = 0) -> bytes:
    addresses = bytes([198, 51, 100, 1, 198, 51, 100, 2])
    ip = struct.pack(">BBHHHBBH", 0x45, traffic_class, 20 + length, 0, 0, 64, protocol, 0)
    return bytes(12) + b"\x08\x00" + ip + addresses + inner
