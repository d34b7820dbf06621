"""Where the connector's log lines come out: beside the engine's own."""

from __future__ import annotations

import logging


def join_log(engine: str, ours: str = "kvstore") -> None:
    """Give our log the handlers and the level of the engine's, unless it has handlers already.

    Without that, Python prints warnings bare and drops the rest.

    Args:
        engine: name of the engine's logger.
        ours: name of our logger.
    """
    log, model = logging.getLogger(ours), logging.getLogger(engine)
    if not log.hasHandlers():
        log.handlers = list(model.handlers)
        log.setLevel(model.level)
