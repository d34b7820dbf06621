"""Segments and pre-fault: sealing, sharing, giving pages back, stopping."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tiers import prefault
from tiers.arena import Arena
from tiers.errors import BadExtent, MediumFailed
from tiers.prefault import CHUNK, Prefaulter
from tiers.segment import HugePages, Segment

MIB = 1 << 20


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment(1, MIB, "auto")
    yield segment
    segment.close()


def resident(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("size", [0, MIB - 4096, 2 * MIB])
def test_nobody_can_change_a_segments_size(segment: Segment, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, size)
    assert os.fstat(segment.fd).st_size == MIB


def test_another_process_maps_it_by_descriptor(segment: Segment) -> None:
    code = (
        "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), 0);"
        "assert m[:5] == b'hello'; m[5:10] = b'world'"
    )
    segment.view[:5] = b"hello"
    command = [sys.executable, "-c", code, str(segment.fd)]
    subprocess.run(command, pass_fds=[segment.fd], check=True)
    assert segment.view[:10] == b"helloworld"


def test_the_descriptor_is_not_inherited_unasked(segment: Segment) -> None:
    assert not os.get_inheritable(segment.fd)


def test_nothing_is_touched_when_it_is_made(segment: Segment) -> None:
    assert resident(segment.fd) == 0


def test_closing_gives_pages_back_though_another_has_it_mapped() -> None:
    segment = Segment(1, MIB, "never")
    segment.view[:] = b"x" * MIB
    other = os.dup(segment.fd)
    with mmap.mmap(other, MIB) as mapped:
        assert resident(other) == MIB
        assert segment.close()
        assert resident(other) == 0
        assert mapped[:4096] == bytes(4096)
    os.close(other)


def test_an_impossible_size_is_a_typed_error_and_leaks_nothing() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MediumFailed):
        Segment(1, 1 << 60, "auto")
    assert os.listdir("/proc/self/fd") == before


def test_prefault_touches_every_page() -> None:
    size = 3 * CHUNK + 4096
    segments = [Segment(number, size, "never") for number in (1, 2)]
    prefaulter = Prefaulter(threads=2)
    for segment in segments:
        prefaulter.add(segment)
    assert prefaulter.wait(10)
    assert [resident(segment.fd) for segment in segments] == [size, size]
    assert (prefaulter.populated, prefaulter.remaining) == (2 * size, 0)
    prefaulter.remove(segments[0])
    assert prefaulter.populated == size
    prefaulter.close()
    for segment in segments:
        segment.close()


def test_prefault_keeps_what_was_written() -> None:
    segment = Segment(1, CHUNK, "never")
    segment.view[:5] = b"hello"
    prefaulter = Prefaulter()
    prefaulter.add(segment)
    assert prefaulter.wait(10)
    prefaulter.close()
    assert segment.view[:5] == b"hello"
    segment.close()


class Held:
    """Stands for the kernel: populating waits until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.calls = 0

    def __call__(self, address: int, length: int, advice: int) -> None:
        self.calls += 1
        self.entered.release()
        assert self.go.acquire(timeout=10)


def test_removing_a_segment_waits_for_the_chunk_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(prefault, "advise", held)
    segment = Segment(1, 8 * CHUNK, "never")
    prefaulter = Prefaulter(threads=1)
    prefaulter.add(segment)
    assert held.entered.acquire(timeout=10)
    remover = threading.Thread(target=prefaulter.remove, args=(segment,))
    remover.start()
    remover.join(0.05)
    assert remover.is_alive()
    held.go.release()
    remover.join(10)
    assert not remover.is_alive()
    assert held.calls == 1
    prefaulter.close()
    segment.close()


def test_a_segment_can_be_touched_at_once(segment: Segment) -> None:
    Prefaulter().populate(segment, lambda: True)
    assert resident(segment.fd) == MIB


def test_touching_at_once_ends_where_the_segment_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, gone = Held(), threading.Event()
    monkeypatch.setattr(prefault, "advise", held)
    segment, prefaulter = Segment(1, 3 * CHUNK, "never"), Prefaulter()
    still = (segment, lambda: not gone.is_set())
    toucher = threading.Thread(target=prefaulter.populate, args=still)
    toucher.start()
    assert held.entered.acquire(timeout=10)
    gone.set()
    remover = threading.Thread(target=prefaulter.remove, args=(segment,))
    remover.start()
    remover.join(0.05)
    assert remover.is_alive(), "it waits for the chunk in flight"
    held.go.release()
    for thread in (remover, toucher):
        thread.join(10)
        assert not thread.is_alive()
    assert held.calls == 1
    segment.close()


def test_close_stops_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    monkeypatch.setattr(prefault, "advise", held)
    segment = Segment(1, 100 * CHUNK, "never")
    before = threading.active_count()
    prefaulter = Prefaulter(threads=1)
    prefaulter.add(segment)
    assert held.entered.acquire(timeout=10)
    for _ in range(2):
        held.go.release()
    prefaulter.close()
    assert held.calls <= 2
    assert threading.active_count() == before
    segment.close()


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EINVAL, "Linux 5.14"), (errno.ENOMEM, "memory")]
)
def test_prefault_gives_up_where_the_kernel_does(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    def refuse(address: int, length: int, advice: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(prefault, "advise", refuse)
    segment = Segment(1, 4 * CHUNK, "never")
    prefaulter = Prefaulter()
    prefaulter.add(segment)
    assert prefaulter.wait(10)
    assert prefaulter.failure is not None
    assert reason in prefaulter.failure
    assert prefaulter.populated == 0
    prefaulter.close()
    segment.close()


def test_a_segment_that_cannot_be_replaced_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, size: int, huge_pages: HugePages, owner: str) -> Segment:
        raise MediumFailed("no memory")

    arena = Arena("auto", prefault=False)
    arena.create(1, MIB)
    monkeypatch.setattr("tiers.arena.Segment", refuse)
    assert not arena.replace(1, 2, "b")
    assert arena.size == 0
    with pytest.raises(BadExtent):
        arena[1]
    arena.close()
