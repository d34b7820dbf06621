"""The file as a whole: its superblock, and a size that the capacity and the file system allow."""

from __future__ import annotations

import errno
import logging
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tiers.errors import MediumFailed, TierConfigError
from tiers.ssd.buffers import aligned_memory
from tiers.ssd.format import (
    MAX_FILE_BYTES,
    MAX_REGION_BYTES,
    MIN_REGION_PAGES,
    PAGE,
    STORE_BYTES,
    Superblock,
    decode_superblock,
    encode_superblock,
)

if TYPE_CHECKING:
    from tiers.ssd.device import Device

_log = logging.getLogger(__name__)

_FIXED_OVERHEAD: Final = 2 * PAGE
"""The superblock and the lock file."""
_LEAST_BOOKKEEPING: Final = 64 << 10
_GIB: Final = 1 << 30
_BOOKKEEPING_SHIFT: Final = 10
"""File systems count their maps of a file's blocks as part of it: allow 1/1024 for them."""


@dataclass(frozen=True, slots=True)
class Volume:
    """A file that is ready for use.

    Attributes:
        store: the superblock's.
        regions: number of regions in it.
        region_pages: pages in each.
        fresh: whether there is nothing to recover.
    """

    store: bytes
    regions: int
    region_pages: int
    fresh: bool


def check_region_bytes(region_bytes: int) -> None:
    """Refuse an impossible region size.

    Raises:
        TierConfigError: saying what is possible.
    """
    least = MIN_REGION_PAGES * PAGE
    if region_bytes % PAGE or not least <= region_bytes <= MAX_REGION_BYTES:
        raise TierConfigError(
            f"ssd region of {region_bytes} bytes: must be a multiple of {PAGE}, "
            f"from {least} to {MAX_REGION_BYTES}"
        )


def regions_within(capacity: int, region_bytes: int) -> int:
    """How many regions fit in ``capacity`` bytes beside everything else that takes space.

    Raises:
        TierConfigError: not one, or more than a file can have.
    """
    if capacity > MAX_FILE_BYTES:
        raise TierConfigError(f"ssd capacity of {capacity} bytes: at most {MAX_FILE_BYTES}")
    overhead = _FIXED_OVERHEAD + max(_LEAST_BOOKKEEPING, capacity >> _BOOKKEEPING_SHIFT)
    regions = (capacity - overhead) // region_bytes
    if regions < 1:
        raise TierConfigError(
            f"ssd capacity of {capacity} bytes holds no region of {region_bytes} bytes: "
            "raise the capacity or lower the region size"
        )
    return regions


def prepare(device: Device, capacity: int, region_bytes: int) -> Volume:
    """Keep what the file holds where it fits these settings, else make a new one of it.

    Raises:
        TierConfigError: the capacity holds no region, or does not fit on the file system.
        MediumFailed: the file can't be made.
    """
    regions = regions_within(capacity, region_bytes)
    known = _read_superblock(device)
    try:
        if known is not None and known.region_bytes == region_bytes:
            return _keep(device, known, regions)
        if device.size:
            _log.warning("ssd tier: starting empty, the file is of another format or region size")
        return _make(device, regions, region_bytes)
    except OSError as error:
        raise MediumFailed(f"the ssd tier's file can't be made: {error}") from error


def _file_bytes(regions: int, region_bytes: int) -> int:
    return PAGE + regions * region_bytes


def _read_superblock(device: Device) -> Superblock | None:
    if device.size < PAGE:
        return None
    page = aligned_memory(PAGE)
    try:
        device.read([page], 0)
    except OSError as error:
        _log.warning("ssd tier: the superblock can't be read: %s", error)
        return None
    return decode_superblock(page)


def _write_superblock(device: Device, superblock: Superblock) -> None:
    page = aligned_memory(PAGE)
    page[:] = encode_superblock(superblock)
    device.write([page], 0)
    device.sync()


def _make(device: Device, regions: int, region_bytes: int) -> Volume:
    _grow(device, _file_bytes(regions, region_bytes))
    store = secrets.token_bytes(STORE_BYTES)
    _write_superblock(device, Superblock(region_bytes, regions, store))
    return Volume(store, regions, region_bytes // PAGE, fresh=True)


def _keep(device: Device, known: Superblock, regions: int) -> Volume:
    size = _file_bytes(regions, known.region_bytes)
    if regions > known.regions:
        _grow(device, size)
    else:
        regions = _restore_size(device, size, known.region_bytes, regions)
    if regions != known.regions:
        _try_superblock(device, replace(known, regions=regions))
    return Volume(known.store, regions, known.region_bytes // PAGE, fresh=False)


def _grow(device: Device, size: int) -> None:
    room = device.room
    if room >= size:
        try:
            device.resize(size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            return
    raise TierConfigError(
        f"the ssd tier needs {size / _GIB:.1f} GiB on its file system, which has room for "
        f"{room / _GIB:.1f} GiB: lower ssd.capacity or free some space"
    )


def _restore_size(device: Device, size: int, region_bytes: int, regions: int) -> int:
    try:
        device.resize(size)
    except OSError as error:
        whole = min(regions, max(0, device.size - PAGE) // region_bytes)
        _log.warning("ssd tier: only %d of %d regions usable: %s", whole, regions, error)
        return whole
    return regions


def _try_superblock(device: Device, superblock: Superblock) -> None:
    # The number of regions only tells a grown capacity from a file that was cut, so an old one
    # does no harm.
    try:
        _write_superblock(device, superblock)
    except OSError as error:
        _log.warning("ssd tier: the superblock can't be written: %s", error)
