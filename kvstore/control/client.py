"""The control plane seen from the other end: a ``ControlTarget`` that asks a node over gRPC."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from kvstore.control import control_pb2 as pb
from kvstore.control import interface
from kvstore.control.channel import ControlChannel
from kvstore.control.control_grpc import ControlStub
from kvstore.control.wire import decode, encode


class ControlClient(ControlChannel):
    """A connection to one node's control plane, with the methods of ``ControlTarget``."""

    async def status(self) -> interface.NodeStatus:
        """See ``ControlTarget.status``."""
        answer = await self.call(self._stub.Status, pb.StatusRequest())
        return decode(answer, interface.NodeStatus)

    async def snapshot(self) -> interface.Snapshot:
        """See ``ControlTarget.snapshot``."""
        answer = await self.call(self._stub.Snapshot, pb.SnapshotRequest())
        return decode(answer, interface.Snapshot)

    async def namespaces(self) -> Sequence[interface.NamespaceReport]:
        """See ``ControlTarget.namespaces``."""
        answer = await self.call(self._stub.Namespaces, pb.NamespacesRequest())
        return [decode(one, interface.NamespaceReport) for one in answer.namespaces]

    async def find(
        self, beginning: str, namespace: bytes | None, limit: int
    ) -> Sequence[interface.BlockName]:
        """See ``ControlTarget.find``."""
        request = pb.FindRequest(beginning=beginning, namespace=namespace or b"", limit=limit)
        answer = await self.call(self._stub.Find, request)
        return [decode(one, interface.BlockName) for one in answer.blocks]

    async def list_blocks(self, query: interface.BlockQuery) -> interface.BlockPage:
        """See ``ControlTarget.list_blocks``."""
        answer = await self.call(self._stub.ListBlocks, encode(query, pb.BlockQuery()))
        return decode(answer, interface.BlockPage)

    async def inspect(
        self, namespace: bytes, hash: bytes, *, prefix: bool, limit: int
    ) -> Sequence[interface.BlockReport]:
        """See ``ControlTarget.inspect``."""
        request = pb.InspectRequest(namespace=namespace, hash=hash, prefix=prefix, limit=limit)
        answer = await self.call(self._stub.Inspect, request)
        return [decode(one, interface.BlockReport) for one in answer.blocks]

    async def match(self, namespace: bytes, hashes: Sequence[bytes]) -> interface.MatchReport:
        """See ``ControlTarget.match``."""
        request = pb.PrefixRequest(namespace=namespace, hashes=b"".join(hashes))
        answer = await self.call(self._stub.Match, request)
        return decode(answer, interface.MatchReport)

    async def explain(self, namespace: bytes, hashes: Sequence[bytes]) -> interface.Explanation:
        """See ``ControlTarget.explain``."""
        request = pb.PrefixRequest(namespace=namespace, hashes=b"".join(hashes))
        answer = await self.call(self._stub.Explain, request)
        return decode(answer, interface.Explanation)

    async def pin(
        self, namespace: bytes, hash: bytes, seconds: float | None
    ) -> interface.PinReport:
        """See ``ControlTarget.pin``."""
        request = pb.PinRequest(namespace=namespace, hash=hash, seconds=seconds)
        answer = await self.call(self._stub.Pin, request)
        return decode(answer, interface.PinReport)

    async def pins(self) -> Sequence[interface.PinReport]:
        """See ``ControlTarget.pins``."""
        answer = await self.call(self._stub.Pins, pb.PinsRequest())
        return [decode(one, interface.PinReport) for one in answer.pins]

    async def unpin(self, namespace: bytes, hash: bytes) -> interface.Removal:
        """See ``ControlTarget.unpin``."""
        request = pb.BlockName(namespace=namespace, hash=hash)
        answer = await self.call(self._stub.Unpin, request)
        return decode(answer, interface.Removal)

    async def evict(self, namespace: bytes, hash: bytes | None) -> interface.Removal:
        """See ``ControlTarget.evict``."""
        request = pb.EvictRequest(namespace=namespace, hash=hash or b"")
        answer = await self.call(self._stub.Evict, request)
        return decode(answer, interface.Removal)

    async def flush(self, tier: str) -> interface.Removal:
        """See ``ControlTarget.flush``."""
        answer = await self.call(self._stub.Flush, pb.FlushRequest(tier=tier))
        return decode(answer, interface.Removal)

    async def verify(
        self, namespace: bytes | None, tier: str | None
    ) -> AsyncIterator[interface.VerifyProgress]:
        """See ``ControlTarget.verify``."""
        request = pb.VerifyRequest(namespace=namespace or b"", tier=tier or "")
        async with aclosing(self.stream(self._stub.Verify, request)) as steps:
            async for step in steps:
                yield decode(step, interface.VerifyProgress)

    @property
    def _stub(self) -> ControlStub:
        return ControlStub(self.channel)
