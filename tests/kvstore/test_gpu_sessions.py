"""What sessions may ask about a node's GPUs, and what they are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore import gpu_session
from kvstore.errors import AccessDenied, InvalidRequest
from kvstore.process_watch import ProcessWatch
from kvstore.protocol.messages import (
    DRAM,
    HBM,
    DeviceSegments,
    Get,
    Ping,
    Release,
    release_header,
    request_header,
    unmapped_header,
)
from rdma.transport import split_place
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content
from tests.kvstore.test_process_watch import pidfds
from tests.kvstore.watched import Watched, chain
from tests.running import make_config, wait_for
from tests.shared_gpu import SharedDevice, SharedMapper, name_of, read

HASHES = chain("gpu", length=4)
OTHER = replace(NAMESPACE, tenant="other")
OFFER: dict[str, object] = {"gpu": name_of(0), "gpus": [name_of(0)]}
SECTIONS = {"hbm": {"capacity": "1MiB", "segment": "512KiB", "gpus": [0, 1]}}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make_config(tmp_path, **SECTIONS), make_device=SharedDevice) as running:
        with Peer(running.path) as owner:
            owner.hello()
            owner.put(HASHES)
        yield running


@pytest.fixture
def peer(daemon: Watched) -> Iterator[Peer]:
    """A session that computes on GPU 0, on which the blocks are."""
    with Peer(daemon.path) as opened:
        welcome = opened.hello(transport="shm", offer=OFFER)
        assert welcome.details["gpus"] == [name_of(0), name_of(1)]
        wait_for(lambda: get(opened)[0] == bytes([HBM]) * 4, 20.0)
        yield opened


def get(peer: Peer, device: bool = True) -> tuple[bytes, list[int]]:
    """The tiers of the blocks and where they lie; nothing is kept pinned."""
    answer = peer.ask(Get(HASHES, device=device))[0]
    peer.send(release_header([answer.lease]))
    return answer.tiers, list(answer.locations)


def departing(daemon: Watched) -> int:
    sessions = daemon.daemon.server.gpus
    assert sessions is not None
    return sessions.departing


def sharers(daemon: Watched) -> int:
    gpus = daemon.daemon.node.gpus
    assert gpus is not None

    def count() -> int:
        return sum(segment.sharers for number in (0, 1) for segment in gpus[number].tier.segments())

    counted: int = daemon.call(count)
    return counted


def test_a_handle_maps_the_blocks(peer: Peer) -> None:
    _, places = get(peer)
    numbers = {split_place(place)[0] for place in places}
    assert len(numbers) == 1
    (segment,) = peer.ask(DeviceSegments(list(numbers)))[0].segments
    number, size, handle = segment
    assert (number, size) == (numbers.pop(), 512 << 10)
    mapper = SharedMapper(set())
    start = mapper.open(handle)
    for place, name in zip(places, HASHES, strict=True):
        assert read(start + split_place(place)[1], BLOCK) == content(name)
    mapper.close(start)


def test_a_byte_range_lies_within_the_blocks(peer: Peer) -> None:
    _, whole = get(peer)
    answer = peer.ask(Get(HASHES, 128, 64, device=True))[0]
    assert list(answer.locations) == [place + 128 for place in whole]


def test_who_does_not_ask_for_it_is_answered_from_memory(peer: Peer, daemon: Watched) -> None:
    tiers, places = get(peer, device=False)
    assert tiers == bytes([DRAM]) * 4
    dram = daemon.daemon.node.dram
    for place, name in zip(places, HASHES, strict=True):
        assert bytes(dram.view(place, BLOCK)) == content(name)


def test_a_segment_is_shared_once_with_a_session(peer: Peer, daemon: Watched) -> None:
    number = split_place(get(peer)[1][0])[0]
    first = peer.ask(DeviceSegments([number]))[0]
    assert peer.ask(DeviceSegments([number]))[0] == first
    assert sharers(daemon) == 1
    for _ in range(2):  # what is not mapped, and what never was, is nothing to speak of
        peer.send(unmapped_header([number, 77]))
    peer.ask(Ping())
    assert sharers(daemon) == 0
    assert peer.ask(DeviceSegments([number]))[0] == first
    assert sharers(daemon) == 1
    peer.send(unmapped_header([number]))
    peer.sock.close()
    wait_for(lambda: not daemon.metrics.sessions)
    assert departing(daemon) == sharers(daemon) == 0


def test_what_a_client_said_before_it_went_counts(peer: Peer, daemon: Watched) -> None:
    number = split_place(get(peer)[1][0])[0]
    peer.ask(DeviceSegments([number]))
    busy, gone = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        gone.wait(30)

    # The node gets to read all this when nobody takes the first answer any more.
    daemon.loop.call_soon_threadsafe(hold)
    assert busy.wait(30)
    peer.send(request_header(100, 5000, Ping()))
    peer.send(unmapped_header([number]))
    peer.sock.close()
    gone.set()
    wait_for(lambda: not daemon.metrics.sessions)
    assert departing(daemon) == sharers(daemon) == 0


def test_a_session_that_says_nothing_is_remembered(peer: Peer, daemon: Watched) -> None:
    number = split_place(get(peer)[1][0])[0]
    peer.ask(DeviceSegments([number]))
    peer.sock.close()
    wait_for(lambda: departing(daemon) == 1)
    assert sharers(daemon) == 1  # this process lives


def test_a_process_that_breaks_sessions_gets_no_more(
    peer: Peer, daemon: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_session, "MOST_DEPARTING", 1)
    peer.ask(DeviceSegments([split_place(get(peer)[1][0])[0]]))
    peer.sock.close()
    wait_for(lambda: departing(daemon) == 1)
    with Peer(daemon.path) as again:
        assert "too many" in str(again.hello(transport="shm", offer=OFFER).details["why"])


def test_a_session_that_mapped_nothing_is_forgotten(peer: Peer, daemon: Watched) -> None:
    assert peer.ask(Get(HASHES, device=True))[0].tiers == bytes([HBM]) * 4
    assert pidfds() == 1
    peer.sock.close()
    wait_for(lambda: not daemon.metrics.sessions)
    assert departing(daemon) == daemon.daemon.node.metrics.pins == 0
    assert pidfds() == 0


@pytest.mark.parametrize("number", [1 << 16, 5, 7 << 16, 0xF_FFFF])
def test_what_is_out_of_reach_or_nowhere_is_refused(peer: Peer, number: int) -> None:
    with pytest.raises(AccessDenied):
        peer.ask(DeviceSegments([number]))


def test_no_other_tenant_gets_a_segment(peer: Peer, daemon: Watched) -> None:
    number = split_place(get(peer)[1][0])[0]
    with Peer(daemon.path) as stranger:
        stranger.hello(OTHER, transport="shm", offer=OFFER)
        with pytest.raises(AccessDenied):
            stranger.ask(DeviceSegments([number]))
    assert sharers(daemon) == 0


@pytest.mark.parametrize(
    ("transport", "offer", "why"),
    [
        ("tcp", OFFER, ""),
        ("shm", None, ""),
        (
            "shm",
            {"gpu": bytes(16), "gpus": [bytes(16)]},
            "gpu: the client reaches none of the node's GPUs",
        ),
    ],
)
def test_sessions_without_a_gpu_see_memory(
    peer: Peer, daemon: Watched, transport: str, offer: dict[str, object] | None, why: str
) -> None:
    with Peer(daemon.path) as plain:
        details = plain.hello(transport=transport, offer=offer).details
        assert "gpus" not in details
        assert details["why"] == why
        answer, payload = plain.ask(Get(HASHES, device=True))
        assert answer.tiers == bytes([DRAM]) * 4
        if transport == "tcp":
            assert payload == b"".join(map(content, HASHES))
        with pytest.raises(InvalidRequest, match="reach"):
            plain.ask(DeviceSegments([0]))


def test_a_process_that_cannot_be_seen_sees_memory(
    daemon: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessWatch, "of_peer", lambda _: None)
    with Peer(daemon.path) as peer:
        details = peer.hello(transport="shm", offer=OFFER).details
        assert details == {"why": "gpu: the node can't see the client's process"}


def test_a_node_without_gpus_says_so(tmp_path: Path) -> None:
    with Watched(make_config(tmp_path)) as daemon, Peer(daemon.path) as peer:
        details = peer.hello(transport="shm", offer=OFFER).details
        assert details == {"why": "gpu: the node keeps no blocks on GPUs"}


def test_an_offer_that_makes_no_sense_opens_no_session(daemon: Watched) -> None:
    with Peer(daemon.path) as peer, pytest.raises(InvalidRequest, match="GPU is named"):
        peer.hello(transport="shm", offer={"gpu": b"", "gpus": []})


def test_leases_are_bounded_on_gpus_too(tmp_path: Path) -> None:
    config = make_config(tmp_path, **SECTIONS, limits={"session_pinned": 3 * BLOCK / (8 << 20)})
    with Watched(config, make_device=SharedDevice) as daemon, Peer(daemon.path) as peer:
        with Peer(daemon.path) as owner:
            owner.hello()
            for at, name in enumerate(HASHES):
                owner.put([name], HASHES[at - 1] if at else bytes(32))
        peer.hello(transport="shm", offer=OFFER)

        def there() -> bool:
            answer = peer.ask(Get(HASHES[:3], device=True))[0]
            peer.send(release_header([answer.lease]))
            return answer.tiers == bytes([HBM]) * 3

        wait_for(there, 20.0)
        answer = peer.ask(Get(HASHES, device=True))[0]
        assert answer.tiers == bytes([HBM] * 3 + [0])
        assert len(answer.locations) == 3
        assert daemon.daemon.node.metrics.pins == 3
        peer.send(release_header([answer.lease]))
        peer.ask(Ping())
        assert daemon.daemon.node.metrics.pins == 0


def test_release_is_what_ends_a_read(peer: Peer, daemon: Watched) -> None:
    (session,) = daemon.call(daemon.daemon.server.sessions)
    lease = peer.ask(Get(HASHES, device=True))[0].lease
    assert session.reading_gpu
    memory = peer.ask(Get(HASHES))[0].lease
    peer.send([0, Release.op, 0, [lease]])
    peer.ask(Ping())
    assert not session.reading_gpu
    assert session.writing is False
    peer.send(release_header([memory]))
