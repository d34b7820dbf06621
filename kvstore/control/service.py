"""The control plane's gRPC server: checks what comes in, asks the node, answers.

Every request is bounded before the node sees it. Errors of ``kvstore.errors`` reach the caller with
their code, as ``code: message`` in the gRPC status; anything else is a fault of ours, which is
logged, counted and answered as ``internal``.
"""

import hmac
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast
from weakref import WeakSet

import structlog
from grpclib.const import Status
from grpclib.events import RecvRequest, listen
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream

from kvstore.control import control_pb2 as pb
from kvstore.control import interface
from kvstore.control.control_grpc import ControlBase
from kvstore.control.wire import decode, encode
from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVStoreError,
    OutOfSpace,
    Unavailable,
)
from kvstore.units import Address

MAX_REQUEST: Final = 4 << 20
"""Bytes of one request message: room for ``MAX_HASHES`` hashes."""
HASH_BYTES: Final = 32
TIERS: Final = ("hbm", "dram", "ssd")
_HEX: Final = frozenset("0123456789abcdef")
_MAX_CURSOR: Final = 4096

_STATUSES: Final[tuple[tuple[type[KVStoreError], Status], ...]] = (
    (InvalidRequest, Status.INVALID_ARGUMENT),
    (AccessDenied, Status.UNAUTHENTICATED),
    (Unavailable, Status.UNAVAILABLE),
    (DeadlineExceeded, Status.DEADLINE_EXCEEDED),
    (OutOfSpace, Status.RESOURCE_EXHAUSTED),
)

_log = structlog.get_logger(__name__)


class ControlService(ControlBase):
    """Answers control calls from a ``ControlTarget``.

    Args:
        target: the node.
        on_fault: called for every exception that is not one of ``kvstore.errors``, to count it.
    """

    def __init__(
        self, target: interface.ControlTarget, on_fault: Callable[[], None] = lambda: None
    ) -> None:
        self._target = target
        self._on_fault = on_fault

    async def Status(self, stream: Stream[pb.StatusRequest, pb.NodeStatus]) -> None:
        """Answer with ``ControlTarget.status``."""
        async with self._request(stream):
            await stream.send_message(encode(await self._target.status(), pb.NodeStatus()))

    async def Snapshot(self, stream: Stream[pb.SnapshotRequest, pb.NodeSnapshot]) -> None:
        """Answer with ``ControlTarget.snapshot``."""
        async with self._request(stream):
            await stream.send_message(encode(await self._target.snapshot(), pb.NodeSnapshot()))

    async def Namespaces(self, stream: Stream[pb.NamespacesRequest, pb.NamespacesAnswer]) -> None:
        """Answer with ``ControlTarget.namespaces``."""
        async with self._request(stream):
            found = (await self._target.namespaces())[: interface.MAX_NAMESPACES]
            await stream.send_message(
                pb.NamespacesAnswer(namespaces=[encode(one, pb.NamespaceReport()) for one in found])
            )

    async def Find(self, stream: Stream[pb.FindRequest, pb.FindAnswer]) -> None:
        """Answer with ``ControlTarget.find``."""
        async with self._request(stream) as request:
            limit = _limit(request.limit)
            found = await self._target.find(
                _beginning(request.beginning), _hash_or_none(request.namespace), limit
            )
            names = [encode(one, pb.BlockName()) for one in found[:limit]]
            await stream.send_message(pb.FindAnswer(blocks=names))

    async def ListBlocks(self, stream: Stream[pb.BlockQuery, pb.BlockPage]) -> None:
        """Answer with ``ControlTarget.list_blocks``."""
        async with self._request(stream) as request:
            query = decode(request, interface.BlockQuery)
            _hash_or_none(request.namespace)
            _limit(query.limit)
            _tier_or_none(request.tier)
            if len(query.cursor) > _MAX_CURSOR:
                raise InvalidRequest("the cursor is none of this node's")
            await stream.send_message(encode(await self._target.list_blocks(query), pb.BlockPage()))

    async def Inspect(self, stream: Stream[pb.InspectRequest, pb.InspectAnswer]) -> None:
        """Answer with ``ControlTarget.inspect``."""
        async with self._request(stream) as request:
            limit = _limit(request.limit)
            found = await self._target.inspect(
                _hash(request.namespace),
                _hash(request.hash),
                prefix=request.prefix,
                limit=limit,
            )
            reports = [encode(one, pb.BlockReport()) for one in found[:limit]]
            await stream.send_message(pb.InspectAnswer(blocks=reports))

    async def Match(self, stream: Stream[pb.PrefixRequest, pb.MatchReport]) -> None:
        """Answer with ``ControlTarget.match``."""
        async with self._request(stream) as request:
            report = await self._target.match(_hash(request.namespace), _hashes(request.hashes))
            await stream.send_message(encode(report, pb.MatchReport()))

    async def Explain(self, stream: Stream[pb.PrefixRequest, pb.Explanation]) -> None:
        """Answer with ``ControlTarget.explain``."""
        async with self._request(stream) as request:
            report = await self._target.explain(_hash(request.namespace), _hashes(request.hashes))
            await stream.send_message(encode(report, pb.Explanation()))

    async def Pin(self, stream: Stream[pb.PinRequest, pb.PinReport]) -> None:
        """Answer with ``ControlTarget.pin``."""
        async with self._request(stream) as request:
            seconds = request.seconds if request.HasField("seconds") else None
            if seconds is not None and not 0 < seconds <= interface.MAX_PIN_SECONDS:
                raise InvalidRequest("a pin's lifetime must be positive and at most 366 days")
            report = await self._target.pin(_hash(request.namespace), _hash(request.hash), seconds)
            await stream.send_message(encode(report, pb.PinReport()))

    async def Pins(self, stream: Stream[pb.PinsRequest, pb.PinsAnswer]) -> None:
        """Answer with ``ControlTarget.pins``."""
        async with self._request(stream):
            pins = (await self._target.pins())[: interface.MAX_PAGE]
            await stream.send_message(
                pb.PinsAnswer(pins=[encode(one, pb.PinReport()) for one in pins])
            )

    async def Unpin(self, stream: Stream[pb.BlockName, pb.Removal]) -> None:
        """Answer with ``ControlTarget.unpin``."""
        async with self._request(stream) as request:
            removal = await self._target.unpin(_hash(request.namespace), _hash(request.hash))
            await stream.send_message(encode(removal, pb.Removal()))

    async def Evict(self, stream: Stream[pb.EvictRequest, pb.Removal]) -> None:
        """Answer with ``ControlTarget.evict``."""
        async with self._request(stream) as request:
            removal = await self._target.evict(
                _hash(request.namespace), _hash_or_none(request.hash)
            )
            await stream.send_message(encode(removal, pb.Removal()))

    async def Flush(self, stream: Stream[pb.FlushRequest, pb.Removal]) -> None:
        """Answer with ``ControlTarget.flush``."""
        async with self._request(stream) as request:
            removal = await self._target.flush(_tier(request.tier))
            await stream.send_message(encode(removal, pb.Removal()))

    async def Verify(self, stream: Stream[pb.VerifyRequest, pb.VerifyProgress]) -> None:
        """Answer with ``ControlTarget.verify``."""
        async with self._request(stream) as request:
            namespace = _hash_or_none(request.namespace)
            progress = self._target.verify(namespace, _tier_or_none(request.tier))
            async for step in _closing(progress):
                await stream.send_message(encode(step, pb.VerifyProgress()))

    @asynccontextmanager
    async def _request(self, stream: Stream[Any, Any]) -> AsyncIterator[Any]:
        """The request message; errors of the block become gRPC statuses."""
        try:
            request = await stream.recv_message()
            if request is None:
                raise InvalidRequest("the request is empty")
            yield request
        except KVStoreError as error:
            raise _as_status(error) from error
        except GRPCError:
            raise
        except Exception as error:
            self._on_fault()
            _log.exception("control request failed", error=repr(error))
            raise _as_status(InternalError("the node failed; its log says how")) from error


async def _closing(
    steps: AsyncIterator[interface.VerifyProgress],
) -> AsyncIterator[interface.VerifyProgress]:
    """The same steps, with their generator closed at once when the caller goes away."""
    try:
        async for step in steps:
            yield step
    finally:
        close = getattr(steps, "aclose", None)
        if close is not None:
            await close()


def _as_status(error: KVStoreError) -> GRPCError:
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), None)
    return GRPCError(status or Status.INTERNAL, f"{error.code}: {error}")


def _hash(value: bytes) -> bytes:
    if len(value) != HASH_BYTES:
        raise InvalidRequest(f"a hash has {HASH_BYTES} bytes, not {len(value)}")
    return value


def _hash_or_none(value: bytes) -> bytes | None:
    return _hash(value) if value else None


def _hashes(joined: bytes) -> list[bytes]:
    count, rest = divmod(len(joined), HASH_BYTES)
    if rest:
        raise InvalidRequest(f"hashes of {HASH_BYTES} bytes each, not {len(joined)} bytes in all")
    if count > interface.MAX_HASHES:
        raise InvalidRequest(f"{count} hashes, at most {interface.MAX_HASHES} fit")
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]


def _limit(limit: int) -> int:
    if not 0 < limit <= interface.MAX_PAGE:
        raise InvalidRequest(f"a limit must be between 1 and {interface.MAX_PAGE}")
    return limit


def _beginning(text: str) -> str:
    if not interface.MIN_BEGINNING <= len(text) <= 2 * HASH_BYTES or not _HEX.issuperset(text):
        raise InvalidRequest(
            f"the beginning of a hash is {interface.MIN_BEGINNING} to {2 * HASH_BYTES} "
            "lower-case hex digits"
        )
    return text


def _tier(name: str) -> str:
    if name not in TIERS:
        raise InvalidRequest(f"no such tier: {name[:32]!r}; tiers are {', '.join(TIERS)}")
    return name


def _tier_or_none(name: str) -> str | None:
    return _tier(name) if name else None


class _BoundedInput:
    """A gRPC stream's input that refuses messages above ``MAX_REQUEST`` before reading them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def recv_data(self, size: int) -> bytes:
        """As the stream's own, for sizes within the bound."""
        if size > MAX_REQUEST:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"invalid_request: a message of {size} bytes is too large",
            )
        return cast(bytes, await self._inner.recv_data(size))


class _HangingUpServer(Server):
    """grpclib's server, which by itself leaves open connections alone when it closes."""

    def __init__(self, service: ControlService) -> None:
        super().__init__([service])
        self._connections: WeakSet[H2Protocol] = WeakSet()

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self._connections.add(protocol)
        return protocol

    def close(self) -> None:
        """Stop listening, cancel the requests, hang up on the clients."""
        super().close()
        for protocol in self._connections:
            if hasattr(protocol, "processor"):
                protocol.processor.close(reason="the node is stopping")


class ControlServer:
    """The listening side: one socket, closed for certain by ``close``.

    Args:
        target: the node.
        address: where to listen; port 0 takes a free one, see ``address`` after ``start``.
        token: bearer token that every call must carry, or None.
        on_fault: see ``ControlService``.
    """

    def __init__(
        self,
        target: interface.ControlTarget,
        address: Address,
        *,
        token: str | None = None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._token = token
        self._server = _HangingUpServer(ControlService(target, on_fault))
        listen(self._server, RecvRequest, self._admit)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken or none of this machine's.
        """
        family = socket.AF_INET6 if ":" in self.address.host else socket.AF_INET
        listener = socket.create_server(self.address, family=family)
        listener.setblocking(False)
        self.address = Address(self.address.host, listener.getsockname()[1])
        await self._server.start(sock=listener)

    async def close(self) -> None:
        """Stop listening, cancel what is being answered and wait until it has ended."""
        self._server.close()
        await self._server.wait_closed()

    async def _admit(self, event: RecvRequest) -> None:
        if self._token is not None:
            given = event.metadata.get("authorization", "")
            wanted = f"Bearer {self._token}"
            if not isinstance(given, str) or not hmac.compare_digest(
                given.encode(), wanted.encode()
            ):
                raise _as_status(AccessDenied("the call carries no valid control token"))
        answer = event.method_func

        async def bounded(stream: Any) -> None:
            stream._stream = _BoundedInput(stream._stream)
            await answer(stream)

        event.method_func = bounded
