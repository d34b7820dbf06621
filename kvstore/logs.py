"""Structured logs on standard error: for people, or one JSON object a line.

``configure`` is called once, by the process's entry point. Library code only calls
``structlog.get_logger(__name__)`` and passes what happened as keywords.
"""

import logging
import os
import sys
from typing import Any, Final, TextIO

import structlog

from kvstore.config import LogSection

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure(section: LogSection, stream: TextIO | None = None) -> None:
    """Send the logs of the whole process to ``stream``, by default standard error.

    The standard library's logging (grpclib and asyncio use it) goes the same way from ``warning``
    up, so that there is one format.
    """
    stream = sys.stderr if stream is None else stream
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, *_rendering(section, stream)],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[section.level]),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(section, stream),
            ],
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(LEVELS[section.level], logging.WARNING))


def _rendering(section: LogSection, stream: TextIO) -> list[Any]:
    if section.format == "json":
        return [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(sort_keys=False, default=_text),
        ]
    colours = stream.isatty() and not os.environ.get("NO_COLOR")
    return [structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False)]


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
