from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.tiers.tier_contract import payload, record
from tiers.errors import StateLocked
from tiers.ssd import FileDevice, SsdTier
from tiers.ssd.format import PAGE
from tiers.ssd.lock import DirectoryLock

Call = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FileDevice]:
    device = FileDevice(tmp_path / "file")
    device.open()
    yield device
    device.close()


def memory(data: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(data)))
    view[:] = data
    return view


def test_reads_what_was_written(device: FileDevice) -> None:
    device.resize(8 * PAGE)
    first, second = os.urandom(PAGE), os.urandom(2 * PAGE)
    device.write([memory(first), memory(second)], PAGE)
    device.sync()
    into = [memory(bytes(2 * PAGE)), memory(bytes(2 * PAGE))]
    device.read(into, 0)
    assert b"".join(into) == bytes(PAGE) + first + second
    assert not device.buffered


def test_preallocates_and_shrinks(device: FileDevice) -> None:
    device.resize(1 << 20)
    assert device.size == 1 << 20
    assert 1 << 20 <= device.occupied < (1 << 20) + 8 * PAGE
    assert device.room > device.occupied
    device.resize(1 << 16)
    assert device.size == 1 << 16
    assert device.occupied < 1 << 20


def test_an_impossible_size_leaves_the_file_as_it_was(device: FileDevice) -> None:
    device.resize(1 << 16)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            device.resize(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert device.size == 1 << 16


@pytest.mark.parametrize("length", [0, 100, PAGE, PAGE + 100])
def test_a_file_that_is_too_short_is_an_error(device: FileDevice, length: int) -> None:
    device.resize(length) if length else None
    with pytest.raises(OSError, match="bytes at") as failure:
        device.read([memory(bytes(2 * PAGE))], 0)
    assert failure.value.errno == errno.EIO
    assert not device.buffered


def test_goes_on_after_a_short_transfer(
    device: FileDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(call: Call) -> Call:
        def one_page(fd: int, views: Sequence[memoryview], offset: int) -> int:
            return call(fd, [views[0][:PAGE]], offset)

        return one_page

    device.resize(8 * PAGE)
    data = os.urandom(4 * PAGE)
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    device.write([memory(data[:PAGE]), memory(data[PAGE:])], PAGE)
    into = memory(bytes(4 * PAGE))
    device.read([into[: 3 * PAGE], into[3 * PAGE :]], PAGE)
    assert into == data


def refuse_direct(call: Call) -> Call:
    def refusing(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(fd, views, offset)

    return refusing


def refuse_to_open(*args: object) -> int:
    if isinstance(args[1], int) and args[1] & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return REAL_OPEN(*args)  # type: ignore[arg-type]


REAL_OPEN = os.open


@pytest.mark.parametrize("refused", ["open", "read", "write"])
def test_without_o_direct_it_goes_through_the_page_cache_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
) -> None:
    if refused == "open":
        monkeypatch.setattr(os, "open", refuse_to_open)
    if refused == "read":
        monkeypatch.setattr(os, "preadv", refuse_direct(os.preadv))
    if refused == "write":
        monkeypatch.setattr(os, "pwritev", refuse_direct(os.pwritev))
    tier = SsdTier(tmp_path, 2 << 20, region_bytes=256 << 10)
    with caplog.at_level(logging.WARNING), tier:
        extents = [tier.store(record(seed, 10_000), payload(seed, 10_000), seed) for seed in (1, 2)]
        for seed, extent in enumerate(extents, 1):
            assert extent is not None
            into = bytearray(10_000)
            tier.load(extent, memoryview(into))
            assert into == payload(seed, 10_000)
        assert tier.statistics().buffered
    assert caplog.text.count("no O_DIRECT") == 1


def test_works_on_tmpfs() -> None:
    directory = Path(f"/dev/shm/kvstore-test-{os.getpid()}")
    if not directory.parent.is_dir():
        pytest.skip("no /dev/shm here")
    try:
        with SsdTier(directory, 2 << 20, region_bytes=256 << 10) as tier:
            extent = tier.store(record(1), payload(1), 1)
            assert extent is not None
            tier.verify(extent)
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def test_the_lock_names_the_process_that_has_it(tmp_path: Path) -> None:
    code = "import sys, pathlib, tiers.ssd.lock as l\n"
    code += "k = l.DirectoryLock(pathlib.Path(sys.argv[1])); k.acquire()\n"
    code += "print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StateLocked, match=f"process {holder.pid}") as refusal:
            SsdTier(tmp_path, 2 << 20, region_bytes=256 << 10).open()
        assert (refusal.value.path, refusal.value.pid) == (tmp_path, holder.pid)
        holder.kill()
    with SsdTier(tmp_path, 2 << 20, region_bytes=256 << 10):
        pass


def test_a_lock_file_without_a_pid_is_still_a_lock(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    (tmp_path / "lock").write_text("what")
    with pytest.raises(StateLocked, match="another process") as refusal:
        second.acquire()
    assert refusal.value.pid is None
    first.release()
    first.release()
    second.acquire()
    second.release()
