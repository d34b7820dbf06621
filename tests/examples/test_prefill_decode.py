"""The proxy of the prefill and decode example, between a client and scripted engines.

The engines are doubles that speak HTTP and compute nothing; `tests.engines.test_disaggregation` has
the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest
from aiohttp import ClientPayloadError, ClientSession, ServerDisconnectedError, web
from aiohttp.test_utils import TestServer

from examples.prefill_decode.proxy import (
    Options,
    decode_body,
    engine_url,
    main,
    make_application,
    prefill_body,
    prompt_tokens,
    rotations,
)

COMPLETIONS = "/v1/completions"
ASK = {"model": "m", "prompt": list(range(100)), "max_tokens": 5}
GONE = "http://127.0.0.1:9"  # the port for what is discarded: nobody listens
PATIENCE = 10.0

Script: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ScriptedEngine:
    """Answers as its script says, and knows what it was asked.

    Attributes:
        asked: the bodies.
        headers: of the requests.
        ended: how many of its answers were cut short by the one who asked.
        health: the status that it says it is in.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.ended = 0
        self.health = 200
        self.arrived = asyncio.Event()
        self._script = script or self._echo
        application = web.Application()
        application.add_routes([web.post("/v1/{kind:.*}", self._serve)])
        application.add_routes([web.get("/v1/models", self._models)])
        application.add_routes([web.get("/health", self._health)])
        self._server = TestServer(application)

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def __aenter__(self) -> ScriptedEngine:
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    def waits(self) -> list[float]:
        """How long it was told to wait for blocks, by each request."""
        params = (each.get("kv_transfer_params") or {} for each in self.asked)
        return [each.get("kvstore", {}).get("wait", 0.0) for each in params]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers)
        self.arrived.set()
        try:
            return await self._script(request)
        except asyncio.CancelledError:
            self.ended += 1
            raise

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "m"}]})

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"path": request.path, "asked": self.asked[-1]})


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(PATIENCE)
    return web.Response()


async def fails(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


def dies(after: asyncio.Event) -> Script:
    """Is gone in the middle of a request, once something has happened."""

    async def script(request: web.Request) -> web.StreamResponse:
        await after.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return script


def waits_as_told(engine: list[ScriptedEngine]) -> Script:
    """As a decode engine whose blocks never come: silent for as long as it was told to wait."""

    async def script(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(engine[0].waits()[-1])
        return web.json_response({"answer": 1})

    return script


@contextlib.asynccontextmanager
async def proxy(prefill: list[str], decode: list[str], **options: Any) -> AsyncIterator[str]:
    told = Options(prefill, decode, **({"wait": PATIENCE} | options))
    server = TestServer(make_application(told))
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def ask(url: str, body: Any = ASK, path: str = COMPLETIONS) -> tuple[int, Any]:
    async with ClientSession() as session, session.post(url + path, json=body) as answer:
        return answer.status, await answer.json()


# --- what engines are asked ----------------------------------------------------------------------


def test_prefill_computes_one_token_and_no_other_output() -> None:
    body = prefill_body(
        ASK
        | {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 7,
            "n": 3,
            "cache_salt": "s",
        }
    )
    assert body == {
        "model": "m",
        "prompt": ASK["prompt"],
        "cache_salt": "s",
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": {},
    }


@pytest.mark.parametrize("given", [None, "nonsense", {"other": 1, "kvstore": {"wait": 99}}])
def test_decode_is_told_how_long_to_wait_and_all_else_is_left(given: Any) -> None:
    body = decode_body(ASK | {"kv_transfer_params": given, "stream": True}, 3.0)
    others = {"other": 1} if isinstance(given, dict) else {}
    assert body.pop("kv_transfer_params") == others | {"kvstore": {"wait": 3.0}}
    assert body == ASK | {"stream": True}


def test_tokens_are_counted_or_guessed() -> None:
    assert prompt_tokens({"prompt": [1, 2, 3]}) == 3
    assert prompt_tokens({"prompt": "x" * 40}) == 10
    assert prompt_tokens({"prompt": ["x" * 40, "y" * 40]}) >= 20
    assert prompt_tokens({"messages": [{"role": "user", "content": "x" * 4000}]}) >= 1000
    assert prompt_tokens({}) < 5


def test_each_engine_is_the_first_in_its_turn() -> None:
    orders = rotations(["a/", "b", "c"])
    assert [next(orders) for _ in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


# --- how it is started ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("localhost:8001", "http://localhost:8001"),
        ("http://localhost:8001/", "http://localhost:8001"),
        ("https://engines/one", "https://engines/one"),
        ("[::1]:8001", "http://[::1]:8001"),
    ],
)
def test_addresses_of_engines_get_their_scheme(typed: str, url: str) -> None:
    assert engine_url(typed) == url


@pytest.mark.parametrize("typed", ["unix:///run/x", "http://", "", "localhost:port", "a:99999"])
def test_what_is_no_address_of_an_engine_is_refused(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--prefill", typed, "--decode", "localhost:8001"])
    assert f"{typed!r} is no address such as http://localhost:8001" in capsys.readouterr().err


def test_options_are_not_guessed_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--prefill", "a:1", "--decode", "b:1", "--min", "5"])
    assert "unrecognized arguments: --min" in capsys.readouterr().err


async def test_engines_that_are_not_there_are_told_of_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ScriptedEngine() as well, ScriptedEngine() as ill:
        ill.health = 503
        async with proxy([well.url, GONE], [ill.url, well.url]), asyncio.timeout(PATIENCE):
            while len(caplog.records) < 2:
                await asyncio.sleep(0.01)
        told = sorted(record.getMessage() for record in caplog.records)
        assert len(told) == 2
        assert any(each.startswith(f"{GONE}/health does not answer well yet: ") for each in told)
        assert f"{ill.url}/health does not answer well yet: status 503" in told


async def test_it_says_that_it_is_there_whatever_engines_are() -> None:
    async with (
        proxy([GONE], [GONE]) as url,
        ClientSession() as session,
        session.get(url + "/health") as answer,
    ):
        assert answer.status == 200


# --- what its log says ---------------------------------------------------------------------------


def ways(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of each request, but for the time that it took."""
    told = [each.getMessage() for each in caplog.records if each.levelname == "INFO"]
    return [re.sub(r" in [0-9.]+ s: ", ": ", each) for each in told if each.startswith("POST")]


async def test_each_request_has_a_line_with_its_engines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefill_decode")
    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine() as decode,
        proxy([prefill.url], [decode.url], wait=3.0, min_tokens=50) as url,
    ):
        await ask(url)
        await ask(url, ASK | {"prompt": [1]})
        await ask(url, [1])
        assert ways(caplog) == [
            f"POST {COMPLETIONS}: 200, prefill {prefill.url}, decode {decode.url}, wait 3 s",
            f"POST {COMPLETIONS}: 200, prefill none, decode {decode.url}, wait 0 s",
            f"POST {COMPLETIONS}: 400, the body is no JSON object",
        ]


async def test_requests_that_fail_have_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefill_decode")
    async with proxy([GONE], [GONE], wait=3.0) as url:
        assert (await ask(url))[0] == 502
    (line,) = ways(caplog)
    assert line.startswith(f"POST {COMPLETIONS}: 502, prefill none, decode none, wait ")


# --- what clients are answered -------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_both_engines_are_asked_and_the_decode_engine_answers(path: str) -> None:
    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine() as decode,
        proxy([prefill.url], [decode.url], wait=3.0) as url,
    ):
        status, answer = await ask(url, path=path)
    assert (status, answer["path"]) == (200, path)
    assert answer["asked"] == decode_body(ASK, 3.0)
    assert prefill.asked == [prefill_body(ASK)]
    assert decode.waits() == [3.0]


async def test_decode_is_asked_while_prefill_computes() -> None:
    async with (
        ScriptedEngine(never) as prefill,
        ScriptedEngine() as decode,
        proxy([prefill.url], [decode.url]) as url,
    ):
        status, _ = await ask(url)
    assert status == 200
    assert prefill.ended == 1  # nobody needs it any more


async def test_an_answer_is_handed_on_as_it_comes() -> None:
    more = asyncio.Event()

    async def streams(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await more.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine(streams) as decode,
        proxy([prefill.url], [decode.url]) as url,
        ClientSession() as session,
        session.post(url + COMPLETIONS, json=ASK | {"stream": True}) as answer,
    ):
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert await answer.content.readany() == b"data: 1\n\n"
        more.set()
        assert await answer.read() == b"data: [DONE]\n\n"
    assert decode.asked[0]["stream"] is True


async def test_an_answer_that_breaks_off_does_not_look_whole() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine(breaks) as decode,
        proxy([prefill.url], [decode.url]) as url,
        ClientSession() as session,
    ):
        with pytest.raises((ClientPayloadError, ServerDisconnectedError, ConnectionError)):
            async with session.post(url + COMPLETIONS, json=ASK) as answer:
                await answer.read()


async def test_what_the_engine_says_is_wrong_is_handed_on() -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "no such model"}, status=404)

    async with (
        ScriptedEngine(refuses) as prefill,
        ScriptedEngine(refuses) as decode,
        proxy([prefill.url], [decode.url]) as url,
    ):
        assert await ask(url) == (404, {"error": "no such model"})
    assert len(decode.asked) == 1


async def test_credentials_are_handed_on() -> None:
    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine() as decode,
        proxy([prefill.url], [decode.url]) as url,
        ClientSession() as session,
    ):
        headers = {"Authorization": "Bearer x", "Cookie": "y"}
        async with session.post(url + COMPLETIONS, json=ASK, headers=headers) as answer:
            await answer.read()
    for engine in (prefill, decode):
        assert engine.headers[0]["Authorization"] == "Bearer x"
        assert "Cookie" not in engine.headers[0]


async def test_models_are_those_of_the_decode_engine() -> None:
    async with (
        ScriptedEngine() as decode,
        proxy([GONE], [decode.url]) as url,
        ClientSession() as session,
        session.get(url + "/v1/models") as answer,
    ):
        assert await answer.json() == {"data": [{"id": "m"}]}


async def test_short_prompts_go_to_decode_alone() -> None:
    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine() as decode,
        proxy([prefill.url], [decode.url], min_tokens=100) as url,
    ):
        await ask(url, ASK | {"prompt": list(range(99))})
        assert (prefill.asked, len(decode.asked)) == ([], 1)
        assert "kv_transfer_params" not in decode.asked[0]
        await ask(url, ASK)
        assert len(prefill.asked) == 1


async def test_engines_take_turns() -> None:
    async with (
        ScriptedEngine() as p1,
        ScriptedEngine() as p2,
        ScriptedEngine() as d1,
        ScriptedEngine() as d2,
        ScriptedEngine() as d3,
    ):
        async with proxy([p1.url, p2.url], [d1.url, d2.url, d3.url]) as url:
            for _ in range(6):
                await ask(url)
        assert [len(each.asked) for each in (p1, p2, d1, d2, d3)] == [3, 3, 2, 2, 2]


# --- when things go wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "error", "dies"])
async def test_nobody_waits_for_a_prefill_that_failed(how: str) -> None:
    engine: list[ScriptedEngine] = []
    async with ScriptedEngine(waits_as_told(engine)) as decode:
        engine.append(decode)
        script = fails if how == "error" else dies(decode.arrived)
        async with ScriptedEngine(script) as prefill:
            urls = [GONE if how == "gone" else prefill.url]
            async with proxy(urls, [decode.url]) as url, asyncio.timeout(PATIENCE / 2):
                assert await ask(url) == (200, {"answer": 1})
    assert decode.asked[-1].get("kv_transfer_params") is None
    assert decode.ended == len(decode.asked) - 1  # the first was given up, if it was there at all


async def test_another_engine_prefills_where_one_is_gone() -> None:
    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine(never) as decode,
        proxy([GONE, prefill.url], [decode.url]) as url,
    ):
        asking = asyncio.create_task(ask(url))
        async with asyncio.timeout(PATIENCE):
            await prefill.arrived.wait()
        assert len(decode.asked) <= 1
        asking.cancel()
        await asyncio.wait((asking,))


async def test_a_prefill_that_takes_too_long_is_given_up_and_decode_goes_on() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return web.json_response({"answer": 1})

    async with (
        ScriptedEngine(never) as prefill,
        ScriptedEngine(slow) as decode,
        proxy([prefill.url], [decode.url], wait=0.2) as url,
    ):
        assert await ask(url) == (200, {"answer": 1})
    assert (prefill.ended, decode.waits()) == (1, [0.2])


async def test_another_engine_decodes_where_one_is_gone() -> None:
    async with (
        ScriptedEngine() as prefill,
        ScriptedEngine() as decode,
        proxy([prefill.url], [GONE, decode.url]) as url,
    ):
        assert (await ask(url))[0] == 200


async def test_without_a_decode_engine_the_client_is_told() -> None:
    async with ScriptedEngine() as prefill, proxy([prefill.url], [GONE]) as url:
        status, answer = await ask(url)
        assert (status, answer["error"]["code"]) == (502, 502)
        async with ClientSession() as session, session.get(url + "/v1/models") as models:
            assert models.status == 502


async def test_a_client_that_goes_away_ends_both_requests() -> None:
    async with (
        ScriptedEngine(never) as prefill,
        ScriptedEngine(never) as decode,
        proxy([prefill.url], [decode.url]) as url,
    ):
        asking = asyncio.create_task(ask(url))
        async with asyncio.timeout(PATIENCE):
            await prefill.arrived.wait()
            await decode.arrived.wait()
            asking.cancel()
            await asyncio.wait((asking,))
            while not (prefill.ended and decode.ended):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff"])
async def test_what_is_no_request_is_refused(body: bytes) -> None:
    async with (
        ScriptedEngine() as engine,
        proxy([engine.url], [engine.url]) as url,
        ClientSession() as session,
        session.post(url + COMPLETIONS, data=body) as answer,
    ):
        assert answer.status == 400
        assert json.loads(await answer.read())["error"]["message"]
    assert engine.asked == []


async def test_bodies_are_bounded() -> None:
    async with (
        ScriptedEngine() as engine,
        proxy([engine.url], [engine.url], max_body=100) as url,
        ClientSession() as session,
        session.post(url + COMPLETIONS, data=b" " * 200) as answer,
    ):
        assert answer.status == 413
    assert engine.asked == []
