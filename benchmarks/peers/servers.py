"""The peers that have servers, or an environment, of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.peers import lmcache_servers as lmcache
from benchmarks.peers import mooncake_servers as mooncake
from benchmarks.peers.contender import Contender, Place, Scene, Setup
from benchmarks.peers.environments import interpreter
from benchmarks.peers.isolation import first_line, loopback, running

_LOCAL = frozenset({Scene.LOCAL})


@contextmanager
def nixl_ucx(place: Place) -> Iterator[Setup]:
    """A process with registered memory."""
    python = interpreter(place, "nixl")
    log = place.directory / "target.log"
    with loopback() as prefix:
        command = [*prefix, python, "-m", "benchmarks.peers.nixl_target", str(place.capacity)]
        with running(command, log, output=subprocess.PIPE) as process:
            settings: dict[str, str] = json.loads(first_line(process, log))
            pids = {"target": process.pid}
            yield Setup(settings, {}, prefix, python, pids)


PEERS: Final = (
    Contender(
        "mooncake-local",
        "Mooncake, in process",
        "mooncake",
        "peer",
        _LOCAL,
        mooncake.in_process,
        "segment in the client's own process, registered buffers, put_from and get_into",
    ),
    Contender(
        "mooncake-tcp",
        "Mooncake, TCP",
        "mooncake",
        "peer",
        frozenset({Scene.TCP}),
        mooncake.over_tcp,
        "segment in another process, registered buffers, put_from and get_into",
    ),
    Contender(
        "mooncake-shm",
        "Mooncake, shared memory",
        "mooncake",
        "peer",
        _LOCAL,
        mooncake.shared_memory,
        "dummy client, buffers of the pool that it shares with the store's process",
    ),
    Contender(
        "mooncake-hot",
        "Mooncake, hot cache",
        "mooncake",
        "peer",
        frozenset({Scene.VIEWS}),
        mooncake.hot_cache,
        "dummy client, get_buffer from a hot cache in shared memory that has all blocks; to give "
        "them back takes a request for each, which the figures include",
    ),
    Contender(
        "mooncake-ssd",
        "Mooncake, SSD",
        "mooncake",
        "peer",
        frozenset({Scene.DISK}),
        mooncake.offloaded,
        "SSD offload by io_uring and O_DIRECT, heartbeat every second, buckets of 64 MiB; a put "
        "that finds no room is tried again, and returns once the block is in memory",
    ),
    Contender(
        "lmcache-cpu",
        "LMCache, in process",
        "lmcache",
        "peer",
        frozenset({Scene.LOCAL, Scene.VIEWS}),
        lmcache.in_process,
        "the storage manager of its engines in the client's own process: no other can see a block",
        frozenset({"share"}),
    ),
    Contender(
        "lmcache-disk",
        "LMCache, local disk",
        "lmcache",
        "peer",
        frozenset({Scene.DISK}),
        lmcache.local_disk,
        "in the client's own process, one O_DIRECT file a block; a put ends when it is written",
    ),
    Contender(
        "lmcache-server",
        "LMCache, lm:// server",
        "lmcache",
        "peer",
        frozenset({Scene.TCP}),
        lmcache.lm_server,
        "one connection; the server never removes a block: past its capacity the client writes "
        "over the oldest of its own",
    ),
    Contender(
        "lmcache-mp",
        "LMCache, MP server",
        "lmcache_mp",
        "peer",
        frozenset({Scene.LOCAL, Scene.VIEWS}),
        lmcache.mp_server,
        "the server in a process of its own, its memory shared, chunks of 16 tokens; a get looks "
        "up the prompt to its end",
    ),
    Contender(
        "nixl-ucx",
        "NIXL, UCX",
        "nixl",
        "peer",
        _LOCAL,
        nixl_ucx,
        "a transport alone: keys stay with the client; descriptors prepared, no progress thread",
        frozenset({"exists", "view", "mingle", "traffic", "replay", "keys", "share"}),
    ),
)
"""Every mode of every peer that has servers or an environment of its own."""
