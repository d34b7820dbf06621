"""Blocks shown where they lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, Self, TypeVar, overload

from client.operations import Seen
from client.results import leading_hits
from rdma.gpu_segments import GpuView

V_co = TypeVar("V_co", bound="memoryview | GpuView", covariant=True)

_RELEASE: Final[Callable[[Any], None]] = memoryview.release


class Session(Protocol):
    """The session whose pins keep the blocks in place."""

    @property
    def alive(self) -> bool:
        """Whether it still holds its pins."""


class Views(Sequence["V_co | None"], Generic[V_co]):
    """Blocks in the order asked for; ``None`` for a miss. See :class:`BlockViews`.

    Attributes:
        codes: the tier code of each block, 0 for a miss.
        failure: why all of them are misses, as the code of an error; ``None`` where the node
            answered.
    """

    __slots__ = ("_session", "_unpin", "_views", "codes", "failure", "leases")

    def __init__(
        self,
        seen: Seen[V_co],
        session: Session | None,
        unpin: Callable[[list[int]], object] | None,
        failure: str | None = None,
    ) -> None:
        self.codes = seen.codes
        self.leases = seen.leases
        self.failure = failure
        self._views = seen.views
        self._session = session
        self._unpin = unpin

    @classmethod
    def missed(cls, count: int, failure: str) -> Self:
        """Views of which none was found."""
        return cls(Seen(bytes(count), [None] * count, []), None, None, failure)

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, index: int) -> V_co | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[V_co | None]: ...
    def __getitem__(self, index: int | slice) -> V_co | list[V_co | None] | None:
        return self._views[index]

    def __iter__(self) -> Iterator[V_co | None]:
        return iter(self._views)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.found} of {len(self)} found>"

    @property
    def found(self) -> int:
        """Number of blocks found."""
        return len(self.codes) - self.codes.count(0)

    @property
    def prefix(self) -> int:
        """Number of blocks found before the first miss."""
        return leading_hits(self.codes)

    @property
    def valid(self) -> bool:
        """Whether what was read through the views so far is what the node stored.

        False once the session has ended, because the node may then have put other blocks there.
        """
        return not self.leases or (self._session is not None and self._session.alive)

    def release(self) -> None:
        """Give the pins back; may be called again."""
        views, self._views = self._views, [None] * len(self._views)
        try:
            deque(map(_RELEASE, views), maxlen=0)
        except (BufferError, TypeError):  # a view is in use by an array, or is a miss
            _release_each(views)
        unpin, self._unpin = self._unpin, None
        if unpin is not None and self.leases:
            unpin(self.leases)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class BlockViews(Views[memoryview]):
    """Read-only views of blocks, in the order asked for; ``None`` for a miss.

    The bytes stay where they are until ``release``, which the end of a ``with`` block calls. The
    views can't be used after it; whatever was made from them, a numpy array for example, must not
    be.
    """

    __slots__ = ()


class DeviceViews(Views["memoryview | GpuView"]):
    """As ``BlockViews``, with a ``GpuView`` for each block that lies on a GPU.

    Copies from it are queued, and go on when the call that queued them has returned: call
    ``release`` when they have ended, by an event, and see then whether the views were ``valid``.
    As long as nobody has called it, the blocks stay mapped and in place, whatever becomes of the
    session. On a GPU nothing keeps anybody from writing to a block, which is forbidden.
    """

    __slots__ = ("_ended",)

    def __init__(
        self,
        seen: Seen[memoryview | GpuView],
        session: Session | None,
        unpin: Callable[[list[int]], object] | None,
        failure: str | None = None,
    ) -> None:
        super().__init__(seen, session, unpin, failure)
        self._ended = seen.ended

    def release(self) -> None:
        """Give the pins back, and what was mapped for the views; may be called again."""
        try:
            super().release()
        finally:
            ended, self._ended = self._ended, ()
            for each in ended:
                each()


def _release_each(views: Sequence[memoryview | GpuView | None]) -> None:
    for view in views:
        if isinstance(view, memoryview):
            with suppress(BufferError):
                view.release()
