"""One OpenAI endpoint in front of engines that prefill and engines that decode.

Each request goes to one engine of either kind at once. The prefill engine computes the prompt and
saves its blocks; the decode engine takes them out of the store as they come, and computes what has
not come within the time it was told to wait. So prefill engines are never needed for an answer,
only for a fast one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, web

logger = logging.getLogger("prefill_decode")

PATHS: Final = ("/v1/completions", "/v1/chat/completions")
PARAMS: Final = "kv_transfer_params"
HEADERS: Final = ("Authorization", "X-Request-Id")
"""What is handed on of a request, beside its body."""

CHARACTERS: Final = 4
"""Characters of text that make about one token."""

CONNECT: Final = ClientTimeout(total=None, sock_connect=2.0)
"""An answer may take long, but an engine that is there accepts at once."""

HEALTH: Final = ClientTimeout(total=5.0)
"""For an engine to say that it is there, when the proxy starts."""

LEFT_OUT: Final = ("stream", "stream_options", "max_completion_tokens", "n", "use_beam_search")
"""What would make the prefill engine do more than it has to."""

T = TypeVar("T")
Body: TypeAlias = dict[str, Any]
Answer: TypeAlias = tuple[ClientResponse, bytes]
"""An engine's, and its first bytes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the proxy is told; see ``main``."""

    prefill: Sequence[str]
    decode: Sequence[str]
    wait: float
    min_tokens: int = 0
    max_body: int = 8 << 20


def engine_url(text: str) -> str:
    """The address of an engine as somebody has typed it, with its scheme and without a last slash.

    Raises:
        ArgumentTypeError: it is none.
    """
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://localhost:8001")
    return url


def prefill_body(body: Body) -> Body:
    """What the prefill engine is asked: the prompt, and no more of an answer than it must give."""
    kept = {name: value for name, value in body.items() if name not in LEFT_OUT}
    return kept | {"max_tokens": 1, "min_tokens": 1, "stream": False, PARAMS: {}}


def decode_body(body: Body, wait: float) -> Body:
    """What the decode engine is asked: all, and to wait so many seconds for the prompt's blocks."""
    given = body.get(PARAMS)
    params = given if isinstance(given, dict) else {}
    return body | {PARAMS: params | {"kvstore": {"wait": wait}}}


def prompt_tokens(body: Body) -> int:
    """About how many tokens a request's prompt has: ids are counted, text is guessed at."""
    prompt = body.get("prompt", body.get("messages"))
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return len(prompt)
    return len(prompt if isinstance(prompt, str) else json.dumps(prompt)) // CHARACTERS


def rotations(urls: Sequence[str]) -> Iterator[list[str]]:
    """In which order to try engines of one kind: each is the first in its turn, without end."""
    bases = [url.rstrip("/") for url in urls]
    return itertools.cycle([bases[first:] + bases[:first] for first in range(len(bases))])


@dataclass(slots=True)
class Way:
    """Which way a request has taken, for the log.

    Attributes:
        prefill: the engine that computes its prompt, if any.
        decode: the engine that answers.
        wait: seconds that the latter was told to wait for the former.
        status: of the answer; ``None`` where the client didn't stay for it.
    """

    prefill: str = "none"
    decode: str = "none"
    wait: float = 0.0
    status: int | None = None

    def __str__(self) -> str:
        outcome = "given up" if self.status is None else self.status
        return f"{outcome}, prefill {self.prefill}, decode {self.decode}, wait {self.wait:g} s"


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's request on its way to engines."""

    method: str
    path: str
    body: Body | None
    headers: dict[str, str]
    way: Way = field(default_factory=Way)


class Proxy:
    """Answers requests with what a decode engine says."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._prefill, self._decode = rotations(options.prefill), rotations(options.decode)
        self._session: ClientSession

    async def connected(self, application: web.Application) -> AsyncIterator[None]:
        """Have connections to engines for as long as the application runs."""
        async with ClientSession(timeout=CONNECT) as self._session, _task(self._look()):
            yield

    async def _look(self) -> None:
        """Say which engines are not there; they may come later."""
        urls = (*self._options.prefill, *self._options.decode)
        await asyncio.gather(*map(self._look_at, {url.rstrip("/") for url in urls}))

    async def _look_at(self, url: str) -> None:
        try:
            async with self._session.get(f"{url}/health", timeout=HEALTH) as answer:
                reason = "" if answer.ok else f"status {answer.status}"
        except (ClientError, TimeoutError) as error:
            reason = str(error) or repr(error)
        if reason:
            logger.warning("%s/health does not answer well yet: %s", url, reason)

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Answer that the proxy is there, whatever engines are."""
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a completion."""
        try:
            body = await request.json()
        except ValueError:
            return _refused(request, "the body is no JSON")
        if not isinstance(body, dict):
            return _refused(request, "the body is no JSON object")
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        return await self._hand_on(request, Ask("POST", request.path, body, headers))

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Answer what a decode engine says of its models."""
        return await self._hand_on(request, Ask("GET", request.path, None, {}))

    async def _hand_on(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        began = time.monotonic()
        try:
            response = await self._respond(request, ask)
            ask.way.status = response.status
            return response
        finally:
            taken = time.monotonic() - began
            logger.info("%s %s in %.3f s: %s", ask.method, ask.path, taken, ask.way)

    async def _respond(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            try:
                answer, first = await self._answer(ask, stack)
            except ClientError as error:
                return _error(502, f"no decode engine answers: {error}")
            return await _send(request, answer, first)

    async def _answer(self, ask: Ask, stack: AsyncExitStack) -> Answer:
        """What a decode engine says. Raises ``ClientError`` if none answers."""
        if ask.body is None or prompt_tokens(ask.body) < self._options.min_tokens:
            return await self._open(ask, stack)
        prefill = await stack.enter_async_context(_task(self._compute(ask)))
        waits = await stack.enter_async_context(AsyncExitStack())
        later = replace(ask, body=decode_body(ask.body, self._options.wait))
        ask.way.wait = self._options.wait
        opening = await waits.enter_async_context(_task(self._open(later, waits)))
        await asyncio.wait((opening, prefill), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done() and not await prefill:
            # Nobody computes what the decode engine waits for: it is asked anew.
            await waits.aclose()
            ask.way.wait = 0.0
            return await self._open(ask, stack)
        return await opening

    async def _compute(self, ask: Ask) -> bool:
        """Have a prompt computed; says whether it may be of use to wait for its blocks."""
        ask = replace(ask, body=prefill_body(ask.body or {}))
        try:
            async with asyncio.timeout(self._options.wait):
                for url in next(self._prefill):
                    if await self._compute_at(url, ask):
                        return True
        except TimeoutError:
            logger.warning("a prompt took longer than %g s to compute", self._options.wait)
            return True  # the decode engine waits no longer either
        return False

    async def _compute_at(self, url: str, ask: Ask) -> bool:
        ask.way.prefill = url
        try:
            async with self._call(url, ask) as answer:
                await answer.read()
        except ClientError as error:
            reason = str(error) or repr(error)
        else:
            if answer.status < 500:
                return True  # what is wrong with a request, the decode engine says as well
            reason = f"status {answer.status}"
        ask.way.prefill = "none"
        logger.warning("%s did not compute a prompt: %s", url, reason)
        return False

    async def _open(self, ask: Ask, stack: AsyncExitStack) -> Answer:
        """What the first decode engine says that says anything; else raises ``ClientError``."""
        *urls, last = next(self._decode)
        for url in urls:
            try:
                return await self._open_at(url, ask, stack)
            except ClientError as error:
                logger.warning("%s does not answer: %s", url, str(error) or repr(error))
        return await self._open_at(last, ask, stack)

    async def _open_at(self, url: str, ask: Ask, stack: AsyncExitStack) -> Answer:
        answer = await stack.enter_async_context(self._call(url, ask))
        ask.way.decode = url
        return answer, await answer.content.readany()

    def _call(self, url: str, ask: Ask) -> AbstractAsyncContextManager[ClientResponse]:
        return self._session.request(ask.method, url + ask.path, json=ask.body, headers=ask.headers)


@asynccontextmanager
async def _task(work: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """A task that is gone when the block is."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _send(request: web.Request, answer: ClientResponse, first: bytes) -> web.StreamResponse:
    """Send an engine's answer to the client as it comes."""
    response = web.StreamResponse(status=answer.status)
    response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/json")
    await response.prepare(request)
    await response.write(first)
    try:
        async for part in answer.content.iter_any():
            await response.write(part)
    except ClientError as error:
        logger.warning("an answer broke off: %r", error)
        if request.transport is not None:
            request.transport.abort()  # an answer that ended here would look whole
        return response
    await response.write_eof()
    return response


def _refused(request: web.Request, message: str) -> web.Response:
    logger.info("%s %s: 400, %s", request.method, request.path, message)
    return _error(400, message)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def make_application(options: Options) -> web.Application:
    """The proxy as an application of aiohttp's."""
    proxy = Proxy(options)
    application = web.Application(client_max_size=options.max_body)
    application.cleanup_ctx.append(proxy.connected)
    application.add_routes([web.post(path, proxy.complete) for path in PATHS])
    application.add_routes([web.get("/v1/models", proxy.models), web.get("/health", proxy.health)])
    return application


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted, as the command line says."""
    # An abbreviated option may be another one that was misspelled.
    parser = argparse.ArgumentParser(
        description="prefill on one engine, decode on another", allow_abbrev=False
    )
    option = parser.add_argument
    for kind in ("--prefill", "--decode"):
        option(kind, action="append", type=engine_url, required=True, metavar="URL",
               help="may be repeated")  # fmt: skip
    option("--wait", type=float, default=10.0, help="seconds that decode waits for a prefill")
    option("--min-tokens", type=int, default=0, help="shorter prompts go to decode alone")
    option("--max-body", type=int, default=8 << 20, help="bytes that a request may have")
    option("--host", default="127.0.0.1")
    option("--port", type=int, default=8000)
    given = vars(parser.parse_args(arguments))
    host, port = given.pop("host"), given.pop("port")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # A client that went away has its request aborted at the engines. The log has a line of ours for
    # each request, with the engines that it went to.
    application = make_application(Options(**given))
    web.run_app(application, host=host, port=port, handler_cancellation=True, access_log=None)


if __name__ == "__main__":
    main()
