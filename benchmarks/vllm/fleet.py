"""The contenders' engines, up at the same time so that they can take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.vllm.contenders import Contender, Place, Setup
from benchmarks.vllm.process import Engine, EngineFailed


@dataclass(slots=True)
class Running:
    """A contender with its engine.

    Attributes:
        contender: who it is.
        engine: takes its prompts.
        failure: why it takes none any more; empty while it does.
    """

    contender: Contender
    engine: Engine | None = None
    failure: str = ""

    def forget(self) -> None:
        """Leave the prefix to the store alone."""
        self.up.forget(self.contender.external)

    @property
    def up(self) -> Engine:
        """The engine.

        Raises:
            EngineFailed: there is none.
        """
        if self.engine is None:
            raise EngineFailed(self.failure)
        return self.engine


@contextmanager
def fleet(contenders: Sequence[Contender], place: Place, model: Path) -> Iterator[list[Running]]:
    """Start the engines of all contenders; those that fail to start are in the list, too.

    Args:
        contenders: whose.
        place: its scratch gets a directory for each.
        model: the model's directory.
    """
    with ExitStack() as stack:
        started = [_start(each, stack, place, model) for each in contenders]
        for each in started:
            if each.engine is not None:
                _wait(each)
        yield started


def rotated(running: Sequence[Running], turn: int) -> list[Running]:
    """Those that are up, each turn beginning with the next one."""
    up = [each for each in running if not each.failure]
    first = turn % len(up) if up else 0
    return up[first:] + up[:first]


def _start(contender: Contender, stack: ExitStack, place: Place, model: Path) -> Running:
    own = replace(place, scratch=place.scratch / contender.key)
    own.scratch.mkdir()
    running = Running(contender)
    try:
        setup: Setup = stack.enter_context(contender.prepare(own))
    except (EngineFailed, OSError, RuntimeError) as error:
        running.failure = str(error)
        return running
    running.engine = Engine(
        own.python,
        model,
        own.scratch / "engine.log",
        setup.transfer,
        setup.environment,
        setup.paths,
    )
    stack.callback(running.engine.end)
    return running


def _wait(running: Running) -> None:
    try:
        running.up.wait_until_ready()
    except EngineFailed as error:
        running.failure = str(error)
