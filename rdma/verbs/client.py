"""The client's half of the ``rdma`` transport: the passive end, which registers and waits."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rdma.errors import BadPlace, TransportError
from rdma.region import Region
from rdma.transport import ClientTransport
from rdma.verbs.adapter import Adapter, open_adapter
from rdma.verbs.buffers import ClientMemory
from rdma.verbs.choice import Wish
from rdma.verbs.errors import DeviceError
from rdma.verbs.handshake import describe, parse
from rdma.verbs.memory import VerbsRegistrar
from rdma.verbs.queue import QueuePair
from rdma.verbs.settings import QueueSettings

__all__ = ["ClientDevice", "VerbsClientTransport", "shared_device"]


class ClientDevice:
    """A device as the clients of a process share it, with what they have registered.

    Args:
        adapter: the device; closed with this.

    Attributes:
        adapter: as given.
        memory: what is registered, for all connections.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.memory = ClientMemory(VerbsRegistrar(adapter, shared=True))
        try:
            # Nothing ever completes here, but a queue pair can't be without.
            self.completions: Any = adapter.binding.cq.CQ(adapter.context, 1, None, None, 0)
        except adapter.binding.Error as error:
            adapter.close()
            raise DeviceError(
                f"{adapter.choice.device} makes no completion queue: {error}"
            ) from error

    def close(self) -> None:
        """Deregister everything and give the device back."""
        self.memory.close()
        self.completions.close()
        self.adapter.close()


_lock = threading.Lock()
_shared: dict[Wish, ClientDevice] = {}


def shared_device(wish: Wish | None = None) -> ClientDevice:
    """Return the device that all clients of this process with the same wish share.

    It stays open: a registration is worth the most when the next connection finds it.

    Args:
        wish: which one; the best there is, by default.

    Raises:
        BindingError: pyverbs is missing.
        DeviceError: no device serves, or it can't be opened.
    """
    wish = wish or Wish()
    with _lock:
        device = _shared.get(wish)
        if device is None:
            device = _shared[wish] = ClientDevice(open_adapter(wish))
        return device


class VerbsClientTransport(ClientTransport):
    """The client's half; one queue pair.

    Args:
        device: which one to use; by default the one that :func:`shared_device` returns.
        settings: how the queue pair is set up.

    Raises:
        BindingError: pyverbs is missing.
        DeviceError: no device serves, or it refused.
    """

    name: ClassVar[str] = "rdma"
    exposes_memory: ClassVar[bool] = True

    def __init__(
        self, device: ClientDevice | None = None, settings: QueueSettings | None = None
    ) -> None:
        self._device = device if device is not None else shared_device()
        self._memory = self._device.memory
        self._pair = QueuePair(
            self._device.adapter,
            self._device.completions,
            settings or QueueSettings(),
            active=False,
        )
        self._named: dict[int, tuple[Sequence[int], list[Region]]] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<VerbsClientTransport {self._device.adapter.choice} calls={len(self._named)}>"

    def offer(self) -> dict[str, object]:
        """Return what the node needs to connect its end."""
        return describe(self._pair.local)

    def accept(self, details: Mapping[str, object]) -> None:
        """Connect to the node's end; see :meth:`ClientTransport.accept`."""
        self._pair.connect(parse(details))

    def register(self, buffer: memoryview) -> Region:
        """Register a buffer for all calls to come; see :meth:`ClientMemory.register`."""
        return self._memory.register(buffer)

    def release(self, region: Region) -> None:
        """Undo one :meth:`register`."""
        self._memory.release(region)

    def destinations(self, buffers: Sequence[memoryview]) -> Sequence[int] | None:
        """Register the buffers and return their addresses and keys."""
        return self._name(buffers)

    def place(self, locations: Sequence[int] | None, buffers: Sequence[memoryview]) -> None:
        """Do nothing: the node has written to ``buffers`` by now."""
        _no_places(locations)

    def sources(self, buffers: Sequence[memoryview]) -> Sequence[int] | None:
        """Register the buffers and return their addresses and keys."""
        return self._name(buffers)

    def fill(
        self, locations: Sequence[int] | None, offset: int, buffers: Sequence[memoryview]
    ) -> Sequence[memoryview]:
        """Do nothing: the node reads from the buffers itself."""
        _no_places(locations)
        return ()

    def done(self, named: Sequence[int] | None) -> None:
        """Deregister what was registered for one call only."""
        _, regions = self._named.pop(id(named), (None, ()))
        self._memory.give_back(regions)

    def close(self) -> None:
        """Destroy the queue pair, so that the node can touch nothing any more, and deregister."""
        if self._closed:
            return
        self._closed = True
        self._pair.destroy()
        for _, regions in self._named.values():
            self._memory.give_back(regions)
        self._named.clear()

    def _name(self, buffers: Sequence[memoryview]) -> Sequence[int]:
        if self._closed:
            raise TransportError("the connection is closed")
        named, regions = self._memory.name(buffers)
        if regions:
            self._named[id(named)] = (named, regions)
        return named


def _no_places(places: Sequence[int] | None) -> None:
    if places is not None:
        raise BadPlace("the rdma transport is told no places of the node's")
