"""What operators see and do, on a real node with real clients."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import Config
from kvstore.control.interface import (
    MAX_NAMESPACES,
    BlockName,
    BlockQuery,
    BlockReport,
    Ending,
    VerifyProgress,
)
from kvstore.entry import Entry
from kvstore.errors import InvalidRequest, OutOfSpace
from kvstore.identity import ROOT_PARENT, Namespace
from kvstore.inspection import Inspection
from kvstore.protocol.messages import FILL, Abort, Exists, Get, Match, Reserve
from tests.kvstore import test_node
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content
from tests.kvstore.watched import Operator, Watched, chain, connected, name
from tests.running import make_config, wait_for
from tiers.errors import CorruptBlock

FINGERPRINT = NAMESPACE.fingerprint
PAIR = dataclasses.replace(NAMESPACE, model="pair", tp_size=2)
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


def is_right(peer: Peer, hashes: Sequence[bytes]) -> bool:
    return bool(peer.ask(Get(hashes))[1] == b"".join(map(content, hashes)))


# --- totals ---------------------------------------------------------------------------------------


def test_status_counts_what_there_is(daemon: Watched, operator: Operator, peer: Peer) -> None:
    number = peer.ask(Reserve(HASHES[-1], [name("next")]))[0].reservation
    status = operator.status()
    assert status.pid == os.getpid()
    assert status.state == "serving"
    assert (status.sessions, status.namespaces, status.blocks) == (1, 1, 10)
    assert (status.pins, status.reservations) == (0, 1)
    assert [(tier.name, tier.blocks, tier.used) for tier in status.tiers] == [
        ("dram", 11, 11 * BLOCK),
        ("ssd", 0, 0),
    ]
    assert [tier.capacity for tier in status.tiers] == [8 << 20, 32 << 20]
    assert 0 <= status.uptime < 60
    peer.ask(Abort(number))
    daemon.call(lambda: setattr(daemon.daemon.server, "stopping", True))
    assert operator.status().state == "stopping"


def test_snapshot_gives_the_counters(operator: Operator, peer: Peer) -> None:
    peer.ask(Get([*HASHES[:4], name("absent")]))
    before = operator.snapshot()
    assert before.lookups == 5
    assert (before.hits, before.misses) == ({"dram": 4}, {"absent": 1})
    assert before.puts["stored"] == 10
    assert before.moved_bytes == {"tcp in": 10 * BLOCK, "tcp out": 4 * BLOCK}
    assert before.latencies["get"].count == 1
    peer.ask(Get(HASHES))
    after = operator.snapshot()
    assert after.lookups == 15
    assert after.clock > before.clock


def test_namespaces_are_named_and_counted(daemon: Watched, operator: Operator, peer: Peer) -> None:
    with connected(daemon, PAIR, shard=1) as other:
        other.put(HASHES[:3])
        found = operator.namespaces()
        assert [one.fingerprint for one in found] == [FINGERPRINT, PAIR.fingerprint]
        assert found[1].description == PAIR.describe()
        assert (found[1].blocks, found[1].bytes) == (3, 3 * BLOCK)
        assert (found[1].shards, found[1].sessions) == ((1,), 1)
        assert found[0].shards == (0,)
    assert len(found) < MAX_NAMESPACES


# --- blocks ---------------------------------------------------------------------------------------


def test_blocks_are_found_by_the_beginning_of_their_hash(operator: Operator, peer: Peer) -> None:
    wanted = HASHES[3]
    for digits in (8, 9, 64):
        found = operator.find(wanted.hex()[:digits], None, 10)
        assert found == [BlockName(FINGERPRINT, wanted)]
    assert operator.find(wanted.hex()[:8], PAIR.fingerprint, 10) == []
    assert operator.find("", FINGERPRINT, 10) != []
    assert len(operator.find("", None, 4)) == 4
    wrong = "0" if wanted.hex()[8] != "0" else "1"
    assert operator.find(wanted.hex()[:8] + wrong, None, 10) == []


def pages(operator: Operator, **query: Any) -> list[list[BlockReport]]:
    found, cursor = [], b""
    while True:
        page = operator.list_blocks(BlockQuery(cursor=cursor, **query))
        found.append(list(page.blocks))
        cursor = page.cursor
        if not cursor:
            return found


def test_listing_has_pages(daemon: Watched, operator: Operator, peer: Peer) -> None:
    with connected(daemon, PAIR, shard=1) as other:
        other.put(HASHES[:3])
    assert [len(page) for page in pages(operator, limit=4)] == [4, 4, 4, 1]
    assert [len(page) for page in pages(operator, limit=13)] == [13], "the last page has no cursor"
    assert [len(page) for page in pages(operator, limit=100, namespace=FINGERPRINT)] == [10]
    assert [len(page) for page in pages(operator, limit=100, shard=1)] == [3]
    assert pages(operator, limit=2, tier="hbm") == [[]]
    assert pages(operator, limit=2, tier="ssd") == [[]]
    operator.flush("dram")
    peer.ask(Get(HASHES[:3]))
    assert [len(page) for page in pages(operator, limit=2, tier="dram")] == [2, 1]
    assert sum(map(len, pages(operator, limit=5, tier="ssd"))) == 13
    listed = {(one.namespace, one.hash) for page in pages(operator, limit=3) for one in page}
    assert len(listed) == 13
    with pytest.raises(InvalidRequest, match="cursor"):
        operator.list_blocks(BlockQuery(cursor=b"somebody else's"))


@given(
    start=st.sets(st.integers(0, 40)),
    changes=st.lists(st.sets(st.integers(0, 40)), max_size=20),
    limit=st.integers(1, 7),
)
def test_listing_shows_once_what_stays_while_blocks_come_and_go(
    start: set[int], changes: list[set[int]], limit: int
) -> None:
    node = test_node.make_node()
    shard = node.shard(test_node.NAMESPACE, 0)
    inspection = Inspection(node, None, None, None, Config(), "x")  # type: ignore[arg-type]

    def toggle(numbers: set[int]) -> None:
        for number in numbers:
            entry = shard.committed.get(test_node.name(number))
            if entry is None:
                assert test_node.put(node, (number,)) == bytes([FILL])
            else:
                node.drop(entry, "dram", test_node.DepartureReason.ADMIN)

    toggle(start)
    always, listed, cursor = set(shard.committed), [], b""
    try:
        for change in [*changes, *[set[int]()] * 42]:
            page = asyncio.run(inspection.list_blocks(BlockQuery(cursor=cursor, limit=limit)))
            assert len(page.blocks) <= limit
            listed += [one.hash for one in page.blocks]
            cursor = page.cursor
            if not cursor:
                break
            toggle(change)
            always &= set(shard.committed)
    finally:
        node.dram.close()
    assert not cursor
    assert len(set(listed)) == len(listed)
    assert always <= set(listed)


def test_inspection_of_a_block_and_of_its_prefix(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    operator.flush("dram")
    peer.ask(Get(HASHES[2:3]))
    (found,) = operator.inspect(FINGERPRINT, HASHES[2], prefix=False, limit=10)
    assert (found.hash, found.parent, found.shard) == (HASHES[2], HASHES[1], 0)
    assert (found.state, found.tiers, found.size) == ("committed", ("dram", "ssd"), BLOCK)
    assert (found.children, found.pins) == (1, 0)
    assert found.checksum == crc32c(content(HASHES[2]))
    assert 0 <= found.idle <= found.age < 60
    prefix = operator.inspect(FINGERPRINT, HASHES[4], prefix=True, limit=10)
    assert [one.hash for one in prefix] == HASHES[:5]
    assert prefix[0].parent == ROOT_PARENT
    assert [one.tiers for one in prefix[:2]] == [("ssd",), ("ssd",)]
    last = operator.inspect(FINGERPRINT, HASHES[4], prefix=True, limit=2)
    assert [one.hash for one in last] == HASHES[3:5]
    assert operator.inspect(PAIR.fingerprint, HASHES[2], prefix=True, limit=10) == []
    number = peer.ask(Reserve(HASHES[-1], [name("next")]))[0].reservation
    (pending,) = operator.inspect(FINGERPRINT, name("next"), prefix=False, limit=10)
    assert (pending.state, pending.pins, pending.checksum) == ("reserved", 1, None)
    peer.ask(Abort(number))


def test_inspection_shows_shards_side_by_side_even_where_they_disagree(
    daemon: Watched, operator: Operator
) -> None:
    with connected(daemon, PAIR, 0) as first, connected(daemon, PAIR, 1) as second:
        first.put(HASHES[:3])
        second.put(HASHES[:2])
        found = operator.inspect(PAIR.fingerprint, HASHES[1], prefix=True, limit=10)
        assert [(one.hash, one.shard) for one in found] == [
            (block, shard) for block in HASHES[:2] for shard in (0, 1)
        ]
        second.put(HASHES[2:3])
        assert len(operator.inspect(PAIR.fingerprint, HASHES[2], prefix=True, limit=10)) == 4


def test_match_tells_the_tier_of_each_block(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    operator.flush("dram")
    peer.ask(Get(HASHES[:2]))
    used = [one.idle for one in operator.inspect(FINGERPRINT, HASHES[0], prefix=False, limit=1)]
    found = operator.match(FINGERPRINT, [*HASHES[:4], name("absent"), HASHES[4]])
    assert (found.asked, found.blocks) == (6, 4)
    assert found.tiers == ("dram", "dram", "ssd", "ssd")
    again = [one.idle for one in operator.inspect(FINGERPRINT, HASHES[0], prefix=False, limit=1)]
    assert again >= used, "a look was taken for a use"
    assert operator.match(bytes(32), HASHES).tiers == ()


# --- shards ---------------------------------------------------------------------------------------


def test_prefix_counts_only_where_all_shards_hold_it(daemon: Watched, operator: Operator) -> None:
    with connected(daemon, PAIR, 0) as first, connected(daemon, PAIR, 1) as second:
        first.put(HASHES[:4])
        assert first.ask(Match(HASHES))[0].tiers == b""
        assert first.ask(Exists(HASHES[:2]))[0].tiers == b"\2\2", "exists is about one shard"
        second.put(HASHES[:2])
        for one in (first, second):
            assert one.ask(Match(HASHES))[0].tiers == b"\2\2"
            assert is_right(one, HASHES[:2])
        assert operator.match(PAIR.fingerprint, HASHES).blocks == 2
        found = daemon.explain(HASHES, PAIR)
        assert (found.ending, found.blocks, found.shard) == (Ending.SHARD_ABSENT, 2, 1)
        number = second.ask(Reserve(HASHES[1], HASHES[2:3]))[0].reservation
        found = daemon.explain(HASHES, PAIR)
        assert (found.ending, found.blocks, found.shard) == (Ending.PENDING, 2, 1)
        second.ask(Abort(number))
        operator.evict(PAIR.fingerprint, HASHES[1])
        assert first.ask(Match(HASHES))[0].tiers == b"\2"
        operator.flush("dram")
        second.ask(Get(HASHES[:1]))
        assert first.ask(Match(HASHES))[0].tiers == b"\3", "the slowest tier of all shards counts"


# --- pins -----------------------------------------------------------------------------------------


def press(peer: Peer, blocks: int, *path: object) -> None:
    """Put so much that all that is not pinned leaves both tiers."""
    for number in range(blocks // 4):
        peer.put(chain(*path, number, length=4))


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Watched]:
    config = make_config(
        tmp_path,
        ssd={"capacity": "12MiB", "region": "1MiB"},
        policy={"low_watermark": 0.4, "high_watermark": 0.6},
    )
    with Watched(config) as running:
        yield running


@pytest.mark.parametrize("from_tier", ["dram", "ssd"])
def test_pinned_prefix_outlives_pressure_and_reclaim(crowded: Watched, from_tier: str) -> None:
    operator = Operator(crowded)
    pinned, loose = chain("pinned", length=6), chain("loose", length=6)
    with connected(crowded) as peer:
        peer.put(pinned)
        peer.put(loose)
        if from_tier == "ssd":
            operator.flush("dram")
        report = operator.pin(FINGERPRINT, pinned[4], None)
        assert (report.blocks, report.bytes, report.expires) == (5, 5 * BLOCK, None)
        metrics = crowded.metrics
        for round_ in range(50):
            press(peer, DRAM_BLOCKS, "crowd", round_)
            wait_for(lambda: crowded.used < 0.7 * (8 << 20))
            if any(tier == "ssd" for tier, _ in metrics.evictions) and round_ > 3:
                break
        assert metrics.evictions["ssd", "ssd_reclaim"] > 0  # type: ignore[index]
        assert crowded.explain(pinned[:5]).ending is Ending.COMPLETE
        assert crowded.explain(loose).ending is not Ending.COMPLETE
        assert is_right(peer, pinned[:5])
        assert operator.unpin(FINGERPRINT, pinned[4]).blocks == 5
        assert operator.unpin(FINGERPRINT, pinned[4]).blocks == 0


def test_pin_ends_at_its_time_and_is_replaced_by_another(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    assert operator.pin(FINGERPRINT, HASHES[3], 3600.0).blocks == 4
    assert operator.pin(FINGERPRINT, HASHES[3], 1000.0).blocks == 4
    (report,) = operator.pins()
    assert (report.hash, report.blocks) == (HASHES[3], 4)
    assert report.expires == pytest.approx(1000, abs=30)
    assert daemon.metrics.pins == 4
    operator.pin(FINGERPRINT, HASHES[5], None)
    assert daemon.metrics.pins == 10
    assert operator.inspect(FINGERPRINT, HASHES[3], prefix=False, limit=1)[0].pins == 2
    operator.pin(FINGERPRINT, HASHES[3], 0.05)
    wait_for(lambda: daemon.metrics.pins == 6)
    assert [one.hash for one in operator.pins()] == [HASHES[5]]
    operator.unpin(FINGERPRINT, HASHES[5])


def test_impossible_pins_are_refused(daemon: Watched, operator: Operator, peer: Peer) -> None:
    with pytest.raises(InvalidRequest, match="does not hold"):
        operator.pin(FINGERPRINT, name("absent"), None)
    with pytest.raises(InvalidRequest):
        operator.pin(PAIR.fingerprint, HASHES[0], None)
    most = DRAM_BLOCKS // 2
    longer = chain("long", length=most)
    peer.put(longer)
    operator.pin(FINGERPRINT, longer[-1], None)
    with pytest.raises(OutOfSpace):
        operator.pin(FINGERPRINT, HASHES[0], None)
    assert operator.pin(FINGERPRINT, longer[-1], 60.0).blocks == most
    assert daemon.metrics.pins == most
    operator.unpin(FINGERPRINT, longer[-1])
    assert operator.pin(FINGERPRINT, HASHES[0], None).blocks == 1


# --- evict and flush ------------------------------------------------------------------------------


def test_eviction_takes_what_follows_and_spares_what_is_pinned(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    branch = chain("branch", length=3)
    peer.put(branch, parent=HASHES[5])
    operator.pin(FINGERPRINT, HASHES[7], None)
    left = operator.evict(FINGERPRINT, HASHES[5])
    assert (left.blocks, left.bytes, left.kept) == (2 + 3, 5 * BLOCK, 3)
    assert peer.ask(Exists([*HASHES, *branch]))[0].tiers == b"\2" * 8 + bytes(5)
    assert operator.evict(PAIR.fingerprint, None).blocks == 0
    left = operator.evict(FINGERPRINT, None)
    assert (left.blocks, left.kept) == (0, 8)
    operator.unpin(FINGERPRINT, HASHES[7])
    left = operator.evict(FINGERPRINT, None)
    assert (left.blocks, left.kept) == (8, 0)
    assert daemon.used == 0
    assert operator.evict(FINGERPRINT, HASHES[0]).blocks == 0


def test_eviction_spares_what_a_client_reads_or_writes(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    number = peer.ask(Reserve(HASHES[4], [name("next")]))[0].reservation
    left = operator.evict(FINGERPRINT, None)
    assert (left.blocks, left.kept) == (5, 5)
    peer.ask(Abort(number))
    assert operator.evict(FINGERPRINT, None).blocks == 5


def test_flush_of_dram_moves_and_flush_of_ssd_drops(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    operator.pin(FINGERPRINT, HASHES[1], None)
    flushed = operator.flush("dram")
    assert (flushed.moved, flushed.blocks, flushed.kept) == (10, 8, 2)
    assert peer.ask(Match(HASHES))[0].tiers == b"\2\2" + b"\3" * 8
    assert is_right(peer, HASHES[:4])
    flushed = operator.flush("ssd")
    assert (flushed.blocks, flushed.kept) == (8, 2)
    assert peer.ask(Match(HASHES))[0].tiers == b"\2" * 4
    assert is_right(peer, HASHES[:4])
    operator.unpin(FINGERPRINT, HASHES[1])
    with pytest.raises(InvalidRequest, match="no hbm tier"):
        operator.flush("hbm")


def test_flush_without_an_ssd_drops(tmp_path: Path) -> None:
    with Watched(make_config(tmp_path)) as daemon, connected(daemon) as peer:
        operator = Operator(daemon)
        peer.put(HASHES)
        operator.pin(FINGERPRINT, HASHES[1], None)
        flushed = operator.flush("dram")
        assert (flushed.moved, flushed.blocks, flushed.kept) == (0, 8, 2)
        assert peer.ask(Match(HASHES))[0].tiers == b"\2\2"
        with pytest.raises(InvalidRequest, match="no ssd tier"):
            operator.flush("ssd")
        operator.unpin(FINGERPRINT, HASHES[1])


# --- verify ---------------------------------------------------------------------------------------


def flip_a_bit_on_disk(directory: Path, block: bytes) -> None:
    with (directory / "ssd" / "regions").open("r+b") as file:
        at = file.read().index(content(block)[:4096])
        file.seek(at + 1000)
        (byte,) = file.read(1)
        file.seek(at + 1000)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())


def test_flipped_bit_on_the_ssd_is_found(
    tmp_path: Path, daemon: Watched, operator: Operator, peer: Peer
) -> None:
    operator.flush("dram")
    assert operator.verify()[-1] == VerifyProgress(10, 10, 10 * BLOCK, finished=True)
    flip_a_bit_on_disk(tmp_path, HASHES[6])
    assert operator.verify(PAIR.fingerprint)[-1] == VerifyProgress(0, 0, 0, finished=True)
    assert operator.verify(tier="dram")[-1].corrupt == 0
    found = operator.verify(FINGERPRINT, "ssd")
    assert (found[-1].corrupt, found[-1].unreadable, found[-1].finished) == (1, 0, True)
    named = [block for progress in found for block in progress.names]
    assert named == [BlockName(FINGERPRINT, HASHES[6])]
    assert peer.ask(Match(HASHES))[0].tiers == b"\3" * 6
    assert is_right(peer, HASHES[:6])
    explained = daemon.explain(HASHES)
    assert (explained.ending, explained.tier, explained.blocks) == (Ending.CORRUPT, "ssd", 6)
    assert operator.verify()[-1] == VerifyProgress(6, 6, 6 * BLOCK, finished=True)


def test_verification_of_a_tier_counts_what_lies_there(operator: Operator, peer: Peer) -> None:
    nothing = VerifyProgress(0, 0, 0, finished=True)
    everything = VerifyProgress(10, 10, 10 * BLOCK, finished=True)
    assert operator.verify(tier="ssd")[-1] == nothing
    assert operator.verify(tier="dram")[-1] == everything
    operator.flush("dram")
    assert operator.verify(tier="ssd")[-1] == everything
    assert operator.verify(tier="dram")[-1] == nothing


def test_a_tier_that_the_node_does_not_have_is_not_verified(tmp_path: Path) -> None:
    with Watched(make_config(tmp_path)) as daemon:
        for tier in ("ssd", "hbm"):
            with pytest.raises(InvalidRequest, match=f"no {tier} tier"):
                Operator(daemon).verify(tier=tier)


def test_what_leaves_the_tier_meanwhile_is_not_counted(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    operator.flush("dram")
    found = []

    async def verify() -> None:
        async for progress in operator.target.verify(None, "ssd"):
            if not found:
                await operator.target.flush("ssd")
            found.append(progress)

    daemon.call(verify)
    assert found[0].checked == found[0].total - 2 == 8
    assert found[-1] == VerifyProgress(8, 8, 8 * BLOCK, finished=True)


def test_flipped_bit_on_the_ssd_is_a_miss(
    tmp_path: Path, daemon: Watched, operator: Operator, peer: Peer
) -> None:
    operator.flush("dram")
    flip_a_bit_on_disk(tmp_path, HASHES[6])
    answer, payload = peer.ask(Get(HASHES[:7]))
    assert answer.tiers == b"\3" * 6 + b"\0"
    assert payload == b"".join(map(content, HASHES[:6]))
    assert daemon.metrics.misses == {"corrupt": 1}
    assert daemon.explain(HASHES).ending is Ending.CORRUPT


def test_flipped_bit_in_memory_is_found_where_the_checksum_is_known(
    daemon: Watched, operator: Operator, peer: Peer
) -> None:
    operator.flush("dram")
    peer.ask(Get(HASHES))
    node = daemon.daemon.node

    def flip() -> None:
        (entry,) = node.index.find(HASHES[8])
        node.dram.view(entry.dram, BLOCK)[77] ^= 1  # type: ignore[arg-type]

    daemon.call(flip)
    assert operator.verify(tier="ssd")[-1].corrupt == 0
    assert operator.verify()[-1].corrupt == 1
    explained = daemon.explain(HASHES)
    assert (explained.ending, explained.tier, explained.blocks) == (Ending.CORRUPT, "dram", 8)


def test_block_that_moves_while_it_is_verified_is_not_corrupt(
    daemon: Watched, operator: Operator, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reclaim may write over what a verification is about to read."""
    operator.flush("dram")
    node, movement = daemon.daemon.node, daemon.daemon.movement
    assert node.ssd is not None
    assert movement is not None
    (entry,) = node.index.find(HASHES[-1])
    verify, moved = node.ssd.verify, []

    def verify_late(extent: int) -> None:
        if extent == entry.ssd and not moved:
            moved.append(extent)
            step = movement._rewrite(entry)
            asyncio.run_coroutine_threadsafe(step, daemon.loop).result(10)
            raise CorruptBlock("written over")
        verify(extent)

    monkeypatch.setattr(node.ssd, "verify", verify_late)
    assert operator.verify()[-1] == VerifyProgress(10, 10, 10 * BLOCK, finished=True)
    assert moved != [entry.ssd]
    assert isinstance(entry, Entry)
    assert is_right(peer, HASHES)


def test_verification_can_be_left(daemon: Watched, operator: Operator, peer: Peer) -> None:
    async def first() -> VerifyProgress:
        progress = operator.target.verify(None, None)
        try:
            return await anext(progress)
        finally:
            await progress.aclose()  # type: ignore[attr-defined]

    assert not daemon.call(first).finished
    assert daemon.metrics.pins == 0


def test_a_namespace_without_a_name_is_still_listed(tmp_path: Path) -> None:
    """The catalog was lost; the SSD still tells the fingerprint."""
    config = make_config(tmp_path, ssd={"capacity": "32MiB"})
    with Watched(config) as daemon, connected(daemon) as peer:
        peer.put(HASHES)
    (tmp_path / "namespaces.msgpack").write_bytes(b"\xc1 damaged")
    with Watched(config) as daemon:
        operator = Operator(daemon)
        (found,) = operator.namespaces()
        assert (found.fingerprint, found.description, found.blocks) == (FINGERPRINT, {}, 10)
        assert operator.match(FINGERPRINT, HASHES).blocks == 10
        assert daemon.explain(HASHES).ending is Ending.COMPLETE
        with connected(daemon) as peer:
            assert is_right(peer, HASHES)
        assert operator.namespaces()[0].description == NAMESPACE.describe()


def test_unknown_namespace_is_no_error(operator: Operator, peer: Peer) -> None:
    other = Namespace("nobody", "float32", "test", 16, BLOCK).fingerprint
    assert operator.match(other, HASHES).blocks == 0
    assert operator.evict(other, None).blocks == 0
    assert operator.unpin(other, HASHES[0]).blocks == 0
    assert operator.list_blocks(BlockQuery(namespace=other)).blocks == ()
