"""Why a prefix ends: every answer of ``explain`` that one node can give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.control.interface import Ending
from kvstore.protocol.messages import Abort, Reserve
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer
from tests.kvstore.watched import Operator, Watched, chain, connected, name
from tests.running import make_config

FINGERPRINT = NAMESPACE.fingerprint
HASHES = chain("main", length=10)
DRAM_BLOCKS = (8 << 20) // BLOCK


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    with Watched(make_config(tmp_path, ssd={"capacity": "32MiB"})) as running:
        yield running


@pytest.fixture
def operator(daemon: Watched) -> Iterator[Operator]:
    operator = Operator(daemon)
    yield operator
    daemon.call(operator.target.close)


@pytest.fixture
def peer(daemon: Watched) -> Iterator[Peer]:
    with connected(daemon) as peer:
        peer.put(HASHES)
        yield peer


def test_explain_of_what_is_held_or_was_never_stored(daemon: Watched, peer: Peer) -> None:
    assert daemon.explain(HASHES).ending is Ending.COMPLETE
    assert daemon.explain([]).ending is Ending.COMPLETE
    found = daemon.explain([*HASHES, name("absent")])
    assert (found.ending, found.asked, found.blocks) == (Ending.NEVER_STORED, 11, 10)
    assert found.hash == name("absent")
    unknown = dataclasses.replace(NAMESPACE, model="unknown")
    assert daemon.explain([name("absent")], unknown).ending is Ending.NEVER_STORED


def test_explain_of_what_is_being_written(daemon: Watched, peer: Peer) -> None:
    number = peer.ask(Reserve(HASHES[-1], [name("next")]))[0].reservation
    assert daemon.explain([*HASHES, name("next")]).ending is Ending.PENDING
    peer.ask(Abort(number))
    assert daemon.explain([*HASHES, name("next")]).ending is Ending.NEVER_STORED


def test_explain_of_what_has_left(daemon: Watched, operator: Operator, peer: Peer) -> None:
    operator.evict(FINGERPRINT, HASHES[7])
    found = daemon.explain(HASHES)
    assert (found.ending, found.blocks, found.hash) == (Ending.DEPARTED, 7, HASHES[7])
    assert (found.tier, found.reason, found.shard) == ("dram", "admin", 0)
    assert found.ago is not None
    assert 0 <= found.ago < 60
    assert daemon.explain(HASHES[:7]).ending is Ending.COMPLETE
    operator.flush("dram")
    operator.flush("ssd")
    found = daemon.explain(HASHES)
    assert (found.blocks, found.tier, found.reason) == (0, "ssd", "admin")
    peer.put(HASHES)
    assert daemon.explain(HASHES).ending is Ending.COMPLETE


def test_explain_of_what_made_room(tmp_path: Path) -> None:
    config = make_config(tmp_path, policy={"departures": 2})
    with Watched(config) as daemon, connected(daemon) as peer:
        peer.put([name("first")])
        peer.put([name("second")])
        for number in range(DRAM_BLOCKS - 1):
            peer.put([name("filler", number)])
        found = daemon.explain([name("first")])
        assert (found.ending, found.tier, found.reason) == (Ending.DEPARTED, "dram", "capacity")
        assert daemon.explain([name("absent")]).ending is Ending.NEVER_STORED
        for number in range(2):
            peer.put([name("more", number)])
        assert daemon.explain([name("second")]).ending is Ending.DEPARTED
        assert daemon.explain([name("first")]).ending is Ending.FORGOTTEN
        assert daemon.explain([name("absent")]).ending is Ending.FORGOTTEN


def test_explain_names_the_nearest_namespace(daemon: Watched, peer: Peer) -> None:
    near = dataclasses.replace(NAMESPACE, dtype="bfloat16")
    far = dataclasses.replace(near, model="other", salt="pepper")
    for namespace in (far, near):
        with connected(daemon, namespace) as other:
            other.put([name("elsewhere")])
    found = daemon.explain([name("elsewhere")])
    assert found.ending is Ending.OTHER_NAMESPACE
    assert found.nearest == near.fingerprint
    (difference,) = found.differences
    assert difference == "dtype: ours is 'float32', theirs is 'bfloat16'"
    found = daemon.explain([name("elsewhere")], dataclasses.replace(far, layout="HND"))
    assert (found.ending, found.nearest) == (Ending.OTHER_NAMESPACE, far.fingerprint)
