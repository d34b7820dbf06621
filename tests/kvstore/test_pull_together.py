"""One node pulls a chain from several others at once, and from the start of each that is meant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from kvstore.identity import ROOT_PARENT
from kvstore.peer_session import Greeting
from kvstore.protocol.frames import encode
from kvstore.protocol.messages import (
    Exists,
    ExistsAnswer,
    Get,
    GetAnswer,
    answer_header,
)
from kvstore.pull import Pull, Puller, Shortfall
from tests.client.scripted_node import Session
from tests.kvstore.peer import BLOCK, NAMESPACE, content
from tests.kvstore.pulling import LISTEN, only_tcp, port_of, scripted_peer
from tests.kvstore.watched import Watched, chain, connected
from tests.running import make_config, wait_for

HASHES = chain("together", length=24)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make_config(tmp_path / "home")) as running:
        yield running


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[list[Watched]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(Watched(make_config(tmp_path / f"owner{number}", listen=LISTEN)))
            for number in range(3)
        ]


def store(owner: Watched, hashes: Sequence[bytes]) -> None:
    with connected(owner) as peer:
        peer.put(hashes)


class Together:
    """A node that pulls from several ports."""

    def __init__(self, daemon: Watched, ports: Sequence[int], incarnation: str = "") -> None:
        self.daemon = daemon
        self.failed: list[Shortfall] = []
        self.lacking: list[int | None] = []
        self.pullers: list[Puller] = [
            daemon.call(
                lambda port=port: Puller(
                    daemon.daemon.node,
                    Greeting("127.0.0.1", port, NAMESPACE, 0, incarnation=incarnation),
                    only_tcp,
                    most_bytes=4 << 20,
                )
            )
            for port in ports
        ]

    def __call__(self, hashes: Sequence[bytes] = HASHES, seconds: float = 5.0) -> tuple[int, str]:
        async def run() -> Any:
            node = self.daemon.daemon.node
            pull = Pull(node, self.pullers, ROOT_PARENT, hashes, 4 << 20)
            pulled = await pull.run(asyncio.get_running_loop().time() + seconds)
            self.failed = [pull.failed.get(one, "") for one in self.pullers]
            self.lacking = [pull.lacking.get(one) for one in self.pullers]
            return pulled

        result: tuple[int, str] = self.daemon.call(run)
        return result

    def holds_all(self, hashes: Sequence[bytes] = HASHES) -> bool:
        node = self.daemon.daemon.node

        def look() -> bool:
            found = [node.index.find(block) for block in hashes]
            return all(
                one and bytes(node.dram.view(one[0].dram or 0, BLOCK)) == content(block)
                for block, one in zip(hashes, found, strict=True)
            )

        return bool(self.daemon.call(look))


@contextmanager
def together(daemon: Watched, *ports: int, incarnation: str = "") -> Iterator[Together]:
    pulling = Together(daemon, ports, incarnation)
    try:
        yield pulling
    finally:
        for puller in pulling.pullers:
            daemon.call(puller.close)


def got(owner: Watched) -> int:
    return owner.metrics.moved_bytes["tcp", "out"] // BLOCK


def answer(session: Session, *, bad: bytes = b"", lacks: int = 1 << 30) -> int | None:
    """Answer one request as a good node would; the id of a GET, which is left to the script."""
    request_id, request = session.ask()
    if isinstance(request, Exists):
        session.answer(
            request_id, ExistsAnswer(bytes(2 * (n < lacks) for n in range(len(request.hashes))))
        )
    else:
        assert isinstance(request, Get)
        payload = b"".join(bad or content(block) for block in request.hashes)
        session.answer(request_id, found(request), payload)
    return None


def found(request: Get) -> GetAnswer:
    """That all of it is there, with the right checksums."""
    sums = [crc32c(content(block)) for block in request.hashes]
    return GetAnswer(0, b"\2" * len(request.hashes), None, sums)


def test_owners_share_the_work(owners: list[Watched], daemon: Watched) -> None:
    for owner in owners:
        store(owner, HASHES)
    with together(daemon, *map(port_of, owners)) as pull:

        def shared() -> bool:
            daemon.call(_forget, daemon)
            before = [got(owner) for owner in owners]
            assert pull() == (24, "")
            assert pull.holds_all()
            assert pull.failed == [""] * 3
            wait_for(lambda: sum(map(got, owners)) == sum(before) + 24)
            took = [got(owner) - then for owner, then in zip(owners, before, strict=True)]
            return sorted(took)[1] > 0

        # An owner that is late once finds that the others have done it all.
        wait_for(shared)
    assert all(daemon.daemon.node.index.find(block)[0].replica for block in HASHES)


def test_each_brings_what_it_holds(owners: list[Watched], daemon: Watched) -> None:
    for owner, length in zip(owners, (3, 24, 11), strict=True):
        store(owner, HASHES[:length])
    with together(daemon, *map(port_of, owners)) as pull:
        assert pull() == (24, "")
        assert pull.holds_all()
    assert sum(map(got, owners)) == 24


def test_nobody_holds_all(owners: list[Watched], daemon: Watched) -> None:
    for owner, length in zip(owners, (3, 20, 11), strict=True):
        store(owner, HASHES[:length])
    with together(daemon, *map(port_of, owners)) as pull:
        assert pull() == (20, "absent")
        assert pull.failed == ["absent"] * 3


def test_a_peer_that_dies_in_the_middle_is_replaced(owners: list[Watched], daemon: Watched) -> None:
    store(owners[0], HASHES)

    def dies(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        answer(session)
        request_id, request = session.ask()
        announced = BLOCK * len(request.hashes)
        header = encode(answer_header(request_id, found(request)), announced)
        session.sock.sendall(header + b"\xee" * (announced // 2))

    with scripted_peer(dies) as port, together(daemon, port, port_of(owners[0])) as pull:
        began = time.monotonic()
        assert pull() == (24, "")
        assert time.monotonic() - began < 4
        assert pull.holds_all()


def test_a_peer_that_stalls_does_not_hold_up_the_others(
    owners: list[Watched], daemon: Watched
) -> None:
    store(owners[0], HASHES)

    def stalls(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        answer(session)
        for _ in range(100):
            session.ask()

    def never_answers(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        session.ask()
        session.ask()

    for script in (stalls, never_answers):
        with scripted_peer(script) as port, together(daemon, port, port_of(owners[0])) as pull:
            # Within the deadline, to the end of which it says nothing.
            assert pull(seconds=2.0) == (24, "")
            assert pull.holds_all()
        daemon.call(_forget, daemon)


def _forget(daemon: Watched) -> None:
    from kvstore.departures import DepartureReason

    for entry in daemon.daemon.node.index.find(HASHES[0]):
        daemon.daemon.node.drop(entry, "dram", DepartureReason.ADMIN)


def test_what_is_corrupt_comes_from_another(owners: list[Watched], daemon: Watched) -> None:
    def corrupts(session: Session) -> None:
        session.welcome(block_bytes=BLOCK)
        while True:
            answer(session, bad=b"\xee" * BLOCK)

    with scripted_peer(corrupts) as port, together(daemon, port) as pull:
        assert pull() == (0, "corrupt")
        assert pull.lacking == [0]
    store(owners[0], HASHES)
    with scripted_peer(corrupts) as port, together(daemon, port, port_of(owners[0])) as pull:
        assert pull() == (24, "")
        assert pull.holds_all()
    assert daemon.used == 24 * BLOCK


def test_a_block_that_changed_at_its_owner_is_not_kept(
    owners: list[Watched], daemon: Watched
) -> None:
    store(owners[0], HASHES)
    with connected(owners[0]) as peer:
        peer.ask(Get(HASHES, checksums=True))
    node = owners[0].daemon.node
    (entry,) = node.index.find(HASHES[5])
    owners[0].call(node.dram.view(entry.dram or 0, 1).__setitem__, 0, HASHES[5][0] ^ 1)
    with together(daemon, port_of(owners[0])) as pull:
        assert pull() == (5, "corrupt")
        assert pull.lacking == [5]
        assert pull.holds_all(HASHES[:5])


def test_another_start_of_a_node_is_not_asked(owners: list[Watched], daemon: Watched) -> None:
    store(owners[0], HASHES)
    with together(daemon, port_of(owners[0]), incarnation="an earlier one") as pull:
        assert pull() == (0, "unavailable")
    assert owners[0].metrics.requests["exists"] == 0
    incarnation = owners[0].daemon.incarnation
    with together(daemon, port_of(owners[0]), incarnation=incarnation) as pull:
        assert pull() == (24, "")
