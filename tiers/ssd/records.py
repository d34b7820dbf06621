"""Records on the medium: written in one go, checked whenever they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from tiers.errors import CorruptBlock
from tiers.ssd.buffers import aligned
from tiers.ssd.format import PAGE, RecordHeader, decode_record, pages_of

if TYPE_CHECKING:
    from tiers.ssd.buffers import Bounce, BouncePool
    from tiers.ssd.device import Device
    from tiers.ssd.region import Held, Slot

_ZEROS: Final = bytes(PAGE)


class RecordIO:
    """Moves records between the medium and memory, straight where the memory is aligned.

    Args:
        device: where they are.
        pool: aligned memory for headers, for tails, and for what is not aligned.
    """

    def __init__(self, device: Device, pool: BouncePool) -> None:
        self._device = device
        self._pool = pool

    def write(self, slot: Slot, payload: memoryview) -> None:
        """Write header and payload in one vectored write; raises OSError."""
        with self._pool.take() as bounce:
            if self._device.buffered or aligned(payload):
                views = _gather(bounce, slot.header, payload)
            else:
                views = [_copy(bounce, slot.header, payload)]
            self._device.write(views, slot.page * PAGE)

    def read(self, held: Held, into: memoryview, offset: int) -> None:
        """Read and check a block, then give ``len(into)`` bytes of it from ``offset``.

        Raises:
            CorruptBlock: header or payload are not what was stored; ``into`` is undefined.
            OSError: the medium failed.
        """
        with self._pool.take() as bounce:
            whole = len(into) == held.size
            if whole and (self._device.buffered or aligned(into)):
                self._scatter(bounce, held, into)
                return
            payload = self._fetch(bounce, held)
            into[:] = payload[offset : offset + len(into)]

    def verify(self, held: Held) -> None:
        """Read and check a block; raises as :meth:`read` does."""
        with self._pool.take() as bounce:
            self._fetch(bounce, held)

    def header(self, held: Held) -> RecordHeader:
        """Read and check a block's header; raises as :meth:`read` does."""
        with self._pool.take() as bounce:
            self._device.read([bounce.head], held.page * PAGE)
            return _check_header(held, bounce.head)

    def _scatter(self, bounce: Bounce, held: Held, into: memoryview) -> None:
        direct = held.size - held.size % PAGE
        views = [bounce.head]
        if direct:
            views.append(into[:direct])
        if direct < held.size:
            views.append(bounce.tail)
        self._device.read(views, held.page * PAGE)
        _check_header(held, bounce.head)
        into[direct:] = bounce.tail[: held.size - direct]
        _check_payload(held, into)

    def _fetch(self, bounce: Bounce, held: Held) -> memoryview:
        memory = bounce.large((1 + pages_of(held.size)) * PAGE)
        self._device.read([memory], held.page * PAGE)
        _check_header(held, memory[:PAGE])
        payload = memory[PAGE : PAGE + held.size]
        _check_payload(held, payload)
        return payload


def _gather(bounce: Bounce, header: bytes, payload: memoryview) -> list[memoryview]:
    direct = len(payload) - len(payload) % PAGE
    bounce.head[:] = header.ljust(PAGE, b"\0")
    views = [bounce.head]
    if direct:
        views.append(payload[:direct])
    if direct < len(payload):
        bounce.tail[:] = bytes(payload[direct:]).ljust(PAGE, b"\0")
        views.append(bounce.tail)
    return views


def _copy(bounce: Bounce, header: bytes, payload: memoryview) -> memoryview:
    memory = bounce.large((1 + pages_of(len(payload))) * PAGE)
    end = PAGE + len(payload)
    memory[:PAGE] = header.ljust(PAGE, b"\0")
    memory[PAGE:end] = payload
    memory[end:] = _ZEROS[: len(memory) - end]
    return memory


def _check_header(held: Held, page: memoryview) -> RecordHeader:
    found = decode_record(page)
    if found is not None:
        header, crc = found
        # The crc covers the block's names, so an equal one says that they are those stored.
        if (header.page, header.generation, crc) == (
            held.page,
            held.generation,
            held.header_crc,
        ):
            return header
    raise CorruptBlock(f"the header at page {held.page} of the ssd tier is not the block's")


def _check_payload(held: Held, payload: memoryview) -> None:
    if crc32c(payload) != held.checksum:
        raise CorruptBlock(f"the payload at page {held.page} of the ssd tier is damaged")
