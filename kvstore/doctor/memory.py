"""Checks of the memory that a node wants: enough of it, in pages of which size, locked or not."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.config import HUGE_PAGE, Config, DramSection
from kvstore.doctor.finding import Finding, State
from kvstore.units import format_size

_KERNEL: Final = Path("/sys/kernel/mm")
_SHARED: Final = "transparent_hugepage/shmem_enabled"
_SHARED_2M: Final = "transparent_hugepage/hugepages-2048kB/shmem_enabled"
_RESERVED: Final = "hugepages/hugepages-2048kB/free_hugepages"
_CAP_IPC_LOCK: Final = 1 << 14


def check_memory(config: Config, root: Path = Path("/")) -> Iterator[Finding]:
    """memfd, and the memory at hand against the DRAM capacity.

    Args:
        config: what is asked for.
        root: where ``proc`` and ``sys`` are.
    """
    try:
        descriptor = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC)
    except (OSError, AttributeError) as error:
        yield Finding("memory", "failure", f"memfd_create does not work: {error}")
    else:
        os.close(descriptor)
        yield Finding("memory", "ok", "memfd works; /dev/shm is not needed")
    yield check_capacity(config.dram, root)


def check_capacity(dram: DramSection, root: Path = Path("/")) -> Finding:
    """The DRAM capacity against the memory that the machine, or a control group of ours, has left.

    Args:
        dram: what is asked for.
        root: where ``proc`` and ``sys`` are.
    """
    meminfo = root / "proc/meminfo"
    found = available(root)
    if found is None:
        return Finding("memory", "warning", f"{meminfo} does not say how much memory is free")
    left, place = found
    text = (
        f"{format_size(left)} available{place}, "
        f"{format_size(dram.capacity)} wanted for the DRAM tier"
    )
    if dram.huge_pages == "require":
        return Finding("memory", "info", f"{text}; it comes from reserved huge pages")
    if left >= dram.capacity:
        return Finding("memory", "ok", text)
    if dram.overcommit:
        return Finding("memory", "warning", f"{text}; dram.overcommit lets the node start anyway")
    remedy = f"kvstore serve --dram {max(left * 3 // 4 >> 20, 1)}MiB"
    return Finding("memory", "failure", text, remedy)


def available(root: Path = Path("/")) -> tuple[int, str] | None:
    """Memory that this process may still have.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        Bytes, and where the limit is as a message says it, such as `` in /sys/fs/cgroup/a``, empty
        for the whole machine; None where the kernel does not say.
    """
    free = _fields(root / "proc/meminfo").get("MemAvailable")
    if free is None:
        return None
    return min([(free, ""), *((left, f" in {group}") for left, group in room(root))])


def room(root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """What each control group that this process is in may still take, where it has a limit.

    Pages of files count as free: the kernel gives them up before it kills.

    Args:
        root: where ``proc`` and ``sys`` are.

    Yields:
        Bytes, and the group's directory.
    """
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            groups, limit, usage = top, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            groups, limit, usage = top / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = groups / path.lstrip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(groups):
                break
            most, used = _read(group / limit), _read(group / usage)
            if most.isdigit() and used.isdigit():
                yield max(0, int(most) - int(used) + _files(group / "memory.stat")), group


def _files(stat: Path) -> int:
    """Bytes of pages of files that a control group is charged for, those of its children too."""
    found = dict(line.split()[:2] for line in _read(stat).splitlines() if line.count(" ") == 1)
    return sum(
        int(found.get(f"total_{name}", found.get(name, "0")))
        for name in ("active_file", "inactive_file")
    )


def _fields(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in _read(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def check_huge_pages(dram: DramSection, kernel: Path = _KERNEL) -> Iterator[Finding]:
    """Whether segments get the 2 MiB pages that are asked for.

    Args:
        dram: what is asked for.
        kernel: the folder of sysfs that says what can be had.
    """
    if dram.huge_pages == "never":
        yield Finding("huge pages", "info", "not asked for (dram.huge_pages = never)")
    elif dram.huge_pages == "require":
        yield _reserved(dram.capacity, kernel / _RESERVED)
    else:
        yield _transparent(kernel)


def _reserved(capacity: int, file: Path) -> Finding:
    text = _read(file)
    if not text.isdigit():
        return Finding("huge pages", "failure", "this kernel has no huge pages of 2 MiB to reserve")
    free, wanted = int(text), -(-capacity // HUGE_PAGE)
    detail = f"{free} of 2 MiB are reserved and free, {wanted} wanted"
    if free >= wanted:
        return Finding("huge pages", "ok", detail)
    return Finding("huge pages", "failure", detail, f"sysctl -w vm.nr_hugepages={wanted}")


def _transparent(kernel: Path) -> Finding:
    file = kernel / _SHARED_2M
    chosen = _chosen(file)
    if chosen in ("", "inherit"):
        file = kernel / _SHARED
        chosen = _chosen(file)
    if chosen in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", "ok", f"shared memory may have them ({chosen})")
    if not chosen:
        detail = "this kernel gives none to shared memory, which so has pages of 4 KiB"
        return Finding("huge pages", "warning", detail, "boot a kernel with transparent huge pages")
    detail = (
        f"shared memory has pages of 4 KiB ({file} is {chosen}); the first use and the "
        "registration of memory take longer"
    )
    remedy = (
        f"echo advise > {file}   # as root; for good: "
        f"echo 'w {file} - - - - advise' > /etc/tmpfiles.d/kvstore.conf"
    )
    return Finding("huge pages", "warning", detail, remedy)


def _chosen(file: Path) -> str:
    return _read(file).partition("[")[2].partition("]")[0]


def lock_limit(status: Path = Path("/proc/self/status")) -> int | None:
    """How many bytes this process may lock; None where there is no limit."""
    for line in _read(status).splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff" and int(value, 16) & _CAP_IPC_LOCK:
            return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def check_locked_memory(
    capacity: int, limit: int | None, *, devices: bool, required: bool
) -> Iterator[Finding]:
    """The limit of locked memory against the arena, which RDMA locks as a whole.

    Args:
        capacity: of the arena, in bytes.
        limit: how many bytes may be locked; None for any.
        devices: whether there is an RDMA device that a node would use.
        required: whether a node is not to run without RDMA.
    """
    if limit is None or limit > capacity:
        shown = "any amount" if limit is None else format_size(limit)
        yield Finding("locked memory", "ok", f"{shown} may be locked")
        return
    detail = (
        f"{format_size(limit)} may be locked, not more than the DRAM capacity "
        f"({format_size(capacity)}); only RDMA needs that"
    )
    remedy = (
        "ulimit -l unlimited   # LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for "
        "a container"
    )
    state: State = "failure" if required else "warning" if devices else "info"
    yield Finding("locked memory", state, detail, remedy)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
