import mmap
import threading
from collections.abc import Iterator

import numpy
import pytest

from rdma.copy import Copier, copy, copy_all


def test_bytes_are_copied_whatever_their_type() -> None:
    source = numpy.arange(100, dtype=numpy.float32)
    target = bytearray(400)
    copy(memoryview(target), memoryview(source))
    assert target == source.tobytes()


def test_sizes_have_to_agree() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        copy(memoryview(bytearray(3)), memoryview(b"1234"))


def test_read_only_memory_is_not_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        copy(memoryview(b"123"), memoryview(b"456"))


def test_nothing_is_copied_from_nothing() -> None:
    copy(memoryview(bytearray()), memoryview(b""))


def test_pairs_are_copied_in_order() -> None:
    target = memoryview(bytearray(4))
    copy_all([(target[:2], memoryview(b"ab")), (target[1:], memoryview(b"xyz"))])
    assert target == b"axyz"


def test_other_threads_run_meanwhile() -> None:
    size = 128 << 20
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    started, ticks = threading.Event(), 0
    over = threading.Event()

    def count() -> None:
        nonlocal ticks
        started.set()
        while not over.is_set():
            ticks += 1

    counter = threading.Thread(target=count)
    counter.start()
    started.wait()
    before = ticks
    copy(memoryview(target), memoryview(source))
    during = ticks - before
    over.set()
    counter.join()
    source.close()
    target.close()
    assert during > 0


@pytest.fixture
def copier() -> Iterator[Copier]:
    copier = Copier()
    yield copier
    copier.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-copy"]


@pytest.mark.parametrize("sizes", [[10], [5 << 20], [1 << 20] * 9, [3, (7 << 20) + 1, 0, 1 << 20]])
def test_large_copies_are_shared_out_and_whole(copier: Copier, sizes: list[int]) -> None:
    sources = [numpy.random.default_rng(size).bytes(size) for size in sizes]
    targets = [bytearray(size) for size in sizes]
    for _ in range(3):
        copier.copy_all(
            [(memoryview(to), memoryview(of)) for to, of in zip(targets, sources, strict=True)]
        )
        assert targets == sources
        for target in targets:
            target[:] = bytes(len(target))


def test_threads_share_a_copier(copier: Copier) -> None:
    source = memoryview(numpy.random.default_rng(1).bytes(6 << 20))
    targets = [bytearray(6 << 20) for _ in range(4)]

    def work(target: bytearray) -> None:
        for _ in range(10):
            target[:] = bytes(len(target))
            copier.copy_all([(memoryview(target), source)])

    threads = [threading.Thread(target=work, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(target == source for target in targets)


def test_failed_large_copy_raises_and_touches_nothing_later(copier: Copier) -> None:
    source = memoryview(bytes(8 << 20))
    with pytest.raises(ValueError, match="do not fit"):
        copier.copy_all([(memoryview(bytearray(1)), source)])
    target = bytearray(8 << 20)
    copier.copy_all([(memoryview(target), source)])


def test_closed_copier_still_copies() -> None:
    copier = Copier()
    copier.close()
    target = bytearray(5 << 20)
    copier.copy_all([(memoryview(target), memoryview(b"x" * (5 << 20)))])
    assert target == b"x" * (5 << 20)
