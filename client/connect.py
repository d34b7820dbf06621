"""How a client is made."""

from __future__ import annotations

import logging
import os

from client.aio import AsyncClient
from client.blocking import Client
from client.endpoint import Endpoint, Settings
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError
from kvstore.identity import Namespace

logger = logging.getLogger("kvstore.client")


def connect(
    url: str,
    namespace: Namespace,
    *,
    shard: int = 0,
    transport: str = "auto",
    deadline: float = 1.0,
    token: str | None = None,
    required: bool = True,
) -> Client:
    """Make a blocking client.

    Args:
        url: ``unix:///path`` or ``tcp://host:port``.
        namespace: of the blocks.
        shard: this rank's shard of each block.
        transport: ``shm``, ``rdma``, ``tcp``, or ``auto``: ``shm`` over a Unix socket, else
            ``rdma`` where both ends have a device, else ``tcp``. What was chosen, and why, is
            logged and stands in ``stats()``.
        deadline: seconds that a call may take where it doesn't say.
        token: credential of the tenant, if the node wants one.
        required: whether a node that can't be reached now is an error; otherwise calls give misses
            until it can be.

    Raises:
        ConfigError: the URL makes no sense, or the transport can't be had there.
        InvalidRequest: the namespace has no such shard, or the deadline is not positive.
        KVStoreError: the node can't be reached or refuses the session.
    """
    client = prepare(
        url, namespace, shard=shard, transport=transport, deadline=deadline, token=token
    )
    try:
        client.open()
    except KVStoreError as error:
        if required or not error.retry:
            client.close()
            raise
        logger.warning("%s can't be reached yet: %s", url, error)
    return client


def prepare(
    url: str,
    namespace: Namespace,
    *,
    shard: int = 0,
    transport: str = "auto",
    deadline: float = 1.0,
    token: str | None = None,
) -> Client:
    """Make a blocking client that opens its session later: when ``open`` or another call asks.

    Args and errors are those of ``connect``, less what comes of reaching the node.
    """
    return Client(_settings(url, namespace, shard, transport, token, deadline), deadline)


async def aconnect(
    url: str,
    namespace: Namespace,
    *,
    shard: int = 0,
    transport: str = "auto",
    deadline: float = 1.0,
    token: str | None = None,
    required: bool = True,
) -> AsyncClient:
    """Make an asyncio client; otherwise as ``connect``.

    It is a coroutine, so that a ``with`` block begins ``async with await kvstore.aconnect(...)``.
    """
    client = AsyncClient(_settings(url, namespace, shard, transport, token, deadline), deadline)
    try:
        await client.open()
    except KVStoreError as error:
        if required or not error.retry:
            await client.close()
            raise
        logger.warning("%s can't be reached yet: %s", url, error)
    return client


def _settings(
    url: str,
    namespace: Namespace,
    shard: int,
    transport: str,
    token: str | None,
    deadline: float,
) -> Settings:
    endpoint = Endpoint.parse(url)
    if not 0 <= shard < namespace.shards:
        raise InvalidRequest(f"shard {shard} of a namespace that has {namespace.shards}")
    if not deadline > 0:
        raise ConfigError(f"a deadline must be positive, not {deadline}")
    offers = endpoint.offers(transport)
    return Settings(endpoint, namespace, shard, offers, token, f"pid {os.getpid()}")
