"""The guest's kernel, and the little file system that it boots into."""

from __future__ import annotations

import hashlib
import re
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.guest.errors import GuestError

# What mounts the host's file system comes first, then what makes the RoCE device.
MODULES = (
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_net",
    "virtio_rng",
    "crc32_generic",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)
_BUSYBOX = Path("/bin/busybox")
_INIT = Path(__file__).with_name("init.sh")


@dataclass(frozen=True)
class Kernel:
    """An installed kernel."""

    version: str
    image: Path
    modules: tuple[Path, ...]
    """All that `MODULES` need, each after what it needs itself."""


def find_kernel(boot: Path = Path("/boot")) -> Kernel:
    """The newest installed kernel that has `rdma_rxe`.

    Raises:
        GuestError: there is none.
    """
    images = sorted(boot.glob("vmlinuz-*"), key=_version_order, reverse=True)
    for image in images:
        version = image.name.removeprefix("vmlinuz-")
        if (modules := _module_files(version)) is not None:
            return Kernel(version, image, modules)
    raise GuestError(f"no kernel with rdma_rxe among {[str(image) for image in images]}")


def build_initramfs(kernel: Kernel, cache: Path) -> Path:
    """The initramfs for `kernel`, made anew only when something in it has changed."""
    contents: list[tuple[str, int, bytes]] = [
        (name, stat.S_IFDIR | 0o755, b"")
        for name in ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper")
    ]
    contents.append(("init", stat.S_IFREG | 0o755, _INIT.read_bytes()))
    contents.append(("bin/busybox", stat.S_IFREG | 0o755, _BUSYBOX.read_bytes()))
    contents += [
        (f"modules/{number:02d}-{path.name}", stat.S_IFREG | 0o644, path.read_bytes())
        for number, path in enumerate(kernel.modules)
    ]
    archive = _archive(contents)
    target = cache / f"initramfs-{kernel.version}-{hashlib.sha256(archive).hexdigest()[:16]}.cpio"
    if not target.exists():
        for old in cache.glob("initramfs-*"):
            old.unlink()
        unfinished = cache / "initramfs-unfinished"
        unfinished.write_bytes(archive)
        unfinished.rename(target)
    return target


def _version_order(image: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", image.name)]


def _module_files(version: str) -> tuple[Path, ...] | None:
    """The files of `MODULES` with all they depend on; None if the kernel lacks one."""
    if not Path("/lib/modules", version).is_dir():
        return None
    done = subprocess.run(
        ["/sbin/modprobe", "--set-version", version, "--show-depends", "--all", *MODULES],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return None
    lines = [line.split() for line in done.stdout.splitlines()]
    files = [Path(words[1]) for words in lines if words and words[0] == "insmod"]
    return tuple(dict.fromkeys(files))


def _archive(contents: list[tuple[str, int, bytes]]) -> bytes:
    """A cpio archive in the `newc` format (kernel: Documentation/driver-api/early-userspace)."""
    out = bytearray()
    for number, (name, mode, data) in enumerate([*contents, ("TRAILER!!!", 0, b"")], start=1):
        encoded = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return bytes(out)
