"""A contender that is up: its servers, and the worker that drives it."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.contender import Contender, PeerFailed, Place, Setup
from benchmarks.peers.isolation import DIE_WITH_PARENT
from benchmarks.vllm.process import end_group, last_error

REPOSITORY = Path(__file__).parents[2]
ANSWER = 150.0
"""Seconds that one order may take."""


class Worker:
    """The other end of `benchmarks.peers.worker`."""

    def __init__(self, contender: Contender, setup: Setup, log: Path) -> None:
        """Start it and do not wait.

        Raises:
            PeerFailed: there is no such interpreter.
        """
        self._log = log
        worker = (setup.python, "-m", "benchmarks.peers.worker", contender.adapter)
        command = [*DIE_WITH_PARENT, *setup.prefix, *worker]
        with log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | dict(setup.environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerFailed(f"its worker can't be started: {error}") from None

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it takes orders."""
        return self._process.poll() is None

    def begin(self, **order: Any) -> None:
        """Send an order.

        Raises:
            PeerFailed: the worker is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"its worker died: {last_error(self._log)}") from None

    def finish(self, patience: float = ANSWER) -> dict[str, Any]:
        """Wait for the answer.

        Raises:
            PeerFailed: the order failed, or there was no answer.
        """
        output = self._process.stdout
        assert output is not None
        # One answer to one order: nothing is left in the reader's buffer that select cannot see.
        if not select.select([output], [], [], patience)[0]:
            self.end()
            raise PeerFailed(f"no answer in {patience:.0f} s: {last_error(self._log)}")
        line = output.readline()
        if not line:
            raise PeerFailed(f"its worker died: {last_error(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise PeerFailed(answer["failed"])
        return answer

    def order(self, **order: Any) -> dict[str, Any]:
        """Send an order and wait for the answer.

        Raises:
            PeerFailed: as of `begin` and `finish`.
        """
        self.begin(**order)
        return self.finish()

    def end(self) -> None:
        """Kill it and what it started; may be called again."""
        end_group(self._process)


class Player:
    """A contender while it takes part.

    Attributes:
        contender: who it is.
        setup: how its workers are started; None where its servers aren't up.
        worker: drives it.
        failure: why it can do nothing any more, or for now; empty while it can.
    """

    def __init__(self, contender: Contender, place: Place) -> None:
        self.contender = contender
        self.place = place
        self.setup: Setup | None = None
        self.worker: Worker | None = None
        self.failure = ""

    def start(self, stack: ExitStack) -> None:
        """Start servers and worker, which the stack stops; a failure is noted."""
        try:
            self.place.directory.mkdir(parents=True)
            self.setup = stack.enter_context(self.contender.start(self.place))
            self.worker = self.new_worker(stack)
        except (PeerFailed, OSError, RuntimeError) as error:
            self.failure = str(error) or type(error).__name__

    def new_worker(self, stack: ExitStack) -> Worker:
        """One more client process.

        Raises:
            PeerFailed: the servers aren't up, or it can't be started.
        """
        if self.setup is None:
            raise PeerFailed(self.failure)
        worker = Worker(self.contender, self.setup, self.place.directory / "worker.log")
        stack.callback(worker.end)
        return worker

    def settings(self, block_bytes: int) -> dict[str, str]:
        """What a worker's ``open`` is told."""
        common = {"block_bytes": str(block_bytes), "capacity": str(self.place.capacity)}
        return common | dict(self.setup.settings if self.setup else {})

    @contextmanager
    def opened(self, block_bytes: int) -> Iterator[None]:
        """Have the store open for blocks of one size.

        Where that fails ``failure`` says so until the end of the block, and for good only where the
        worker is gone.
        """
        before = self.failure
        if not before:
            self._try(do="open", settings=self.settings(block_bytes))
        is_open = not self.failure
        try:
            yield
        finally:
            if is_open:
                self._try(do="close")
            if self.worker is not None and self.worker.alive:
                self.failure = before

    def run(self, work: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Have one turn done.

        Raises:
            PeerFailed: why there is no outcome.
        """
        if self.failure or self.worker is None:
            raise PeerFailed(self.failure or "it is not started")
        return self.worker.order(do="run", work=work, parameters=dict(parameters))

    def prepare(self, work: str, parameters: Mapping[str, Any]) -> None:
        """The same, where the outcome doesn't matter; what goes wrong is noted."""
        try:
            self.run(work, parameters)
        except PeerFailed as error:
            self.failure = str(error)

    def _try(self, **order: Any) -> None:
        try:
            assert self.worker is not None
            self.worker.order(**order)
        except PeerFailed as error:
            self.failure = str(error)


@contextmanager
def players(
    contenders: Sequence[Contender],
    directory: Path,
    environments: Path,
    capacity: int,
    disk: int = 0,
) -> Iterator[list[Player]]:
    """Start all of them; those that can't be started are in the list, too.

    Args:
        contenders: who.
        directory: gets a directory for each.
        environments: see `Place`.
        capacity: see `Place`.
        disk: see `Place`.
    """
    with ExitStack() as stack:
        started = []
        for number, contender in enumerate(contenders):
            # Short, because sockets lie in it.
            place = Place(directory / str(number), capacity, disk, environments)
            started.append(Player(contender, place))
            started[-1].start(stack)
        yield started
