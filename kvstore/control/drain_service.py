"""The node's answers to the calls of ``Drain``."""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final, cast

from grpclib.server import Stream

from kvstore.control import drain_pb2 as pb
from kvstore.control.boundary import answering
from kvstore.control.drain import MAX_SECONDS, DrainOrder, DrainTarget
from kvstore.control.drain_grpc import DrainBase
from kvstore.control.wire import encode
from kvstore.errors import InvalidRequest

_PARTING_SECONDS: Final = 5.0
"""How long a caller may take to hang up before its connection goes."""


class DrainService(DrainBase):
    """Answers calls for draining from a ``DrainTarget``.

    Args:
        target: the node.
        on_fault: called for every exception that is not one of ``kvstore.errors``, to count it.
    """

    def __init__(self, target: DrainTarget, on_fault: Callable[[], None] = lambda: None) -> None:
        self._target = target
        self._on_fault = on_fault

    async def Drain(self, stream: Stream[pb.DrainRequest, pb.DrainProgress]) -> None:
        """Answer with ``DrainTarget.drain``."""
        async with answering(stream, self._on_fault) as request:
            order = _order(request)
            async with aclosing(cast(Any, self._target.drain(order))) as steps:
                async for step in steps:
                    last = step.finished and step.state == "drained"
                    await stream.send_message(encode(step, pb.DrainProgress()))
            if order.stop and last:
                await self._stop()

    async def _stop(self) -> None:
        """Stop the daemon when whoever asked has heard the last word, and so hung up."""
        try:
            await asyncio.sleep(_PARTING_SECONDS)
        finally:
            self._target.stop()

    async def Resume(self, stream: Stream[pb.ResumeRequest, pb.DrainProgress]) -> None:
        """Answer with ``DrainTarget.resume``."""
        async with answering(stream, self._on_fault):
            await stream.send_message(encode(await self._target.resume(), pb.DrainProgress()))


def _order(request: pb.DrainRequest) -> DrainOrder:
    rate = request.rate if request.HasField("rate") else None
    if not 0 <= request.seconds <= MAX_SECONDS:
        raise InvalidRequest(f"a drain may take from 0 to {MAX_SECONDS:.0f} s")
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise InvalidRequest("a rate must be above 0")
    return DrainOrder(request.seconds, request.drop, rate, request.stop)
