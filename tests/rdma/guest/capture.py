"""What a packet capture says about who moved how many bytes."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROCE_PORT = 4791
"""RoCEv2's UDP port (IBTA, annex A17)."""

_UDP, _TCP = 17, 6
_FILE_HEADER = 24
_PACKET_HEADER = struct.Struct("<IIII")


@dataclass(frozen=True)
class Traffic:
    """IPv4 payload above UDP or TCP, in bytes as sent, whatever was kept of them."""

    roce: Counter[tuple[str, str]]
    """RoCEv2, its own headers included, by source and destination."""
    tcp: Counter[tuple[str, str]]
    """TCP payload by source and destination."""
    dscp: Counter[int]
    """RoCEv2 packets by their DSCP."""


def read_capture(path: Path) -> Traffic:
    """Reads a pcap file of Ethernet frames, to the last packet that is whole."""
    data = path.read_bytes()
    roce: Counter[tuple[str, str]] = Counter()
    tcp: Counter[tuple[str, str]] = Counter()
    dscp: Counter[int] = Counter()
    at = _FILE_HEADER
    while at + _PACKET_HEADER.size <= len(data):
        _, _, kept, _ = _PACKET_HEADER.unpack_from(data, at)
        frame = data[at + _PACKET_HEADER.size : at + _PACKET_HEADER.size + kept]
        at += _PACKET_HEADER.size + kept
        if len(frame) < 42 or frame[12:14] != b"\x08\x00":
            continue
        packet = frame[14:]
        header, length = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
        ends = (_dotted(packet[12:16]), _dotted(packet[16:20]))
        inner = packet[header:]
        if packet[9] == _UDP and int.from_bytes(inner[2:4], "big") == ROCE_PORT:
            roce[ends] += length - header - 8
            dscp[packet[1] >> 2] += 1
        elif packet[9] == _TCP:
            tcp[ends] += length - header - (inner[12] >> 4) * 4
    return Traffic(roce, tcp, dscp)


def _dotted(address: bytes) -> str:
    return ".".join(str(byte) for byte in address)
