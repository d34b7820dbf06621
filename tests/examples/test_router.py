"""The router of the example, between a client, scripted engines and real nodes."""

from __future__ import annotations

import asyncio
import contextlib
from argparse import ArgumentTypeError
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

import kvstore
from examples.router import router
from examples.router.choice import Offer, candidates, hashes_of, offer, order, tokens_of
from examples.router.router import Options, Router, engine_and_node, make_application
from kvstore.config import TlsSection
from kvstore.control.block_map import BlockEvent, BlockMap, EventBatch
from kvstore.control.client import ControlClient
from kvstore.units import Address, parse_address
from tests.kvstore.directory.servers import free_port
from tests.running import DaemonProcess, make_config

BLOCK = 4096
NAMESPACE = kvstore.Namespace("acme/llama", "uint8", "raw", 4, BLOCK)
PROMPT = list(range(100, 140))
HASHES = kvstore.prefix_hashes(PROMPT, 4)
PATIENCE = 20.0
GONE = "http://127.0.0.1:9"  # the port for what is discarded: nobody listens


class Engine:
    """Says who it is, and of which tokens a text is."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.hold = asyncio.Event()
        self.hold.set()
        application = web.Application()
        application.add_routes([web.post("/v1/{kind:.*}", self._serve)])
        application.add_routes([web.post("/tokenize", self._tokenize)])
        self._server = TestServer(application)

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def __aenter__(self) -> Engine:
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        await self.hold.wait()
        return web.json_response({"engine": self.url, "path": request.path})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = body.get("prompt") or body["messages"][0]["content"]
        return web.json_response({"tokens": [int(word) for word in text.split()]})


@contextlib.asynccontextmanager
async def serving(router: Router) -> AsyncIterator[str]:
    server = TestServer(make_application(router))
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def ask(url: str, body: Any, path: str = "/v1/completions") -> tuple[int, str, int]:
    """The status, the engine that answered, and how many tokens its node was thought to hold."""
    async with ClientSession() as session, session.post(url + path, json=body) as answer:
        await answer.read()
        headers = answer.headers
        return answer.status, headers.get("X-Engine", ""), int(headers.get("X-Tokens-Held", "0"))


async def until_asked(url: str, body: Any, wanted: tuple[int, str, int]) -> None:
    async with asyncio.timeout(PATIENCE):
        while await ask(url, body) != wanted:
            await asyncio.sleep(0.02)


# --- the choice ----------------------------------------------------------------------------------


def known(*held: tuple[bytes, str]) -> BlockMap:
    made = BlockMap()
    made.apply(EventBatch("reset", 0, 0, True, "n", "i"))
    events = tuple(
        BlockEvent("stored", NAMESPACE.fingerprint, 0, block, bytes(32), (tier,))
        for block, tier in held
    )
    made.apply(EventBatch("events", 0, len(events), True, events=events))
    return made


def test_a_node_offers_its_longest_prefix() -> None:
    hashes = hashes_of(PROMPT, [NAMESPACE], None)
    held = known((HASHES[0], "dram"), (HASHES[1], "ssd"), (HASHES[3], "dram"))
    assert offer(held, [NAMESPACE], hashes, 3) == Offer(8, 7.0, 3)
    assert offer(None, [NAMESPACE], hashes, 3) == Offer(0, 0.0, 3)
    assert offer(held, [], {}, 3) == Offer(0, 0.0, 3)


def test_a_salted_prompt_is_another() -> None:
    assert hashes_of(PROMPT, [NAMESPACE], None) == {4: HASHES}
    assert not set(hashes_of(PROMPT, [NAMESPACE], "salt")[4]) & set(HASHES)


def test_namespaces_are_those_of_the_model_if_it_has_any() -> None:
    other = kvstore.Namespace("acme/mistral", "uint8", "raw", 4, BLOCK)
    assert candidates("acme/mistral", [NAMESPACE, other]) == [other]
    assert candidates("an alias", [NAMESPACE, other]) == [NAMESPACE, other]


@pytest.mark.parametrize("prompt", ["text", ["text"], [[1, 2]], [True], None])
def test_prompts_without_token_ids(prompt: Any) -> None:
    assert tokens_of({"prompt": prompt}) is None


def offers(*of: tuple[float, int]) -> list[Offer]:
    return [Offer(int(worth), worth, busy) for worth, busy in of]


@pytest.mark.parametrize(
    ("given", "turn", "best"),
    [
        (offers((0, 0), (8, 5), (4, 0)), 0, [1, 2, 0]),  # the longest prefix
        (offers((8, 2), (8, 1), (8, 3)), 0, [1, 0, 2]),  # of equals the least busy
        (offers((0, 0), (0, 0), (0, 0)), 1, [1, 2, 0]),  # of these each in its turn
        (offers((0, 0), (0, 0), (0, 0)), 2, [2, 0, 1]),
        (offers((0, 1), (8, 10), (0, 2)), 0, [0, 2, 1]),  # not one that is far busier
    ],
)
def test_the_order_of_engines(given: Sequence[Offer], turn: int, best: list[int]) -> None:
    assert order(given, turn, most_ahead=8) == best


# --- with engines --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def engines(number: int) -> AsyncIterator[list[Engine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Engine()) for _ in range(number)]


def nowhere(*urls: str) -> Router:
    """A router to engines whose nodes are not there."""
    return Router(Options([(url, Address("127.0.0.1", 9)) for url in urls]))


async def test_engines_take_turns_where_nothing_is_known() -> None:
    async with engines(3) as three, serving(nowhere(*(one.url for one in three))) as url:
        asked = [await ask(url, {"prompt": PROMPT}) for _ in range(6)]
        assert asked == [(200, one.url, 0) for one in three] * 2


async def test_the_next_engine_answers_where_one_is_gone() -> None:
    async with engines(1) as (one,), serving(nowhere(GONE, one.url)) as url:
        for _ in range(2):
            assert await ask(url, {"prompt": PROMPT}) == (200, one.url, 0)
    async with serving(nowhere(GONE)) as url:
        assert await ask(url, {"prompt": PROMPT}) == (502, "", 0)


async def test_a_busy_engine_is_not_asked_where_another_is_free() -> None:
    async with engines(2) as (one, other):
        made = nowhere(one.url, other.url)

        async def until_only_one_is_busy() -> None:
            async with asyncio.timeout(PATIENCE):
                while not one.asked or [each.busy for each in made.engines] != [1, 0]:
                    await asyncio.sleep(0.01)

        async with serving(made) as url:
            one.hold.clear()
            waiting = asyncio.create_task(ask(url, {"prompt": PROMPT}))
            for _ in range(3):
                await until_only_one_is_busy()
                assert await ask(url, {"prompt": PROMPT}) == (200, other.url, 0)
            one.hold.set()
            assert await waiting == (200, one.url, 0)
    assert len(one.asked) == 1


@pytest.mark.parametrize("body", [[1], "text"])
async def test_what_is_no_request_is_refused(body: Any) -> None:
    async with serving(nowhere(GONE)) as url:
        assert (await ask(url, body))[0] == 400


def test_engines_are_named_with_their_nodes() -> None:
    assert engine_and_node("localhost:8001,node-1:9401") == (
        "http://localhost:8001",
        Address("node-1", 9401),
    )
    for text in ("localhost:8001", "localhost:8001,nowhere", ",node:1"):
        with pytest.raises(ArgumentTypeError):
            engine_and_node(text)


def test_it_is_told_what_the_command_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Options] = []
    monkeypatch.setenv("KVSTORE_AUTH__CONTROL_TOKEN", "secret")
    monkeypatch.setattr(router, "Router", lambda options: made.append(options) or Router(options))
    monkeypatch.setattr(router.web, "run_app", lambda *_, **__: None)
    router.main(["--engine", "a:1,b:2", "--engine", "c:3,d:4", "--ca", "/ca.pem"])
    (options,) = made
    assert options.engines == [("http://a:1", Address("b", 2)), ("http://c:3", Address("d", 4))]
    assert options.tls == TlsSection(ca=Path("/ca.pem"))
    assert options.token == "secret"
    with pytest.raises(SystemExit):
        router.main(["--engine", "a:1"])


# --- with nodes ----------------------------------------------------------------------------------


class Nodes:
    """Real daemons, each in a process of its own."""

    def __init__(self, directory: Path, number: int) -> None:
        self.daemons = [
            DaemonProcess(
                make_config(
                    directory / f"node-{at}",
                    node={"name": f"node-{at}"},
                    listen={"control": f"127.0.0.1:{free_port()}", "metrics": None},
                )
            )
            for at in range(number)
        ]

    def control(self, at: int) -> Address:
        return parse_address(self.daemons[at].config.listen.control)

    def put(self, at: int, hashes: Sequence[bytes]) -> None:
        with kvstore.connect(self.daemons[at].url, NAMESPACE, deadline=10.0) as client:
            assert client.put(hashes, [bytes(BLOCK)] * len(hashes)).stored

    async def evict(self, at: int, block: bytes) -> None:
        async with ControlClient(self.control(at)) as node:
            assert (await node.evict(NAMESPACE.fingerprint, block)).blocks


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, 3)
    try:
        for daemon in made.daemons:
            daemon.start()
        yield made
    finally:
        for daemon in made.daemons:
            daemon.kill()


async def test_prompts_go_where_most_of_them_is_held(nodes: Nodes) -> None:
    """Through evictions, and the death and return of a node."""
    text = " ".join(map(str, PROMPT))
    ids = {"model": "acme/llama", "prompt": PROMPT}
    async with engines(3) as three:
        made = Router(Options([(one.url, nodes.control(at)) for at, one in enumerate(three)]))
        first, second, third = (one.url for one in three)
        nodes.put(0, HASHES[:4])  # before anybody follows
        async with serving(made) as url:
            await until_asked(url, ids, (200, first, 16))
            nodes.put(1, HASHES[:7])
            await until_asked(url, ids, (200, second, 28))
            assert await ask(url, {"prompt": text}) == (200, second, 28)
            chat = {"messages": [{"role": "user", "content": text}]}
            assert await ask(url, chat, "/v1/chat/completions") == (200, second, 28)
            assert (await ask(url, ids | {"cache_salt": "x"}))[2] == 0
            await nodes.evict(1, HASHES[3])
            await until_asked(url, ids, (200, first, 16))
            nodes.put(2, HASHES)
            await until_asked(url, ids, (200, third, 40))
            nodes.daemons[2].kill()
            await until_asked(url, ids, (200, first, 16))
            nodes.daemons[2].start()  # with nothing in it
            async with asyncio.timeout(PATIENCE):
                while made.engines[2].following.connections < 2:
                    await asyncio.sleep(0.02)
            assert await ask(url, ids) == (200, first, 16)
            nodes.put(2, HASHES[:6])
            await until_asked(url, ids, (200, third, 24))
