import mmap
import threading

import numpy
import pytest

from rdma.copy import copy, copy_all


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
