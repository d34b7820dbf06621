"""Memory that a client registers once, for all its calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import TracebackType

from client.buffers import flat_bytes
from client.endpoint import Settings
from kvstore.errors import ConfigError
from rdma.errors import RegionError, TransportError
from rdma.verbs.client import shared_device


class Registered:
    """A buffer that calls can use without registering it each time, until it is closed.

    The memory is kept alive, and its pages stay pinned, as long.
    """

    __slots__ = ("_pid", "_undo")

    def __init__(self, undo: Callable[[], object] | None = None) -> None:
        self._undo = undo
        self._pid = os.getpid()

    @property
    def pinned(self) -> bool:
        """Whether anything is registered: over ``shm`` and ``tcp`` nothing has to be."""
        return self._undo is not None

    def close(self) -> None:
        """Deregister the buffer; may be called again. No call may be using it."""
        undo, self._undo = self._undo, None
        if undo is not None and self._pid == os.getpid():
            undo()

    def __enter__(self) -> Registered:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def register(settings: Settings, transport: str, buffer: object) -> Registered:
    """Register a buffer where calls would register it otherwise.

    Args:
        settings: what the client's sessions ask for.
        transport: that of its session; empty before the first.
        buffer: as for a get or a put.

    Raises:
        InvalidRequest: it is no buffer.
        ConfigError: it can't be registered; the message says what mends it.
    """
    view = flat_bytes(buffer)
    if "rdma" not in settings.offers or transport not in ("", "rdma") or not view.nbytes:
        return Registered()
    try:
        memory = shared_device().memory
        region = memory.register(view)
    except RegionError as error:
        raise ConfigError(str(error)) from error
    except TransportError:
        return Registered()  # there is no device, so that sessions will do without
    return Registered(partial(memory.release, region))
