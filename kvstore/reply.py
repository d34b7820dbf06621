"""What a session answers to one request, at once or later."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from kvstore.entry import Entry
from kvstore.protocol.messages import Answer

T = TypeVar("T")


@dataclass(slots=True)
class Reply:
    """What goes back to the client.

    Attributes:
        answer: the header's content; None where nothing is answered.
        payload: views of the arena that follow the header.
        pinned: entries to unpin once the payload has left.
        used: entries to touch, in the order of the request, once the reply is on its way.
        fds: file descriptors that go with the first byte.
    """

    answer: Answer | None
    payload: Sequence[memoryview] = ()
    pinned: Sequence[Entry] = ()
    used: Sequence[Entry] = ()
    fds: Sequence[int] = ()


Handled: TypeAlias = Reply | Coroutine[Any, Any, Reply]


async def finished(handled: Handled) -> Reply:
    """The reply of what was handled, at once or later."""
    return handled if isinstance(handled, Reply) else await handled


def at_once(step: Coroutine[Any, Any, T]) -> T:
    """Run the step of a transport that never waits."""
    try:
        step.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    step.close()
    raise RuntimeError("a transport waited that should not")
