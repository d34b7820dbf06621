"""What every test runs under."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# `ci` gives the same examples in every run, so that a red build is red again at one's desk.
# `thorough` looks for new ones: HYPOTHESIS_PROFILE=thorough make test
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough", settings.get_profile("ci"), derandomize=False, max_examples=2000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _to_stderr(*_: object) -> structlog.PrintLogger:
    """Where nodes in the tests' own process log.

    Not between what a command prints, and not to the stream that pytest puts in the place of
    ``sys.stderr``: a node in a thread would write to it after the test has closed it.
    """
    return structlog.PrintLogger(sys.__stderr__)


structlog.configure(logger_factory=_to_stderr)


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Undo what a test, or a command that it runs, makes of the process's logs."""
    root, configured = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.configure(**configured)
