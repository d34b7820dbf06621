"""Addresses of many buffers are those that numpy knows."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from client.addresses import addresses_of
from rdma.region import address_of


def test_addresses_are_those_of_numpy() -> None:
    whole = memoryview(bytearray(4096))
    mapped = memoryview(mmap.mmap(-1, 4096)).toreadonly()
    buffers = [whole[at : at + 7] for at in (0, 9, 4000)] + [mapped[at:] for at in (0, 77)]
    found = addresses_of(buffers)
    assert found.dtype == np.int64
    assert found.tolist() == [address_of(buffer) for buffer in buffers]
    assert len(addresses_of([])) == 0


def test_what_has_no_address_is_refused() -> None:
    buffer = memoryview(bytearray(16))
    with pytest.raises(BufferError):
        addresses_of([buffer[::2]])
    buffer.release()
    with pytest.raises(ValueError, match="released"):
        addresses_of([buffer])


def test_no_buffer_is_kept() -> None:
    source = bytearray(64)
    addresses_of([memoryview(source)])
    source.extend(b"x")  # which a buffer in use forbids
