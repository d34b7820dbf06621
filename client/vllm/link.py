"""A client that is connected in the background, so that no step of the engine pays for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, Protocol

from client.results import GetResult
from kvstore.errors import KVStoreError, Unavailable
from kvstore.identity import ROOT_PARENT

logger = logging.getLogger("kvstore.client.vllm")

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
"""Seconds between two attempts to reach a node: they double from the first to the longest."""


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
    """

    def __init__(self, client: Opens, name: str) -> None:
        self.up = False
        self._client = client
        self._name = name
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
        """Try until it works or the link is closed; say so once, not at each attempt."""
        pause, said = FIRST_PAUSE, ""
        while not self._closing.is_set():
            try:
                self._client.open()
                self._ask()
            except KVStoreError as error:
                if said != (said := str(error)):
                    logger.warning("%s can't be reached, nothing is reused: %s", self._name, error)
            else:
                if said:
                    logger.warning("%s is back", self._name)
                self.up = True
                return
            finally:
                self._tried.set()
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _ask(self) -> None:
        """Have the node answer something: a session may be there although the node has stopped.

        Raises:
            Unavailable: it does not.
        """
        if (failure := self._client.exists([ROOT_PARENT]).failure) is not None:
            raise Unavailable(f"the node does not answer ({failure})")
