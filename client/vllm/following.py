"""Learns on a thread of its own what a shard of the node no longer holds.

The node's feed is read at short intervals, and the node is asked about single blocks where the feed
can't tell: after changes were lost, and once about each block announced, which may have been gone
before anybody knew of it. While the node does not answer nothing is said: it may come back with all
that it held, and where it doesn't the feed will not be complete.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from client.results import Changes, GetResult
from client.vllm.counts import Counts

logger = logging.getLogger("kvstore.client.vllm")

PAUSE: Final = 0.1
"""Seconds between two readings of the feed."""

DEADLINE: Final = 1.0
"""Seconds that one call may take; nobody waits for it."""

LIMIT: Final = 16_384
"""Changes that one answer may bring; a node may have a lower limit of its own."""

MANY: Final = 256
"""Changes that make another question worthwhile at once, rather than after a pause."""

PIECE: Final = 4_096
"""Blocks that the node is asked about at once."""

MOST_REMOVED: Final = 131_072
"""Removed blocks kept for an engine that is idle; where there are more, it has to ask anew."""


class FollowClient(Protocol):
    """The calls of the blocking client that are made here."""

    def follow(self, after: int, *, limit: int, deadline: float | None = None) -> Changes:
        """Say which blocks the shard gained and lost since a position."""

    def exists(self, hashes: Sequence[bytes], *, deadline: float | None = None) -> GetResult:
        """Say which blocks the shard holds."""


@dataclass(frozen=True, slots=True)
class News:
    """What was learnt since the last news.

    Attributes:
        removed: hashes of blocks that the shard no longer holds.
        lost: whether more may be gone: ``check`` is to be called with all that is believed.
    """

    removed: Sequence[bytes]
    lost: bool


class Following:
    """Follows one shard. ``take`` and ``check`` return at once and are for one thread at a time.

    Args:
        client: of the shard.
        counts: errors kept from the engine are counted there.
        pause: seconds between two readings.
    """

    def __init__(self, client: FollowClient, counts: Counts, pause: float = PAUSE) -> None:
        self._client = client
        self._counts = counts
        self._pause = pause
        self._position = 0
        self._failing = False
        self._lock = threading.Lock()
        self._removed: dict[bytes, None] = {}
        self._lost = False
        self._pieces: deque[Sequence[bytes]] = deque()
        """Blocks to ask about. A piece stays until it is answered."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-following", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Stop; returns when the thread has ended, after the call it is in."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> News:
        """What was learnt since the last call. ``lost`` waits for checks that are under way."""
        with self._lock:
            removed, self._removed = self._removed, {}
            lost = self._lost and not self._pieces
            self._lost = self._lost and not lost
        return News(list(removed), lost)

    def check(self, hashes: Sequence[bytes]) -> None:
        """Ask the node, soon, which of these blocks it does not hold; they will be in the news.

        Args:
            hashes: the blocks.
        """
        pieces = [hashes[start : start + PIECE] for start in range(0, len(hashes), PIECE)]
        with self._lock:
            self._pieces.extend(pieces)

    def poll(self) -> None:
        """Read the feed up to its end, then ask about what is to be checked."""
        if self._read():
            self._ask()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            self._poll_guarded()
            self._closing.wait(self._pause)

    def _poll_guarded(self) -> None:
        """The boundary: an error here must not end the thread, or routers would learn no more."""
        try:
            self.poll()
        except Exception:
            self._counts.add(guarded_errors=1)
            if not self._failing:
                logger.exception("following the store failed; begun anew until it works")
            self._failing = True
            self._position = 0
            with self._lock:
                self._pieces.clear()
        else:
            self._failing = False

    def _read(self) -> bool:
        """Whether the node answered."""
        news: dict[bytes, bool] = {}
        complete = True
        more = True
        while more and not self._closing.is_set():
            answer = self._client.follow(self._position, limit=LIMIT, deadline=DEADLINE)
            if answer.failure is not None:
                break
            self._position = answer.sequence
            complete = complete and answer.complete
            news.update(answer.changes)
            more = len(answer.changes) >= MANY
        self._note(news, complete)
        return not more

    def _note(self, news: dict[bytes, bool], complete: bool) -> None:
        """Add what the last changes of blocks were: ``True`` where a block was stored."""
        with self._lock:
            for block, stored in news.items():
                if stored:
                    self._removed.pop(block, None)
                else:
                    self._removed[block] = None
            if len(self._removed) > MOST_REMOVED:
                self._removed.clear()
                complete = False
            self._lost = self._lost or not complete

    def _ask(self) -> None:
        while self._pieces and not self._closing.is_set():
            piece = self._pieces[0]
            answer = self._client.exists(piece, deadline=DEADLINE)
            if answer.failure is not None:
                return
            hits = zip(piece, answer.hits, strict=True)
            with self._lock:
                self._removed.update((block, None) for block, hit in hits if not hit)
                self._pieces.popleft()
