"""Devices that go down and away, on one that is made for it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator

import pytest

from rdma.verbs.adapter import Adapter, open_adapter
from rdma.verbs.choice import Wish, choose
from rdma.verbs.client import ClientDevice
from rdma.verbs.devices import list_devices
from rdma.verbs.driver import Driver
from rdma.verbs.errors import DeviceError, HandshakeError, QueueBroken
from tests.rdma.node_memory import NodeMemory
from tests.rdma.verbs.ends import Node, Stopwatch

INTERFACE, NAME = "doomed0", "rxe1"
ADDRESS = "198.51.100.1"


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)


@pytest.fixture
def doomed() -> Iterator[Wish]:
    """A device on an interface of its own."""
    run("modprobe", "dummy", "numdummies=0")
    run("ip", "link", "add", INTERFACE, "type", "dummy")
    run("ip", "address", "add", f"{ADDRESS}/24", "dev", INTERFACE)
    run("ip", "link", "set", INTERFACE, "up")
    run("rdma", "link", "add", NAME, "type", "rxe", "netdev", INTERFACE)
    yield Wish(device=NAME)
    run("ip", "link", "delete", INTERFACE)


@pytest.fixture
async def second(doomed: Wish) -> AsyncIterator[Node]:
    """A node on that device."""
    adapter = open_adapter(doomed)
    device = ClientDevice(open_adapter(doomed))
    driver = Driver(adapter)
    driver.start()
    with NodeMemory() as memory:
        node = Node(driver, memory, device)
        yield node
        node.close()
    driver.close()
    device.close()
    adapter.close()


def test_a_device_that_others_can_reach_is_preferred(doomed: Wish) -> None:
    devices = list_devices()
    assert [device.name for device in devices] == ["rxe0", NAME]
    choice = choose(devices)
    assert (choice.device, str(choice.gid), choice.mtu) == (NAME, ADDRESS, 1024)
    assert choose(devices, Wish(gid="127.0.0.1")).device == "rxe0"


def test_sysfs_and_the_device_agree_on_the_mtu(adapter: Adapter) -> None:
    assert adapter.mtu == adapter.choice.mtu == 4096


def test_a_device_that_is_not_there_is_a_typed_error() -> None:
    with pytest.raises(DeviceError, match="rxe0"):
        open_adapter(Wish(device="mlx5_0"))


async def test_a_port_that_goes_down_is_a_typed_error_and_comes_back(
    second: Node, node: Node
) -> None:
    session, other = second.session(), node.session()
    places, buffers = second.blocks(4, 4096)
    await session.get(places, buffers)
    run("ip", "link", "set", INTERFACE, "down")
    with Stopwatch() as watch, pytest.raises(QueueBroken):
        await session.get(places, buffers)
    assert watch.seconds < 2
    with pytest.raises(HandshakeError):
        second.session()
    assert second.driver.port_down
    others, room = node.blocks(4, 4096)
    await other.get(others, room)
    assert node.same(others, room)
    run("ip", "link", "set", INTERFACE, "up")
    await asyncio.sleep(0.5)
    again = second.session()
    await again.get(places, buffers)
    assert second.same(places, buffers)
    assert not second.driver.port_down


async def test_a_device_that_is_taken_away_waits_for_us_to_let_go(doomed: Wish) -> None:
    """Soft-RoCE's is removed when its last user closes it; no call hangs for that."""
    adapter = open_adapter(doomed)
    device = ClientDevice(open_adapter(doomed))
    driver = Driver(adapter)
    driver.start()
    memory = NodeMemory()
    node = Node(driver, memory, device)
    session = node.session()
    places, buffers = node.blocks(4, 4096)
    await session.get(places, buffers)
    deleting = await asyncio.create_subprocess_exec("rdma", "link", "delete", NAME)
    await asyncio.sleep(0.5)
    assert deleting.returncode is None
    with Stopwatch() as watch:
        await asyncio.gather(session.get(places, buffers, 2), return_exceptions=True)
    assert watch.seconds < 2.5
    with pytest.raises(DeviceError):
        open_adapter(doomed)
    node.close()
    memory.close()
    driver.close()
    device.close()
    adapter.close()
    async with asyncio.timeout(10):
        assert await deleting.wait() == 0
