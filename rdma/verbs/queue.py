"""The life of a queue pair: made, connected, put in error, destroyed."""

from __future__ import annotations

import logging
import secrets
from typing import Any, Final

from rdma.verbs.adapter import Adapter
from rdma.verbs.errors import DeviceError, HandshakeError
from rdma.verbs.handshake import Endpoint, joint_mtu
from rdma.verbs.posting import ChainPoster, ExtendedPoster, Poster
from rdma.verbs.settings import MTUS, QueueSettings

__all__ = ["QueuePair"]

_log = logging.getLogger(__name__)

_RELIABLE: Final = 2
_ERROR: Final = 6
_STATE: Final = 1
_REMOTE_WRITE_AND_READ: Final = 2 | 4
_DOMAIN_AND_OPERATIONS: Final = 1 | 64
_WRITE_AND_READ: Final = 1 | 16
"""Of <infiniband/verbs.h>: IBV_QPT_RC, IBV_QPS_ERR, IBV_QP_STATE, IBV_ACCESS_REMOTE_*,
IBV_QP_INIT_ATTR_* and IBV_QP_EX_WITH_*, all ABI."""


class QueuePair:
    """A reliable connected queue pair.

    The active end posts RDMA READs and WRITEs and grants the peer nothing. The passive end posts
    nothing; its peer may touch what it has registered for that.

    Args:
        adapter: the device.
        completions: pyverbs' completion queue.
        settings: how it is set up.
        active: which end it is.

    Attributes:
        local: what to tell the peer.
        number: of the queue pair.
        pieces: of one work request at most.
        depth: work requests under way at most.

    Raises:
        DeviceError: the device refused.
    """

    def __init__(
        self, adapter: Adapter, completions: Any, settings: QueueSettings, *, active: bool
    ) -> None:
        self._adapter = adapter
        self._settings = settings
        self._active = active
        self._destroyed = False
        limits = adapter.limits
        self.pieces = limits.pieces if active else 1
        self.depth = min(settings.depth, limits.works) if active else 1
        try:
            self._queue, self._poster = self._make(completions)
        except adapter.binding.Error as error:
            raise DeviceError(f"{adapter.choice.device} makes no queue pair: {error}") from error
        self.number: int = self._queue.qp_num
        self.local = Endpoint(
            self.number,
            secrets.randbits(24),
            adapter.choice.gid.address,
            min(adapter.mtu, settings.mtu or adapter.mtu),
            min(settings.reads, limits.reads_out if active else limits.reads_in),
        )

    def __repr__(self) -> str:
        end = "active" if self._active else "passive"
        return f"<QueuePair {self.number:#x} {end} on {self._adapter.choice.device}>"

    def connect(self, remote: Endpoint) -> None:
        """Bring the queue pair up.

        Args:
            remote: the other end, which may be connected earlier or later.

        Raises:
            HandshakeError: the device can't reach the other end so.
        """
        attributes = self._attributes(remote)
        try:
            self._queue.to_rts(attributes)
        except self._adapter.binding.Error as error:
            raise HandshakeError(
                f"no connection from {self._adapter.choice} to {remote.gid}: {error}"
            ) from error

    def post(self, chain: Any) -> None:
        """Post a chain of work requests; see :meth:`rdma.verbs.posting.Poster.post`."""
        self._poster.post(chain)

    def break_off(self) -> None:
        """Put it in error: the device flushes what is under way and touches memory no more."""
        if self._destroyed:
            return
        attributes = self._adapter.binding.qp.QPAttr()
        attributes.qp_state = _ERROR
        try:
            self._queue.modify(attributes, _STATE)
        except self._adapter.binding.Error as error:
            _log.warning("%r cannot be put in error: %s", self, error)

    def destroy(self) -> None:
        """Destroy it; when this returns, the device has ended all access for it."""
        if self._destroyed:
            return
        self._destroyed = True
        try:
            self._queue.close()
        except self._adapter.binding.Error as error:
            # Only a device that is gone refuses; the kernel ended its access before.
            _log.error("%r cannot be destroyed: %s", self, error)

    def _make(self, completions: Any) -> tuple[Any, Poster]:
        binding = self._adapter.binding
        capacity = binding.qp.QPCap(
            max_send_wr=self.depth, max_recv_wr=1, max_send_sge=self.pieces, max_recv_sge=1
        )
        if self._active:
            extended = self._make_extended(completions, capacity)
            if extended is not None:
                return extended, ExtendedPoster(binding, extended)
        initial = binding.qp.QPInitAttr(
            qp_type=_RELIABLE, scq=completions, rcq=completions, cap=capacity, sq_sig_all=0
        )
        plain = binding.qp.QP(self._adapter.domain, initial)
        return plain, ChainPoster(binding, plain)

    def _make_extended(self, completions: Any, capacity: Any) -> Any:
        """Make an extended queue pair; None where the device has none."""
        binding = self._adapter.binding
        try:
            initial = binding.qp.QPInitAttrEx(
                qp_type=_RELIABLE,
                scq=completions,
                rcq=completions,
                cap=capacity,
                sq_sig_all=0,
                pd=self._adapter.domain,
                comp_mask=_DOMAIN_AND_OPERATIONS,
                send_ops_flags=_WRITE_AND_READ,
            )
            return binding.qp.QPEx(self._adapter.context, initial)
        except binding.Error as error:
            _log.debug("%s has no extended queue pairs: %s", self._adapter.choice.device, error)
            return None

    def _attributes(self, remote: Endpoint) -> Any:
        addr, settings, choice = self._adapter.binding.addr, self._settings, self._adapter.choice
        attributes = self._adapter.binding.qp.QPAttr(port_num=choice.port)
        attributes.qp_access_flags = 0 if self._active else _REMOTE_WRITE_AND_READ
        attributes.path_mtu = MTUS[joint_mtu(self.local, remote)]
        attributes.dest_qp_num = remote.queue
        attributes.rq_psn = remote.psn
        attributes.sq_psn = self.local.psn
        reads = max(1, min(self.local.reads, remote.reads))
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = reads
        attributes.min_rnr_timer = settings.min_rnr_timer
        attributes.timeout = settings.timeout
        attributes.retry_cnt = settings.retry_count
        attributes.rnr_retry = settings.rnr_retry
        route = addr.GlobalRoute(
            dgid=addr.GID(remote.gid.exploded),
            sgid_index=choice.gid.index,
            hop_limit=settings.hop_limit,
            traffic_class=settings.traffic_class,
        )
        attributes.ah_attr = addr.AHAttr(
            gr=route, is_global=1, port_num=choice.port, sl=settings.service_level
        )
        return attributes
