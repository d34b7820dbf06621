"""A member of a pool seen from the other end: its control plane, and what it says of the pool."""

from kvstore.control import pool_pb2 as pb
from kvstore.control.client import ControlClient
from kvstore.control.pool import LoadReport, PoolReport
from kvstore.control.pool_grpc import PoolStub
from kvstore.control.wire import decode


class PoolClient(ControlClient):
    """A connection to a node's control plane, with the methods of ``PoolTarget`` as well."""

    async def pool(self) -> PoolReport:
        """See ``PoolTarget.pool``."""
        answer = await self.call(PoolStub(self.channel).Members, pb.MembersRequest())
        return decode(answer, PoolReport)

    async def load(self) -> LoadReport:
        """See ``PoolTarget.load``."""
        answer = await self.call(PoolStub(self.channel).Load, pb.LoadRequest())
        return decode(answer, LoadReport)
