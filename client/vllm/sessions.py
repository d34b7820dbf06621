"""The clients that the connector makes: one for each namespace and shard that it has to do with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from client.blocking import Client
from client.connect import prepare
from client.endpoint import Endpoint
from client.vllm.link import Link
from client.vllm.scheduler import Node
from client.vllm.settings import Settings
from kvstore.errors import ConfigError
from kvstore.identity import Namespace

logger = logging.getLogger("kvstore.client.vllm")


def client_of(
    settings: Settings, namespace: Namespace, shard: int = 0, *, gpu: int | None = None
) -> Client:
    """A client that opens its session later.

    Args:
        settings: of the connector.
        namespace: of the blocks.
        shard: which part of each block.
        gpu: number of the GPU that takes blocks from where they lie on one; where CUDA doesn't let
            it, they come from the node's DRAM.

    Raises:
        ConfigError: the transport can't be had at that address.
        InvalidRequest: the namespace has no such shard.
    """
    prepared = partial(
        prepare,
        settings.url,
        namespace,
        shard=shard,
        transport=settings.transport,
        deadline=settings.connect_deadline,
        token=settings.reveal_token(),
        ca=settings.ca,
        certificate=settings.certificate,
        key=settings.key,
    )
    if gpu is not None:
        try:
            return prepared(gpu=gpu)
        except ConfigError as error:
            logger.warning("no blocks are taken from the node's GPUs: %s", error)
    return prepared()


def link_of(settings: Settings, client: Client) -> Link:
    """What keeps a client connected; not begun yet."""
    url = settings.url
    return Link(client, f"the node at {url}", Endpoint.parse(url).advice)


def node_of(settings: Settings, namespace: Namespace) -> Node:
    """A session for lookups, which speak of all shards; waits a moment for it to be opened."""
    client = client_of(settings, namespace)
    link = link_of(settings, client)
    link.open(settings.connect_deadline)
    return Node(client, link)


def shard_clients(settings: Settings, namespaces: Sequence[Namespace]) -> list[Client]:
    """A client for every shard of some namespaces."""
    return [
        client_of(settings, namespace, shard)
        for namespace in namespaces
        for shard in range(namespace.shards)
    ]
