"""Checks of the interpreter, the system, and the places where a node writes."""

import ctypes
import importlib.util
import mmap
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.config import MAX_SOCKET_PATH, Config
from kvstore.doctor.finding import Finding
from kvstore.units import format_size

EXTRAS: Final = (
    ("torch", "transformers", "KV tensors of torch, and the Transformers connector"),
    ("transformers", "transformers", "the Transformers connector"),
    ("matplotlib", "plot", "plots of simulate"),
)
"""Optional modules, the extra that brings each, and what it is needed for."""

_EARLIEST_CLOCK: Final = 1_735_689_600.0
_BLOCK: Final = 4096
_INSTALL: Final = "pip install '.[{extra}]'   # in the checkout of tiered-kvstore"


def check_python() -> Iterator[Finding]:
    """The interpreter, and whether its compiled helpers are there."""
    text = f"Python {platform.python_version()} at {sys.executable}"
    yield Finding("python", "ok", text)
    for module in ("crc32c", "uvloop", "grpclib", "numpy"):
        if importlib.util.find_spec(module) is None:
            remedy = "pip install .   # in the checkout of tiered-kvstore"
            yield Finding("python", "failure", f"module {module} is missing", remedy)


def check_platform(system: str | None = None, pointer_bits: int | None = None) -> Iterator[Finding]:
    """Operating system, kernel and word size."""
    system = platform.system() if system is None else system
    bits = ctypes.sizeof(ctypes.c_void_p) * 8 if pointer_bits is None else pointer_bits
    text = f"{system} {platform.release()} on {platform.machine()}, {os.cpu_count()} processors"
    if system != "Linux" or bits != 64:
        yield Finding("platform", "failure", f"{text}: a node needs Linux on 64 bits")
    else:
        yield Finding("platform", "ok", text)


def check_state_directory(directory: Path) -> Iterator[Finding]:
    """Whether the state directory is there, or can be made, and can be written."""
    parent = _nearest(directory)
    if not os.access(parent, os.W_OK | os.X_OK):
        remedy = f"install -d -m 700 -o {_user()} {directory}   # as root"
        detail = f"{parent} cannot be written by {_user()}"
        yield Finding("state directory", "failure", detail, remedy)
    elif parent != directory:
        yield Finding("state directory", "ok", f"{directory} will be made by `kvstore serve`")
    else:
        yield Finding("state directory", "ok", f"{directory} can be written")


def check_ssd(config: Config) -> Iterator[Finding]:
    """``O_DIRECT`` where the SSD tier writes, and free space against its capacity."""
    directory = config.ssd.directory
    if not config.ssd.capacity or directory is None:
        yield Finding("ssd", "info", "the SSD tier is off (ssd.capacity = 0)")
        return
    place = _nearest(directory)
    yield _direct(place)
    held = sum(_allocated(file) for file in directory.glob("*")) if directory.is_dir() else 0
    free = shutil.disk_usage(place).free + held
    text = f"{format_size(free)} free or ours, {format_size(config.ssd.capacity)} wanted"
    if free < config.ssd.capacity:
        remedy = f"kvstore serve --ssd {max(free * 9 // 10 >> 20, 0)}MiB   # or free some space"
        yield Finding("ssd", "failure", f"{place}: {text}", remedy)
    else:
        yield Finding("ssd", "ok", f"{place}: {text}")


def _allocated(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0


def _direct(place: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=place) as scratch, mmap.mmap(-1, _BLOCK) as page:
            descriptor = os.open(f"/proc/self/fd/{scratch.fileno()}", os.O_RDWR | os.O_DIRECT)
            try:
                os.pwrite(descriptor, page, 0)
                os.preadv(descriptor, [page], 0)
            finally:
                os.close(descriptor)
    except OSError as error:
        detail = f"{place}: no O_DIRECT here: {error.strerror}"
        return Finding("ssd", "failure", detail, "put ssd.directory on ext4 or xfs, not on tmpfs")
    return Finding("ssd", "ok", f"{place}: O_DIRECT works")


def check_socket(path: Path | None) -> Iterator[Finding]:
    """The Unix socket's path: short enough, its directory there and ours."""
    if path is None:
        yield Finding("socket", "info", "no Unix socket is configured")
        return
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        detail = f"{path} has {size} bytes, {MAX_SOCKET_PATH} fit"
        yield Finding("socket", "failure", detail, "kvstore serve --unix /run/kvstore.sock")
        return
    parent = _nearest(path.parent)
    if not os.access(parent, os.W_OK | os.X_OK):
        remedy = f"install -d -m 755 -o {_user()} {path.parent}   # as root"
        yield Finding("socket", "failure", f"{parent} cannot be written by {_user()}", remedy)
        return
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        remedy = f"ls -l {path}   # run as its owner, or join its group"
        yield Finding("socket", "failure", f"{path} is not for {_user()} to use", remedy)
        return
    yield Finding("socket", "ok", f"{path} ({size} of {MAX_SOCKET_PATH} bytes)")


def check_clock(now: float | None = None) -> Iterator[Finding]:
    """Whether the clocks are plausible and fine enough for deadlines."""
    now = time.time() if now is None else now
    step = time.get_clock_info("monotonic").resolution
    if now < _EARLIEST_CLOCK:
        shown = time.strftime("%Y-%m-%d", time.gmtime(now))
        yield Finding("clock", "warning", f"it says {shown}", "timedatectl set-ntp true")
    else:
        yield Finding("clock", "ok", f"monotonic, in steps of {step * 1e9:.0f} ns")


def check_extras() -> Iterator[Finding]:
    """Which optional packages are installed."""
    for module, extra, purpose in EXTRAS:
        if importlib.util.find_spec(module) is not None:
            yield Finding("extras", "ok", f"{module} is installed")
        else:
            detail = f"{module} is not installed; {purpose} need the extra {extra}"
            yield Finding("extras", "info", detail, _INSTALL.format(extra=extra))


def _nearest(path: Path) -> Path:
    """The path itself, or the closest parent that exists."""
    for candidate in (path, *path.parents):
        if candidate.exists():
            return candidate
    return Path("/")


def _user() -> str:
    return f"user {os.geteuid()}"
