"""A client that is connected in the background, so that no step of the engine pays for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from client.results import GetResult
from kvstore.errors import KVStoreError, Unavailable
from kvstore.identity import ROOT_PARENT

logger = logging.getLogger("kvstore.client.vllm")

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
"""Seconds between two attempts to reach a node: they double from the first to the longest."""

REMIND: Final = 60.0
"""Seconds after which the log says again that a node is away."""


class Opens(Protocol):
    """What can be opened again and again, until it works."""

    def open(self) -> None:
        """Open a session, unless there is one.

        Raises:
            KVStoreError: why that can't be done now.
        """

    def exists(self, hashes: Sequence[bytes]) -> GetResult:
        """Ask the node for blocks."""

    def close(self) -> None:
        """Give everything back."""


class Link:
    """Keeps one client connected. ``up`` says whether a call is worth making now.

    A thread opens the session, first and after each failure that it is told of. Only that thread
    waits for a node that is slow, stopped or gone.

    Args:
        client: what to keep connected. Closed with the link.
        name: what the node is called in the log.
        advice: what the log says to do where nobody was ever reached.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        client: Opens,
        name: str,
        advice: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.up = False
        self._client = client
        self._name = name
        self._advice = advice
        self._clock = clock
        self._known = False  # whether it was ever reached
        self._away = 0.0  # since when it is away, on the clock
        self._said = ""  # why, as the log says; empty where it says nothing
        self._due = 0.0  # when to say so again
        self._without = 0
        self._wanted = threading.Event()
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-link", daemon=True)

    def open(self, wait: float = 0.0) -> None:
        """Begin to connect.

        Args:
            wait: seconds to wait for the first attempt, so that an engine which starts beside a
                running node finds it at its first request.
        """
        self._thread.start()
        self._tried.wait(wait)

    def failed(self) -> None:
        """Take note that a call got no answer: no more are worth making until that is mended."""
        self.up = False
        self._wanted.set()

    def went_without(self) -> None:
        """Count a request that the node was not there for."""
        self._without += 1

    def close(self) -> None:
        """Stop, and close the client."""
        self._closing.set()
        self._wanted.set()
        self._client.close()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wanted.clear()
            self._connect()
            self._wanted.wait()

    def _connect(self) -> None:
        """Try until it works or the link is closed."""
        pause, self._away = FIRST_PAUSE, self._clock()
        while not self._closing.is_set():
            try:
                self._client.open()
                self._ask()
            except KVStoreError as error:
                self._complain(error)
            else:
                self._greet()
                self.up = True
                return
            finally:
                self._tried.set()
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _complain(self, error: KVStoreError) -> None:
        """Say that the node is away: once, when the reason is another, and now and then."""
        now, reason = self._clock(), str(error)
        if reason == self._said and now < self._due:
            return
        if self._said:
            logger.warning("%s still can't be reached%s: %s", self._name, self._toll(now), reason)
        elif self._known:
            logger.warning("%s is lost, nothing is reused until it is back: %s", self._name, reason)
        else:
            # A node that answers, and refuses, need not be started.
            advice = f"; {self._advice}" if self._advice and isinstance(error, Unavailable) else ""
            logger.warning(
                "%s can't be reached, nothing is reused: %s%s", self._name, reason, advice
            )
        self._said, self._due = reason, now + REMIND

    def _greet(self) -> None:
        """Say that the node is there, unless nobody was told that it was not."""
        if self._known and self._said:
            logger.warning("%s is back%s", self._name, self._toll(self._clock()))
        elif not self._known:
            late = self._toll(self._clock()) if self._said else ""
            logger.info("%s is reached%s", self._name, late)
        self._known, self._said, self._without = True, "", 0

    def _toll(self, now: float) -> str:
        """What the absence has cost so far."""
        requests = f"; requests that went without: {self._without}" if self._without else ""
        return f", after {now - self._away:.0f} s{requests}"

    def _ask(self) -> None:
        """Have the node answer something: a session may be there although the node has stopped.

        Raises:
            Unavailable: it does not.
        """
        if (failure := self._client.exists([ROOT_PARENT]).failure) is not None:
            raise Unavailable(f"the node does not answer ({failure})")
