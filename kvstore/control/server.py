"""The control plane's listening side: one socket for all its gRPC services.

Calls without the token are refused, and messages above ``MAX_REQUEST`` before they are read.
"""

import hmac
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast
from weakref import WeakSet

from grpclib.const import Handler, Status
from grpclib.events import RecvRequest, listen
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server

from kvstore.control.boundary import as_status
from kvstore.errors import AccessDenied
from kvstore.units import Address

MAX_REQUEST: Final = 4 << 20
"""Bytes of one request message: room for ``interface.MAX_HASHES`` hashes."""


class Service(Protocol):
    """What grpclib generates a base class of for each service of a .proto file."""

    def __mapping__(self) -> Mapping[str, Handler]:
        """The handler of each method, by its path."""
        ...


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

    def __init__(self, services: Sequence[Service]) -> None:
        super().__init__(services)
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
        services: what is answered.
        address: where to listen; port 0 takes a free one, see ``address`` after ``start``.
        token: bearer token that every call must carry, or None.
        context: for TLS; None for none.
    """

    def __init__(
        self,
        services: Sequence[Service],
        address: Address,
        *,
        token: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self._context = context
        self._token = token
        self._server = _HangingUpServer(services)
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
        await self._server.start(sock=listener, ssl=self._context)

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
                raise as_status(
                    AccessDenied(
                        "the call carries no valid control token: give auth.control_token_file "
                        "or KVSTORE_AUTH__CONTROL_TOKEN"
                    )
                )
        answer = event.method_func

        async def bounded(stream: Any) -> None:
            stream._stream = _BoundedInput(stream._stream)
            await answer(stream)

        event.method_func = bounded
