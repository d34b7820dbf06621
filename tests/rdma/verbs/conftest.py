"""Devices, opened once, and what is made of them for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from rdma.verbs.adapter import Adapter, open_adapter
from rdma.verbs.choice import Wish
from rdma.verbs.client import ClientDevice
from rdma.verbs.driver import Driver
from rdma.verbs.settings import QueueSettings
from tests.rdma.node_memory import NodeMemory
from tests.rdma.verbs.ends import Node

WISH = Wish(device="rxe0")


@pytest.fixture(scope="session")
def adapter() -> Iterator[Adapter]:
    adapter = open_adapter(WISH)
    yield adapter
    adapter.close()


@pytest.fixture(scope="session")
def device() -> Iterator[ClientDevice]:
    device = ClientDevice(open_adapter(WISH))
    yield device
    device.close()


@pytest.fixture
def settings() -> QueueSettings:
    return QueueSettings()


@pytest.fixture
async def driver(adapter: Adapter, settings: QueueSettings) -> AsyncIterator[Driver]:
    driver = Driver(adapter, settings)
    driver.start()
    yield driver
    driver.close()


@pytest.fixture
def memory() -> Iterator[NodeMemory]:
    with NodeMemory(size=8 << 20) as memory:
        yield memory


@pytest.fixture
async def node(driver: Driver, memory: NodeMemory, device: ClientDevice) -> AsyncIterator[Node]:
    node = Node(driver, memory, device)
    yield node
    node.close()
