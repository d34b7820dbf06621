"""Registered memory: known once it is registered, given back once nobody uses it."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from client.pinning import PinnedSegments
from rdma import segments
from rdma.region import address_of
from rdma.segments import SegmentMap

SIZE = 1 << 16


class Registrar:
    """Stands in for CUDA, which can't exist here."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuse = False
        self.go = threading.Event()
        self.go.set()

    def register(self, address: int, size: int) -> None:
        assert self.go.wait(10)
        if self.refuse:
            raise OSError("CUDA error 2")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def registrar() -> Registrar:
    return Registrar()


@pytest.fixture
def pinned(registrar: Registrar, monkeypatch: pytest.MonkeyPatch) -> PinnedSegments:
    monkeypatch.setattr(segments, "_watchers", [])
    return PinnedSegments(registrar)


def add(mapped: SegmentMap, number: int) -> int:
    """Map a segment; its address."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    mapped.add(number, fd, SIZE, populate=False)
    return address_of(mapped.writable(number << segments.SEGMENT_SHIFT, SIZE))


def is_there(pinned: PinnedSegments, length: int, *addresses: int) -> bool:
    with pinned.using(np.array(addresses, np.int64), length) as there:
        return there


def test_mappings_are_registered_whether_they_come_before_or_after(
    pinned: PinnedSegments, registrar: Registrar
) -> None:
    mapped = SegmentMap()
    first = add(mapped, 1)
    segments.watch(pinned)
    second = add(mapped, 2)
    assert pinned.wait(10)
    assert registrar.registered == {first: SIZE, second: SIZE}
    assert is_there(pinned, 5, first, second + 100, first + SIZE - 5)
    assert not is_there(pinned, SIZE, min(first, second), max(first, second) + 1)
    assert not is_there(pinned, 1, first, min(first, second) - 1)
    assert is_there(pinned, 1)
    found = pinned.begin_at(np.array([first + 1, second, first, second + 1]))
    assert found.tolist() == [False, True, True, False]
    mapped.close()
    assert registrar.registered == {}
    assert not is_there(pinned, 1, first)


def test_nothing_is_known_before_it_is_registered(
    pinned: PinnedSegments, registrar: Registrar
) -> None:
    segments.watch(pinned)
    mapped = SegmentMap()
    registrar.go.clear()
    address = add(mapped, 1)
    assert not is_there(pinned, 1, address)
    assert not pinned.wait(0)
    closing = threading.Thread(target=mapped.close)
    closing.start()
    registrar.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert registrar.registered == {}


def test_a_segment_in_use_is_not_given_back(pinned: PinnedSegments, registrar: Registrar) -> None:
    segments.watch(pinned)
    mapped = SegmentMap()
    address = add(mapped, 1)
    assert pinned.wait(10)
    closing = threading.Thread(target=mapped.close)
    with pinned.using(np.array([address]), 10) as there:
        assert there
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        assert registrar.registered
    closing.join(10)
    assert registrar.registered == {}


def test_what_cannot_be_registered_is_not_used(
    pinned: PinnedSegments, registrar: Registrar
) -> None:
    segments.watch(pinned)
    mapped = SegmentMap()
    registrar.refuse = True
    address = add(mapped, 1)
    assert pinned.wait(10)
    assert not is_there(pinned, 1, address)
    mapped.close()
