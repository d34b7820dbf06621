"""An engine's process, as far as it maps a segment of an HBM tier: run by the tests on a GPU.

    python -m tests.tiers.hbm_engine UUID HANDLE SEGMENT_BYTES

It reads a JSON line for each thing to do, and answers with one.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from rdma.gpu_segments import CudaMapper, GpuSegmentMap
from tiers.cuda import CudaDevice
from tiers.host_copies import HostCopies

PIECE = 8 << 20


def digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def write_for_ever(device: CudaDevice, to: int, size: int) -> None:
    """Queue copies without an end, as an engine does that is killed in the middle of a put."""
    stream, source = device.stream(), device.allocate(size)
    device.zero(source, size, stream)
    device.copy(to, source, size, stream)
    device.record(stream).wait()
    print(json.dumps("writing"), flush=True)
    while True:
        device.copy(to, source, size, stream)


def main(uuid: str, handle: str, size: int) -> None:
    device = CudaDevice(0)
    device.open()
    copies = HostCopies(device, 1, PIECE)
    mapper = CudaMapper(bytes.fromhex(uuid))
    mapped = GpuSegmentMap(mapper)
    start = mapped.add(0, bytes.fromhex(handle), size)
    print(json.dumps(mapper.length(start)), flush=True)
    for line in sys.stdin:
        do, *arguments = json.loads(line)
        answer: object = do
        if do == "digest":
            place, length = arguments
            data = np.full(length, 0xA5, np.uint8)
            copies.load(mapped.address(place, length), data)
            answer = digest(data.tobytes())
        elif do == "write":
            place, text = arguments
            data = np.frombuffer(bytes.fromhex(text), np.uint8)
            copies.store(mapped.address(place, len(data)), data)
        elif do == "write for ever":
            place, length = arguments
            write_for_ever(device, mapped.address(place, length), length)
        elif do == "close":
            mapped.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
