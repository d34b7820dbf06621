"""The client's half of the ``rdma`` transport: the passive end, which registers and waits."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from rdma.errors import BadPlace, RegionError, TransportError
from rdma.region import Region, RegionCache
from rdma.transport import ClientTransport
from rdma.verbs.adapter import Adapter, open_adapter
from rdma.verbs.buffers import ClientMemory
from rdma.verbs.choice import Wish
from rdma.verbs.errors import DeviceError
from rdma.verbs.handshake import describe, parse
from rdma.verbs.memory import Registration, VerbsRegistrar
from rdma.verbs.queue import QueuePair
from rdma.verbs.settings import QueueSettings

__all__ = ["ClientDevice", "VerbsClientTransport", "shared_device"]


class ClientDevice:
    """A device as the clients of a process share it, with what they have registered.

    Args:
        adapter: the device; closed with this.
        readable: whether nodes may read what they may write.

    Attributes:
        adapter: as given.
        memory: what is registered, for all connections.
        pairs: queue pairs of its connections.
        inherited: whether the process was forked since: all this is the parent's then.
        proof: what nodes may read where ``readable`` is false; see ``handshake.Endpoint``.
    """

    def __init__(self, adapter: Adapter, *, readable: bool = True) -> None:
        self.adapter = adapter
        self.pairs: weakref.WeakSet[QueuePair] = weakref.WeakSet()
        self.inherited = False
        self.memory = ClientMemory(VerbsRegistrar(adapter, shared=True, readable=readable))
        try:
            # Nothing ever completes here, but a queue pair can't be without.
            self.completions: Any = adapter.binding.cq.CQ(adapter.context, 1, None, None, 0)
        except adapter.binding.Error as error:
            adapter.close()
            raise DeviceError(
                f"{adapter.choice.device} makes no completion queue: {error}"
            ) from error
        self.proof: tuple[int, int] | None = None
        if not readable:
            self._offer_proof()

    def _offer_proof(self) -> None:
        page = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).toreadonly()
        self._provable = RegionCache(VerbsRegistrar(self.adapter, shared=True))
        try:
            region = self._provable.acquire(page)
        except RegionError:
            self.completions.close()
            raise
        registration = region.registration
        assert isinstance(registration, Registration)
        self.proof = registration.base, registration.remote

    def close(self) -> None:
        """Deregister everything and give the device back."""
        self.memory.close()
        if self.proof is not None:
            self._provable.close()
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


_kept: Final[list[tuple[ClientDevice, list[QueuePair]]]] = []
"""What the parent of this process uses: what was finalized here would be destroyed there."""


def _before_fork() -> None:
    _lock.acquire()
    _kept.extend((device, list(device.pairs)) for device in _shared.values())


def _after_fork_in_parent() -> None:
    del _kept[len(_kept) - len(_shared) :]
    _lock.release()


def _after_fork_in_child() -> None:
    for device in _shared.values():
        device.inherited = True
    _shared.clear()
    # Not even at the end of the process, when what modules hold is finalized.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))
    _lock.release()


def _at_exit() -> None:
    """Give the devices back in the order that pyverbs wants; the interpreter's end has none."""
    while _shared:
        _, device = _shared.popitem()
        for pair in list(device.pairs):
            pair.destroy()
        device.close()


atexit.register(_at_exit)
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def _replace(failed: ClientDevice) -> ClientDevice:
    """Open a shared device anew; whoever still uses the old one keeps it.

    Raises:
        DeviceError: it is not shared, or there is no device any more.
    """
    with _lock:
        wish = next((wish for wish, device in _shared.items() if device is failed), None)
        if wish is None:
            raise DeviceError(f"{failed.adapter.choice.device} takes no more queue pairs")
        del _shared[wish]
    return shared_device(wish)


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
        settings = settings or QueueSettings()
        try:
            self._pair = self._make_pair(settings)
        except DeviceError:
            # It may have gone and come back since it was opened.
            self._device = _replace(self._device)
            self._pair = self._make_pair(settings)
        self._memory = self._device.memory
        self._named: dict[int, tuple[Sequence[int], list[Region]]] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<VerbsClientTransport {self._device.adapter.choice} calls={len(self._named)}>"

    def offer(self) -> dict[str, object]:
        """Return what the node needs to connect its end."""
        return describe(self._pair.local._replace(proof=self._device.proof))

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
        if self._device.inherited:
            return
        self._pair.destroy()
        for _, regions in self._named.values():
            self._memory.give_back(regions)
        self._named.clear()

    def _make_pair(self, settings: QueueSettings) -> QueuePair:
        device = self._device
        pair = QueuePair(device.adapter, device.completions, settings, active=False)
        device.pairs.add(pair)
        return pair

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
