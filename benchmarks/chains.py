"""Blocks with made-up names for the rows that move them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kvstore
from benchmarks.memory import Blocks
from benchmarks.node import namespace

if TYPE_CHECKING:
    from client.blocking import Client

DEADLINE = 30.0


def chain(length: int) -> list[bytes]:
    """Names of a prefix that nobody has stored."""
    return [os.urandom(32) for _ in range(length)]


@contextmanager
def session(url: str, block_bytes: int, transport: str) -> Iterator[Client]:
    """A connected client that waits long enough to never miss for want of time."""
    client = kvstore.connect(url, namespace(block_bytes), transport=transport, deadline=DEADLINE)
    try:
        yield client
    finally:
        client.close()


def store(client: Client, names: list[bytes], blocks: Blocks) -> None:
    """Put a whole prefix.

    Raises:
        RuntimeError: a block was not stored, so the figure would be of something else.
    """
    result = client.put(names, blocks)
    if result.stored != len(names):
        raise RuntimeError(f"put stored {result.stored} of {len(names)}: {result.outcomes}")
