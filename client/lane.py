"""One way to the node: a session that is opened, watched and opened again as calls need it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from client.endpoint import Settings
from client.health import Health
from client.operations import Operation, Terms
from client.tally import NO_SESSION
from client.wire import Wire
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.protocol.caller import Counters

logger = logging.getLogger("kvstore.client")

T = TypeVar("T")


class Lane:
    """A session with the node and the rules for making another. Used by one thread at a time.

    Args:
        settings: what its sessions ask for.

    Attributes:
        counters: what it has done.
        wire: the session, while there is one.
        session: what the last session is or was.
        releases: leases to give back, from whatever thread.
    """

    def __init__(self, settings: Settings) -> None:
        self.counters = Counters()
        self.wire: Wire | None = None
        self.session = NO_SESSION
        self.releases: list[tuple[Wire, list[int]]] = []
        self._settings = settings
        self._health = Health(self.counters)
        self._fine = False  # nothing speaks against using the session at once
        self._addresses: list[tuple[socket.AddressFamily, Any]] = []

    @property
    def state(self) -> str:
        """``connected``, ``suspect`` or ``disconnected``."""
        return self._health.state

    def run(self, begin: Callable[[Terms], Operation[T]], end: float) -> T:
        """Carry out an operation, opening a session first where there is none.

        An operation that a session's end cut short is tried once more on a new session: whatever
        it did, doing it again does no harm.

        Args:
            begin: makes the operation for a session's terms.
            end: when to give up, on the monotonic clock.

        Raises:
            KVStoreError: as the node answered, or why it did not.
        """
        wire = self.wire if self._fine else None
        if wire is None:
            wire = self.ready(end)
        try:
            return self._try(wire, begin, end)
        except Unavailable:
            if not wire.closed:
                raise
        return self._try(self.ready(end), begin, end)

    def ready(self, end: float) -> Wire:
        """The session to use now.

        Raises:
            KVStoreError: there is none, and none can be opened now.
        """
        if self.wire is not None and self._health.suspect:
            self._catch_up(self.wire)
        if self._health.admit() and self.wire is not None:
            return self.wire
        return self._connect(end)

    def flush(self, end: float) -> None:
        """Give back the leases that were dropped while somebody else used the lane."""
        while self.releases:
            wire, leases = self.releases.pop()
            if not wire.closed:
                wire.release(leases, end)

    def close(self) -> None:
        """End the session."""
        self.releases.clear()
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    def _try(self, wire: Wire, begin: Callable[[Terms], Operation[T]], end: float) -> T:
        heard, timeouts = wire.heard, self.counters.timeouts
        try:
            return wire.run(begin(wire.terms), end)
        except KVStoreError as error:
            self._health.judge(
                error,
                heard=wire.heard != heard,
                timed_out=self.counters.timeouts != timeouts,
                closed=wire.closed,
            )
            raise
        finally:
            if wire.closed:
                self.wire = None
            elif self._health.suspect and wire.heard != heard:
                self._health.answered()
            self._fine = self.wire is not None and not self._health.suspect

    def _catch_up(self, wire: Wire) -> None:
        heard = wire.heard
        wire.catch_up()
        if wire.heard != heard:
            self._health.answered()
        if wire.closed:
            self.wire = None
            self._health.lost(Unavailable("the node ended the session"))

    def _connect(self, end: float) -> Wire:
        self.close()
        try:
            self.wire = self._open(end)
        except KVStoreError as error:
            self._health.not_opened(error)
            raise
        self._health.opened()
        self._fine = True
        self.session = self.wire.session
        logger.info("session with %s at %s", self.session, self._settings.endpoint.url)
        return self.wire

    def _open(self, end: float) -> Wire:
        addresses, self._addresses = self._addresses, []
        addresses = addresses or self._settings.endpoint.addresses()
        error: KVStoreError = Unavailable("the node has no address")
        for address in addresses:
            try:
                wire = Wire.open(self._settings, address, self.counters, end)
            except (Unavailable, DeadlineExceeded) as failed:
                error = failed
            else:
                self._addresses = addresses
                return wire
        raise error
