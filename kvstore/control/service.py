"""The node's answers to the calls of ``Control``: checks what comes in, asks the node, answers."""

from collections.abc import AsyncIterator, Callable
from typing import Final

from grpclib.server import Stream

from kvstore.control import control_pb2 as pb
from kvstore.control import interface
from kvstore.control.arguments import (
    checked_beginning,
    checked_hash,
    checked_limit,
    checked_tier,
    hash_or_none,
    split_hashes,
    tier_or_none,
)
from kvstore.control.boundary import answering
from kvstore.control.control_grpc import ControlBase
from kvstore.control.wire import decode, encode
from kvstore.errors import InvalidRequest

_MAX_CURSOR: Final = 4096


class ControlService(ControlBase):
    """Answers control calls from a ``ControlTarget``.

    Args:
        target: the node.
        on_fault: called for every exception that is not one of ``kvstore.errors``, to count it.
    """

    def __init__(
        self, target: interface.ControlTarget, on_fault: Callable[[], None] = lambda: None
    ) -> None:
        self._target = target
        self._on_fault = on_fault

    async def Status(self, stream: Stream[pb.StatusRequest, pb.NodeStatus]) -> None:
        """Answer with ``ControlTarget.status``."""
        async with answering(stream, self._on_fault):
            await stream.send_message(encode(await self._target.status(), pb.NodeStatus()))

    async def Snapshot(self, stream: Stream[pb.SnapshotRequest, pb.NodeSnapshot]) -> None:
        """Answer with ``ControlTarget.snapshot``."""
        async with answering(stream, self._on_fault):
            await stream.send_message(encode(await self._target.snapshot(), pb.NodeSnapshot()))

    async def Namespaces(self, stream: Stream[pb.NamespacesRequest, pb.NamespacesAnswer]) -> None:
        """Answer with ``ControlTarget.namespaces``."""
        async with answering(stream, self._on_fault):
            found = (await self._target.namespaces())[: interface.MAX_NAMESPACES]
            await stream.send_message(
                pb.NamespacesAnswer(namespaces=[encode(one, pb.NamespaceReport()) for one in found])
            )

    async def Find(self, stream: Stream[pb.FindRequest, pb.FindAnswer]) -> None:
        """Answer with ``ControlTarget.find``."""
        async with answering(stream, self._on_fault) as request:
            limit = checked_limit(request.limit)
            found = await self._target.find(
                checked_beginning(request.beginning), hash_or_none(request.namespace), limit
            )
            names = [encode(one, pb.BlockName()) for one in found[:limit]]
            await stream.send_message(pb.FindAnswer(blocks=names))

    async def ListBlocks(self, stream: Stream[pb.BlockQuery, pb.BlockPage]) -> None:
        """Answer with ``ControlTarget.list_blocks``."""
        async with answering(stream, self._on_fault) as request:
            query = decode(request, interface.BlockQuery)
            hash_or_none(request.namespace)
            checked_limit(query.limit)
            tier_or_none(request.tier)
            if len(query.cursor) > _MAX_CURSOR:
                raise InvalidRequest("the cursor is none of this node's")
            await stream.send_message(encode(await self._target.list_blocks(query), pb.BlockPage()))

    async def Inspect(self, stream: Stream[pb.InspectRequest, pb.InspectAnswer]) -> None:
        """Answer with ``ControlTarget.inspect``."""
        async with answering(stream, self._on_fault) as request:
            limit = checked_limit(request.limit)
            found = await self._target.inspect(
                checked_hash(request.namespace),
                checked_hash(request.hash),
                prefix=request.prefix,
                limit=limit,
            )
            reports = [encode(one, pb.BlockReport()) for one in found[:limit]]
            await stream.send_message(pb.InspectAnswer(blocks=reports))

    async def Match(self, stream: Stream[pb.PrefixRequest, pb.MatchReport]) -> None:
        """Answer with ``ControlTarget.match``."""
        async with answering(stream, self._on_fault) as request:
            report = await self._target.match(
                checked_hash(request.namespace), split_hashes(request.hashes)
            )
            await stream.send_message(encode(report, pb.MatchReport()))

    async def Explain(self, stream: Stream[pb.PrefixRequest, pb.Explanation]) -> None:
        """Answer with ``ControlTarget.explain``."""
        async with answering(stream, self._on_fault) as request:
            report = await self._target.explain(
                checked_hash(request.namespace), split_hashes(request.hashes)
            )
            await stream.send_message(encode(report, pb.Explanation()))

    async def Pin(self, stream: Stream[pb.PinRequest, pb.PinReport]) -> None:
        """Answer with ``ControlTarget.pin``."""
        async with answering(stream, self._on_fault) as request:
            seconds = request.seconds if request.HasField("seconds") else None
            if seconds is not None and not 0 < seconds <= interface.MAX_PIN_SECONDS:
                raise InvalidRequest("a pin's lifetime must be positive and at most 366 days")
            report = await self._target.pin(
                checked_hash(request.namespace), checked_hash(request.hash), seconds
            )
            await stream.send_message(encode(report, pb.PinReport()))

    async def Pins(self, stream: Stream[pb.PinsRequest, pb.PinsAnswer]) -> None:
        """Answer with ``ControlTarget.pins``."""
        async with answering(stream, self._on_fault):
            pins = (await self._target.pins())[: interface.MAX_PAGE]
            await stream.send_message(
                pb.PinsAnswer(pins=[encode(one, pb.PinReport()) for one in pins])
            )

    async def Unpin(self, stream: Stream[pb.BlockName, pb.Removal]) -> None:
        """Answer with ``ControlTarget.unpin``."""
        async with answering(stream, self._on_fault) as request:
            removal = await self._target.unpin(
                checked_hash(request.namespace), checked_hash(request.hash)
            )
            await stream.send_message(encode(removal, pb.Removal()))

    async def Evict(self, stream: Stream[pb.EvictRequest, pb.Removal]) -> None:
        """Answer with ``ControlTarget.evict``."""
        async with answering(stream, self._on_fault) as request:
            removal = await self._target.evict(
                checked_hash(request.namespace), hash_or_none(request.hash)
            )
            await stream.send_message(encode(removal, pb.Removal()))

    async def Flush(self, stream: Stream[pb.FlushRequest, pb.Removal]) -> None:
        """Answer with ``ControlTarget.flush``."""
        async with answering(stream, self._on_fault) as request:
            removal = await self._target.flush(checked_tier(request.tier))
            await stream.send_message(encode(removal, pb.Removal()))

    async def Verify(self, stream: Stream[pb.VerifyRequest, pb.VerifyProgress]) -> None:
        """Answer with ``ControlTarget.verify``."""
        async with answering(stream, self._on_fault) as request:
            namespace = hash_or_none(request.namespace)
            progress = self._target.verify(namespace, tier_or_none(request.tier))
            async for step in _closing(progress):
                await stream.send_message(encode(step, pb.VerifyProgress()))


async def _closing(
    steps: AsyncIterator[interface.VerifyProgress],
) -> AsyncIterator[interface.VerifyProgress]:
    """The same steps, with their generator closed at once when the caller goes away."""
    try:
        async for step in steps:
            yield step
    finally:
        close = getattr(steps, "aclose", None)
        if close is not None:
            await close()
