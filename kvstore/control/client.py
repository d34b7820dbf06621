"""The control plane seen from the other end: a ``ControlTarget`` that asks a node over gRPC."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import Message
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from kvstore.control import control_pb2 as pb
from kvstore.control import interface
from kvstore.control.control_grpc import ControlStub
from kvstore.control.wire import decode, encode
from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    KVStoreError,
    Unavailable,
    UnknownError,
    from_code,
)
from kvstore.units import Address

Answer = TypeVar("Answer", bound=Message)


class ControlClient:
    """A connection to one node's control plane, with the methods of ``ControlTarget``.

    Use it as an asynchronous context manager. Every method raises what the node raised;
    ``Unavailable`` where nothing answers at the address; ``DeadlineExceeded`` after ``timeout``.

    Args:
        address: where the node's control plane listens.
        token: bearer token, or None.
        timeout: seconds for one call; for ``verify``, between two steps of progress.
    """

    def __init__(
        self, address: Address, *, token: str | None = None, timeout: float = 10.0
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._metadata = {"authorization": f"Bearer {token}"} if token else {}
        self._channel: Channel | None = None

    async def __aenter__(self) -> Self:
        """Prepare the connection; it is made by the first call."""
        self._channel = Channel(self._address.host, self._address.port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def status(self) -> interface.NodeStatus:
        """See ``ControlTarget.status``."""
        answer = await self._call(self._stub.Status, pb.StatusRequest())
        return decode(answer, interface.NodeStatus)

    async def snapshot(self) -> interface.Snapshot:
        """See ``ControlTarget.snapshot``."""
        answer = await self._call(self._stub.Snapshot, pb.SnapshotRequest())
        return decode(answer, interface.Snapshot)

    async def namespaces(self) -> Sequence[interface.NamespaceReport]:
        """See ``ControlTarget.namespaces``."""
        answer = await self._call(self._stub.Namespaces, pb.NamespacesRequest())
        return [decode(one, interface.NamespaceReport) for one in answer.namespaces]

    async def find(
        self, beginning: str, namespace: bytes | None, limit: int
    ) -> Sequence[interface.BlockName]:
        """See ``ControlTarget.find``."""
        request = pb.FindRequest(beginning=beginning, namespace=namespace or b"", limit=limit)
        answer = await self._call(self._stub.Find, request)
        return [decode(one, interface.BlockName) for one in answer.blocks]

    async def list_blocks(self, query: interface.BlockQuery) -> interface.BlockPage:
        """See ``ControlTarget.list_blocks``."""
        answer = await self._call(self._stub.ListBlocks, encode(query, pb.BlockQuery()))
        return decode(answer, interface.BlockPage)

    async def inspect(
        self, namespace: bytes, hash: bytes, *, prefix: bool, limit: int
    ) -> Sequence[interface.BlockReport]:
        """See ``ControlTarget.inspect``."""
        request = pb.InspectRequest(namespace=namespace, hash=hash, prefix=prefix, limit=limit)
        answer = await self._call(self._stub.Inspect, request)
        return [decode(one, interface.BlockReport) for one in answer.blocks]

    async def match(self, namespace: bytes, hashes: Sequence[bytes]) -> interface.MatchReport:
        """See ``ControlTarget.match``."""
        request = pb.PrefixRequest(namespace=namespace, hashes=b"".join(hashes))
        answer = await self._call(self._stub.Match, request)
        return decode(answer, interface.MatchReport)

    async def explain(self, namespace: bytes, hashes: Sequence[bytes]) -> interface.Explanation:
        """See ``ControlTarget.explain``."""
        request = pb.PrefixRequest(namespace=namespace, hashes=b"".join(hashes))
        answer = await self._call(self._stub.Explain, request)
        return decode(answer, interface.Explanation)

    async def pin(
        self, namespace: bytes, hash: bytes, seconds: float | None
    ) -> interface.PinReport:
        """See ``ControlTarget.pin``."""
        request = pb.PinRequest(namespace=namespace, hash=hash, seconds=seconds)
        answer = await self._call(self._stub.Pin, request)
        return decode(answer, interface.PinReport)

    async def pins(self) -> Sequence[interface.PinReport]:
        """See ``ControlTarget.pins``."""
        answer = await self._call(self._stub.Pins, pb.PinsRequest())
        return [decode(one, interface.PinReport) for one in answer.pins]

    async def unpin(self, namespace: bytes, hash: bytes) -> interface.Removal:
        """See ``ControlTarget.unpin``."""
        request = pb.BlockName(namespace=namespace, hash=hash)
        answer = await self._call(self._stub.Unpin, request)
        return decode(answer, interface.Removal)

    async def evict(self, namespace: bytes, hash: bytes | None) -> interface.Removal:
        """See ``ControlTarget.evict``."""
        request = pb.EvictRequest(namespace=namespace, hash=hash or b"")
        answer = await self._call(self._stub.Evict, request)
        return decode(answer, interface.Removal)

    async def flush(self, tier: str) -> interface.Removal:
        """See ``ControlTarget.flush``."""
        answer = await self._call(self._stub.Flush, pb.FlushRequest(tier=tier))
        return decode(answer, interface.Removal)

    async def verify(
        self, namespace: bytes | None, tier: str | None
    ) -> AsyncIterator[interface.VerifyProgress]:
        """See ``ControlTarget.verify``."""
        request = pb.VerifyRequest(namespace=namespace or b"", tier=tier or "")
        with self._errors():
            async with self._stub.Verify.open(metadata=self._metadata) as stream:
                await asyncio.wait_for(stream.send_message(request, end=True), self._timeout)
                while (step := await self._step(stream)) is not None:
                    yield decode(step, interface.VerifyProgress)

    async def _step(self, stream: Any) -> pb.VerifyProgress | None:
        step: pb.VerifyProgress | None = await asyncio.wait_for(
            stream.recv_message(), self._timeout
        )
        return step

    @property
    def _stub(self) -> ControlStub:
        if self._channel is None:
            raise Unavailable("the connection is closed")
        return ControlStub(self._channel)

    async def _call(self, method: UnaryUnaryMethod[Any, Answer], request: Message) -> Answer:
        with self._errors():
            # wait_for as well: grpclib's own timeout does not cover the making of the connection.
            return await asyncio.wait_for(
                method(request, timeout=self._timeout, metadata=self._metadata), self._timeout + 0.5
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except GRPCError as error:
            raise _from_status(error) from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the node at {self._address} did not answer within {self._timeout:g} s"
            ) from error
        except (StreamTerminatedError, ProtocolError) as error:
            raise Unavailable(f"the node at {self._address} closed the connection") from error
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise Unavailable(f"nothing answers at {self._address}: {why}") from error


def _from_status(error: GRPCError) -> KVStoreError:
    code, separator, message = (error.message or "").partition(": ")
    if separator:
        ours = from_code(code, message)
        if not isinstance(ours, UnknownError):
            return ours
    text = error.message or error.status.name
    if error.status is Status.DEADLINE_EXCEEDED:
        return DeadlineExceeded(text)
    if error.status is Status.UNAUTHENTICATED:
        return AccessDenied(text)
    return Unavailable(text)
