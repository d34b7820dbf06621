"""Reading from a GPU's memory in tests that have one."""

from __future__ import annotations

import numpy as np

from tiers.cuda import CudaDevice
from tiers.host_copies import HostCopies

_PIECE = 8 << 20


class CudaReader:
    """Reads what lies at an address of a GPU now, in the context that PyTorch uses."""

    def __init__(self, number: int = 0) -> None:
        device = CudaDevice(number)
        device.open()
        self._copies = HostCopies(device, 1, _PIECE)

    def __call__(self, address: int, length: int) -> bytes:
        data = np.empty(length, np.uint8)
        self._copies.load(address, data)
        return data.tobytes()
