"""`scripts/rdma-guest`: runs a command of this repository where there is RoCEv2."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.rdma.guest.errors import GuestError
from tests.rdma.guest.initramfs import build_initramfs, find_kernel
from tests.rdma.guest.machine import SHARE, Description, Machine
from tests.rdma.guest.packages import ensure_packages

REPOSITORY = Path(__file__).resolve().parents[3]
CACHE = REPOSITORY / ".guest"

TIMED_OUT = 124
"""Exit status when the guest was ended for its time, as that of timeout(1)."""
NO_GUEST = 125
"""Exit status when there was no guest to run the command in."""

LOOPBACK_DEVICE = (
    ("ip", "link", "set", "lo", "up"),
    ("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "lo"),
)


def main(arguments: Sequence[str]) -> int:
    """Boots, runs, cleans up; the command's exit status, or one of ours."""
    options = _parse(arguments)
    try:
        with _one_at_a_time(), _share() as share:
            status = _run(options, share)
            if options.results is not None:
                shutil.copytree(share / "results", options.results, dirs_exist_ok=True)
            return status
    except TimeoutError:
        print(f"rdma-guest: ended after {options.timeout} s", file=sys.stderr)
        return TIMED_OUT
    except GuestError as error:
        print(f"rdma-guest: {error}", file=sys.stderr)
        return NO_GUEST


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rdma-guest", description=__doc__)
    parser.add_argument("--timeout", type=float, default=300, help="seconds, boot included")
    parser.add_argument("--results", type=Path, help="where files of $RDMA_GUEST_RESULTS go")
    parser.add_argument("--memory", default="3G")
    parser.add_argument("--processors", type=int, default=2)
    parser.add_argument("command", nargs="+", help="after --")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, share: Path) -> int:
    ensure_packages()
    kernel = find_kernel()
    description = Description(
        name="a",
        kernel=kernel.image,
        initramfs=build_initramfs(kernel, CACHE),
        share=share,
        processors=options.processors,
        memory=options.memory,
        setup=LOOPBACK_DEVICE,
        environment=_environment(),
        directory=REPOSITORY,
    )
    deadline = time.monotonic() + options.timeout
    with Machine(description, options.command, _to_stdout) as machine:
        return machine.wait(deadline - time.monotonic())


def _environment() -> dict[str, str]:
    return {
        "PATH": f"{REPOSITORY}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "RDMA_GUEST": "a",
        "RDMA_GUEST_RESULTS": str(SHARE / "results"),
    }


def _to_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Emulation takes every processor that there is: a second guest waits for the first."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _share() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rdma-guest-") as name:
        share = Path(name)
        (share / "results").mkdir()
        os.chmod(share, 0o755)
        yield share


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
