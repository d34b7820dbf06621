"""What the tests of every directory share: members, chains, and waiting for what is told soon."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence

from kvstore.directory.interface import NOBODY, Directory, Member, Place, Reach

NAMESPACE = hashlib.sha256(b"a namespace").digest()
OTHER_NAMESPACE = hashlib.sha256(b"another namespace").digest()


def member(node: str) -> Member:
    """A node that has not joined yet."""
    return Member(NOBODY, node, f"incarnation of {node}", f"host of {node}", f"{node}:9000")


def chain(name: str, blocks: int) -> list[bytes]:
    """Prefix hashes of ``blocks`` blocks."""
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(blocks)]


def places(hashes: Sequence[bytes], shard: int = 0, namespace: bytes = NAMESPACE) -> list[Place]:
    """Where a whole chain is named."""
    return [Place(namespace, shard, hashes[0], block) for block in hashes]


def store(directory: Directory, hashes: Sequence[bytes], shard: int = 0) -> None:
    """Note a whole chain as held."""
    for place in places(hashes, shard):
        directory.stored(place)


async def reach(
    directory: Directory,
    hashes: Sequence[bytes],
    start: int = 0,
    shards: int = 1,
    namespace: bytes = NAMESPACE,
    seconds: float = 5.0,
) -> Reach:
    """Ask with a deadline."""
    deadline = asyncio.get_running_loop().time() + seconds
    return await directory.reach(namespace, shards, hashes, start, deadline=deadline)


async def joined(*directories: Directory) -> None:
    """Wait until all are members, and each sees all others."""
    others = len(directories) - 1
    await until(lambda: all(d.me is not None and len(d.members) == others for d in directories))


def number(directory: Directory) -> int:
    """Under which it is a member."""
    assert directory.me is not None
    return directory.me.number


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = 10.0
) -> None:
    """Poll until a condition is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if not isinstance(value, bool):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.005)


async def until_reach(
    directory: Directory,
    hashes: Sequence[bytes],
    blocks: int,
    *,
    shards: int = 1,
    owners: set[int] | None = None,
    seconds: float = 10.0,
) -> Reach:
    """Wait until a chain is said to be held that far, by these owners if given."""
    seen = Reach(0)

    async def there() -> bool:
        nonlocal seen
        seen = await reach(directory, hashes, shards=shards)
        if seen.failure is not None or seen.blocks != blocks:
            return False
        return owners is None or set(seen.owners[0] if seen.owners else ()) == owners

    try:
        await until(there, seconds)
    except AssertionError:
        raise AssertionError(f"wanted {blocks} blocks of {owners}, last seen {seen}") from None
    return seen
