"""The Debian packages that a guest is made of, installed where they are missing."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.rdma.guest.errors import GuestError

PACKAGES = (
    "busybox-static",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "linux-image-amd64",
    "perftest",
    "python3-pyverbs",
    "qemu-system-common",
    "qemu-system-x86",
    "rdma-core",
)


def ensure_packages() -> None:
    """Installs what is missing of `PACKAGES`.

    Raises:
        GuestError: there is no apt, the caller isn't root, or apt failed.
    """
    if shutil.which("dpkg-query") is None:
        raise GuestError("this is no Debian: the guest is made of Debian packages")
    missing = [name for name in PACKAGES if not _installed(name)]
    if not missing:
        return
    if os.geteuid() != 0:
        raise GuestError(f"needs the Debian packages: {' '.join(missing)} (not root)")
    print(f"rdma-guest: installing {' '.join(missing)}", flush=True)
    # INITRD=No: the guest has its own initramfs, and the kernel's package need not make one.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "INITRD": "No"}
    for arguments in (
        ["update", "-qq"],
        ["install", "-y", "-qq", "--no-install-recommends", *missing],
    ):
        done = subprocess.run(
            ["apt-get", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise GuestError(f"apt-get {arguments[0]} failed:\n{done.stdout[-4000:]}")


def _installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout == "installed"
