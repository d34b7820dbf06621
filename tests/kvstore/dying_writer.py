"""A process that is dying while it still writes, as one does whose GPU has copies under way.

    python -m tests.kvstore.dying_writer URL BLOCK_BYTES BLOCKS

It reserves blocks, ends its main thread, which is what the kernel calls dying, and has its socket
closed. It prints "closed", writes to what it had reserved once it is told to, prints "written", and
is gone at the end of its input.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence

import kvstore
from kvstore.identity import Namespace, prefix_hashes

SYS_EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]


def is_dying() -> bool:
    with open("/proc/self/stat", "rb") as file:
        return bool(int(file.read().rpartition(b")")[2].split()[6]) & 4)


def close_sockets() -> None:
    for name in os.listdir("/proc/thread-self/fd"):
        try:
            if os.readlink(f"/proc/thread-self/fd/{name}").startswith("socket:"):
                os.close(int(name))
        except FileNotFoundError:
            continue


class Pages:
    """What never gets as far as having been written."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def write(self, positions: Sequence[int], into: Sequence[memoryview]) -> None:
        while not is_dying():
            time.sleep(0.001)
        close_sockets()
        print("closed", flush=True)
        sys.stdin.readline()
        for each in into:
            each[:] = b"\xbb" * len(each)
        print("written", flush=True)
        sys.stdin.readline()
        os._exit(0)


def put(url: str, size: int, count: int) -> None:
    space = Namespace("dying", "uint8", "raw", 1, size)
    client = kvstore.connect(url, space, deadline=60.0)
    client.put(prefix_hashes(range(count), 1), Pages(count))


if __name__ == "__main__":
    threading.Thread(target=put, args=(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))).start()
    ctypes.CDLL(None).syscall(SYS_EXIT, 0)
