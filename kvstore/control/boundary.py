"""Where a control call's errors become gRPC statuses.

Errors of ``kvstore.errors`` reach the caller with their code, as ``code: message`` in the gRPC
status; anything else is a fault of ours, which is logged, counted and answered as ``internal``.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVStoreError,
    OutOfSpace,
    Unavailable,
)

_STATUSES: Final[tuple[tuple[type[KVStoreError], Status], ...]] = (
    (InvalidRequest, Status.INVALID_ARGUMENT),
    (AccessDenied, Status.UNAUTHENTICATED),
    (Unavailable, Status.UNAVAILABLE),
    (DeadlineExceeded, Status.DEADLINE_EXCEEDED),
    (OutOfSpace, Status.RESOURCE_EXHAUSTED),
)

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def answering(
    stream: Stream[Any, Any], on_fault: Callable[[], None] = lambda: None
) -> AsyncIterator[Any]:
    """The request message of a call; errors of the block become its gRPC status.

    Args:
        stream: the call.
        on_fault: called for every exception that is not one of ``kvstore.errors``, to count it.
    """
    try:
        request = await _received(stream)
        if request is None:
            raise InvalidRequest("the request is empty")
        yield request
    except KVStoreError as error:
        raise as_status(error) from error
    except GRPCError:
        raise
    except Exception as error:
        on_fault()
        _log.exception("control request failed", error=repr(error))
        raise as_status(InternalError("the node failed; its log says how")) from error


async def _received(stream: Stream[Any, Any]) -> Any:
    """The request message; None where there is none.

    Raises:
        InvalidRequest: it is not what the call takes.
    """
    try:
        return await stream.recv_message()
    except DecodeError as error:
        raise InvalidRequest("the request is no message of this call") from error


def as_status(error: KVStoreError) -> GRPCError:
    """The gRPC status of an error."""
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), None)
    return GRPCError(status or Status.INTERNAL, f"{error.code}: {error}")
