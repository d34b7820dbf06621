"""Whether the GPUs of the HBM tier are there, and have room."""

from collections.abc import Callable, Iterator

from kvstore.config import HbmSection
from kvstore.doctor.finding import Finding
from kvstore.units import format_size
from tiers.cuda import CudaDevice
from tiers.device import Device
from tiers.errors import TierConfigError

_CHECK = "hbm"


def check_hbm(
    section: HbmSection, make_device: Callable[[int], Device] = CudaDevice
) -> Iterator[Finding]:
    """Open each GPU that a node would open; nothing where the tier is off."""
    if section.capacity:
        for number in section.gpus:
            yield _gpu(section.capacity, number, make_device(number))


def _gpu(capacity: int, number: int, device: Device) -> Finding:
    try:
        device.open()
        free = device.free_bytes()
    except TierConfigError as error:
        return Finding(_CHECK, "failure", str(error), "nvidia-smi   # or serve without --hbm")
    except OSError as error:
        detail = f"GPU {number} can't be used: {error.strerror}"
        return Finding(_CHECK, "failure", detail, "nvidia-smi   # or serve without --hbm")
    found = f"GPU {number} has {format_size(free)} free"
    if free >= capacity:
        return Finding(_CHECK, "ok", f"{found} of {format_size(capacity)} wanted")
    return Finding(
        _CHECK,
        "warning",
        f"{found}, which is less than {format_size(capacity)}, unless a node has them already",
        "nvidia-smi   # who has it; start the node before the engines, or make --hbm smaller",
    )
