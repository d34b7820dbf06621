"""Redis through redis-py, as most programs use it; hiredis parses where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis

from benchmarks.peers import adapter


class Adapter(adapter.Adapter):
    """One connection.

    Settings: ``socket``, a path, or ``port`` on the loopback; ``pid`` of the server.
    """

    def open(self, settings: Mapping[str, str]) -> None:
        """Connect."""
        self._redis: Any
        if "socket" in settings:
            self._redis = redis.Redis(unix_socket_path=settings["socket"])
        else:
            self._redis = redis.Redis(port=int(settings["port"]))
        self._redis.ping()

    def close(self) -> None:
        """Empty the server, since the next size begins with all of its memory."""
        self._redis.flushdb()
        self._redis.close()

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """``SET``; in a pipeline where there are several."""
        if len(keys) == 1:
            return int(self._redis.set(keys[0], blocks[0]))
        pipeline = self._redis.pipeline(transaction=False)
        for key, block in zip(keys, blocks, strict=True):
            pipeline.set(key, block)
        return sum(map(bool, pipeline.execute()))

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """``MGET``, then a copy into each buffer."""
        found = 0
        for value, block in zip(self._redis.mget(keys), into, strict=True):
            if value is not None:
                block[:] = value
                found += 1
        return found

    def exists(self, keys: Sequence[bytes]) -> int:
        """A pipeline of ``EXISTS``: one with all keys would only count them."""
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return sum(pipeline.execute())

    def remove_all(self) -> None:
        """``FLUSHDB``."""
        self._redis.flushdb()

    def memory(self) -> int:
        """All that the server has allocated, blocks among it."""
        return int(self._redis.info("memory")["used_memory"])
