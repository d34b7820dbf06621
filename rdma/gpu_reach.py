"""The GPU that a process computes on, and those whose memory it can map and read there."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from rdma.errors import SegmentError
from rdma.gpu_segments import CudaMapper, Mapper, checked

__all__ = ["ComputeGpu", "CudaGpu"]


@runtime_checkable
class ComputeGpu(Protocol):
    """A GPU that a client computes on. Any thread may call it."""

    def uuid(self) -> bytes:
        """16 bytes that name it in every process of the host."""

    def reaches(self) -> Sequence[bytes]:
        """Names of the GPUs whose memory it can read, itself first."""

    def mapper(self, uuid: bytes) -> Mapper:
        """What maps memory of one of these.

        Raises:
            SegmentError: nothing can.
        """


class CudaGpu:
    """A GPU by the number that this process, and PyTorch in it, sees it under.

    Args:
        number: as in ``cuda:0``.

    Raises:
        SegmentError: there is no CUDA here, or no such GPU.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        try:
            self._driver: Any = import_module("cuda.bindings.driver")
            self._check(self._driver.cuInit(0))
            own = self._check(self._driver.cuDeviceGet(number))
            self._uuid = self._name(own)
            self._reaches = [self._uuid, *self._peers(own)]
        except ImportError as error:
            raise SegmentError(
                f"GPU {number} can't be used: CUDA is reached through the package cuda-bindings, "
                f"which comes with PyTorch for CUDA ({error})"
            ) from error
        except (OSError, RuntimeError) as error:
            # A RuntimeError is how cuda-bindings says that there is no driver to load.
            raise SegmentError(f"GPU {number} can't be used: {error}") from error

    def uuid(self) -> bytes:
        """See ``ComputeGpu.uuid``."""
        return self._uuid

    def reaches(self) -> Sequence[bytes]:
        """See ``ComputeGpu.reaches``."""
        return self._reaches

    def mapper(self, uuid: bytes) -> Mapper:
        """See ``ComputeGpu.mapper``."""
        return CudaMapper(uuid, self._number)

    def _peers(self, own: Any) -> list[bytes]:
        devices = map(self._driver.cuDeviceGet, range(self._check(self._driver.cuDeviceGetCount())))
        others = [device for device in map(self._check, devices) if int(device) != int(own)]
        return [
            self._name(device)
            for device in others
            if self._check(self._driver.cuDeviceCanAccessPeer(own, device))
        ]

    def _name(self, device: Any) -> bytes:
        return bytes(self._check(self._driver.cuDeviceGetUuid(device)).bytes)

    def _check(self, answer: tuple[Any, ...]) -> Any:
        return checked(self._driver, answer)
