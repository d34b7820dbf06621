"""One OpenAI endpoint in front of engines, each with a node of its own for its KV cache.

The router follows the events of the nodes, so it knows what each of them holds, and sends a prompt
to the engine whose node has the longest prefix of it. Whatever it doesn't know, about a node, a
model or a prompt, costs no request: engines are then taken by how busy they are.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

from examples.prefill_decode.proxy import engine_url
from examples.router.choice import Offer, candidates, hashes_of, offer, order, tokens_of
from kvstore.config import TlsSection
from kvstore.control.channel import ControlChannel
from kvstore.control.client import ControlClient
from kvstore.control.event_client import EventClient, Following
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.identity import Namespace
from kvstore.tls import reaching
from kvstore.units import Address, parse_address

logger = logging.getLogger("router")

PATHS: Final = ("/v1/completions", "/v1/chat/completions")
HEADERS: Final = ("Authorization", "X-Request-Id")
"""What is handed on of a request, beside its body."""
CONNECT: Final = ClientTimeout(total=None, sock_connect=2.0)
"""An answer may take long, but an engine that is there accepts at once."""
TOKENIZE: Final = ClientTimeout(total=2.0)
"""For an engine to say of which tokens a text is."""
TLS: Final = ("ca", "certificate", "key")
"""Options that name files, as the keys of a node's ``[tls]``."""
ASK_AGAIN_SECONDS: Final = 5.0
"""Between two questions for what a namespace is that the node has not told of yet."""

Body: TypeAlias = dict[str, Any]
C = TypeVar("C", bound=ControlChannel)


@dataclass(frozen=True, slots=True)
class Options:
    """What the router is told; see ``main``."""

    engines: Sequence[tuple[str, Address]]
    token: str | None = None
    tls: TlsSection | None = None
    most_ahead: int = 8
    max_body: int = 8 << 20


@dataclass(slots=True)
class Engine:
    """An engine, and what is known of its node."""

    url: str
    node: Address
    following: Following
    busy: int = 0
    asked: float = field(default=float("-inf"))

    @property
    def name(self) -> str:
        """Of the node."""
        return self.following.map.node or str(self.node)


class Router:
    """Answers requests with what the best engine for each says."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.engines = [self._engine(url, node) for url, node in options.engines]
        self._namespaces: dict[bytes, Namespace] = {}
        self._turns = itertools.count()
        self._session: ClientSession

    def _engine(self, url: str, node: Address) -> Engine:
        return Engine(url, node, Following(lambda: self._reach(node, EventClient)))

    def _reach(self, node: Address, kind: type[C]) -> C:
        tls = self._options.tls
        # Made anew for each connection, as certificates are renewed.
        context = None if tls is None else reaching(tls)
        return kind(node, token=self._options.token, context=context)

    async def connected(self, application: web.Application) -> AsyncIterator[None]:
        """Follow the nodes, and have connections to engines, for as long as it runs."""
        async with ClientSession(timeout=CONNECT) as self._session:
            tasks = [asyncio.create_task(self._follow(engine)) for engine in self.engines]
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- what nodes hold -----------------------------------------------------------------------

    async def _follow(self, engine: Engine) -> None:
        try:
            async with aclosing(engine.following.batches()) as batches:
                async for batch in batches:
                    if any(event.namespace not in self._namespaces for event in batch.events):
                        await self._learn(engine)
        except KVStoreError as error:
            logger.error("%s is not followed: %s", engine.name, error)

    async def _learn(self, engine: Engine) -> None:
        """Ask a node what its namespaces are: events have their fingerprints only."""
        if time.monotonic() - engine.asked < ASK_AGAIN_SECONDS:
            return
        engine.asked = time.monotonic()
        try:
            async with self._reach(engine.node, ControlClient) as node:
                reports = await node.namespaces()
            for report in reports:
                if report.description:
                    self._namespaces[report.fingerprint] = Namespace.parse(report.description)
        except KVStoreError as error:
            logger.warning("%s does not say what it holds: %s", engine.name, error)

    # --- requests ------------------------------------------------------------------------------

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a completion."""
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the body is no JSON")
        if not isinstance(body, dict):
            return _error(400, "the body is no JSON object")
        offers = await self._offers(request, body)
        ranked = order(offers, next(self._turns), self._options.most_ahead)
        for at in ranked:
            engine = self.engines[at]
            engine.busy += 1
            try:
                return await self._hand_on(request, body, engine, offers[at])
            except ClientError as error:
                logger.warning("%s does not answer: %s", engine.url, str(error) or repr(error))
            finally:
                engine.busy -= 1
        return _error(502, "no engine answers")

    async def _offers(self, request: web.Request, body: Body) -> list[Offer]:
        namespaces = candidates(body.get("model"), list(self._namespaces.values()))
        tokens = await self._tokens(request, body) if namespaces else None
        try:
            hashes = hashes_of(tokens or (), namespaces, body.get("cache_salt"))
        except InvalidRequest as error:
            logger.info("the prompt has no hashes: %s", error)
            hashes = hashes_of((), namespaces, None)
        return [
            offer(
                engine.following.map if engine.following.connected else None,
                namespaces,
                hashes,
                engine.busy,
            )
            for engine in self.engines
        ]

    async def _tokens(self, request: web.Request, body: Body) -> list[int] | None:
        """The token ids of a prompt: given, or as the least busy engine makes them of its text."""
        tokens = tokens_of(body)
        if tokens is not None:
            return tokens
        names = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
        asked = {name: body[name] for name in names if name in body}
        headers = _handed_on(request)
        for engine in sorted(self.engines, key=lambda engine: engine.busy):
            try:
                async with self._session.post(
                    f"{engine.url}/tokenize", json=asked, headers=headers, timeout=TOKENIZE
                ) as answer:
                    found = await answer.json() if answer.ok else None
            except (ClientError, TimeoutError, ValueError) as error:
                logger.warning("%s makes no tokens: %s", engine.url, str(error) or repr(error))
                continue
            return tokens_of({"prompt": found.get("tokens")}) if isinstance(found, dict) else None
        return None

    async def _hand_on(
        self, request: web.Request, body: Body, engine: Engine, chosen: Offer
    ) -> web.StreamResponse:
        """Ask an engine. Raises ``ClientError`` while nothing of an answer has been handed on."""
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            call = self._session.post(
                engine.url + request.path, json=body, headers=_handed_on(request)
            )
            answer = await stack.enter_async_context(call)
            first = await answer.content.readany()
            response = await _send(request, answer, first, engine, chosen)
        logger.info(
            "POST %s in %.3f s: %d, %s, %d tokens held at %s",
            request.path, time.monotonic() - began, response.status, engine.url, chosen.tokens,
            engine.name,
        )  # fmt: skip
        return response

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Answer which nodes are followed, and how many blocks each holds."""
        nodes = {
            engine.url: {
                "node": engine.name,
                "followed": engine.following.connected,
                "blocks": len(engine.following.map),
                "busy": engine.busy,
            }
            for engine in self.engines
        }
        return web.json_response(nodes)


async def _send(
    request: web.Request, answer: ClientResponse, first: bytes, engine: Engine, chosen: Offer
) -> web.StreamResponse:
    """Send an engine's answer to the client as it comes."""
    response = web.StreamResponse(status=answer.status)
    response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/json")
    response.headers["X-Engine"] = engine.url
    response.headers["X-Tokens-Held"] = str(chosen.tokens)
    await response.prepare(request)
    try:
        await response.write(first)
        async for part in answer.content.iter_any():
            await response.write(part)
    except ClientError as error:
        logger.warning("an answer broke off: %r", error)
        if request.transport is not None:
            request.transport.abort()  # an answer that ended here would look whole
        return response
    await response.write_eof()
    return response


def _handed_on(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in HEADERS if name in request.headers}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def make_application(router: Router, max_body: int = 8 << 20) -> web.Application:
    """The router as an application of aiohttp's."""
    application = web.Application(client_max_size=max_body)
    application.cleanup_ctx.append(router.connected)
    application.add_routes([web.post(path, router.complete) for path in PATHS])
    application.add_routes([web.get("/health", router.health)])
    return application


def engine_and_node(text: str) -> tuple[str, Address]:
    """An engine's URL and the control address of its node, as ``URL,HOST:PORT``.

    Raises:
        ArgumentTypeError: it is not of this form.
    """
    url, comma, node = text.rpartition(",")
    if not comma:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form http://localhost:8001,localhost:9401"
        )
    try:
        return engine_url(url), parse_address(node)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted, as the command line says."""
    parser = argparse.ArgumentParser(
        description="send each prompt to where most of it is held", allow_abbrev=False
    )
    option = parser.add_argument
    option("--engine", action="append", type=engine_and_node, required=True, metavar="URL,CONTROL",
           dest="engines", help="an engine and its node's control address; may be repeated",
    )  # fmt: skip
    option("--most-ahead", type=int, default=8,
           help="requests that an engine may have more than the least busy one")  # fmt: skip
    option("--max-body", type=int, default=8 << 20, help="bytes that a request may have")
    for name in TLS:
        option(f"--{name}", type=Path, metavar="FILE", help="for nodes that speak TLS")
    option("--host", default="127.0.0.1")
    option("--port", type=int, default=8000)
    given = vars(parser.parse_args(arguments))
    host, port = given.pop("host"), given.pop("port")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    files = {name: path for name in TLS if (path := given.pop(name)) is not None}
    tls = TlsSection(**files) if files else None
    options = Options(**given, tls=tls, token=os.environ.get("KVSTORE_AUTH__CONTROL_TOKEN"))
    application = make_application(Router(options), options.max_body)
    web.run_app(application, host=host, port=port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
