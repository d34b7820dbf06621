"""A client in a process of its own, which can be stopped and killed.

It says on a line what its transport offers and where its memory is, takes what the node's end
says from a line, and then waits. Started by ``test_peers.py``.
"""

from __future__ import annotations

import json
import mmap
import sys
from typing import Any

from rdma.verbs.choice import Wish
from rdma.verbs.client import VerbsClientTransport, shared_device

PATTERN = bytes(range(256))


def pack(details: dict[str, Any]) -> dict[str, Any]:
    """Make what a transport says fit for JSON."""
    return {**details, "gid": details["gid"].hex()}


def unpack(details: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`pack`."""
    return {**details, "gid": bytes.fromhex(details["gid"])}


def main() -> None:
    size = int(sys.argv[1])
    memory = mmap.mmap(-1, size)
    memory.write(PATTERN * (size // 256))
    client = VerbsClientTransport(shared_device(Wish(device="rxe0")))
    named = client.destinations([memoryview(memory)])
    print(json.dumps([pack(client.offer()), named]), flush=True)
    client.accept(unpack(json.loads(sys.stdin.readline())))
    print("ready", flush=True)
    for command in sys.stdin:
        if command == "bytes\n":
            print(memory[:16].hex(), flush=True)


if __name__ == "__main__":
    main()
