"""The control plane over a real loopback socket, against an in-memory fake of a node."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpclib.client
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from kvstore.control import control_pb2 as pb
from kvstore.control import interface, snapshot
from kvstore.control.client import ControlClient
from kvstore.control.control_grpc import ControlStub
from kvstore.control.server import MAX_REQUEST, ControlServer
from kvstore.control.service import ControlService
from kvstore.control.wire import decode, encode
from kvstore.departures import DepartureReason
from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutOfSpace,
    Unavailable,
)
from kvstore.metrics import Metrics
from kvstore.units import Address
from tests.kvstore.fake_target import HASHES, HELD, NAMESPACE, FakeTarget, block, unknown_hash

ANY_PORT = Address("127.0.0.1", 0)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
async def server(target: FakeTarget) -> AsyncIterator[ControlServer]:
    running = ControlServer([ControlService(target)], ANY_PORT)
    await running.start()
    yield running
    await running.close()


@pytest.fixture
async def node(server: ControlServer) -> AsyncIterator[ControlClient]:
    async with ControlClient(server.address, timeout=5) as client:
        yield client


async def test_every_answer_crosses_the_wire_unchanged(
    target: FakeTarget, node: ControlClient
) -> None:
    name, leaf = NAMESPACE.fingerprint, HASHES[4]
    assert await node.status() == await target.status()
    assert await node.namespaces() == await target.namespaces()
    query = interface.BlockQuery(namespace=name, shard=0, tier="ssd", limit=4)
    assert await node.list_blocks(query) == await target.list_blocks(query)
    assert target.asked[-2] == ("list_blocks", query)
    assert await node.inspect(name, leaf, prefix=True, limit=3) == [block(i) for i in (2, 3, 4)]
    assert await node.match(name, HASHES) == await target.match(name, HASHES)
    assert await node.explain(name, HASHES) == await target.explain(name, HASHES)
    assert await node.pin(name, leaf, 60.0) == target.pinned[leaf]
    assert await node.pins() == list(target.pinned.values())
    assert await node.unpin(name, leaf) == interface.Removal(5, 5 << 20)
    assert await node.unpin(name, leaf) == interface.Removal(0, 0)
    assert await node.evict(name, None) == await target.evict(name, None)
    assert target.asked[-2] == ("evict", name, None)
    assert await node.flush("dram") == await target.flush("dram")
    found = await node.find(leaf.hex()[:8], None, 2)
    assert found == [interface.BlockName(name, leaf)]
    seen, direct = await node.snapshot(), await target.snapshot()
    assert replace(
        seen, clock=0, lookups=0, hits={}, misses={}, moved_bytes={}, matched={}
    ) == replace(direct, clock=0, lookups=0, hits={}, misses={}, moved_bytes={}, matched={})


async def test_pages_follow_each_other(node: ControlClient) -> None:
    seen: list[bytes] = []
    query = interface.BlockQuery(limit=4)
    while True:
        page = await node.list_blocks(query)
        seen += [one.hash for one in page.blocks]
        if not page.cursor:
            break
        query = replace(query, cursor=page.cursor)
    assert seen == HASHES[:HELD]


async def test_verify_streams_and_ends(target: FakeTarget, node: ControlClient) -> None:
    target.corrupt = 1
    steps = [step async for step in node.verify(None, "ssd")]
    assert [step.checked for step in steps] == [2, 4, 6]
    assert steps[-1].finished
    assert steps[-1].names == (interface.BlockName(NAMESPACE.fingerprint, HASHES[0]),)
    assert target.verifying == 0


async def test_a_caller_who_leaves_ends_its_verification(
    target: FakeTarget, server: ControlServer
) -> None:
    target.verify_steps, target.verify_pause = 10_000, 0.01
    async with ControlClient(server.address) as client:
        steps = client.verify(None, None)
        await anext(aiter(steps))
        assert target.verifying == 1
        await steps.aclose()  # type: ignore[attr-defined]
    for _ in range(200):
        if not target.verifying:
            break
        await asyncio.sleep(0.01)
    assert target.verifying == 0


async def test_closing_the_server_ends_what_is_running(target: FakeTarget) -> None:
    target.verify_steps, target.verify_pause = 10_000, 0.01
    running = ControlServer([ControlService(target)], ANY_PORT)
    await running.start()
    async with ControlClient(running.address) as client:
        steps = client.verify(None, None)
        await anext(aiter(steps))
        await running.close()
        assert target.verifying == 0
        with pytest.raises(Unavailable):
            async for _ in steps:
                pass
    with pytest.raises(Unavailable, match="nothing answers"):
        async with ControlClient(running.address) as client:
            await client.status()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (InvalidRequest("no such thing: really"), InvalidRequest),
        (OutOfSpace("too much"), OutOfSpace),
        (Unavailable("stopping"), Unavailable),
        (ZeroDivisionError("a bug"), InternalError),
    ],
)
async def test_errors_keep_their_kind(
    target: FakeTarget, raised: Exception, expected: type[Exception]
) -> None:
    faults = 0

    def count() -> None:
        nonlocal faults
        faults += 1

    target.failure = raised
    running = ControlServer([ControlService(target, count)], ANY_PORT)
    await running.start()
    async with ControlClient(running.address) as client:
        with pytest.raises(expected) as caught:
            await client.status()
        target.failure = None
        await client.status()
    await running.close()
    assert faults == (expected is InternalError)
    assert "a bug" not in str(caught.value)


async def test_a_call_ends_by_its_timeout(target: FakeTarget, server: ControlServer) -> None:
    async def never() -> interface.NodeStatus:
        await asyncio.sleep(60)
        raise AssertionError

    target.status = never  # type: ignore[method-assign]
    async with ControlClient(server.address, timeout=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            await client.status()


@pytest.mark.parametrize(
    "token", [None, "wrong", "Bearer right", "r\N{LATIN SMALL LETTER I WITH GRAVE}ght"]
)
async def test_a_token_is_needed_where_one_is_set(target: FakeTarget, token: str | None) -> None:
    running = ControlServer([ControlService(target)], ANY_PORT, token="right")
    await running.start()
    async with ControlClient(running.address, token="right") as client:
        assert (await client.status()).name == "node-a"
    asked = len(target.asked)
    if token is None or token.isascii():
        async with ControlClient(running.address, token=token) as client:
            with pytest.raises(AccessDenied):
                await client.status()
            with pytest.raises(AccessDenied):
                await anext(aiter(client.verify(None, None)))
    assert len(target.asked) == asked
    await running.close()


BAD_REQUESTS = [
    ("Inspect", pb.InspectRequest(namespace=b"short", hash=HASHES[0], limit=1)),
    ("Inspect", pb.InspectRequest(namespace=HASHES[0], hash=b"", limit=1)),
    ("Inspect", pb.InspectRequest(namespace=HASHES[0], hash=HASHES[0], limit=0)),
    ("ListBlocks", pb.BlockQuery(limit=interface.MAX_PAGE + 1)),
    ("ListBlocks", pb.BlockQuery(limit=1, cursor=b"x" * 5000)),
    ("ListBlocks", pb.BlockQuery(limit=1, cursor=b"not mine")),
    ("ListBlocks", pb.BlockQuery(limit=1, tier="tape")),
    ("Find", pb.FindRequest(beginning="abc", limit=1)),
    ("Find", pb.FindRequest(beginning="ABCDEF01", limit=1)),
    ("Match", pb.PrefixRequest(namespace=HASHES[0], hashes=b"x" * 33)),
    ("Match", pb.PrefixRequest(namespace=HASHES[0], hashes=bytes(32 * 65537))),
    ("Pin", pb.PinRequest(namespace=HASHES[0], hash=HASHES[0], seconds=0)),
    ("Pin", pb.PinRequest(namespace=HASHES[0], hash=HASHES[0], seconds=float("nan"))),
    ("Pin", pb.PinRequest(namespace=HASHES[0], hash=unknown_hash())),
    ("Flush", pb.FlushRequest(tier="")),
    ("Flush", pb.FlushRequest(tier="hbm")),
]


@pytest.mark.parametrize(("method", "request_"), BAD_REQUESTS)
async def test_bad_requests_are_refused(
    server: ControlServer, method: str, request_: object
) -> None:
    channel = grpclib.client.Channel("127.0.0.1", server.address.port)
    try:
        with pytest.raises(GRPCError) as caught:
            await getattr(ControlStub(channel), method)(request_)
        assert caught.value.status is Status.INVALID_ARGUMENT
        assert (caught.value.message or "").startswith("invalid_request: ")
        await ControlStub(channel).Status(pb.StatusRequest())
    finally:
        channel.close()


async def test_a_request_beyond_the_bound_is_refused_unread(server: ControlServer) -> None:
    channel = grpclib.client.Channel("127.0.0.1", server.address.port)
    try:
        with pytest.raises(GRPCError) as caught:
            await ControlStub(channel).Match(
                pb.PrefixRequest(namespace=HASHES[0], hashes=bytes(MAX_REQUEST)), timeout=10
            )
        assert caught.value.status is Status.RESOURCE_EXHAUSTED
        await ControlStub(channel).Status(pb.StatusRequest())
    finally:
        channel.close()


async def test_a_malformed_message_is_the_fault_of_who_sent_it(target: FakeTarget) -> None:
    faults: list[None] = []
    service = ControlService(target, lambda: faults.append(None))
    server = ControlServer([service], ANY_PORT)
    await server.start()
    channel = grpclib.client.Channel("127.0.0.1", server.address.port)
    find = grpclib.client.UnaryUnaryMethod(
        channel, "/kvstore.control.v1.Control/Find", pb.InspectRequest, pb.FindAnswer
    )
    try:
        with pytest.raises(GRPCError) as caught:
            # The same field is text in what the call takes.
            await find(pb.InspectRequest(namespace=b"\xff"))
        assert caught.value.status is Status.INVALID_ARGUMENT
        assert faults == []
    finally:
        channel.close()
        await server.close()


async def test_what_is_no_grpc_is_shrugged_off(server: ControlServer, node: ControlClient) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
    await writer.drain()
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    assert (await node.status()).name == "node-a"


texts = st.text(max_size=8)
counts = st.integers(0, 2**63)
hashes = st.binary(min_size=32, max_size=32)
floats = st.floats(0, 1e12)
REPORTS: dict[type, tuple[type, st.SearchStrategy[object]]] = {
    interface.BlockReport: (
        pb.BlockReport,
        st.builds(
            interface.BlockReport,
            shard=st.integers(0, 4095),
            tiers=st.lists(st.sampled_from(["hbm", "dram", "ssd"])).map(tuple),
            size=counts,
            children=counts,
            pins=counts,
            age=floats,
            idle=floats,
            checksum=st.none() | st.integers(0, 2**32 - 1),
        ),
    ),
    interface.NamespaceReport: (
        pb.NamespaceReport,
        st.builds(
            interface.NamespaceReport,
            description=st.dictionaries(texts, texts | st.integers(-(2**63), 2**63 - 1)),
            blocks=counts,
            bytes=counts,
            sessions=counts,
            shards=st.lists(st.integers(0, 4095)).map(tuple),
        ),
    ),
    interface.Explanation: (
        pb.Explanation,
        st.builds(
            interface.Explanation,
            asked=st.integers(0, 65536),
            blocks=st.integers(0, 65536),
            shard=st.none() | st.integers(0, 4095),
            ago=st.none() | floats,
            differences=st.lists(texts).map(tuple),
            tier=texts,
            reason=texts,
            hash=hashes,
            nearest=hashes,
        ),
    ),
    interface.BlockQuery: (
        pb.BlockQuery,
        st.builds(
            interface.BlockQuery,
            namespace=st.none() | hashes,
            shard=st.none() | st.integers(0, 4095),
            tier=st.none() | st.just("ssd"),
            cursor=st.binary(),
            limit=st.integers(0, 1000),
        ),
    ),
    interface.VerifyProgress: (
        pb.VerifyProgress,
        st.builds(
            interface.VerifyProgress,
            checked=counts,
            total=counts,
            bytes=counts,
            corrupt=counts,
            unreadable=counts,
            names=st.lists(st.builds(interface.BlockName)).map(tuple),
        ),
    ),
}


@given(st.data())
@pytest.mark.parametrize("kind", REPORTS)
def test_reports_survive_the_wire(kind: type, data: st.DataObject) -> None:
    message_type, reports = REPORTS[kind]
    report = data.draw(reports)
    sent = encode(report, message_type()).SerializeToString()
    assert decode(message_type.FromString(sent), kind) == report


def test_the_snapshot_adds_up() -> None:
    metrics = Metrics()
    metrics.hit("dram", 3)
    metrics.miss("absent", 2)
    metrics.moved("shm", "out", 4096)
    metrics.evictions["dram", DepartureReason.CAPACITY] += 1
    metrics.match_seconds.observe(3e-6)
    seen = snapshot.take(metrics, 12.5, [])
    assert sum(seen.hits.values()) + sum(seen.misses.values()) == seen.lookups == 5
    assert seen.moved_bytes == {"shm out": 4096}
    assert seen.evictions == {"dram capacity": 1}
    assert seen.latencies["match"] == interface.Latency(1, 5e-6, 5e-6)
    assert decode(encode(seen, pb.NodeSnapshot()), interface.Snapshot) == seen


def test_the_generated_code_is_that_of_the_proto() -> None:
    root = Path(__file__).parents[2]
    pytest.importorskip("grpc_tools")
    made = subprocess.run(
        [root / "scripts/proto", "--check"],
        cwd=root,
        env={"VENV": sys.prefix, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr


async def test_nothing_is_left_behind(target: FakeTarget) -> None:
    for _ in range(3):
        running = ControlServer([ControlService(target)], ANY_PORT)
        await running.start()
        async with ControlClient(running.address) as client:
            await client.status()
        await running.close()
    await asyncio.sleep(0.05)
    gc.collect()
    assert len(asyncio.all_tasks()) == 1
