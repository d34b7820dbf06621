"""A daemon with an HBM tier on a stand-in for a GPU, from start to stop, as operators see it."""

from __future__ import annotations

import dataclasses
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import output
from kvstore.cli.pool_totals import status_table
from kvstore.control.interface import BlockName, BlockQuery, NodeStatus
from kvstore.control.pool_views import Answer
from kvstore.daemon import Daemon
from kvstore.entry import IN_HBM, Entry
from kvstore.errors import ConfigError
from kvstore.gpus import Gpus
from kvstore.protocol.messages import DRAM, HBM, Exists, Get
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content
from tests.kvstore.test_pool_views import member
from tests.kvstore.watched import Operator, Watched, chain, connected
from tests.running import DaemonThread, make_config, wait_for
from tests.tiers.cpu_device import CpuDevice
from tiers.device import Device

HASHES = chain("gpu", length=8)
CAPACITY = 1 << 20


def hbm(directory: Path, **keys: Any) -> dict[str, Any]:
    return {"directory": directory, "hbm": {"capacity": CAPACITY, "segment": "512KiB"} | keys}


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(4 * CAPACITY)


@pytest.fixture
def daemon(tmp_path: Path, device: CpuDevice) -> Iterator[Watched]:
    config = make_config(**hbm(tmp_path), ssd={"capacity": "32MiB"})
    with Watched(config, make_device=lambda _: device) as running:
        yield running
    assert device.live == device.host == device.registered == {}


def gpus(daemon: Watched) -> Gpus:
    found = daemon.daemon.node.gpus
    assert found is not None
    return found


def entries(daemon: Watched) -> list[Entry]:
    (shard,) = daemon.daemon.node.index.shards
    return [shard.committed[one] for one in HASHES if one in shard.committed]


def promote(daemon: Watched, count: int) -> None:
    """Have the first blocks used on the GPU, and wait until they are there."""
    some = entries(daemon)[:count]
    for _ in range(2):
        daemon.call(gpus(daemon).used, some, 0)
    wait_for(lambda: all(entry.state & IN_HBM for entry in some))


@pytest.fixture
def peer(daemon: Watched) -> Iterator[Peer]:
    with connected(daemon) as peer:
        peer.put(HASHES)
        promote(daemon, 4)
        yield peer


def test_others_get_the_same_bytes_from_memory(daemon: Watched, peer: Peer) -> None:
    assert peer.ask(Exists(HASHES))[0].tiers == bytes([HBM] * 4 + [DRAM] * 4)
    answer, payload = peer.ask(Get(HASHES))
    assert answer.tiers == bytes([DRAM] * 8)
    assert payload == b"".join(map(content, HASHES))
    assert daemon.metrics.hits == {"dram": 8}


def test_operators_see_the_tier(daemon: Watched, peer: Peer) -> None:
    operator = Operator(daemon)
    tier = operator.status().tiers[0]
    assert (tier.name, tier.blocks, tier.used) == ("hbm", 4, 4 * BLOCK)
    assert tier.capacity == CAPACITY
    assert tier.details == {"policy": "lru", "GPUs": "0"}
    page = operator.list_blocks(BlockQuery(limit=100, tier="hbm"))
    assert {block.hash for block in page.blocks} == set(HASHES[:4])
    (report,) = operator.inspect(NAMESPACE.fingerprint, HASHES[0], prefix=False, limit=10)
    assert report.tiers == ("hbm", "dram")
    found = operator.match(NAMESPACE.fingerprint, HASHES)
    assert found.tiers == ("hbm",) * 4 + ("dram",) * 4
    (account,) = daemon.daemon.node.index.accounts
    assert account.hbm == 4 * BLOCK


def test_a_pool_shows_the_tier_where_a_node_has_it(
    daemon: Watched, peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    status = Operator(daemon).status()
    other = dataclasses.replace(status, name="other", tiers=status.tiers[1:])

    def shown(*of: NodeStatus) -> str:
        answers = [Answer(member(number), one) for number, one in enumerate(of)]
        output.console().print(status_table(answers))
        return capsys.readouterr().out

    both = shown(status, other).splitlines()
    assert "HBM FULL" in both[1]
    (row,) = [line for line in both if "other" in line.split()]
    assert "-" in row.split()
    assert "HBM" not in shown(other)


def scraped(daemon: Watched) -> str:
    url = daemon.daemon.metrics_url
    assert url is not None
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_metrics_have_the_tier_and_the_gpu(daemon: Watched, device: CpuDevice, peer: Peer) -> None:
    text = scraped(daemon)
    assert f'kvstore_tier_used_bytes{{tier="hbm"}} {4.0 * BLOCK}' in text
    assert 'kvstore_promotions_total{from="dram",to="hbm"} 4.0' in text
    assert f'kvstore_tenant_used_bytes{{tenant="*",tier="hbm"}} {4.0 * BLOCK}' in text
    assert 'kvstore_gpu_up{gpu="0"} 1.0' in text
    daemon.call(gpus(daemon).fail, 0, "it broke")
    text = scraped(daemon)
    assert 'kvstore_gpu_up{gpu="0"} 0.0' in text
    assert 'kvstore_tier_used_bytes{tier="hbm"} 0.0' in text
    tier = Operator(daemon).status().tiers[0]
    assert (tier.capacity, tier.details["out of use"]) == (0, "0")


def test_emptying_hbm_takes_copies_and_no_blocks(daemon: Watched, peer: Peer) -> None:
    operator = Operator(daemon)
    pinned = entries(daemon)[:1]
    daemon.call(daemon.daemon.node.pin, pinned)
    removal = operator.flush("hbm")
    assert (removal.blocks, removal.bytes, removal.kept) == (3, 3 * BLOCK, 1)
    daemon.call(daemon.daemon.node.unpin, pinned)
    assert operator.flush("hbm").blocks == 1
    assert peer.ask(Exists(HASHES))[0].tiers == bytes([DRAM] * 8)
    assert operator.status().tiers[0].used == 0


def test_evicting_a_prefix_takes_its_copies(daemon: Watched, peer: Peer) -> None:
    Operator(daemon).evict(NAMESPACE.fingerprint, HASHES[1])
    assert len(entries(daemon)) == 1
    assert len(gpus(daemon).copies) == 1
    assert daemon.call(gpus(daemon).statistics).blocks == 1


def test_a_copy_outlives_its_blocks_place_in_dram(daemon: Watched, peer: Peer) -> None:
    operator = Operator(daemon)
    operator.flush("dram")
    assert [entry.tiers for entry in entries(daemon)] == [("hbm", "ssd")] * 4 + [("ssd",)] * 4
    answer, payload = peer.ask(Get(HASHES))
    assert payload == b"".join(map(content, HASHES))
    assert 0 not in answer.tiers
    assert HBM not in answer.tiers


def test_a_copy_that_is_wrong_is_found(daemon: Watched, device: CpuDevice, peer: Peer) -> None:
    operator = Operator(daemon)
    operator.flush("dram")  # SSD copies have checksums
    (wrong, *_) = entries(daemon)
    place = gpus(daemon).place(wrong, {0})
    assert place is not None
    tier = gpus(daemon)[0].tier
    address = tier.segment(place >> 44).address + (place & ((1 << 44) - 1))
    before = operator.verify(None, "hbm")[-1]
    assert (before.checked, before.total, before.corrupt) == (4, 4, 0)
    device.write(address, b"x")
    found = operator.verify(None, "hbm")
    assert found[-1].corrupt == 1
    names = [name for progress in found for name in progress.names]
    assert names == [BlockName(NAMESPACE.fingerprint, HASHES[0])]
    assert wrong.gone


def test_without_a_gpu_the_node_says_so(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"^hbm.capacity: there is no GPU.*--hbm"),
        DaemonThread(make_config(**hbm(tmp_path, capacity="4MiB", segment="2MiB"))),
    ):
        pass


def test_a_gpu_without_room_is_an_error_at_the_start(tmp_path: Path) -> None:
    free = CpuDevice(4 * CAPACITY)
    full = CpuDevice(CAPACITY // 2)

    def make(number: int) -> Device:
        return (free, full)[number]

    config = make_config(**hbm(tmp_path, gpus=[0, 1]))
    with (
        pytest.raises(ConfigError, match=r"^hbm.capacity: the GPU has \d+ bytes free"),
        DaemonThread(config, make_device=make),
    ):
        pass
    assert free.live == full.live == free.host == full.host == {}


def test_a_node_without_hbm_asks_for_no_gpu(tmp_path: Path) -> None:
    def make(number: int) -> Device:
        raise AssertionError(number)

    with DaemonThread(make_config(tmp_path), make_device=make) as running:
        assert running.daemon.node.gpus is None
    assert Daemon(make_config(tmp_path)).config.hbm.capacity == 0
