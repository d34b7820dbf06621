"""Pinning DRAM for GPUs while its segments come and go, and beside an RDMA device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kvstore.verbs
from kvstore.dram_pins import DramPins
from tests.kvstore.gpu_node import HBM_SEGMENT, SEGMENT, Card
from tests.running import wait_for
from tiers.dram import DramTier
from tiers.hbm import HbmTier


class Slow(Card):
    """Takes its time to pin memory."""

    def __init__(self) -> None:
        super().__init__(0)
        self.begun = threading.Event()
        self.may = threading.Event()
        self.tries = 0

    def register(self, address: int, size: int) -> None:
        self.tries += 1
        self.begun.set()
        assert self.may.wait(30)
        super().register(address, size)


@pytest.fixture
def device() -> Slow:
    return Slow()


@pytest.fixture
def dram() -> Iterator[DramTier]:
    with DramTier(2 * SEGMENT, segment_bytes=SEGMENT, prefault=False) as tier:
        yield tier


@pytest.fixture
def pins(dram: DramTier, device: Slow) -> Iterator[DramPins]:
    tier = HbmTier(
        HBM_SEGMENT, device=device, segment_bytes=HBM_SEGMENT, lanes=1, buffer_bytes=4096
    )
    with tier:
        made = DramPins(dram, tier)
        made.open()
        yield made
        device.may.set()
        made.close()
        assert device.registered == {}


def test_a_segment_goes_only_when_it_has_been_pinned(
    dram: DramTier, device: Slow, pins: DramPins
) -> None:
    assert device.begun.wait(30)
    first = min(segment.number for segment in dram.segments())
    gone = threading.Event()

    def retire() -> None:
        dram.retire_segment(first)
        gone.set()

    thread = threading.Thread(target=retire)
    thread.start()
    assert not gone.wait(0.05)
    device.may.set()
    thread.join(30)
    assert gone.is_set()
    wait_for(lambda: len(pins) == 1)
    assert set(device.registered) == {segment.address for segment in dram.segments()}
    assert not pins.covers(first)


def test_a_segment_that_went_before_its_turn_is_not_pinned(
    dram: DramTier, device: Slow, pins: DramPins
) -> None:
    assert device.begun.wait(30)
    last = max(segment.number for segment in dram.segments())
    dram.retire_segment(last)
    device.may.set()
    wait_for(lambda: len(pins) == 1)
    assert set(device.registered) == {segment.address for segment in dram.segments()}


def test_a_new_segment_is_pinned_when_it_is_used(
    dram: DramTier, device: Slow, pins: DramPins
) -> None:
    device.may.set()
    wait_for(lambda: len(pins) == 2)
    number = dram.add_segment()
    assert not pins.covers(number)
    wait_for(lambda: pins.covers(number))
    assert len(device.registered) == 3


def test_what_can_not_be_pinned_is_not_tried_for_ever(
    dram: DramTier, device: Slow, pins: DramPins
) -> None:
    device.may.set()
    wait_for(lambda: len(pins) == 2)
    device.refused.add("register")
    number = dram.add_segment()
    assert not pins.covers(number)
    wait_for(lambda: device.tries == 3)
    device.refused.clear()
    for tries in (4, 5):
        other = dram.add_segment()
        # One after the other: the try before has ended when this one is over.
        wait_for(lambda other=other: pins.covers(other))
        assert not pins.covers(number)
        assert device.tries == tries


def test_an_rdma_device_passes_on_what_goes(
    dram: DramTier, device: Slow, pins: DramPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.may.set()
    wait_for(lambda: len(pins) == 2)
    forgotten: list[int] = []

    class Quiet:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.forget = forgotten.append

        def start(self) -> None: ...

        def close(self) -> None: ...

    for name in ("Arena", "VerbsRegistrar", "Driver"):
        monkeypatch.setattr(kvstore.verbs, name, Quiet)
    first, second = sorted(segment.number for segment in dram.segments())
    for _ in range(2):  # as where it failed and is opened anew
        opened = kvstore.verbs._Opened(Quiet(), Any, Any, dram)  # type: ignore[arg-type]
        opened.close()
    opened = kvstore.verbs._Opened(Quiet(), Any, Any, dram)  # type: ignore[arg-type]
    dram.retire_segment(first)
    assert forgotten == [first]
    assert len(pins) == len(device.registered) == 1
    opened.close()
    dram.retire_segment(second)
    assert forgotten == [first]
    assert device.registered == {}
