"""Another node, and the session that this one has with it, now and again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.peer_session import Greeting, PeerSession
from kvstore.protocol.breaker import Breaker, Decision
from rdma.transport import ClientTransport

_log = structlog.get_logger(__name__)

_OPEN_SECONDS: Final = 2.0
"""How long the opening of a session may take at most; whoever waits for it may give up before."""
_PROBE_SECONDS: Final = 1.0
_NO_BLOCK: Final = bytes(32)

MakeHalves = Callable[[], Mapping[str, ClientTransport]]
"""Makes this node's halves of the transports to offer, by name, the best first."""


class Peer:
    """Another node, asked about the blocks of one shard.

    The session is opened when it is first needed, and again after it has ended. A peer that does
    not answer is left alone for a while: what would be asked of it meanwhile fails at once. From
    then on it is doubtful until it has answered something, be it a probe that nobody waits for;
    the first comes after some 50 ms, the others after pauses up to 2 s.

    Args:
        greeting: where the node is, and what the session is for.
        transports: makes the halves for each session.
    """

    def __init__(self, greeting: Greeting, transports: MakeHalves) -> None:
        self._greeting = greeting
        self._transports = transports
        self._session: PeerSession | None = None
        self._opening: asyncio.Task[PeerSession] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._breaker = Breaker()
        self._failed = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<Peer {self._greeting.host}:{self._greeting.port} {self._breaker.state}>"

    @property
    def session(self) -> PeerSession | None:
        """The session there is; it says which node answers, and over which transport."""
        return self._session

    @property
    def doubtful(self) -> bool:
        """Whether it has failed since it answered last."""
        return self._failed

    async def ready(self, deadline: float) -> PeerSession:
        """The session to use now; where there is none, one is opened, and all wait for it.

        Args:
            deadline: when to give up, on the event loop's clock.

        Raises:
            KVStoreError: there is none, and none can be had now.
        """
        session = self._healthy()
        if session is None and self._opening is None:
            session = self._admit(deadline)
        if session is not None:
            return session
        assert self._opening is not None
        try:
            async with asyncio.timeout_at(deadline):
                # Shielded: others wait for it, too.
                return await asyncio.shield(self._opening)
        except TimeoutError as error:
            raise DeadlineExceeded("no session with the peer before the deadline") from error
        except asyncio.CancelledError:
            if self._closed:
                raise Unavailable("this node asks its peers nothing any more") from None
            raise

    def answered(self) -> None:
        """Take note that the peer has answered."""
        self._failed = False
        self._breaker.answered()

    def judge(self, session: PeerSession, heard: int, error: KVStoreError) -> None:
        """Draw conclusions from a call that failed.

        Args:
            session: that it was made in.
            heard: how many answers had come there before.
            error: what it failed with.
        """
        if session is not self._session:
            return
        if session.heard != heard:
            self.answered()
        elif isinstance(error, DeadlineExceeded):
            self._breaker.timed_out(_now())
            self._doubt()
        if session.closed:
            self._lose()

    def close(self) -> None:
        """End the session; calls under way fail, and no other is opened."""
        self._closed = True
        for task in (self._opening, self._probing):
            if task is not None:
                task.cancel()
        if self._session is not None:
            self._session.close()

    # --- inside --------------------------------------------------------------------------------

    def _healthy(self) -> PeerSession | None:
        session = self._session
        if session is not None and session.closed:
            self._lose()
            return None
        return None if self._breaker.suspect else session

    def _admit(self, deadline: float) -> PeerSession | None:
        """The session to try in spite of doubt; None where one is now being opened."""
        if self._closed:
            raise Unavailable("this node asks its peers nothing any more")
        decision = self._breaker.decide(_now())
        if decision is Decision.REFUSE:
            raise Unavailable("the peer has just failed, and is left alone for a while")
        if decision is Decision.TRY and self._session is not None:
            return self._session
        self._lose()
        bounded = min(deadline, _now() + _OPEN_SECONDS)
        self._opening = asyncio.get_running_loop().create_task(self._open(bounded))
        self._opening.add_done_callback(self._opened)
        return None

    async def _open(self, deadline: float) -> PeerSession:
        session = await PeerSession.open(self._greeting, self._transports(), deadline)
        _log.info("session with peer", peer=session.welcome.node, transport=session.transport)
        return session

    def _opened(self, opening: asyncio.Task[PeerSession]) -> None:
        self._opening = None
        if opening.cancelled():
            return
        if opening.exception() is not None:
            self._breaker.connect_failed(_now())
            self._doubt()
        elif self._closed:
            opening.result().close()
        else:
            self._session = opening.result()
            self._failed = False
            self._breaker.connection_made()

    def _doubt(self) -> None:
        """From now on try now and then whether it answers again."""
        self._failed = True
        if self._probing is None and not self._closed:
            self._probing = asyncio.get_running_loop().create_task(self._probes())
            self._probing.add_done_callback(self._probed)

    async def _probes(self) -> None:
        while self._failed and not self._closed:
            await asyncio.sleep(self._breaker.pause(_now()))
            if not self._breaker.pause(_now()):
                await self._probe()

    async def _probe(self) -> None:
        deadline = _now() + _PROBE_SECONDS
        try:
            session = await self.ready(deadline)
        except KVStoreError:
            return
        heard = session.heard
        try:
            await session.exists([_NO_BLOCK], deadline)
            self.answered()
        except KVStoreError as error:
            self.judge(session, heard, error)

    def _probed(self, probing: asyncio.Task[None]) -> None:
        self._probing = None
        if probing.cancelled():
            return
        if probing.exception() is not None:
            _log.error("probes of a peer ended", exc_info=probing.exception())
        elif self._failed:
            self._doubt()

    def _lose(self) -> None:
        """Let go of the session there is."""
        if self._session is not None:
            self._session.close()
            self._session = None
            self._breaker.connection_lost(_now())


def _now() -> float:
    return asyncio.get_running_loop().time()
