"""The end of the ``rdma`` transport at which one node pulls blocks from another: a passive one."""

from __future__ import annotations

from rdma.verbs.adapter import Adapter
from rdma.verbs.client import ClientDevice, VerbsClientTransport
from rdma.verbs.settings import QueueSettings

__all__ = ["VerbsPullTransport"]


class VerbsPullTransport(VerbsClientTransport):
    """A client's half by which a peer writes into this node's own arena; one queue pair.

    What the peer can touch: the bytes of the extents named in calls that are under way, each
    registered for its call, to the byte, and deregistered before the call ends. It can write them
    and read none; what it reads, to prove that its writes have arrived, is a page of its own. Until
    the call ends it may write as often as it likes, and anything, so a block is looked at (its
    checksum compared) only after :meth:`done`. It can touch nothing else: the rest of the arena is
    registered for this node's own use alone, and every such transport has a protection domain of
    its own, so that the keys of one peer's extents are worth nothing to another peer, nor those of
    this peer's earlier calls to itself.

    Args:
        adapter: the node's device; closed after this.
        settings: how the queue pair is set up.

    Raises:
        DeviceError: the device refused.
    """

    def __init__(self, adapter: Adapter, settings: QueueSettings) -> None:
        apart = adapter.compartment()
        try:
            device = ClientDevice(apart, readable=False)
        except BaseException:
            apart.close()
            raise
        try:
            super().__init__(device, settings)
        except BaseException:
            device.close()
            raise

    def close(self) -> None:
        """Destroy the queue pair, deregister, and give the protection domain back."""
        super().close()
        self._device.close()
