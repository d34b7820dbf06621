"""How a client is made."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeAlias

from client.aio import AsyncClient
from client.blocking import Client
from client.endpoint import Endpoint, Settings
from client.tls import certificates_of
from kvstore.errors import ConfigError, InvalidRequest, KVStoreError
from kvstore.identity import Namespace
from rdma.certificates import CertificateFiles
from rdma.errors import SegmentError
from rdma.gpu_reach import ComputeGpu, CudaGpu

logger = logging.getLogger("kvstore.client")

File: TypeAlias = str | os.PathLike[str]


def connect(
    url: str,
    namespace: Namespace,
    *,
    shard: int = 0,
    transport: str = "auto",
    deadline: float = 1.0,
    token: str | None = None,
    ca: File | None = None,
    certificate: File | None = None,
    key: File | None = None,
    gpu: int | ComputeGpu | None = None,
    required: bool = True,
) -> Client:
    """Make a blocking client.

    Args:
        url: ``unix:///path``, ``tcp://host:port``, or ``tls://host:port`` for a node that speaks
            TLS there.
        namespace: of the blocks.
        shard: this rank's shard of each block.
        transport: ``shm``, ``rdma``, ``tcp``, or ``auto``: ``shm`` over a Unix socket, else
            ``rdma`` where both ends have a device, else ``tcp``. What was chosen, and why, is
            logged and stands in ``stats()``.
        deadline: seconds that a call may take where it doesn't say.
        token: credential of the tenant, if the node wants one.
        ca: for ``tls``, file of the authorities that the node's certificate must be signed by, in
            PEM. It must also name the host of the URL. Without it the system's count.
        certificate: for ``tls``, file of the client's own certificate, if the node wants one.
        key: file of its key, if that is another. All three are read anew when they have changed.
        gpu: number of the GPU that the process computes on, such as 0 for ``cuda:0``, for ``view``
            to show blocks that the node keeps on it or on another that it reaches. Over ``shm``
            only.
        required: whether a node that can't be reached now is an error; otherwise calls give misses
            until it can be.

    Raises:
        ConfigError: the URL makes no sense, the transport can't be had there, the files of
            certificates can't be used, ``gpu`` is no number, or there is no such GPU.
        InvalidRequest: the namespace has no such shard, or the deadline is not positive.
        KVStoreError: the node can't be reached or refuses the session.
    """
    client = prepare(
        url,
        namespace,
        shard=shard,
        transport=transport,
        deadline=deadline,
        token=token,
        ca=ca,
        certificate=certificate,
        key=key,
        gpu=gpu,
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
    ca: File | None = None,
    certificate: File | None = None,
    key: File | None = None,
    gpu: int | ComputeGpu | None = None,
) -> Client:
    """Make a blocking client that opens its session later: when ``open`` or another call asks.

    Args and errors are those of ``connect``, less what comes of reaching the node.
    """
    files = _files(ca, certificate, key)
    settings = _settings(url, namespace, shard, transport, token, deadline, files, gpu)
    return Client(settings, deadline)


async def aconnect(
    url: str,
    namespace: Namespace,
    *,
    shard: int = 0,
    transport: str = "auto",
    deadline: float = 1.0,
    token: str | None = None,
    ca: File | None = None,
    certificate: File | None = None,
    key: File | None = None,
    gpu: int | ComputeGpu | None = None,
    required: bool = True,
) -> AsyncClient:
    """Make an asyncio client; otherwise as ``connect``.

    It is a coroutine, so that a ``with`` block begins ``async with await kvstore.aconnect(...)``.
    """
    files = _files(ca, certificate, key)
    settings = _settings(url, namespace, shard, transport, token, deadline, files, gpu)
    client = AsyncClient(settings, deadline)
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
    files: CertificateFiles,
    gpu: int | ComputeGpu | None,
) -> Settings:
    endpoint = Endpoint.parse(url)
    if not 0 <= shard < namespace.shards:
        raise InvalidRequest(f"shard {shard} of a namespace that has {namespace.shards}")
    if not deadline > 0:
        raise ConfigError(f"a deadline must be positive, not {deadline}")
    offers = endpoint.offers(transport)
    certificates = None
    if endpoint.scheme == "tls":
        certificates = certificates_of(files)
    elif files != CertificateFiles():
        raise ConfigError(f"certificates are for tls://, and {url} is not encrypted")
    name = f"pid {os.getpid()}"
    return Settings(
        endpoint, namespace, shard, offers, token, name, certificates, _compute_gpu(gpu)
    )


def _compute_gpu(gpu: object) -> ComputeGpu | None:
    if gpu is None or isinstance(gpu, ComputeGpu):
        return gpu
    if not isinstance(gpu, int) or isinstance(gpu, bool):
        raise ConfigError(f"gpu must be the number of a GPU, such as 0 for cuda:0, not {gpu!r}")
    try:
        return CudaGpu(gpu)
    except SegmentError as error:
        raise ConfigError(str(error)) from error


def _files(ca: File | None, certificate: File | None, key: File | None) -> CertificateFiles:
    return CertificateFiles(*(None if not file else Path(file) for file in (ca, certificate, key)))
