"""A node whose GPU is a stand-in that other processes map, and processes that read from it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvstore
from kvstore.gpus import Gpus
from kvstore.identity import Namespace
from kvstore.protocol.messages import HBM
from rdma.gpu_segments import GpuView
from tests.client.gpu_reader import block, names
from tests.running import DaemonProcess, DaemonThread, make_config, wait_for
from tests.shared_gpu import SharedDevice, SharedGpu, read

BLOCK = 64 << 10
ROOM = 16
"""Blocks that the GPU has room for, in two segments."""
SPACE = Namespace("on-gpus", "uint8", "raw", 1, BLOCK)


class Store(DaemonThread):
    """A node with stand-ins for GPUs."""

    def __init__(self, directory: Path, gpus: int = 1, **sections: dict[str, Any]) -> None:
        self.devices = [SharedDevice(number) for number in range(gpus)]
        for device in self.devices:
            device.registered = self.devices[0].registered  # what one has pinned is all's
        hbm: dict[str, Any] = {
            "capacity": ROOM * BLOCK,
            "segment": ROOM // 2 * BLOCK,
            "gpus": list(range(gpus)),
        }
        dram = {"capacity": "32MiB", "segment": "4MiB"}
        config = make_config(directory, **({"dram": dram, "hbm": hbm} | sections))
        super().__init__(config, lambda number: self.devices[number])

    @property
    def gpus(self) -> Gpus:
        found = self.daemon.node.gpus
        assert found is not None
        return found

    @property
    def departing(self) -> int:
        """Ended sessions whose processes may still read."""
        sessions = self.daemon.server.gpus
        assert sessions is not None
        return sessions.departing

    @property
    def sessions(self) -> int:
        return self.daemon.node.metrics.sessions

    @property
    def sharers(self) -> int:
        """Mappings of segments that the node counts."""

        def count() -> int:
            tiers = [self.gpus[gpu].tier for gpu in range(len(self.gpus))]
            return sum(segment.sharers for tier in tiers for segment in tier.segments())

        counted: int = self.call(count)
        return counted

    def connect(self, *gpus: int, **settings: Any) -> kvstore.Client:
        """A client that computes on the first of these GPUs and reaches the others."""
        return kvstore.connect(
            self.url, SPACE, **({"gpu": SharedGpu(*gpus), "deadline": 20.0} | settings)
        )


@contextmanager
def open_store(directory: Path, gpus: int = 1, **sections: dict[str, Any]) -> Iterator[Store]:
    """A node for the time of the block; all memory of its GPUs is given back at the end."""
    with Store(directory, gpus, **sections) as store:
        yield store
    assert [device.live for device in store.devices] == [{}] * gpus


def put(client: kvstore.Client, prompt: int, count: int) -> None:
    """Store a prompt's blocks."""
    blocks = [block(prompt, position, BLOCK) for position in range(count)]
    result = client.put(names(count, prompt), blocks)
    assert result.stored + result.held == count


def bring_up(client: kvstore.Client, prompt: int, count: int) -> None:
    """Use a prompt's blocks on the client's GPU until all of them are there."""

    def there() -> bool:
        with client.view(names(count, prompt), device=True) as views:
            return views.codes == bytes([HBM]) * count

    wait_for(there, 20.0)


def is_right(view: memoryview | GpuView | None, prompt: int, position: int) -> bool:
    """Whether a view shows a block's own bytes."""
    assert view is not None
    shown = read(view.address, view.length) if isinstance(view, GpuView) else bytes(view)
    return shown == block(prompt, position, BLOCK)


def storm(client: kvstore.Client, room: int, first: int = 100) -> None:
    """Put other blocks in all the room that there is on the GPU, several times over."""
    for prompt in range(first, first + 4):
        put(client, prompt, room)
        bring_up(client, prompt, room)


class Reader:
    """Another process that reads, see ``tests.client.gpu_reader``."""

    def __init__(self, store: Store | DaemonProcess, *gpu: str) -> None:
        command = [sys.executable, "-m", "tests.client.gpu_reader"]
        self._process = subprocess.Popen(
            [*command, store.url, SPACE.model, str(BLOCK), *gpu],
            cwd=Path(__file__).parent.parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: object) -> Any:
        """Have it do something; what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended: {self._process.wait(10)}"
        return json.loads(line)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def reader(store: Store | DaemonProcess, *gpu: str) -> Iterator[Reader]:
    """Another process for the time of the block."""
    process = Reader(store, *gpu)
    try:
        yield process
    finally:
        process.kill()
