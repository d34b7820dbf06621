"""Real daemons: how they start, refuse to, stop, die, and come back warm."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.config import Config
from kvstore.errors import ConfigError, StateLocked, Unavailable
from kvstore.identity import ROOT_PARENT
from kvstore.protocol.messages import (
    FILL,
    HELD,
    PROTOCOL_VERSION,
    Exists,
    Get,
    Hello,
    Match,
    Ping,
    Reserve,
    Write,
    parse_answer,
    request_header,
)
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content
from tests.kvstore.shared_peer import SharedPeer
from tests.kvstore.watched import Watched, chain, connected, name
from tests.running import DaemonProcess, daemon_process, make_config, wait_for

SSD = {"capacity": "32MiB"}


@contextlib.contextmanager
def client_of(config: Config) -> Iterator[Peer]:
    assert config.listen.unix is not None
    with Peer(config.listen.unix) as peer:
        peer.hello()
        yield peer


def bytes_of(hashes: Sequence[bytes]) -> bytes:
    return b"".join(map(content, hashes))


# --- starting -------------------------------------------------------------------------------------


def refused(*flags: str) -> tuple[int, str]:
    """Exit status and standard error of a ``kvstore serve`` that can't start."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", "--control", "off", "--metrics", "off", *flags],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, " ".join(ended.stderr.split())


def test_one_daemon_to_a_state_directory_and_to_an_ssd_directory(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with daemon_process(make_config(tmp_path / "first", ssd=SSD)) as first:
        status, said = refused("--state-directory", str(tmp_path / "first"))
        assert status == main.FAILED
        assert f"in use by process {first.pid}" in said
        status, said = refused(
            *("--state-directory", str(tmp_path / "other"), "--dram", "8MiB", "--ssd", "32MiB"),
            *("--ssd-directory", str(tmp_path / "first" / "ssd")),
        )
        assert status == main.FAILED
        assert f"in use by process {first.pid}" in said
        assert str(tmp_path / "first" / "ssd") in said
        with client_of(first.config) as peer:
            assert peer.put([name(1)]) == bytes([FILL])


def test_impossible_settings_are_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state = ("--state-directory", str(tmp_path / "state"))
    status, said = refused("--state-directory", str(tmp_path / "file" / "state"))
    assert (status, "node.state_directory" in said, "Not a directory" in said) == (2, True, True)
    status, said = refused(
        *(*state, "--dram", "8MiB", "--ssd", "900TiB"), "--ssd-directory", str(tmp_path / "ssd")
    )
    assert status == main.USAGE
    assert "ssd capacity" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = refused(*state, "--dram", "8MiB", "--tcp", f"127.0.0.1:{port}")
    assert status == main.USAGE
    assert "listen.tcp" in said
    assert "in use" in said


def test_more_dram_than_there_is_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    status, said = refused("--state-directory", str(tmp_path / "state"), "--dram", "900TiB")
    assert status == main.USAGE
    assert "dram.capacity: " in said
    assert "900 TiB wanted for the DRAM tier kvstore serve --dram " in said
    assert "dram.overcommit=true" in said
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("key", ["control", "metrics"])
def test_a_second_node_is_told_how_to_get_addresses_of_its_own(tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError) as refusal:
            Watched(make_config(tmp_path, listen={key: address})).__enter__()
    assert str(refusal.value) == (
        f"listen.{key} {address}: Address already in use; "
        f"choose another address with --{key}, or --{key} off"
    )


def logged(tmp_path: Path, *flags: str) -> list[dict[str, object]]:
    """What a node logs of its start, one session, and its stop."""
    state = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore", "serve", "--log-format", "json", "--dram", "8MiB",
         "--control", "off", "--metrics", "off", "--state-directory", str(state), *flags],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            wait_for((state / "kvstore.sock").exists, 30)
            with Peer(state / "kvstore.sock") as peer:
                described = dict(NAMESPACE.describe())
                peer.ask(Hello(PROTOCOL_VERSION, "default", None, described, 0, ["tcp"], "pid 1"))
            process.terminate()
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    return [json.loads(line) for line in said.splitlines()]


def test_the_log_says_what_serves_and_who_came_and_went(tmp_path: Path) -> None:
    lines = logged(tmp_path)
    events = {str(line["event"]): line for line in lines}
    assert (events["serving"]["dram"], events["serving"]["ssd"]) == ("8 MiB", "none")
    assert "dram only: a restart forgets all blocks" in events
    for event in ("session opened", "session closed"):
        of_session = {key: events[event][key] for key in ("client", "over", "tenant")}
        assert of_session == {"client": "pid 1", "over": "tcp", "tenant": "default"}
    assert not any("<" in str(value) for line in lines for value in line.values())


def test_the_log_of_a_node_with_an_ssd_warns_of_no_loss(tmp_path: Path) -> None:
    lines = logged(tmp_path, "--ssd", "32MiB", "--ssd-directory", str(tmp_path / "ssd"))
    events = {str(line["event"]): line for line in lines}
    assert events["serving"]["ssd"] == "32 MiB"
    assert "dram only: a restart forgets all blocks" not in events


@pytest.mark.parametrize("key", ["tcp", "control", "metrics"])
def test_start_that_fails_leaves_nothing_behind(tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        failing = Watched(make_config(tmp_path, ssd=SSD, listen={key: address}))
        with pytest.raises(ConfigError, match=f"listen.{key} {address}"):
            failing.__enter__()
    assert not (tmp_path / "kvstore.sock").exists()
    with Watched(make_config(tmp_path, ssd=SSD)) as daemon, connected(daemon) as peer:
        peer.ask(Ping())


def test_state_and_ssd_may_share_a_directory(tmp_path: Path) -> None:
    config = make_config(tmp_path, ssd={**SSD, "directory": str(tmp_path)})
    with Watched(config) as daemon, connected(daemon) as peer:
        peer.put([name(1)])
        with pytest.raises(StateLocked):
            Watched(config).__enter__()
    with Watched(config) as daemon, connected(daemon) as peer:
        assert peer.ask(Get([name(1)]))[1] == content(name(1))


def test_socket_of_a_dead_daemon_is_replaced_and_that_of_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    with daemon_process(make_config(tmp_path)) as daemon:
        daemon.kill()
        assert (tmp_path / "kvstore.sock").is_socket()
        daemon.start()
        second = make_config(tmp_path / "other", listen={"unix": str(tmp_path / "kvstore.sock")})
        with pytest.raises(ConfigError, match="listen.unix .*in use"):
            Watched(second).__enter__()
        with client_of(daemon.config) as peer:
            peer.ask(Ping())
        assert daemon.stop() == 0
        assert not (tmp_path / "kvstore.sock").exists()
    (tmp_path / "kvstore.sock").write_text("somebody's file")
    with pytest.raises(ConfigError, match="listen.unix"):
        Watched(make_config(tmp_path)).__enter__()
    assert (tmp_path / "kvstore.sock").read_text() == "somebody's file"


# --- stopping -------------------------------------------------------------------------------------


def test_daemon_takes_all_descriptors_that_it_may_have(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with daemon_process(make_config(tmp_path)) as daemon:
            assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_daemon_out_of_descriptors_rests_and_serves_again(tmp_path: Path) -> None:
    with daemon_process(make_config(tmp_path)) as daemon:
        held = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (held + 4, held + 4))
        with client_of(daemon.config) as before, contextlib.ExitStack() as stack:
            for _ in range(20):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.connect(str(daemon.config.listen.unix))
            began, spent = time.monotonic(), cpu_seconds(daemon.pid)
            time.sleep(1.0)
            share = (cpu_seconds(daemon.pid) - spent) / (time.monotonic() - began)
            assert share < 0.2
            before.ask(Ping())
        with client_of(daemon.config):
            pass


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_stopped_daemon_comes_back_warm(tmp_path: Path) -> None:
    hashes = chain("warm", length=40)
    branch = chain("branch", length=3)
    with daemon_process(make_config(tmp_path, ssd=SSD)) as daemon:
        with client_of(daemon.config) as peer:
            peer.put(hashes)
            peer.put(branch, parent=hashes[19])
        for _ in range(2):
            assert daemon.stop() == 0
            assert not (tmp_path / "kvstore.sock").exists()
            daemon.start()
            with client_of(daemon.config) as peer:
                assert peer.ask(Match(hashes))[0].tiers == b"\3" * 40
                assert peer.ask(Get(hashes))[1] == bytes_of(hashes)
                assert peer.ask(Get(branch))[1] == bytes_of(branch)
                assert peer.put(hashes) == bytes([HELD]) * 40


def test_what_was_evicted_does_not_come_back(tmp_path: Path) -> None:
    hashes = chain("evicted", length=6)
    with Watched(make_config(tmp_path, ssd=SSD)) as daemon, connected(daemon) as peer:
        peer.put(hashes)
        daemon.call(daemon.inspection().flush, "dram")
        daemon.call(daemon.inspection().evict, NAMESPACE.fingerprint, hashes[4])
        assert peer.ask(Match(hashes))[0].tiers == b"\3" * 4
    with Watched(make_config(tmp_path, ssd=SSD)) as daemon, connected(daemon) as peer:
        assert peer.ask(Exists(hashes))[0].tiers == b"\3\3\3\3\0\0"


def test_stop_finishes_what_is_in_flight(tmp_path: Path) -> None:
    hashes = chain("in flight", length=3)
    with daemon_process(make_config(tmp_path, ssd=SSD, node={"grace": 20.0})) as daemon:
        with client_of(daemon.config) as writer, client_of(daemon.config) as reader:
            number = writer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
            wanted = Get(hashes[:2], wait=True)
            reader.send(request_header(77, 20_000, wanted))
            write = Write(number, [0, 1], 0, BLOCK)
            payload = bytes_of(hashes[:2])
            writer.send(request_header(78, 5000, write), payload[:1000], len(payload))
            daemon.signal(signal.SIGTERM)
            wait_for(lambda: not (tmp_path / "kvstore.sock").exists())
            with pytest.raises(Unavailable, match="stopping"):
                reader.ask(Match(hashes))
            writer.sock.sendall(payload[1000:])
            assert parse_answer(write, writer.receive()[0]).committed == b"\1\1"
            header, received = reader.receive()
            assert parse_answer(wanted, header).tiers == b"\2\2"
            assert received == payload
            with pytest.raises(Unavailable):
                writer.ask(Reserve(hashes[1], [name("more")]))
            last = writer.ask(Write(number, [2], 0, BLOCK), content(hashes[2]))[0]
            assert last.committed == b"\1"
            with pytest.raises((EOFError, ConnectionError)):
                writer.receive()
        assert daemon.stop() == 0
        daemon.start()
        with client_of(daemon.config) as peer:
            assert peer.ask(Get(hashes))[1] == bytes_of(hashes)


def test_client_that_hangs_costs_no_more_than_the_grace_time(tmp_path: Path) -> None:
    hashes = chain("kept", length=60)
    with daemon_process(make_config(tmp_path, ssd=SSD, node={"grace": 2.0})) as daemon:
        with client_of(daemon.config) as hanging, SharedPeer(tmp_path / "kvstore.sock") as looking:
            hanging.put(hashes)
            number = hanging.ask(Reserve(ROOT_PARENT, [name("never")]))[0].reservation
            write = request_header(5, 60_000, Write(number, [0], 0, BLOCK))
            hanging.send(write, bytes(100), BLOCK)
            lease = looking.get(hashes[:3])
            assert looking.read((lease.locations or [])[0]) == content(hashes[0])
            began = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began < 10
            seen = [looking.read(place) for place in lease.locations or ()]
            assert seen == list(map(content, hashes[:3])), "a block changed under its reader"
        daemon.start()
        with client_of(daemon.config) as peer:
            assert peer.ask(Match([*hashes, name("never")]))[0].tiers == b"\3" * 60
            assert peer.ask(Get(hashes))[1] == bytes_of(hashes)


# --- dying ----------------------------------------------------------------------------------------


def put_until_killed(daemon: DaemonProcess, seconds: float, chains: list[list[bytes]]) -> None:
    """Put chains that share their beginnings; the daemon is killed after ``seconds``."""
    with client_of(daemon.config) as peer:
        killer = threading.Timer(seconds, daemon.signal, (signal.SIGKILL,))
        killer.start()
        try:
            while True:
                number = len(chains)
                shared = chain("shared", number // 8, length=4)
                chains.append(shared + chain("own", number, length=4))
                peer.put(chains[-1])
        except (EOFError, OSError):
            pass
        killer.join()
    daemon.kill()


def served(peer: Peer, hashes: list[bytes]) -> int:
    """How many blocks of a chain are held; they must be a prefix, and right."""
    tiers = peer.ask(Exists(hashes))[0].tiers
    held = len(tiers.rstrip(b"\0"))
    assert 0 not in tiers[:held], "a hole in a prefix"
    answer, payload = peer.ask(Get(hashes[:held]))
    found = [block for block, tier in zip(hashes, answer.tiers, strict=False) if tier]
    assert payload == bytes_of(found)
    return len(found)


def test_killed_daemon_serves_only_whole_and_right_prefixes(tmp_path: Path) -> None:
    rng = random.Random(11)
    config = make_config(tmp_path, ssd=SSD, policy={"low_watermark": 0.3, "high_watermark": 0.5})
    chains: list[list[bytes]] = []
    recovered = 0
    with daemon_process(config) as daemon:
        for _ in range(5):
            put_until_killed(daemon, rng.uniform(0.05, 0.4), chains)
            daemon.start()
            with client_of(config) as peer:
                recovered += sum(served(peer, hashes) for hashes in chains[-150:])
        assert daemon.stop() == 0
    assert recovered, "nothing was taken up again: the test proved nothing"
