from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rdma.guest.peer import Peer


@pytest.fixture(scope="session")
def peer_machine() -> Peer:
    """The other machine, whatever state it is in."""
    return Peer()


@pytest.fixture
def peer(peer_machine: Peer) -> Iterator[Peer]:
    """The other machine, up, and without what earlier tests ran there."""
    peer_machine.wait_until_up()
    yield peer_machine
    peer_machine.end_processes()
