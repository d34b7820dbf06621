"""Touching memory before it is needed, in the background and in parallel.

The first touch of a page costs several times a copy into it. Worker threads at low priority ask the
kernel to populate segments chunk by chunk; a chunk is short, so stopping is quick.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from tiers.segment import advise

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.segment import Segment

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later."""

CHUNK = 4 << 20
"""Bytes populated in one call: about two milliseconds of zeroing small pages."""

_NICENESS = 10

_log = logging.getLogger(__name__)


class Prefaulter:
    """Populates the segments that it is given, on its own threads.

    Threads run only while there is something to populate.

    Args:
        threads: how many at most; None for one per processor, up to four.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._most = threads or min(4, os.cpu_count() or 1)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Segment, int]] = deque()
        self._busy: dict[threading.Thread, Segment] = {}
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._done: dict[int, int] = {}
        self._closed = False
        self.failure: str | None = None
        """Why populating stopped, None while all is well. Pages are then touched on first use."""

    @property
    def populated(self) -> int:
        """Bytes populated of the segments that are in use."""
        with self._changed:
            return sum(self._done.values())

    @property
    def remaining(self) -> int:
        """Bytes that are still to be populated."""
        with self._changed:
            waiting = sum(min(CHUNK, segment.size - start) for segment, start in self._waiting)
            return waiting + CHUNK * len(self._busy)

    def add(self, segment: Segment) -> None:
        """Populate a segment, after those that were added before."""
        with self._changed:
            if self._closed or self.failure is not None:
                return
            self._done[segment.number] = 0
            self._waiting.extend((segment, start) for start in range(0, segment.size, CHUNK))
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while self._running < min(self._most, len(self._waiting)):
                thread = threading.Thread(target=self._work, name="kvstore-prefault", daemon=True)
                thread.start()
                self._threads.append(thread)
                self._running += 1

    def remove(self, segment: Segment) -> None:
        """Leave a segment alone from now on; no thread touches it once this returns."""
        with self._changed:
            kept = (job for job in self._waiting if job[0] is not segment)
            self._waiting = deque(kept)
            self._changed.wait_for(lambda: segment not in self._busy.values())
            self._done.pop(segment.number, None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to populate; False where ``timeout`` seconds pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def populate(self, segment: Segment, in_use: Callable[[], bool]) -> None:
        """Populate a segment now, on the calling thread; what is populated already costs little.

        Args:
            segment: may be removed meanwhile, which ends this.
            in_use: whether it still may be touched.
        """
        me = threading.current_thread()
        for start in range(0, segment.size, CHUNK):
            length = min(CHUNK, segment.size - start)
            with self._changed:
                if self._closed or not in_use():
                    return
                self._busy[me] = segment
            try:
                advise(segment.address + start, length, MADV_POPULATE_WRITE)
            except OSError as error:
                _log.warning("segment %d is not populated ahead: %s", segment.number, error)
                return
            finally:
                with self._changed:
                    del self._busy[me]
                    self._changed.notify_all()

    def close(self) -> None:
        """Stop; all threads have ended on return."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        me = threading.current_thread()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (job := self._next(me)) is not None:
            segment, start = job
            length = min(CHUNK, segment.size - start)
            problem: OSError | None = None
            try:
                advise(segment.address + start, length, MADV_POPULATE_WRITE)
            except OSError as error:
                problem = error
            with self._changed:
                del self._busy[me]
                if problem is None:
                    self._done[segment.number] += length
                else:
                    self._give_up(problem)
                self._changed.notify_all()

    def _next(self, me: threading.Thread) -> tuple[Segment, int] | None:
        with self._changed:
            if not self._waiting:
                self._running -= 1
                return None
            job = self._waiting.popleft()
            self._busy[me] = job[0]
            return job

    def _give_up(self, error: OSError) -> None:
        old_kernel = error.errno == errno.EINVAL
        self.failure = "needs Linux 5.14" if old_kernel else str(error)
        self._waiting.clear()
        _log.warning("memory is not populated ahead of use: %s", self.failure)
