"""The asyncio client."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, overload

from client import following, forks, operations, putting
from client.buffers import Buffers, PutBlocks
from client.endpoint import Settings
from client.gpu_views import view_on_gpus
from client.health import Health
from client.layout import Layout
from client.operations import Operation, Seen, Terms
from client.prefix import AsyncPrefixes
from client.registration import Registered, register
from client.results import FAILED, Changes, ClientStats, GetResult, Match, PutResult
from client.stream_wire import StreamWire
from client.tally import NO_SESSION, Tally
from client.views import BlockViews, DeviceViews, Views
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.identity import ROOT_PARENT, Namespace, check_hash
from kvstore.protocol.caller import Counters

logger = logging.getLogger("kvstore.client")

T = TypeVar("T")
W = TypeVar("W", bound=Views[Any])


class AsyncClient:
    """The asyncio twin of ``Client``: the same calls, awaited, and many at once on one session.

    Belongs to the event loop that it was first used on. A call that is cancelled touches the
    caller's memory no more once it has returned. Large copies run on the loop's default executor.

    Args:
        settings: where the node is and what is asked of it.
        deadline: seconds that a call may take where it doesn't say.

    Attributes:
        namespace: of the blocks.
        deadline: as above.
    """

    def __init__(self, settings: Settings, deadline: float) -> None:
        self.namespace: Namespace = settings.namespace
        self.deadline = deadline
        self._settings = settings
        self._tally = Tally()
        self._counters = Counters()
        self._health = Health(self._counters)
        self._wire: StreamWire | None = None
        self._heard_by_then = 0  # answers on it, when the last call was over
        self._session = NO_SESSION
        self._opening = asyncio.Lock()
        self._addresses: list[tuple[socket.AddressFamily, Any]] = []
        self._closed = False
        forks.watch(self)

    # --- blocks --------------------------------------------------------------------------------

    async def match(
        self,
        hashes: Sequence[bytes],
        *,
        prefetch: bool = False,
        deadline: float | None = None,
    ) -> Match:
        """As ``Client.match``."""
        operations.check_hashes(hashes)
        try:
            return await self._run(
                lambda terms: operations.match(terms, hashes, prefetch), deadline
            )
        except KVStoreError as error:
            return Match(b"", self._failed(error))

    async def exists(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        """As ``Client.exists``."""
        operations.check_hashes(hashes)
        try:
            return await self._run(lambda terms: operations.exists(terms, hashes), deadline)
        except KVStoreError as error:
            return GetResult(bytes(len(hashes)), self._failed(error))

    async def get(
        self,
        hashes: Sequence[bytes],
        into: Buffers,
        *,
        offset: int = 0,
        length: int | None = None,
        wait: bool = False,
        deadline: float | None = None,
    ) -> GetResult:
        """As ``Client.get``."""
        operations.check_hashes(hashes)
        wanted = operations.byte_range(self.namespace, offset, length)
        buffers = operations.destinations(into, len(hashes), wanted)
        try:
            result = await self._run(
                lambda terms: operations.get(terms, hashes, buffers, offset, wait), deadline
            )
        except KVStoreError as error:
            result = GetResult(bytes(len(hashes)), self._failed(error))
        self._tally.got(len(hashes), result.found, wanted)
        return result

    @overload
    def view(
        self,
        hashes: Sequence[bytes],
        *,
        device: Literal[False] = False,
        deadline: float | None = None,
    ) -> AsyncViews[BlockViews]: ...
    @overload
    def view(
        self, hashes: Sequence[bytes], *, device: Literal[True], deadline: float | None = None
    ) -> AsyncViews[DeviceViews]: ...
    def view(
        self, hashes: Sequence[bytes], *, device: bool = False, deadline: float | None = None
    ) -> AsyncViews[BlockViews] | AsyncViews[DeviceViews]:
        """As ``Client.view``: ``async with client.view(hashes) as views``."""
        operations.check_hashes(hashes)
        if device:
            return AsyncViews(lambda: self._view(DeviceViews, view_on_gpus, hashes, deadline))
        return AsyncViews(lambda: self._view(BlockViews, operations.view, hashes, deadline))

    async def put(
        self,
        hashes: Sequence[bytes],
        blocks: PutBlocks,
        *,
        parent: bytes = ROOT_PARENT,
        replicas: int | None = None,
        deadline: float | None = None,
    ) -> PutResult:
        """As ``Client.put``."""
        operations.check_hashes(hashes)
        check_hash(parent)
        copies = putting.copies_of(replicas)
        filling = putting.filling_of(self.namespace, hashes, blocks)
        try:
            result = await self._run(
                lambda terms: putting.put(terms, hashes, filling, parent, copies), deadline
            )
        except KVStoreError as error:
            result = PutResult(bytes([FAILED]) * len(hashes), self._failed(error))
        self._tally.put(result.stored, self.namespace.block_bytes)
        filling.check()
        return result

    async def follow(
        self, after: int, *, limit: int = following.LIMIT, deadline: float | None = None
    ) -> Changes:
        """As ``Client.follow``."""
        following.check(after, limit)
        try:
            return await self._run(lambda terms: following.follow(terms, after, limit), deadline)
        except KVStoreError as error:
            return Changes(after, True, failure=self._failed(error))

    async def register(self, buffer: object) -> Registered:
        """As ``Client.register``; the memory is pinned by a thread of the executor."""
        return await asyncio.to_thread(register, self._settings, self._session.transport, buffer)

    def prefixes(self, layout: Layout) -> AsyncPrefixes:
        """As ``Client.prefixes``."""
        return AsyncPrefixes(self, layout)

    # --- the client ----------------------------------------------------------------------------

    def stats(self) -> ClientStats:
        """What the client has done so far, and how it is connected."""
        return self._tally.stats(
            self._settings.endpoint.url,
            [self._counters],
            connected=self._health.state == "connected",
            session=self._session,
        )

    async def open(self) -> None:
        """Open the session now.

        Raises:
            KVStoreError: why that can't be done.
        """
        await self._ready(time.monotonic() + self.deadline)

    async def close(self) -> None:
        """End the session and give back all memory; calls under way return misses."""
        self._closed = True
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def begin_anew(self) -> None:
        """As ``Client.begin_anew``; the child's first call binds the client to its event loop."""
        if self._wire is not None:
            self._wire.disown()
            self._wire = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- inside --------------------------------------------------------------------------------

    async def _run(self, begin: Callable[[Terms], Operation[T]], deadline: float | None) -> T:
        return (await self._run_on_wire(begin, deadline))[0]

    async def _run_on_wire(
        self, begin: Callable[[Terms], Operation[T]], deadline: float | None
    ) -> tuple[T, StreamWire]:
        """Carry out an operation; once more where a session's end cut it short."""
        end = time.monotonic() + (self.deadline if deadline is None else deadline)
        self._tally.calls += 1
        wire = await self._ready(end)
        try:
            return await self._try(wire, begin, end), wire
        except Unavailable:
            if not wire.closed or self._closed:
                raise
        wire = await self._ready(end)
        return await self._try(wire, begin, end), wire

    async def _try(self, wire: StreamWire, begin: Callable[[Terms], Operation[T]], end: float) -> T:
        heard, timeouts = wire.heard, self._counters.timeouts
        try:
            return await wire.run(begin(wire.terms), end)
        except KVStoreError as error:
            ours = self._wire is wire
            if ours:
                self._health.judge(
                    error,
                    heard=wire.heard != heard,
                    timed_out=self._counters.timeouts != timeouts,
                    closed=wire.closed,
                )
            raise
        finally:
            if self._wire is wire:
                self._heard_by_then = wire.heard
                if wire.closed:
                    self._wire = None
                elif self._health.suspect and wire.heard != heard:
                    self._health.answered()

    async def _ready(self, end: float) -> StreamWire:
        """The session to use now; one call at a time opens one, the others wait for it."""
        if (wire := self._healthy()) is not None:
            return wire
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await self._opening.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded("no session was opened before the deadline") from error
        try:
            if (wire := self._healthy()) is not None:
                return wire
            if self._health.admit() and self._wire is not None:
                return self._wire
            return await self._connect(end)
        finally:
            self._opening.release()

    def _healthy(self) -> StreamWire | None:
        if self._closed:
            raise Unavailable("the client is closed")
        if self._wire is not None and self._wire.closed:
            self._wire = None
            self._health.lost(Unavailable("the node ended the session"))
        if self._health.suspect and self._wire and self._wire.heard != self._heard_by_then:
            self._health.answered()  # late
        return None if self._health.suspect else self._wire

    async def _connect(self, end: float) -> StreamWire:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        try:
            self._wire = wire = await self._open(end)
        except KVStoreError as error:
            self._health.not_opened(error)
            raise
        self._health.opened()
        self._session = wire.session
        logger.info("session with %s at %s", self._session, self._settings.endpoint.url)
        return wire

    async def _open(self, end: float) -> StreamWire:
        addresses, self._addresses = self._addresses, []
        if not addresses:
            addresses = await asyncio.to_thread(self._settings.endpoint.addresses)
        error: KVStoreError = Unavailable("the node has no address")
        for address in addresses:
            try:
                wire = await StreamWire.open(self._settings, address, self._counters, end)
            except (Unavailable, DeadlineExceeded) as failed:
                error = failed
            else:
                self._addresses = addresses
                return wire
        raise error

    async def _view(
        self,
        kind: type[W],
        how: Callable[[Terms, Sequence[bytes]], Operation[Seen[Any]]],
        hashes: Sequence[bytes],
        deadline: float | None,
    ) -> W:
        try:
            seen, wire = await self._run_on_wire(lambda terms: how(terms, hashes), deadline)
        except KVStoreError as error:
            views = kind.missed(len(hashes), self._failed(error))
        else:
            views = kind(seen, wire, wire.release)
        self._tally.got(len(hashes), views.found, self.namespace.block_bytes)
        return views

    def _failed(self, error: KVStoreError) -> str:
        """The code of an error that is a miss.

        Raises:
            InvalidRequest: it is the caller's mistake.
        """
        if isinstance(error, InvalidRequest):
            raise error
        self._tally.failed(error)
        return error.code


class AsyncViews(Generic[W]):
    """Shows blocks for the time of an ``async with`` block."""

    __slots__ = ("_show", "_views")

    def __init__(self, show: Callable[[], Coroutine[Any, Any, W]]) -> None:
        self._show = show
        self._views: W | None = None

    async def __aenter__(self) -> W:
        self._views = await self._show()
        return self._views

    async def __aexit__(self, *error: object) -> None:
        if self._views is not None:
            self._views.release()
