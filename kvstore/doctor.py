"""What can be wrong with a machine before a node runs on it, and the command that mends it.

Each check looks at one thing, changes nothing that lasts, and gives findings. None raises: what
cannot be found out is a finding too.
"""

import ctypes
import importlib.util
import mmap
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvstore.config import MAX_SOCKET_PATH, Config
from kvstore.units import format_size

State = Literal["ok", "info", "warning", "failure"]

EXTRAS: Final = (
    ("torch", "transformers", "KV tensors of torch, and the Transformers connector"),
    ("transformers", "transformers", "the Transformers connector"),
    ("matplotlib", "plot", "plots of simulate"),
)
"""Optional modules, the extra that brings each, and what it is needed for."""

_EARLIEST_CLOCK: Final = 1_735_689_600.0
_BLOCK: Final = 4096
_INSTALL: Final = "pip install '.[{extra}]'   # in the checkout of tiered-kvstore"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: a state, what was looked at, and how to mend it."""

    check: str
    state: State
    detail: str
    remedy: str = ""


def examine(config: Config) -> list[Finding]:
    """All checks of this machine for a node with ``config``, except whether one is running."""
    checks: Iterable[Iterator[Finding]] = (
        check_python(),
        check_platform(),
        check_memory(config),
        check_huge_pages(config.dram.huge_pages),
        check_locked_memory(config.dram.capacity),
        check_state_directory(config.node.state_directory),
        check_ssd(config),
        check_socket(config.listen.unix),
        check_clock(),
        check_extras(),
        check_rdma(),
    )
    return [finding for check in checks for finding in check]


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


def check_memory(config: Config, meminfo: Path = Path("/proc/meminfo")) -> Iterator[Finding]:
    """memfd, and the memory at hand against the DRAM capacity."""
    try:
        descriptor = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        yield Finding("memory", "failure", f"memfd_create does not work: {error}")
    else:
        os.close(descriptor)
        yield Finding("memory", "ok", "memfd works; /dev/shm is not needed")
    fields = _meminfo(meminfo)
    available = fields.get("MemAvailable")
    if available is None:
        yield Finding("memory", "warning", f"{meminfo} does not say how much memory is free")
        return
    wanted = config.dram.capacity
    text = f"{format_size(available)} available, {format_size(wanted)} wanted for the DRAM tier"
    if available < wanted:
        remedy = f"kvstore serve --dram {max(available * 3 // 4 >> 20, 1)}MiB"
        yield Finding("memory", "failure", text, remedy)
    else:
        yield Finding("memory", "ok", text)


def _meminfo(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def check_huge_pages(
    wanted: str,
    setting: Path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
) -> Iterator[Finding]:
    """Whether memfd segments can get 2 MiB pages."""
    if wanted == "never":
        yield Finding("huge pages", "info", "not asked for (dram.huge_pages = never)")
        return
    try:
        text = setting.read_text(encoding="ascii").strip()
    except OSError:
        text = ""
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        yield Finding("huge pages", "ok", f"shared memory may have them ({chosen})")
        return
    state: State = "failure" if wanted == "require" else "warning"
    detail = f"the kernel gives none to shared memory ({chosen or 'not supported'})"
    yield Finding("huge pages", state, detail, f"echo advise > {setting}")


def check_locked_memory(capacity: int, limit: int | None = None) -> Iterator[Finding]:
    """The memlock limit against the arena, which RDMA pins as a whole."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY or soft >= capacity:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
        yield Finding("locked memory", "ok", f"limit is {shown}")
        return
    detail = (
        f"limit {format_size(soft)} is below the DRAM capacity ({format_size(capacity)}); "
        "only RDMA needs it"
    )
    remedy = "ulimit -l unlimited   # or LimitMEMLOCK=infinity in the systemd unit"
    yield Finding("locked memory", "info", detail, remedy)


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


def check_rdma(devices: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    """Whether any RDMA device exists."""
    try:
        names = sorted(entry.name for entry in devices.iterdir())
    except OSError:
        names = []
    if names:
        yield Finding("rdma", "ok", f"devices: {', '.join(names)}")
    else:
        yield Finding("rdma", "info", "no RDMA device; blocks move over shm and tcp")


def _nearest(path: Path) -> Path:
    """The path itself, or the closest parent that exists."""
    for candidate in (path, *path.parents):
        if candidate.exists():
            return candidate
    return Path("/")


def _user() -> str:
    return f"user {os.geteuid()}"
