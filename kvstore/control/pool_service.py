"""The node's answers to the calls of ``Pool``."""

from collections.abc import Callable

from grpclib.server import Stream

from kvstore.control import pool_pb2 as pb
from kvstore.control.boundary import answering
from kvstore.control.pool import PoolTarget
from kvstore.control.pool_grpc import PoolBase
from kvstore.control.wire import encode


class PoolService(PoolBase):
    """Answers calls about the pool from a ``PoolTarget``.

    Args:
        target: the node.
        on_fault: called for every exception that is not one of ``kvstore.errors``, to count it.
    """

    def __init__(self, target: PoolTarget, on_fault: Callable[[], None] = lambda: None) -> None:
        self._target = target
        self._on_fault = on_fault

    async def Members(self, stream: Stream[pb.MembersRequest, pb.PoolReport]) -> None:
        """Answer with ``PoolTarget.pool``."""
        async with answering(stream, self._on_fault):
            await stream.send_message(encode(await self._target.pool(), pb.PoolReport()))

    async def Load(self, stream: Stream[pb.LoadRequest, pb.LoadReport]) -> None:
        """Answer with ``PoolTarget.load``."""
        async with answering(stream, self._on_fault):
            await stream.send_message(encode(await self._target.load(), pb.LoadReport()))
