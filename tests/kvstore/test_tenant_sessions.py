"""What sessions of one tenant learn of another's blocks, and that is nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from kvstore.control.interface import TenantReport
from kvstore.errors import AccessDenied, ConfigError, InvalidRequest
from kvstore.identity import ROOT_PARENT
from kvstore.protocol.messages import (
    Exists,
    Follow,
    Get,
    Match,
    Reserve,
    Segments,
    Write,
    request_header,
)
from rdma.transport import split_place
from tests.kvstore.peer import BLOCK, NAMESPACE, Peer, content
from tests.kvstore.pooled import DRAM, REMOTE, pool
from tests.kvstore.shared_peer import SharedPeer, peek_fds
from tests.kvstore.watched import Operator, Watched, chain
from tests.running import make_config, wait_for

A = replace(NAMESPACE, tenant="a")
B = replace(NAMESPACE, tenant="b")
OPEN = replace(NAMESPACE, tenant="c")
HASHES = chain("secret", length=4)


def tokens(directory: Path) -> dict[str, dict[str, str]]:
    """Sections of tenants a and b, each with its token."""
    for tenant in "ab":
        (directory / tenant).write_text(f"token of {tenant}\n")
    return {tenant: {"token_file": str(directory / tenant)} for tenant in "ab"}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Watched]:
    config = make_config(tmp_path, tenants=tokens(tmp_path), auth={"session_token": "general"})
    with Watched(config) as running:
        yield running


def test_a_token_file_that_is_not_there_is_found_at_the_start(tmp_path: Path) -> None:
    config = make_config(tmp_path, tenants={"a": {"token_file": str(tmp_path / "typo")}})
    with pytest.raises(ConfigError, match=r"tenants\.a\.token_file: .*typo"), Watched(config):
        pass


def test_a_session_sees_its_own_blocks_only(daemon: Watched) -> None:
    with Peer(daemon.path) as owner, Peer(daemon.path) as other:
        owner.hello(A, token="token of a")
        other.hello(B, token="token of b")
        before = other.ask(Follow(0, 100))[0]
        owner.put(HASHES)
        assert owner.ask(Match(HASHES))[0].tiers == DRAM * 4
        assert other.ask(Match(HASHES))[0].tiers == b""
        assert other.ask(Match(HASHES, prefetch=True))[0].tiers == b""
        assert other.ask(Exists(HASHES))[0].tiers == bytes(4)
        answer, payload = other.ask(Get(HASHES))
        assert (answer.tiers, payload) == (bytes(4), b"")
        after = other.ask(Follow(before.sequence, 100))[0]
        assert (after.sequence, list(after.hashes)) == (before.sequence, [])


def test_a_put_does_not_tell_whether_another_tenant_has_the_block(daemon: Watched) -> None:
    with Peer(daemon.path) as owner, Peer(daemon.path) as other:
        owner.hello(A, token="token of a")
        other.hello(B, token="token of b")
        owner.put(HASHES)
        fresh = other.ask(Reserve(ROOT_PARENT, HASHES))[0]
        assert fresh.verdicts == bytes(4)
        payload = b"".join(content(block)[::-1] for block in HASHES)
        other.ask(Write(fresh.reservation, [0, 1, 2, 3], 0, BLOCK, commit=True), payload)
        assert owner.ask(Get(HASHES))[1] == b"".join(map(content, HASHES))
        assert other.ask(Get(HASHES))[1] == payload


@pytest.mark.parametrize("token", ["token of b", "general", "", None])
def test_another_token_does_not_open_a_tenant(daemon: Watched, token: str | None) -> None:
    with Peer(daemon.path) as peer, pytest.raises(AccessDenied, match="missing or wrong"):
        peer.hello(A, token=token)


def test_tenants_without_a_token_need_the_general_one(daemon: Watched) -> None:
    with Peer(daemon.path) as peer, pytest.raises(AccessDenied, match="missing or wrong"):
        peer.hello(OPEN, token="token of a")
    with Peer(daemon.path) as peer:
        peer.hello(OPEN, token="general")


def test_a_namespace_of_another_tenant_is_refused_whether_or_not_it_exists(
    daemon: Watched,
) -> None:
    with Peer(daemon.path) as owner:
        owner.hello(A, token="token of a")
        owner.put(HASHES)
    said = set()
    for claimed in (A, replace(A, model="nobody's")):
        with Peer(daemon.path) as peer, pytest.raises(InvalidRequest) as refused:
            peer.hello(claimed, tenant="b", token="token of b")
        said.add(str(refused.value))
    assert len(said) == 1


def test_a_new_token_counts_from_the_next_session_on(daemon: Watched, tmp_path: Path) -> None:
    with Peer(daemon.path) as peer:
        peer.hello(A, token="token of a")
        (tmp_path / "a").write_text("another\n")
        peer.put(HASHES)
        with Peer(daemon.path) as late, pytest.raises(AccessDenied):
            late.hello(A, token="token of a")
        with Peer(daemon.path) as late:
            late.hello(A, token="another")
            assert late.ask(Match(HASHES))[0].tiers == DRAM * 4


def test_memory_is_shared_with_its_own_tenant_only(tmp_path: Path) -> None:
    """Whatever number a client asks for, it learns nothing and gets no descriptor."""
    with Watched(make_config(tmp_path)) as daemon, SharedPeer(daemon.path, A) as owner:
        reserved = owner.ask(Reserve(ROOT_PARENT, HASHES))[0]
        number, _ = split_place(reserved.locations[0])
        with SharedPeer(daemon.path, B) as other:
            said = {}
            for asked in (number, 10**6):
                other.send(request_header(77, 5000, Segments([asked])))
                assert peek_fds(other.sock) == []
                header, _ = other.receive()
                said[asked] = str(header[2:]).replace(str(asked), "N")
            assert len(set(said.values())) == 1
            assert "access_denied" in said[number]


def test_nodes_read_a_tenants_blocks_with_its_token(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"auth": {"session_token": "general"}, "tenants": tokens(tmp_path)}
    with pool(tmp_path, 2, **sections) as running:
        one, other = running.nodes
        with Peer(one.path) as owner, Peer(other.path) as reader, Peer(other.path) as stranger:
            owner.hello(A, token="token of a")
            reader.hello(A, token="token of a")
            stranger.hello(B, token="token of b")
            owner.put(HASHES)
            wait_for(lambda: reader.ask(Match(HASHES))[0].tiers == REMOTE * 4)
            assert stranger.ask(Match(HASHES))[0].tiers == b""
            assert stranger.ask(Get(HASHES))[1] == b""
            assert reader.ask(Get(HASHES))[1] == b"".join(map(content, HASHES))
            assert stranger.ask(Match(HASHES))[0].tiers == b""
        one.hang_up()
        other.hang_up()


def fetched(reader: Peer, hashes: Sequence[bytes]) -> bool:
    """Ask for blocks as a client does; whether all came."""
    reader.ask(Match(hashes))
    return all(reader.ask(Get(hashes))[0].tiers)


def test_a_pool_goes_on_with_a_new_token(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"tenants": tokens(tmp_path)}
    with pool(tmp_path, 2, **sections) as running:
        one, other = running.nodes
        with Peer(one.path) as owner, Peer(other.path) as reader:
            owner.hello(A, token="token of a")
            reader.hello(A, token="token of a")
            owner.put(HASHES[:2])
            wait_for(lambda: fetched(reader, HASHES[:2]))
            (tmp_path / "a").write_text("another\n")
            owners = other.cluster.remote._owners
            other.call(owners.sweep)
            assert not owners._ways
            owner.put(HASHES)
            wait_for(lambda: fetched(reader, HASHES))
            assert other.metrics.pulled_blocks == {"node0": 4}


def test_operators_see_what_each_tenant_holds(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"a": {"dram": "1MiB"}, "*": {"dram": 0}}
    config = make_config(tmp_path, tenants=sections, listen={"metrics": "127.0.0.1:0"})
    with Watched(config) as daemon, Peer(daemon.path) as owner, Peer(daemon.path) as other:
        owner.hello(A)
        owner.put(HASHES)
        other.hello(OPEN)
        other.put(HASHES[:1])
        reports = {one.name: one for one in Operator(daemon).status().tenants}
        assert reports == {
            "a": TenantReport("a", 4 * BLOCK, 0, 1 << 20, None, 1),
            "*": TenantReport("*", BLOCK, 0, 0, None, 1),
        }
        assert daemon.daemon.metrics_url is not None
        with urlopen(daemon.daemon.metrics_url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        assert f'kvstore_tenant_used_bytes{{tenant="a",tier="dram"}} {float(4 * BLOCK)}' in lines
        assert 'kvstore_tenant_quota_bytes{tenant="a",tier="dram"} 1.048576e+06' in lines
        assert 'kvstore_tenant_quota_bytes{tenant="*",tier="dram"} 0.0' in lines
        assert not any("tenant_quota" in line and "ssd" in line for line in lines)
