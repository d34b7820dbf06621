"""Pools of every kind that the contract holds for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from kvstore.directory.interface import Directory
from kvstore.directory.memory import MemoryDirectory, MemoryPool
from tests.kvstore.directory.pools import member

Make = Callable[[str], Directory]
"""Makes a node's view of the pool, not yet opened; it is closed when the test ends."""


@pytest.fixture(params=["memory"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    made: list[Directory] = []
    pool = MemoryPool()

    def build(node: str) -> Directory:
        made.append(MemoryDirectory(pool, member(node)))
        return made[-1]

    yield build
    for directory in made:
        await directory.close()
