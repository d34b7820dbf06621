"""A node that is drained, seen from the other end."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from kvstore.control import drain_pb2 as pb
from kvstore.control.channel import ControlChannel
from kvstore.control.drain import DrainOrder, DrainProgress
from kvstore.control.drain_grpc import DrainStub
from kvstore.control.wire import decode


class DrainClient(ControlChannel):
    """A connection to a node's control plane, to drain it."""

    async def drain(self, order: DrainOrder) -> AsyncIterator[DrainProgress]:
        """See ``DrainTarget.drain``; closing the iterator cancels it."""
        request = pb.DrainRequest(
            seconds=order.seconds, drop=order.drop, rate=order.rate, stop=order.stop
        )
        async with aclosing(self.stream(DrainStub(self.channel).Drain, request)) as steps:
            async for step in steps:
                yield decode(step, DrainProgress)
                if step.finished:
                    return

    async def resume(self) -> DrainProgress:
        """See ``DrainTarget.resume``."""
        answer = await self.call(DrainStub(self.channel).Resume, pb.ResumeRequest())
        return decode(answer, DrainProgress)
