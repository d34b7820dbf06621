from collections.abc import Iterator

import pytest

from rdma.errors import BadPlace, TransportError
from rdma.tcp import TcpClientTransport, TcpNodeTransport
from tests.rdma.node_memory import NodeMemory
from tests.rdma.transport_contract import Pair, TransportContract


class TestTcp(TransportContract):
    @pytest.fixture
    def pair(self, memory: NodeMemory) -> Iterator[Pair]:
        pair = Pair(memory, TcpNodeTransport(memory), TcpClientTransport())
        yield pair
        pair.client.close()
        pair.node.close()

    async def test_the_payload_is_the_nodes_memory_itself(self, pair: Pair) -> None:
        places = pair.memory.places(3, 64)
        delivery = await pair.node.push(places, 64, None, pair.deadline())
        assert not delivery.holds
        assert delivery.locations is None
        pair.memory.view(places[1], 64)[0] = 7
        assert delivery.payload[1][0] == 7

    def test_a_client_is_told_no_places(self, pair: Pair) -> None:
        assert pair.node.grant([1]) is None
        assert not pair.client.shares_memory
        with pytest.raises(BadPlace):
            pair.client.place([1], [])
        with pytest.raises(BadPlace):
            pair.client.fill([1], 0, [])
        with pytest.raises(TransportError, match="shares no memory"):
            pair.client.views([1], 64)
        with pytest.raises(TransportError, match="shares no memory"):
            pair.client.extents([1], 64)
