"""Daemons for tests: in this process on a thread of its own, or as a real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.config import Config
from kvstore.daemon import Daemon
from tiers.cuda import CudaDevice
from tiers.device import Device


def make_config(directory: Path, **sections: dict[str, Any]) -> Config:
    """A small daemon's configuration: 8 MiB of DRAM, no SSD, its state in ``directory``.

    ``sections`` are merged over it, as ``ssd={"capacity": "32MiB"}``; an SSD tier gets a directory
    and small regions by itself.
    """
    tree: dict[str, dict[str, Any]] = {
        "node": {"state_directory": str(directory), "grace": 5.0},
        "listen": {
            "unix": str(directory / "kvstore.sock"),
            "control": "127.0.0.1:0",
            "metrics": "127.0.0.1:0",
        },
        "dram": {"capacity": "8MiB", "segment": "4MiB"},
        "ssd": {},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    if tree["ssd"].get("capacity"):
        tree["ssd"].setdefault("directory", str(directory / "ssd"))
        tree["ssd"].setdefault("region", "2MiB")
    return Config.model_validate(tree)


class DaemonThread:
    """A daemon on an event loop in another thread of this process.

    Args:
        config: of the daemon.
        make_device: makes its GPUs.
    """

    def __init__(self, config: Config, make_device: Callable[[int], Device] = CudaDevice) -> None:
        self.config = config
        self._make_device = make_device
        self.daemon: Daemon
        self.loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="daemon")

    @property
    def url(self) -> str:
        """Of the Unix socket."""
        return f"unix://{self.config.listen.unix}"

    @property
    def tcp_url(self) -> str:
        """Of the TCP socket."""
        return next(url for url in self.daemon.server.urls if url.startswith("tcp"))

    def __enter__(self) -> DaemonThread:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self._failure = error
        finally:
            self._ready.set()

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.daemon = Daemon(self.config, make_device=self._make_device)
        await self.daemon.open()
        self._ready.set()
        await self._stop.wait()
        await self.daemon.close()

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call ``function`` on the daemon's loop, awaiting a coroutine that it returns."""

        async def run() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


class DaemonProcess:
    """A real ``kvstore serve``, to be stopped, killed and started again.

    Args:
        config: of the daemon.
        prefix: words before the command, as of another command that runs it.
        environment: variables over those of this process.
    """

    def __init__(
        self,
        config: Config,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self._prefix = prefix
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the Unix socket."""
        return f"unix://{self.config.listen.unix}"

    @property
    def pid(self) -> int:
        """Of the daemon."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until the socket answers."""
        tree = json.loads(self.config.model_dump_json(exclude_defaults=True))
        path = Path(self.config.node.state_directory) / "daemon.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree))
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "tests.running", str(path)],
            cwd=Path(__file__).parent.parent,
            env=os.environ | self._environment,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line != b"ready\n":
            raise RuntimeError(f"the daemon did not start: {line!r}, {self._process.wait(10)}")

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(30)
        self.kill()
        return status


@contextlib.contextmanager
def daemon_process(config: Config) -> Iterator[DaemonProcess]:
    """A real daemon for the time of the block."""
    daemon = DaemonProcess(config)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    """Poll until ``condition()`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)


def _main() -> int:
    """What ``DaemonProcess`` runs: ``serve``, which tells the parent when it listens."""
    from kvstore import daemon, logs

    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    logs.configure(config.log)
    return daemon.serve(config, on_ready=lambda: os.write(1, b"ready\n"))


if __name__ == "__main__":
    sys.exit(_main())
