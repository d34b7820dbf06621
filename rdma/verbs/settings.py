"""How queue pairs are set up. The defaults suit RoCEv2; each says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rdma.verbs.errors import DeviceError

__all__ = ["MTUS", "QueueSettings", "retry_seconds"]

MTUS: Final[dict[int, int]] = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
"""Path MTU in bytes to ``enum ibv_mtu``."""

_TIMER_UNIT: Final = 4.096e-6


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of the queue pairs and of the work on them.

    Attributes:
        mtu: bytes of payload in a packet at most. None takes what both ports carry: a packet
            larger than that is dropped, a smaller one costs headers and packets.
        traffic_class: of the IP header. 104 is DSCP 26, which the vendors' guides map to the
            priority that switches keep lossless (PFC and ECN); without such a set-up it does
            no harm.
        service_level: 0, since RoCEv2 takes its priority from the DSCP; it is for fabrics that
            sort by the VLAN tag.
        hop_limit: 64, the Internet's usual value; 1 would confine RoCEv2 to one subnet.
        timeout: exponent of the wait for an acknowledgement, 4.096 µs × 2^timeout. 14 is 67 ms:
            above any pause that PFC causes, and seven of them end within a call's second.
        retry_count: resends before the peer counts as lost. 6, since some devices (Soft-RoCE)
            take 7 as for ever.
        rnr_retry: resends where the peer has posted no receive. No receives are used, so that
            one hardly matters; 6, for the same reason.
        min_rnr_timer: code of the wait that a peer is asked for; 12 is 0.64 ms. Likewise.
        reads: RDMA READs under way at once on a queue pair (``max_rd_atomic``). 16 is what
            current NICs allow at most and keeps a 200 Gb/s link full at 1 MiB; fewer where
            either device allows fewer.
        depth: work requests under way at once on one queue pair. 128 keeps a link full at
            64 KiB and bounds what has to be flushed when a peer dies.
        bytes_in_flight: payload under way at once on one queue pair. 16 MiB is several times
            what a 200 Gb/s link holds across a data centre; more only adds waiting.
        device_works: work requests under way at once over all queue pairs of a device. The
            completion queue has room for twice as many, since one that overruns loses
            completions without a word.
        chain: work requests posted together, the last of them signalled: one completion for 32
            costs a thirty-second of the CPU time, and more would make sessions wait for
            each other.
        work_bytes: payload of one work request at most. 1 MiB, above which a link is no
            better used and sessions take turns less finely.
        busy_poll: whether the event loop polls for completions without rest while bytes are
            under way. Off: it saves some µs a call and costs a core.
    """

    mtu: int | None = None
    traffic_class: int = 104
    service_level: int = 0
    hop_limit: int = 64
    timeout: int = 14
    retry_count: int = 6
    rnr_retry: int = 6
    min_rnr_timer: int = 12
    reads: int = 16
    depth: int = 128
    bytes_in_flight: int = 16 << 20
    device_works: int = 2048
    chain: int = 32
    work_bytes: int = 1 << 20
    busy_poll: bool = False

    def __post_init__(self) -> None:
        if self.mtu is not None and self.mtu not in MTUS:
            raise DeviceError(f"an MTU of {self.mtu}; it is one of {', '.join(map(str, MTUS))}")
        for name, least, most in _RANGES:
            if not least <= getattr(self, name) <= most:
                raise DeviceError(
                    f"{name} is {getattr(self, name)}; it lies between {least} and {most}"
                )
        if self.work_bytes > self.bytes_in_flight:
            raise DeviceError("work_bytes is above bytes_in_flight, so nothing could be sent")


_RANGES: Final = (
    ("traffic_class", 0, 255),
    ("service_level", 0, 15),
    ("hop_limit", 1, 255),
    ("timeout", 1, 31),
    ("retry_count", 0, 6),
    ("rnr_retry", 0, 6),
    ("min_rnr_timer", 0, 31),
    ("reads", 1, 255),
    ("depth", 1, 16_384),
    ("bytes_in_flight", 4096, 1 << 40),
    ("device_works", 1, 1 << 20),
    ("chain", 1, 16_384),
    ("work_bytes", 4096, 1 << 31),
)


def retry_seconds(settings: QueueSettings) -> float:
    """Return about how long it takes until a silent peer counts as lost."""
    return float(_TIMER_UNIT * (1 << settings.timeout) * (settings.retry_count + 1))
