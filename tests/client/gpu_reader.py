"""An engine's process that reads blocks on a GPU: run by the tests, told what to do line by line.

    python -m tests.client.gpu_reader URL NAMESPACE BLOCK_BYTES [cuda]

For each JSON line it does one thing and answers with one. It stands for copies that are under way
on a GPU, which nothing stops and which read whenever they get to it: it can be asked for what it
reads now at any time. With ``cuda`` it computes on a real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import kvstore
from client.views import DeviceViews
from kvstore.identity import Namespace, prefix_hashes
from rdma.gpu_segments import GpuView
from tests.cuda_reading import CudaReader
from tests.shared_gpu import SharedGpu
from tests.shared_gpu import read as read_shared

Read: TypeAlias = Callable[[int, int], bytes]


def names(count: int, prompt: int = 0) -> list[bytes]:
    """The names of a prompt's blocks of one token."""
    return prefix_hashes([prompt * 1_000_003 + token for token in range(count)], 1)


def block(prompt: int, position: int, size: int) -> bytes:
    """The bytes of a block, no two alike in any part."""
    seed = hashlib.sha256(b"%d %d" % (prompt, position)).digest()
    return (seed * -(-size // len(seed)))[:size]


def digests(views: Sequence[memoryview | GpuView | None], read: Read) -> list[str | None]:
    """What the views show now."""
    return [
        None
        if view is None
        else hashlib.sha256(
            read(view.address, view.length) if isinstance(view, GpuView) else view
        ).hexdigest()
        for view in views
    ]


def sockets() -> list[int]:
    """The descriptors of this process that are sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except FileNotFoundError:
            continue
    return found


def main(url: str, name: str, size: int, *, cuda: bool) -> None:
    space = Namespace(name, "uint8", "raw", 1, size)
    read: Read = CudaReader() if cuda else read_shared
    client = kvstore.connect(url, space, gpu=0 if cuda else SharedGpu(0), deadline=20.0)
    views: DeviceViews | None = None
    shown: list[memoryview | GpuView | None] = []
    for line in sys.stdin:
        do, *arguments = json.loads(line)
        answer: object = do
        if do == "view":
            views = client.view(names(*arguments), device=True)
            shown = list(views)
            answer = [views.codes.hex(), digests(shown, read)]
        elif do == "digests":
            answer = digests(shown, read)
        elif do == "valid":
            answer = views is not None and views.valid
        elif do == "release":
            assert views is not None
            views.release()
        elif do == "close":
            client.close()
        elif do == "break":  # what a node that is out of its mind, or a bug of ours, would do
            for fd in sockets():
                os.write(fd, b"nonsense that is no frame")
        elif do == "drop":
            for fd in sockets():
                socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)
        elif do == "fork":
            child = os.fork()
            if not child:
                assert views is not None
                good = not views.valid
                views.release()
                with client.view(names(*arguments), device=True) as own:
                    good = good and own.valid and own.found == len(own)
                    good = good and all(isinstance(view, memoryview) for view in own)
                client.close()
                os._exit(0 if good else 1)
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), cuda=sys.argv[4:] == ["cuda"])
