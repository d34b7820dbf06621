"""What sessions hold, wait for and leave behind, seen by clients that work by hand."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from kvstore import checksums
from kvstore.control.interface import Ending
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.identity import ROOT_PARENT
from kvstore.node import RESERVATION_SECONDS
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import (
    BUSY,
    FILL,
    HELD,
    REFUSED,
    Abort,
    Exists,
    Get,
    Match,
    Ping,
    Reserve,
    Write,
    parse_answer,
    request_header,
)
from tests.kvstore.peer import BLOCK, Peer, content
from tests.kvstore.shared_peer import SharedPeer
from tests.kvstore.victim import CHAIN
from tests.kvstore.watched import Operator, Watched, chain, connected, name
from tests.running import make_config, wait_for


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make_config(tmp_path)) as running:
        yield running


@contextlib.contextmanager
def victim(daemon: Watched, stage: str) -> Iterator[subprocess.Popen[str]]:
    """A client process that has come to a stage."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.kvstore.victim", str(daemon.path), stage],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


# --- waiting for what another writes --------------------------------------------------------------


def ask_later(peer: Peer, daemon: Watched, hashes: Sequence[bytes], deadline_ms: int) -> Get:
    """Ask for blocks that are being written, and return when the node waits for them."""
    request = Get(hashes, wait=True)
    peer.send(request_header(77, deadline_ms, request))
    wait_for(lambda: daemon.waiting == 1)
    return request


def answer_of(peer: Peer, request: Get) -> tuple[bytes, bytes]:
    header, payload = peer.receive()
    assert header[0] == 77
    return parse_answer(request, header).tiers, payload


def test_get_waits_for_what_another_writes(daemon: Watched) -> None:
    hashes = chain("handover", length=3)
    with connected(daemon) as writer, connected(daemon) as reader:
        number = writer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
        request = ask_later(reader, daemon, hashes, 10_000)
        for index in range(3):
            assert daemon.waiting == 1
            writer.ask(Write(number, [index], 0, BLOCK), content(hashes[index]))
        tiers, payload = answer_of(reader, request)
        assert tiers == b"\2\2\2"
        assert payload == b"".join(map(content, hashes))
    assert daemon.metrics.lookups == 3


def test_get_that_does_not_wait_misses_what_is_being_written(daemon: Watched) -> None:
    with connected(daemon) as writer, connected(daemon) as reader:
        writer.ask(Reserve(ROOT_PARENT, [name(1)]))
        assert reader.ask(Get([name(1)]))[0].tiers == b"\0"
    assert daemon.metrics.misses == {"pending": 1}


def test_get_stops_waiting_at_its_deadline(daemon: Watched) -> None:
    with connected(daemon) as writer, connected(daemon) as reader:
        writer.put([name(1)])
        writer.ask(Reserve(name(1), [name(1, 1)]))
        began = time.monotonic()
        answer, payload = reader.ask(Get([name(1), name(1, 1)], wait=True), deadline_ms=150)
        assert 0.14 < time.monotonic() - began < 5
        assert answer.tiers == b"\2\0"
        assert payload == content(name(1)), "what was there is returned all the same"
    assert daemon.metrics.misses == {"deadline": 1}


@pytest.mark.parametrize("end", ["abort", "close", "expire"])
def test_get_stops_waiting_when_the_writer_gives_up(daemon: Watched, end: str) -> None:
    with connected(daemon) as writer, connected(daemon) as reader:
        number = writer.ask(Reserve(ROOT_PARENT, [name(1)]))[0].reservation
        request = ask_later(reader, daemon, [name(1)], 60_000)
        if end == "abort":
            writer.ask(Abort(number))
        elif end == "close":
            writer.sock.close()
        else:
            daemon.pass_time(RESERVATION_SECONDS + 1)
        assert answer_of(reader, request) == (b"\0", b"")
        assert reader.put([name(1)]) == bytes([FILL]), "the reader computes it itself"
    assert daemon.metrics.misses == {"pending": 1}


def test_reader_that_leaves_while_it_waits_is_forgotten(daemon: Watched) -> None:
    with connected(daemon) as writer:
        number = writer.ask(Reserve(ROOT_PARENT, [name(1)]))[0].reservation
        with connected(daemon) as reader:
            ask_later(reader, daemon, [name(1)], 60_000)
        wait_for(lambda: daemon.metrics.sessions == 1)
        writer.ask(Write(number, [0], 0, BLOCK), content(name(1)))


# --- what is being written belongs to its writer --------------------------------------------------


def test_child_of_a_block_that_is_being_written_is_left_to_its_writer(daemon: Watched) -> None:
    with connected(daemon) as first, connected(daemon) as second:
        number = first.ask(Reserve(ROOT_PARENT, [name(1)]))[0].reservation
        answer = second.ask(Reserve(name(1), chain(1, length=2)))[0]
        assert answer.verdicts == bytes([BUSY, BUSY])
        assert answer.reservation == 0
        first.ask(Write(number, [0], 0, BLOCK), content(name(1)))
        assert second.put(chain(1, length=2), parent=name(1)) == bytes([FILL, FILL])
        assert second.ask(Match([name(1), *chain(1, length=2)]))[0].tiers == b"\2\2\2"


def test_abort_gives_up_all_that_is_not_committed(daemon: Watched) -> None:
    hashes = chain("half", length=4)
    with connected(daemon) as writer, connected(daemon) as other:
        number = writer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
        writer.ask(Write(number, [0, 2], 0, BLOCK), content(hashes[0]) + content(hashes[2]))
        writer.ask(Abort(number))
        assert other.ask(Exists(hashes))[0].tiers == b"\2\0\0\0"
        assert other.put(hashes) == bytes([HELD, FILL, FILL, FILL])
        for request in (Abort(number), Write(number, [1], 0, 0)):
            with pytest.raises(InvalidRequest):
                writer.ask(request)
    assert daemon.metrics.puts["aborted"] == 3


# --- clients that die -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "kept"), [("reserves", 0), ("sends half", 1), ("leases", 4), ("waits", 0)]
)
def test_killed_client_holds_nothing(daemon: Watched, stage: str, kept: int) -> None:
    with connected(daemon) as witness:
        if stage == "waits":
            number = witness.ask(Reserve(ROOT_PARENT, CHAIN))[0].reservation
        with victim(daemon, stage) as process:
            wait_for(lambda: daemon.metrics.sessions == 2)
            if stage == "waits":
                wait_for(lambda: daemon.waiting == 1)
            elif stage == "leases":
                assert daemon.metrics.pins == 4
            else:
                assert daemon.metrics.reservations == 4 - kept
            process.kill()
            wait_for(lambda: daemon.metrics.sessions == 1)
        if stage == "waits":
            witness.ask(Abort(number))
        assert (daemon.metrics.pins, daemon.metrics.reservations) == (0, 0)
        assert daemon.used == kept * BLOCK
        assert daemon.waiting == 0
        assert witness.put(CHAIN) == bytes([HELD] * kept + [FILL] * (4 - kept))
        assert witness.ask(Get(CHAIN))[1] == b"".join(map(content, CHAIN))


def test_client_that_does_not_read_costs_pins_only_while_it_lives(daemon: Watched) -> None:
    with victim(daemon, "does not read") as process:
        wait_for(lambda: daemon.metrics.pins > 0)
        with connected(daemon) as other:
            assert other.ask(Get(CHAIN))[1] == b"".join(map(content, CHAIN))
        process.kill()
        wait_for(lambda: daemon.metrics.pins == 0)


def test_stopped_client_keeps_its_memory_but_not_the_names(daemon: Watched) -> None:
    """After it wakes it writes to memory that is still its own, to nobody's harm."""
    with victim(daemon, "writes late") as process, connected(daemon) as other:
        process.send_signal(signal.SIGSTOP)
        daemon.pass_time(RESERVATION_SECONDS - 1)
        assert other.put(CHAIN) == bytes([BUSY] * 4)
        daemon.pass_time(2)
        assert other.put(CHAIN) == bytes([FILL] * 4)
        assert daemon.used == 8 * BLOCK
        assert daemon.metrics.reservations == 4
        assert process.stdin is not None
        assert process.stdout is not None
        process.send_signal(signal.SIGCONT)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert bytes.fromhex(process.stdout.readline()) == bytes(4), "committed, though expired"
        assert other.ask(Get(CHAIN))[1] == b"".join(map(content, CHAIN))
        assert daemon.used == 4 * BLOCK
        assert daemon.metrics.reservations == 0


def test_memory_of_a_session_that_the_node_ends_lingers_until_the_client_is_gone(
    daemon: Watched,
) -> None:
    with connected(daemon) as other, SharedPeer(daemon.path) as broken:
        broken.put(chain("leased", length=2))
        lease = broken.get(chain("leased", length=2))
        assert lease.lease
        reserved = broken.reserve([name(9)])
        broken.sock.sendall(b"nonsense" * 4)
        header, _ = broken.receive()
        assert header[:3] == [0, 1, "protocol"]
        with pytest.raises(EOFError):
            broken.receive()
        other.ask(Ping())
        assert (daemon.metrics.pins, daemon.metrics.reservations) == (2, 1)
        assert other.put([name(9)]) == bytes([BUSY])
        daemon.pass_time(RESERVATION_SECONDS + 1)
        assert other.put([name(9)]) == bytes([FILL])
        broken.write((reserved.locations or [])[0], b"late" * (BLOCK // 4))
        assert broken.read((lease.locations or [])[0]) == content(name("leased", 0))
        assert other.ask(Get([name(9)]))[1] == content(name(9))
        broken.sock.sendall(b"more nonsense that nobody reads")
        broken.sock.close()
        wait_for(lambda: daemon.metrics.sessions == 1)
        assert (daemon.metrics.pins, daemon.metrics.reservations) == (0, 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_client_that_breaks_the_protocol_and_leaves_is_forgotten(
    daemon: Watched, transport: str
) -> None:
    for _ in range(5):
        with Peer(daemon.path) as peer:
            peer.hello(transport=transport)
            peer.ask(Reserve(ROOT_PARENT, [name(1)]))
            peer.sock.sendall(b"nonsense" * 4)
        wait_for(lambda: daemon.metrics.sessions == 0)


# --- limits ---------------------------------------------------------------------------------------


def test_no_more_sessions_than_allowed(tmp_path: Path) -> None:
    config = make_config(tmp_path, limits={"sessions": 2})
    with Watched(config) as daemon, connected(daemon), Peer(daemon.path) as third:
        with connected(daemon), pytest.raises(Unavailable, match="2 sessions"):
            third.hello()
        wait_for(lambda: daemon.metrics.sessions == 1)
        third.hello()
        assert third.put([name(1)]) == bytes([FILL])
    assert daemon.metrics.sessions_opened == 3


def test_session_holds_no_more_than_its_share(tmp_path: Path) -> None:
    """8 blocks of 128: what is above is a miss, or refused, until something is given back."""
    hashes = chain("share", length=10)
    with Watched(make_config(tmp_path, limits={"session_pinned": 1 / 16})) as daemon:
        with SharedPeer(daemon.path) as peer:
            assert peer.put(hashes) == bytes([FILL] * 8 + [REFUSED] * 2)
            assert peer.put(hashes[8:], parent=hashes[7]) == bytes([FILL] * 2)
            first = peer.get([name("absent"), *hashes])
            assert first.tiers == bytes([0] + [2] * 8 + [0] * 2)
            assert len(first.locations or ()) == 8
            assert daemon.metrics.misses == {"absent": 1, "no_space": 2}
            assert peer.get(hashes[:1]).tiers == b"\0"
            assert peer.get(hashes[:1]).lease == 0
            assert peer.put([name("new")]) == bytes([REFUSED])
            peer.release(first.lease, first.lease, 12345)
            second = peer.get(hashes[2:])
            assert second.tiers == bytes([2] * 8)
            assert daemon.metrics.pins == 8
            peer.release(second.lease)
            peer.release(second.lease)
            peer.ask(Ping())
            assert daemon.metrics.pins == 0
            reserved = peer.reserve(chain("more", length=6))
            assert peer.get(hashes).tiers == bytes([2] * 2 + [0] * 8)
            peer.ask(Abort(reserved.reservation))
        assert daemon.metrics.lookups == 11 + 1 + 1 + 8 + 10


# --- many at once ---------------------------------------------------------------------------------


class Worker:
    """A client that puts and gets chains shared with all others, a step at a time."""

    def __init__(self, path: Path, number: int) -> None:
        self.rng = random.Random(number)
        self.peer: Peer = SharedPeer(path) if number % 2 else Peer(path)
        if not number % 2:
            self.peer.hello()
        self.asked = self.read = 0
        self.request: Any = None
        self._steps = self._work()
        self._answer: tuple[Any, bytes] = (None, b"")

    def send(self) -> None:
        """Send the next request, or nothing where the work is done."""
        try:
            self.request, payload = self._steps.send(self._answer if self.request else None)
        except StopIteration:
            self.request = None
            return
        self.peer.send(request_header(7, 10_000, self.request), payload)

    def receive(self) -> None:
        """Receive the answer to it."""
        header, payload = self.peer.receive()
        self._answer = parse_answer(self.request, header), payload

    def _work(self) -> Iterator[tuple[Any, bytes]]:
        for _ in range(6):
            hashes = chain("shared", self.rng.randrange(60), length=4)
            yield from self._put(hashes)
            yield from self._get(hashes)

    def _put(self, hashes: list[bytes]) -> Any:
        answer, _ = yield Reserve(ROOT_PARENT, hashes), b""
        wanted = [index for index, verdict in enumerate(answer.verdicts) if verdict == FILL]
        if not wanted:
            return
        blocks = [content(hashes[index]) for index in wanted]
        if isinstance(self.peer, SharedPeer):
            for place, block in zip(answer.locations, blocks, strict=True):
                self.peer.write(place, block)
            yield Write(answer.reservation, wanted), b""
        else:
            yield Write(answer.reservation, wanted, 0, BLOCK), b"".join(blocks)

    def _get(self, hashes: list[bytes]) -> Any:
        self.asked += len(hashes)
        answer, payload = yield Get(hashes, wait=self.rng.random() < 0.5), b""
        found = [block for block, tier in zip(hashes, answer.tiers, strict=True) if tier]
        assert answer.tiers.rstrip(b"\0").count(0) == 0, "a hole in a prefix"
        if isinstance(self.peer, SharedPeer):
            for place, block in zip(answer.locations or (), found, strict=True):
                assert self.peer.read(place) == content(block)
            self.peer.release(answer.lease)
        else:
            assert payload == b"".join(map(content, found))
        self.read += len(found)


def test_fifty_clients_at_once_read_what_was_put(daemon: Watched) -> None:
    """More chains than fit, so that blocks leave while others are put and read."""
    with contextlib.ExitStack() as stack:
        workers = [Worker(daemon.path, number) for number in range(50)]
        for worker in workers:
            stack.enter_context(worker.peer)
        active, rng = list(workers), random.Random(0)
        while active:
            rng.shuffle(active)
            for worker in active:
                worker.send()
            active = [worker for worker in active if worker.request is not None]
            for worker in active:
                worker.receive()
        assert sum(worker.read for worker in workers) > 600
        assert daemon.metrics.lookups == sum(worker.asked for worker in workers)
        assert sum(daemon.metrics.evictions.values()) > 0


# --- integrity = always ---------------------------------------------------------------------------


@pytest.fixture
def careful(tmp_path: Path) -> Iterator[Watched]:
    config = make_config(tmp_path, policy={"integrity": "always"}, ssd={"capacity": "32MiB"})
    with Watched(config) as running:
        yield running


def flip_a_bit_in_memory(daemon: Watched, block: bytes) -> None:
    node = daemon.daemon.node

    def flip() -> None:
        (entry,) = node.index.find(block)
        assert entry.dram is not None
        node.dram.view(entry.dram, BLOCK)[BLOCK // 2] ^= 1

    daemon.call(flip)


def test_block_that_changed_in_memory_is_a_miss(careful: Watched) -> None:
    hashes = chain("flipped", length=4)
    with connected(careful) as peer:
        peer.put(hashes)
        assert peer.ask(Get(hashes))[1] == b"".join(map(content, hashes))
        flip_a_bit_in_memory(careful, hashes[2])
        answer, payload = peer.ask(Get(hashes[1:3]))
        assert (answer.tiers, payload) == (b"\2\0", content(hashes[1]))
        assert peer.ask(Exists(hashes))[0].tiers == b"\2\2\0\0"
        assert careful.metrics.misses == {"corrupt": 1}
        found = careful.explain(hashes)
        assert (found.ending, found.blocks, found.tier) == (Ending.CORRUPT, 2, "dram")
        assert peer.put(hashes) == bytes([HELD, HELD, FILL, FILL])
        assert peer.ask(Get(hashes))[1] == b"".join(map(content, hashes))


def test_block_that_changed_after_its_promotion_is_a_miss(tmp_path: Path) -> None:
    config = make_config(tmp_path, policy={"integrity": "always"}, ssd={"capacity": "32MiB"})
    with Watched(config) as daemon, connected(daemon) as peer:
        peer.put([name(1)])
    with Watched(config) as daemon, connected(daemon) as peer:
        assert peer.ask(Get([name(1)]))[0].tiers == b"\3"
        flip_a_bit_in_memory(daemon, name(1))
        assert peer.ask(Get([name(1)]))[0].tiers == b"\0"
        assert daemon.metrics.misses == {"corrupt": 1}


def test_wrong_checksum_is_refused(careful: Watched) -> None:
    block = content(name(1))
    with connected(careful) as peer:
        number = peer.ask(Reserve(ROOT_PARENT, [name(1)]))[0].reservation
        with pytest.raises(InvalidRequest, match="checksum"):
            peer.ask(Write(number, [0], 0, BLOCK, checksums=[crc32c(block) ^ 1]), block)
        assert peer.ask(Exists([name(1)]))[0].tiers == b"\0"
        right = Write(number, [0], 0, BLOCK, checksums=[crc32c(block)])
        assert peer.ask(right, block)[0].committed == b"\1"
        assert peer.ask(Get([name(1)]))[1] == block


def test_block_does_not_change_between_its_check_and_its_commit(careful: Watched) -> None:
    """A second write of the same block comes while the first is being checked."""
    with connected(careful) as peer:
        for round_ in range(10):
            block = name("twice", round_)
            number = peer.ask(Reserve(ROOT_PARENT, [block]))[0].reservation
            first = request_header(1001, 5000, Write(number, [0], 0, BLOCK))
            second = request_header(1002, 5000, Write(number, [0], 0, BLOCK))
            peer.send(first, content(block))
            peer.send(second, b"x" * BLOCK)
            answers = {header[0]: header for header, _ in (peer.receive(), peer.receive())}
            assert answers[1001][1:] == [0, b"\1"]
            assert answers[1002][1:3] == [1, "invalid_request"]
            assert peer.ask(Get([block]))[1] == content(block)


def test_blocks_that_overtake_their_parents_are_answered_for_as_stored(
    careful: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = chain("overtaken", length=3)

    def check_slowly(view: memoryview) -> int:
        if view[:32] == hashes[0]:
            time.sleep(0.05)
        return crc32c(view)

    monkeypatch.setattr(checksums, "crc32c", check_slowly)
    with connected(careful) as peer:
        number = peer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
        for index in range(3):
            request = Write(number, [index], 0, BLOCK)
            peer.send(request_header(1000 + index, 5000, request), content(hashes[index]))
        answers = [peer.receive()[0] for _ in range(3)]
        assert answers == [[1000 + index, 0, b"\1"] for index in range(3)]


def test_blocks_given_up_as_soon_as_they_are_written_are_not_stored(careful: Watched) -> None:
    hashes = chain("given up", length=2)
    with connected(careful) as peer:
        number = peer.ask(Reserve(ROOT_PARENT, hashes))[0].reservation
        write = encode(request_header(1001, 5000, Write(number, [0, 1], 0, BLOCK)), 2 * BLOCK)
        abort = encode(request_header(1002, 5000, Abort(number)), 0)
        peer.sock.sendall(write + b"".join(map(content, hashes)) + abort)
        answers = {header[0]: header for header, _ in (peer.receive(), peer.receive())}
        assert answers[1001][1:3] == [1, "invalid_request"]
        assert answers[1002][1] == 0
        assert peer.ask(Exists(hashes))[0].tiers == b"\0\0"
        assert peer.put(hashes) == bytes([FILL, FILL])


def test_get_of_nothing_finds_nothing(careful: Watched, tmp_path: Path) -> None:
    with connected(careful) as peer:
        for wait in (False, True):
            answer, payload = peer.ask(Get([], wait=wait))
            assert (answer.tiers, answer.lease, payload) == (b"", 0, b"")
        assert peer.ask(Match([]))[0].tiers == b""
        assert peer.ask(Reserve(ROOT_PARENT, []))[0].verdicts == b""


# --- checksums for other nodes --------------------------------------------------------------------


def test_checksums_are_those_of_the_bytes_and_are_computed_once(daemon: Watched) -> None:
    hashes = chain("summed", length=3)
    request = Get([hashes[0], name("absent"), *hashes[1:]], checksums=True)
    with connected(daemon) as peer:
        peer.put(hashes)
        wanted = [crc32c(content(block)) for block in hashes]
        answer, payload = peer.ask(request)
        assert (answer.tiers, answer.checksums) == (b"\2\0\2\2", wanted)
        assert payload == b"".join(map(content, hashes))
        entry = daemon.daemon.node.index.find(hashes[1])[0]
        assert entry.checksum == wanted[1]
        assert entry.dram is not None
        changed = content(hashes[1])[0] ^ 1
        daemon.call(daemon.daemon.node.dram.view(entry.dram, 1).__setitem__, 0, changed)
        answer, payload = peer.ask(request)
        assert answer.checksums == wanted
        assert payload != b"".join(map(content, hashes))
        assert peer.ask(Get(hashes))[0].checksums is None
        with pytest.raises(InvalidRequest):
            peer.ask(Get(hashes, length=10, checksums=True))


def test_checksums_of_blocks_on_ssd_are_those_of_their_records(tmp_path: Path) -> None:
    hashes = chain("below", length=20)
    with Watched(make_config(tmp_path, ssd={"capacity": "32MiB"})) as daemon:
        with connected(daemon) as peer:
            peer.put(hashes)
            Operator(daemon).flush("dram")
            answer, payload = peer.ask(Get(hashes, checksums=True))
            assert answer.tiers == b"\3" * 20
            assert answer.checksums == [crc32c(content(block)) for block in hashes]
            assert payload == b"".join(map(content, hashes))
        assert all(daemon.daemon.node.index.find(block)[0].checksum is None for block in hashes)
