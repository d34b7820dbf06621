"""This store: our client beside our daemon, over shared memory or TCP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import kvstore
from benchmarks.node import namespace
from benchmarks.peers import adapter
from client.results import GetResult, PutResult
from kvstore.errors import ParentAbsent
from kvstore.identity import ROOT_PARENT

DEADLINE = 30.0

Result = TypeVar("Result", GetResult, PutResult)


class Adapter(adapter.Adapter):
    """One client as users open it.

    Settings: ``url``; ``transport``, ``shm`` or ``tcp``; ``pid`` of the daemon.
    """

    zero_copy = True
    blocks_apart = True

    def open(self, settings: Mapping[str, str]) -> None:
        """Connect; the session is there when this returns."""
        self._client = kvstore.connect(
            settings["url"],
            namespace(int(settings["block_bytes"])),
            transport=settings["transport"],
            deadline=DEADLINE,
        )
        self._pid = int(settings["pid"])

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """A put that finds a block held counts it as stored."""
        return self.put_after((), keys, blocks)

    def put_after(
        self, before: Sequence[bytes], keys: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> int:
        """Where the block before has gone meanwhile, nothing is stored."""
        try:
            result = self._client.put(keys, blocks, parent=before[-1] if before else ROOT_PARENT)
        except ParentAbsent:
            return 0
        _answered(result)
        return result.stored + result.held

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """One call."""
        return _answered(self._client.get(keys, into)).found

    def exists(self, keys: Sequence[bytes]) -> int:
        """One call."""
        return _answered(self._client.exists(keys)).found

    def view(
        self, keys: Sequence[bytes], size: int
    ) -> AbstractContextManager[Sequence[memoryview | None]]:
        """Pinned views of the node's own memory."""
        return self._client.view(keys)

    def memory(self) -> int:
        """Private memory of the daemon: not the blocks, which are in shared memory."""
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        found = next(line for line in lines if line.startswith("RssAnon:"))
        return int(found.split()[1]) << 10


def _answered(result: Result) -> Result:
    """Not a miss because the node is gone: a row with a reason must come of that.

    Raises:
        RuntimeError: the node has not answered.
    """
    if result.failure is not None:
        raise RuntimeError(f"the node has not answered: {result.failure}")
    return result
