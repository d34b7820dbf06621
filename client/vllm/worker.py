"""A worker's side of the connector: its KV tensors, its session, its loads and saves."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from client.blocking import Client
from client.paged import PagedMemory
from client.vllm.counts import Counts
from client.vllm.jobs import LoadJob, SaveJob
from client.vllm.link import Link
from client.vllm.loads import Loads
from client.vllm.progress import Finished, Progress
from client.vllm.saves import Saves
from client.vllm.settings import Settings

logger = logging.getLogger("kvstore.client.vllm")

IDLE_WAIT: Final = 0.002
"""Seconds that an engine with nothing to compute leaves to its transfers in each step."""


def in_order(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """KV tensors in the order of their layers, whatever order the engine names them in.

    ``layers.10`` comes after ``layers.9``.
    """

    def key(name: str) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

    return {name: tensors[name] for name in sorted(tensors, key=key)}


class WorkerSide:
    """Moves blocks between one worker's memory and the store.

    Args:
        settings: of the connector.
        client: of the namespace and shard that the worker's blocks belong to.
        link: keeps it connected.
        memory: the worker's KV tensors.
        saver: whether this worker saves; of several that hold the same bytes only one does.
        counts: what was done.
    """

    def __init__(
        self,
        settings: Settings,
        client: Client,
        link: Link,
        memory: PagedMemory,
        *,
        saver: bool,
        counts: Counts,
    ) -> None:
        self._memory = memory
        self._saver = saver
        self._counts = counts
        self._progress = Progress()
        self._link = link
        size = memory.layout.block_bytes
        self._loads = Loads(
            client,
            memory,
            block_bytes=size,
            deadline=settings.load_deadline,
            counts=counts,
            progress=self._progress,
            lost=link.failed,
        )
        self._saves = Saves(
            client,
            memory,
            block_bytes=size,
            deadline=settings.save_deadline,
            counts=counts,
            progress=self._progress,
            lost=link.failed,
        )

    def open(self) -> None:
        """Start the threads; the session is opened by one of them."""
        self._link.open()
        self._loads.open()
        self._saves.open()

    def load(self, jobs: Sequence[LoadJob]) -> None:
        """Begin with loads; each of them ends."""
        if not jobs:
            return
        marked, mark = self._mark()
        for job in jobs:
            if marked:
                self._loads.submit(job, mark)
            else:
                self._progress.begin()
                self._progress.loaded(job.request, job.blocks)

    def cancel(self, requests: Sequence[str]) -> None:
        """Have loads that wait for blocks end now."""
        for request in requests:
            self._loads.cancel(request)

    def save(self, jobs: Sequence[SaveJob]) -> None:
        """Begin with saves of what the forward that was just asked for computes; each ends."""
        if not jobs:
            return
        marked, mark = self._mark() if self._saver else (False, None)
        for job in jobs:
            if marked:
                self._saves.submit(job, mark)
            else:
                self._progress.begin()
                self._progress.saved(job.number, 0 if self._saver else len(job.hashes))

    def _mark(self) -> tuple[bool, object | None]:
        """What to wait for before the engine's blocks are touched, and whether that is known."""
        try:
            return True, self._memory.mark()
        except Exception:
            logger.exception("the device can't be asked how far it is: nothing is moved")
            self._counts.add(guarded_errors=1)
            return False, None

    def rest(self, pause: bool = False) -> None:
        """Leave the processor to transfers, or a node, for a moment in a step without work.

        Args:
            pause: whether to do so although no transfer is under way.
        """
        self._progress.wait(IDLE_WAIT, pause=pause)

    def take_loads(self) -> Finished:
        """The loads that ended since the last call."""
        return self._progress.take_loads()

    def take_saves(self) -> Finished:
        """The saves that ended since the last call."""
        return self._progress.take_saves()

    def close(self) -> None:
        """Finish the saves, give up the loads, end the session."""
        self._loads.close()
        self._saves.close()
        self._link.close()
