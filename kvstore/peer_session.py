"""A session of this node with another one, in which this node is the client.

It speaks the protocol that clients speak, over the same transports, and asks only what a pull
needs: which blocks of one shard the peer holds, and their bytes, straight into the memory given.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstore.errors import (
    DeadlineExceeded,
    KVStoreError,
    NamespaceMismatch,
    ProtocolError,
    Unavailable,
)
from kvstore.identity import Namespace
from kvstore.protocol.caller import Call, Caller
from kvstore.protocol.messages import (
    MAX_HASHES,
    PROTOCOL_VERSION,
    Answer,
    Exists,
    Get,
    GetAnswer,
    Hello,
    Request,
    Take,
    TakeAnswer,
    Welcome,
)
from kvstore.sums import Sums
from rdma.certificates import Certificates
from rdma.errors import TransportError
from rdma.stream import SocketStream
from rdma.tls import TlsSocket, shake_hands, wrap
from rdma.transport import ClientTransport

A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a session with another node is for.

    Attributes:
        host: name or address of the peer.
        port: of its data path.
        namespace: of the blocks.
        shard: of each block.
        token: what the peer wants to see of sessions, if anything.
        name: what the peer's log calls this node.
        incarnation: which start of the node is meant; any where empty.
        certificates: of this node, where the nodes of the pool speak TLS; never left out then.
    """

    host: str
    port: int
    namespace: Namespace
    shard: int
    token: str | None = field(repr=False, default=None)
    name: str = ""
    incarnation: str = ""
    certificates: Certificates | None = field(repr=False, default=None)

    def hello(self, halves: Mapping[str, ClientTransport]) -> Hello:
        """The request that opens the session and offers these transports, the best first."""
        return Hello(
            PROTOCOL_VERSION,
            self.namespace.tenant,
            self.token,
            dict(self.namespace.describe()),
            self.shard,
            list(halves),
            self.name,
            {name: offer for name, half in halves.items() if (offer := half.offer())},
        )


@dataclass(slots=True)
class Getting:
    """Blocks on their way, until :meth:`PeerSession.finish` or :meth:`PeerSession.give_up`.

    Attributes:
        call: the request.
        named: what the transport told the peer of the memory.
        checksums: the crc32c that the peer says each block found has, once they are there, where
            that was asked for.
        sums: the crc32c of what has come of each, where it came through this process.
    """

    call: Call[GetAnswer]
    named: Sequence[int] | None
    checksums: Sequence[int] | None = None
    sums: Sums | None = None


class PeerSession:
    """One connection with an open session; many calls at once. Made by :meth:`open`.

    All deadlines are seconds on the event loop's clock. A call that has no answer by then is given
    up. Over a transport by which the peer itself touches this node's memory that ends the session,
    since nothing else keeps it from doing so later.

    Attributes:
        welcome: what the peer answered: its name, incarnation, transport and limits.
    """

    welcome: Welcome

    def __init__(self, connected: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._caller = Caller()
        self._transport: ClientTransport | None = None
        self._closed = False
        self._stream: SocketStream[Call[Any]] = SocketStream(
            connected, self._caller, self._done, self._ended, serves=False
        )
        self._stream.start()

    def __repr__(self) -> str:
        return f"<PeerSession {self.transport} pending={self._caller.pending}>"

    @classmethod
    async def open(
        cls, greeting: Greeting, halves: Mapping[str, ClientTransport], deadline: float
    ) -> PeerSession:
        """Connect and open a session.

        Args:
            greeting: with whom, and for what.
            halves: this node's halves of the transports to offer, by name, the best first; taken
                over, and closed where they are not used.
            deadline: when to give up.

        Raises:
            KVStoreError: the peer can't be reached, is too slow, or refuses.
        """
        session = None
        try:
            session = cls(await _connect(greeting, deadline))
            await session._greet(greeting, halves, deadline)
        except BaseException:
            if session is not None:
                session.close()
            for half in halves.values():
                half.close()
            raise
        for half in halves.values():
            if half is not session._transport:
                half.close()
        return session

    async def _greet(
        self, greeting: Greeting, halves: Mapping[str, ClientTransport], deadline: float
    ) -> None:
        self.welcome = welcome = await self._ask(greeting.hello(halves), deadline)
        if greeting.incarnation not in ("", welcome.incarnation):
            raise Unavailable(f"another start of {welcome.node} answers than the one that is meant")
        expected = greeting.namespace.block_bytes
        if welcome.block_bytes != expected:
            raise NamespaceMismatch(
                f"blocks of {welcome.block_bytes} bytes at the peer, {expected} here"
            )
        try:
            half = halves[welcome.transport]
            half.accept(welcome.details)
        except (KeyError, TransportError) as error:
            raise ProtocolError(f"the peer chose {welcome.transport}: {error}") from error
        self._transport = half

    @property
    def transport(self) -> str:
        """Name of the transport; empty before the session is open."""
        return "" if self._transport is None else self._transport.name

    @property
    def closed(self) -> bool:
        """Whether the session has ended, at either end."""
        return self._closed or self._caller.broken is not None

    @property
    def heard(self) -> int:
        """How many answers have come."""
        return self._caller.heard

    def blocks_at_once(self, block_bytes: int, most_bytes: int) -> int:
        """How many blocks one get may ask for, given the most bytes that the caller wants."""
        limits = self.welcome.limits
        size = min(limits.get("max_payload", most_bytes), most_bytes)
        return max(1, min(size // block_bytes, limits.get("max_hashes", MAX_HASHES)))

    async def exists(self, hashes: Sequence[bytes], deadline: float) -> bytes:
        """The code of the tier that the peer holds each block in; 0 where it doesn't.

        Raises:
            KVStoreError: there is no such answer by the deadline.
        """
        step = max(1, min(self.welcome.limits.get("max_hashes", MAX_HASHES), MAX_HASHES))
        tiers = b""
        for start in range(0, len(hashes), step):
            answer = await self._ask(Exists(hashes[start : start + step]), deadline)
            tiers += answer.tiers
        return tiers

    async def take(self, request: Take, deadline: float) -> TakeAnswer:
        """Have the peer take copies of blocks of this node; it answers when that is over.

        Raises:
            KVStoreError: there is no such answer by the deadline.
        """
        return await self._ask(request, deadline)

    def begin_get(
        self,
        hashes: Sequence[bytes],
        into: Sequence[memoryview],
        deadline: float,
        *,
        checksums: bool = False,
    ) -> Getting:
        """Ask for blocks.

        Args:
            hashes: the blocks.
            into: the memory for each; must not be used otherwise until the call has ended.
            deadline: when to give up.
            checksums: whether to ask for their checksums, too, and to compute those of what comes.

        Raises:
            KVStoreError: nothing can be asked of the peer any more.
        """
        transport = self._open_transport()

        def landing(answer: GetAnswer) -> Sequence[memoryview]:
            return () if named is not None else _found(answer.tiers, into)

        try:
            named = transport.destinations(into)
        except TransportError as error:
            self.close(Unavailable(str(error)))
            raise Unavailable(f"no memory can be named to the peer: {error}") from error
        try:
            request = Get(hashes, destinations=named, checksums=checksums)
            call = self._begin(request, deadline, landing)
        except BaseException:
            transport.done(named)
            raise
        getting = Getting(call, named)
        if checksums and named is None:
            call.seen = getting.sums = Sums(len(into[0]))
        return getting

    async def finish(self, getting: Getting) -> bytes:
        """Wait for blocks.

        Returns:
            For each block the code of the tier that the peer had it in; 0 where it didn't, and
            what is in its memory then means nothing.

        Raises:
            KVStoreError: there is no answer by the deadline. Nothing is written to the memory any
                more.
        """
        try:
            answer = await self._finish(getting.call)
            self._open_transport().place(answer.locations, ())
        except TransportError as error:
            self.close(ProtocolError(f"the peer named memory that is not there: {error}"))
            raise Unavailable(f"the session with the peer has ended: {error}") from error
        finally:
            self.give_up(getting)
        getting.checksums = answer.checksums
        return answer.tiers

    def give_up(self, getting: Getting) -> None:
        """Make sure that nothing is written to the memory of a get any more; may come twice."""
        self._abandon(getting.call)
        named, getting.named = getting.named, None
        if named is not None and self._transport is not None:
            self._transport.done(named)

    def close(self, error: KVStoreError | None = None) -> None:
        """End the session at once; calls under way fail, and no memory is touched any more.

        Args:
            error: why, where that is not the owner's wish.
        """
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        if self._transport is not None:
            self._transport.close()
        self._wake(self._caller.lose(error or Unavailable("the session is closed")))

    # --- calls ---------------------------------------------------------------------------------

    def _open_transport(self) -> ClientTransport:
        if self.closed or self._transport is None:
            raise Unavailable(f"the session with the peer has ended: {self._caller.broken}")
        return self._transport

    async def _ask(self, request: Request[A], deadline: float) -> A:
        call = self._begin(request, deadline, None)
        try:
            return await self._finish(call)
        finally:
            self._abandon(call)

    def _begin(self, request: Request[A], deadline: float, sink: Any) -> Call[A]:
        call, frame = self._caller.begin(request, deadline, self._loop.time(), sink)
        self._stream.send([frame])
        return call

    async def _finish(self, call: Call[A]) -> A:
        if not call.done:
            answered: asyncio.Future[None] = self._loop.create_future()
            call.context = answered
            try:
                async with asyncio.timeout_at(call.deadline):
                    await answered
            except TimeoutError:
                self._abandon(call)
        return call.result()

    def _abandon(self, call: Call[Any]) -> None:
        """Give a call up if it has no answer."""
        if call.done:
            return
        self._done(self._caller.abandon(call))
        if self._transport is not None and self._transport.exposes_memory:
            self.close(Unavailable("the peer did not answer a call for memory in time"))

    def _done(self, calls: Sequence[Call[Any]]) -> None:
        self._wake(calls)
        for frame in self._caller.take_outbox():
            self._stream.send([frame])
        if self._caller.broken is not None:
            self.close(self._caller.broken)

    def _wake(self, calls: Sequence[Call[Any]]) -> None:
        for call in calls:
            answered = call.context
            if isinstance(answered, asyncio.Future) and not answered.done():
                answered.set_result(None)

    def _ended(self, error: Exception | None) -> None:
        self.close(Unavailable(f"the connection broke: {error}"))


def _found(tiers: bytes, into: Sequence[memoryview]) -> list[memoryview]:
    return [buffer for tier, buffer in zip(tiers, into, strict=True) if tier]


async def _connect(greeting: Greeting, deadline: float) -> socket.socket:
    """Connect to the first address of a host that answers, and begin TLS where that is spoken.

    Raises:
        DeadlineExceeded: none did in time.
        Unavailable: none does.
    """
    loop = asyncio.get_running_loop()
    host, port = greeting.host, greeting.port
    error: KVStoreError = Unavailable(f"{host} has no address")
    try:
        async with asyncio.timeout_at(deadline):
            for family, _, _, _, address in await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            ):
                try:
                    opened = await _connect_one(family, address)
                    if greeting.certificates is None:
                        return opened
                    return await _secure(opened, greeting.certificates.context(), host)
                except OSError as failed:
                    error = Unavailable(f"no connection to {host}:{port}: {failed}")
    except TimeoutError as late:
        raise DeadlineExceeded(f"no connection to {host}:{port} in time") from late
    except OSError as unknown:
        raise Unavailable(f"{host} is not known: {unknown}") from unknown
    raise error


async def _connect_one(family: int, address: Any) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(opened, address)
    except BaseException:
        opened.close()
        raise
    return opened


async def _secure(opened: socket.socket, context: ssl.SSLContext, host: str) -> TlsSocket:
    made = wrap(opened, context, host)
    try:
        await shake_hands(made)
    except BaseException:
        made.close()
        raise
    return made
