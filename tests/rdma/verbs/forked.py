"""Processes for tests: forked, since importing the daemon anew takes most of a minute here."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

PATIENCE = 60


class Channel:
    """What a child tells its parent, a line each way."""

    def __init__(self, reading: int, writing: int) -> None:
        self._lines = os.fdopen(reading, "r")
        self._writing = writing

    def close(self) -> None:
        """Say and hear nothing more."""
        self._lines.close()
        os.close(self._writing)

    def tell(self, what: object) -> None:
        """Say something that fits JSON."""
        os.write(self._writing, json.dumps(what).encode() + b"\n")

    def hear(self) -> Any:
        """Wait for the other side to say something."""
        ready, _, _ = select.select([self._lines], [], [], PATIENCE)
        assert ready, f"nothing was said for {PATIENCE} s"
        line = self._lines.readline()
        assert line, "the other side is gone"
        return json.loads(line)


class Forked:
    """A child of this process that runs ``work(channel)`` and ends."""

    def __init__(self, work: Callable[[Channel], object]) -> None:
        to_child, to_parent = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(to_child[1])
            os.close(to_parent[0])
            _child(work, Channel(to_child[0], to_parent[1]))
        os.close(to_child[0])
        os.close(to_parent[1])
        self._channel = Channel(to_parent[0], to_child[1])
        self.tell, self.hear = self._channel.tell, self._channel.hear
        self._gone = False

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, and wait until it is gone."""
        if not self._gone:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """Wait for its end; returns its exit status."""
        self._gone = True
        self._channel.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _child(work: Callable[[Channel], object], channel: Channel) -> None:
    """Run the work; never returns."""
    status = 1
    try:
        # Nothing of the parent's may be finalized here: devices are shared with it.
        gc.disable()
        gc.freeze()
        _close_sockets()
        work(channel)
        status = 0
    except BaseException:  # noqa: BLE001 - the end of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _close_sockets() -> None:
    """A connection ends only when every process has closed it."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(int(name))
        except OSError:
            continue
