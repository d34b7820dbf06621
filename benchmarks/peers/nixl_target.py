"""The other side of NIXL's rows: an agent with registered memory, and nothing else.

``python -m benchmarks.peers.nixl_target BYTES`` prints one line of JSON and waits to be ended. What
the library prints goes to stderr.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import sys
import time

from nixl_cu12 import nixl_agent, nixl_agent_config

PROGRESS = 0.01
"""Seconds between two looks at what clients want: only meeting one needs any."""
_PAGE = 4096


def main() -> None:
    """Register memory, say how to reach it, and wait."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    size = int(sys.argv[1])
    memory = mmap.mmap(-1, size)
    memory[::_PAGE] = bytes([1]) * len(range(0, size, _PAGE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # Its own thread for progress spins, and would take a core from whoever else is measured.
    agent = nixl_agent("target", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(address, size, 0, "")], "DRAM")
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"agent": metadata, "address": str(address)}), file=answers, flush=True)
    while True:
        agent.get_new_notifs()
        time.sleep(PROGRESS)


if __name__ == "__main__":
    main()
