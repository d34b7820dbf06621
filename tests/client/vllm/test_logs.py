"""The connector's log lines come out where the engine's do."""

from __future__ import annotations

import logging

import pytest

from client.vllm.logs import join_log


class Lines(logging.Handler):
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.said.append(record.getMessage())


def set_up(
    patch: pytest.MonkeyPatch, name: str, handlers: list[logging.Handler], level: int
) -> logging.Logger:
    """A logger with these handlers alone; pytest adds its own to every one it sees."""
    log = logging.getLogger(name)
    patch.setattr(log, "propagate", False)
    patch.setattr(log, "handlers", handlers)
    patch.setattr(log, "level", level)
    return log


def test_lines_go_to_the_engines_handlers_at_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    set_up(monkeypatch, "an-engine", [lines], logging.INFO)
    set_up(monkeypatch, "our-own", [], logging.NOTSET)
    join_log("an-engine", "our-own")
    join_log("an-engine", "our-own")
    below = logging.getLogger("our-own.client")
    below.info("said once")
    below.debug("not said")
    assert lines.said == ["said once"]


def test_a_log_that_was_set_up_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, own = Lines(), Lines()
    set_up(monkeypatch, "an-engine", [theirs], logging.INFO)
    log = set_up(monkeypatch, "our-own", [own], logging.WARNING)
    join_log("an-engine", "our-own")
    log.info("not said")
    log.warning("said")
    assert (theirs.said, own.said) == ([], ["said"])
