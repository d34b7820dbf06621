"""Clocks that jump: those of nodes by libfaketime, that of Redis by a stand-in.

Redis does not start under libfaketime (jemalloc asks for the time before it can be given). What its
clock does to a pool is to end leases, so the stand-in moves the end of every key that has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.kvstore.directory.servers import RedisServer

_LIBRARIES: Final = "/usr/lib"
_LIBRARY: Final = "faketime/libfaketime.so.1"

_JUMP: Final = """
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left >= 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
end
"""


def jump_in_redis(redis: RedisServer, seconds: int) -> None:
    """What a Redis does whose clock jumps so many seconds ahead, or back."""
    redis.do("EVAL", _JUMP, 0, seconds * 1000)


class Clock:
    """The wall clock of the processes that are started with its variables.

    Args:
        path: of a file of its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.jump_to(0)

    def jump_to(self, seconds: int) -> None:
        """Be so many seconds ahead of the true time from now on, or behind it."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}\n")
        fresh.replace(self._path)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for processes; skips where there is no libfaketime."""
        found = sorted(Path(_LIBRARIES).glob(f"*/{_LIBRARY}"))
        if not found:
            pytest.skip("libfaketime is not installed, and could not be (apt install libfaketime)")
        return {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
