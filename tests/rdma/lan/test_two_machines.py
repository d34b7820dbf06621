"""The LAN is what the other tests here take it for: RoCEv2 between two machines, on record."""

from __future__ import annotations

import signal
import subprocess
import time

from tests.rdma.guest.capture import read_capture
from tests.rdma.guest.peer import ADDRESSES, CAPTURE, Peer
from tests.rdma.guest.perftest import arguments, measure_against

SIZE = 1 << 20
TIMES = 10
TRAFFIC_CLASS = 104
A, B = ADDRESSES["a"], ADDRESSES["b"]


def test_processes_over_there_can_be_stopped_and_killed(peer: Peer) -> None:
    process = peer.start(["sh", "-c", "echo started; exec sleep 600"])
    process.wait_for("started")
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert peer.start(["sh", "-c", "hostname; exit 5"]).wait() == 5


def test_a_write_crosses_the_lan_as_roce_v2(peer: Peer) -> None:
    before = read_capture(CAPTURE)
    command = ["ib_write_bw", *arguments(SIZE, TIMES, f"--tclass={TRAFFIC_CLASS}")]
    server = peer.start(command)
    assert measure_against(peer.address, command) > 0
    assert server.wait() == 0
    after = read_capture(CAPTURE)
    moved = after.roce - before.roce
    assert moved[A, B] >= SIZE * TIMES
    assert moved[B, A] < SIZE
    assert (after.tcp - before.tcp).total() < 1 << 16
    assert set(after.dscp - before.dscp) == {TRAFFIC_CLASS >> 2}


def test_the_other_machine_crashes_and_comes_back(peer: Peer) -> None:
    assert _comes_to(peer.address, answers=True)
    peer.crash()
    assert _comes_to(peer.address, answers=False)
    peer.wait_until_up()
    assert _comes_to(peer.address, answers=True)


def _comes_to(address: str, *, answers: bool) -> bool:
    command = ["busybox", "ping", "-c", "1", "-W", "1", address]
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False)
        if (done.returncode == 0) == answers:
            return True
    return False
