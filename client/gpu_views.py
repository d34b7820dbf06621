"""Showing blocks where they lie on a GPU of the node, without any I/O; see ``client.operations``.

The node answers for each block where it lies: on a GPU within the client's reach, or in its memory.
Segments on GPUs are asked for by handles and mapped once. Where one can't be mapped, the session
does without GPUs from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import compress

from client.operations import (
    Call,
    MapSegments,
    Operation,
    Seen,
    Terms,
    kept,
    show,
    shown,
    spread,
    view,
    view_batches,
)
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.protocol.fields import MAX_SEGMENTS
from kvstore.protocol.messages import HBM, DeviceSegments, DeviceSegmentsAnswer, Get, GetAnswer
from rdma.errors import BadPlace, SegmentError
from rdma.gpu_mappings import GpuMappings
from rdma.gpu_segments import GpuView
from rdma.shm import ShmClientTransport

logger = logging.getLogger("kvstore.client")


def gpus_of(terms: Terms) -> GpuMappings | None:
    """The session's mappings of segments on GPUs; None where it has none."""
    transport = terms.transport
    return transport.gpus if isinstance(transport, ShmClientTransport) else None


def view_on_gpus(terms: Terms, hashes: Sequence[bytes]) -> Operation[Seen[memoryview | GpuView]]:
    """Show blocks where they lie, on a GPU or in the node's memory."""
    gpus = gpus_of(terms)
    if gpus is None or not gpus.usable:
        return (yield from view(terms, hashes))  # type: ignore[return-value]
    seen: Seen[memoryview | GpuView] = Seen(b"", [], [])
    try:
        yield from view_batches(seen, terms, hashes, terms.max_hashes, _show_on_gpus)
    except BaseException:
        for ended in seen.ended:
            ended()
        raise
    return seen


def _show_on_gpus(terms: Terms, hashes: Sequence[bytes]) -> Operation[Seen[memoryview | GpuView]]:
    gpus = gpus_of(terms)
    assert gpus is not None
    if not gpus.usable:
        return (yield from show(terms, hashes))  # type: ignore[return-value]
    answer: GetAnswer = yield Call(Get(hashes, device=True))
    if HBM not in answer.tiers:
        return (yield from shown(terms, answer))  # type: ignore[return-value]
    if answer.locations is None:
        raise BadPlace("the node did not say where the blocks lie")
    leases = [answer.lease] if answer.lease else []
    with kept(terms, leases):
        try:
            yield from _map(gpus, answer)
        except SegmentError as error:
            logger.warning("blocks on the node's GPUs are read from its memory instead: %s", error)
            gpus.usable = False
        else:
            return (yield from _shown_on_gpus(terms, gpus, answer))
    terms.leases += leases
    return (yield from show(terms, hashes))  # type: ignore[return-value]


def _map(gpus: GpuMappings, answer: GetAnswer) -> Operation[None]:
    """Map what an answer named.

    Raises:
        SegmentError: it can't be had, or can't be mapped.
    """
    missing = gpus.missing(_on_gpus(answer))
    for start in range(0, len(missing), MAX_SEGMENTS):
        try:
            shared: DeviceSegmentsAnswer = yield Call(
                DeviceSegments(missing[start : start + MAX_SEGMENTS])
            )
        except DeadlineExceeded:
            raise
        except KVStoreError as error:
            # Where the session has ended, asking for the blocks in memory will say so.
            raise SegmentError(str(error)) from error
        for number, size, handle in shared.segments:
            gpus.add(number, size, handle)


def _shown_on_gpus(
    terms: Terms, gpus: GpuMappings, answer: GetAnswer
) -> Operation[Seen[memoryview | GpuView]]:
    transport, size = terms.transport, terms.namespace.block_bytes
    in_memory = list(compress(answer.locations or (), (code != HBM for code in _found(answer))))
    if missing := transport.missing(in_memory):
        yield MapSegments(missing)
    hosted = iter(transport.views(in_memory, size))
    try:
        # Last: nothing can fail between this and the owner of the views.
        on_gpus = iter(gpus.take(_on_gpus(answer), size))
    except SegmentError as error:
        raise Unavailable(str(error)) from error
    views: list[memoryview | GpuView] = [
        next(on_gpus) if code == HBM else next(hosted) for code in _found(answer)
    ]
    leases = [answer.lease] if answer.lease else []
    return Seen(answer.tiers, spread(answer.tiers, views), leases, [gpus.give_back])


def _found(answer: GetAnswer) -> Iterator[int]:
    return filter(None, answer.tiers)


def _on_gpus(answer: GetAnswer) -> list[int]:
    return list(compress(answer.locations or (), (code == HBM for code in _found(answer))))
