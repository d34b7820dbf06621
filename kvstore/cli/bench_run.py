"""The sessions of ``bench``: what they put into the node, and that all of it is removed again."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.options import Remote, ask
from kvstore.cli.traces import progress_bar

if TYPE_CHECKING:
    from kvstore.bench import Bench, Load, Measured
    from kvstore.control.interface import NodeStatus
    from kvstore.identity import Namespace

MODEL: Final = "kvstore-bench"
"""Model of the benchmark's namespaces: what blocks go by that a killed benchmark left."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLEANING_SECONDS: Final = 10.0
_STEPS: Final = 1000


class Interruption:
    """Lets Ctrl-C, and the signals that end a process, end the benchmark between two calls.

    A put that is broken off could be committed after what it belongs to was removed. A second
    signal does not wait. Use it as a context manager.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: list[Any] = []

    def check(self) -> None:
        """End here if a signal has asked for it.

        Raises:
            KeyboardInterrupt: it has.
        """
        if self._asked:
            raise KeyboardInterrupt

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = [signal.signal(number, self._handle) for number in _SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=False):
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self._asked = True


class Cleaning:
    """Has the blocks of the benchmark removed from the node.

    Args:
        remote: the node.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._pending: set[tuple[bytes, bytes]] = set()

    def remove(self, namespace: bytes, root: bytes) -> int:
        """Remove a block and all that follow it.

        Returns:
            How many stayed, because a session still has them pinned; ``finish`` tries again.
        """
        self._pending.add((namespace, root))
        kept = ask(self._remote, lambda node: node.evict(namespace, root)).kept
        if not kept:
            self._pending.discard((namespace, root))
        return kept

    def finish(self) -> int:
        """Remove what is left, once the benchmark's sessions have been closed.

        Returns:
            Blocks that could not be removed.
        """
        until = time.monotonic() + _CLEANING_SECONDS
        while True:
            # The node may have yet to notice the end of a session, and of the pins with it.
            left = sum(self.remove(*one) for one in list(self._pending))
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)


class Run:
    """The sessions in which loads are measured.

    Args:
        url: where the node's data path is.
        tenant: whose blocks they are.
        options: of the sessions.
        status: of the node that the control plane belongs to.
        cleaning: removes what was put.
        interruption: may end it.

    Attributes:
        transport: what the sessions used.
    """

    def __init__(
        self,
        url: str,
        tenant: str,
        options: dict[str, Any],
        status: "NodeStatus",
        cleaning: Cleaning,
        interruption: Interruption,
    ) -> None:
        self.transport = ""
        self._url = url
        self._tenant = tenant
        self._options = options
        self._status = status
        self._cleaning = cleaning
        self._interruption = interruption

    def measure(self, loads: "Sequence[Load]", memory: int, seconds: float) -> "list[Measured]":
        """Measure one load after the other, with a bar that shows how far it is.

        Raises:
            KVStoreError: what kept the node from taking part.
        """
        from kvstore.bench import Bench

        bench, measured = Bench(memory, self._interruption.check), []
        with progress_bar(len(loads) * _STEPS, "measuring") as advance:
            for load in loads:
                progress = _Progress(advance)
                measured.append(self._measure(bench, load, seconds, progress))
        return measured

    def _measure(
        self, bench: "Bench", load: "Load", seconds: float, progress: Callable[[float], None]
    ) -> "Measured":
        import kvstore

        namespace = self._namespace(load.block_bytes)
        with kvstore.connect(self._url, namespace, **self._options) as client:
            self._check_same(client.stats().incarnation)
            self.transport = client.stats().transport
            return bench.measure(
                client,
                load,
                lambda root: self._cleaning.remove(namespace.fingerprint, root),
                seconds,
                progress,
            )

    def _namespace(self, block_bytes: int) -> "Namespace":
        from kvstore.identity import Namespace

        return Namespace(MODEL, "uint8", "bench", 1, block_bytes, tenant=self._tenant)

    def _check_same(self, incarnation: str) -> None:
        """Go on only where what is put can be removed.

        Raises:
            ConfigError: the sessions are with another node than the control plane's.
        """
        from kvstore.errors import ConfigError

        if incarnation != self._status.incarnation:
            raise ConfigError(
                f"{self._url} is another node than {self._status.name}, whose control plane was "
                "asked: name both of one node with --url and --control"
            )


class _Progress:
    """Advances a bar by what has been done of one load."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self._advance = advance
        self._reached = 0

    def __call__(self, share: float) -> None:
        reached = int(share * _STEPS)
        self._advance(reached - self._reached)
        self._reached = reached
