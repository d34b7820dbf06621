"""A connection to a node's control plane: how calls are made, and what their errors become."""

import asyncio
import os
import ssl
from asyncio import BaseTransport, Transport
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from google.protobuf.message import Message
from grpclib.client import Channel, Handler, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol

from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    KVStoreError,
    Unavailable,
    UnknownError,
    from_code,
)
from kvstore.units import Address
from rdma.errors import TlsError
from rdma.tls import explained

Answer = TypeVar("Answer", bound=Message)


class _Protocol(H2Protocol):
    """grpclib's, which remembers what it speaks on."""

    transport: BaseTransport | None = None

    def connection_made(self, transport: BaseTransport) -> None:
        """Take note of the connection."""
        self.transport = transport
        super().connection_made(transport)


class _Channel(Channel):
    """grpclib's channel, which over TLS waits for the other end after it was closed."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port, ssl=context)
        self._made: WeakSet[_Protocol] = WeakSet()

    def _protocol_factory(self) -> H2Protocol:
        protocol = _Protocol(Handler(), self._config, self._h2_config)
        self._made.add(protocol)
        return protocol

    async def hang_up(self) -> None:
        """End the connections at once."""
        for protocol in self._made:
            if isinstance(protocol.transport, Transport):
                protocol.transport.abort()
        await asyncio.sleep(0)  # the loop's next turn closes them


class ControlChannel:
    """A connection to one node's control plane, for the clients of its services to build on.

    Use it as an asynchronous context manager. Every call raises what the node raised;
    ``Unavailable`` where nothing answers at the address; ``DeadlineExceeded`` after ``timeout``.

    Args:
        address: where the node's control plane listens.
        token: bearer token, or None.
        timeout: seconds for one call; for a stream, between two messages.
        context: for a node that speaks TLS there; None for one that does not.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str | None = None,
        timeout: float = 10.0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._address = address
        self._context = context
        self._timeout = timeout
        self._metadata = {"authorization": f"Bearer {token}"} if token else {}
        self._channel: _Channel | None = None

    async def __aenter__(self) -> Self:
        """Prepare the connection; it is made by the first call."""
        self._channel = _Channel(self._address.host, self._address.port, self._context)
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
            if self._context is not None:
                await self._channel.hang_up()
            self._channel = None

    @property
    def channel(self) -> Channel:
        """The connection, for a stub.

        Raises:
            Unavailable: it is closed.
        """
        if self._channel is None:
            raise Unavailable("the connection is closed")
        return self._channel

    async def call(self, method: UnaryUnaryMethod[Any, Answer], request: Message) -> Answer:
        """Make a call that has one answer."""
        with self._errors():
            # wait_for as well: grpclib's own timeout does not cover the making of the connection.
            return await asyncio.wait_for(
                method(request, timeout=self._timeout, metadata=self._metadata), self._timeout + 0.5
            )

    async def stream(
        self, method: UnaryStreamMethod[Any, Answer], request: Message
    ) -> AsyncGenerator[Answer, None]:
        """Make a call that has many answers; it is cancelled when the iterator is closed."""
        with self._errors():
            async with method.open(metadata=self._metadata) as stream:
                await asyncio.wait_for(stream.send_message(request, end=True), self._timeout)
                while True:
                    answer = await asyncio.wait_for(stream.recv_message(), self._timeout)
                    if answer is None:
                        return
                    yield answer

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
            raise self._hung_up() from error
        except ssl.SSLError as error:
            why = explained(error)
            denied = isinstance(why, TlsError) and why.denied
            kind = AccessDenied if denied else Unavailable
            raise kind(f"no TLS with the node at {self._address}: {why}") from error
        except ConnectionResetError as error:
            raise self._hung_up() from error
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise Unavailable(f"nothing answers at {self._address}: {reason}") from error

    def _hung_up(self) -> Unavailable:
        if self._context is None:
            maybe = "it may speak TLS there: https://, or tls.ca"
        else:
            maybe = "it may want a certificate that it trusts: tls.certificate"
        return Unavailable(f"the node at {self._address} closed the connection; {maybe}")


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
