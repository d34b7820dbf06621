"""What the HBM tier asks of a GPU, so that its logic can be tested without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable

HANDLE_BYTES = 64
"""Length of the handle by which another process maps memory of a device."""


class End(Protocol):
    """The end of something that uses a device's memory."""

    def done(self) -> bool:
        """Whether it has come. Does not block.

        Raises:
            OSError: the device has failed, so that nothing uses its memory any more.
        """


@runtime_checkable
class Event(End, Protocol):
    """The end of all that a stream had been queued up to some point."""

    def wait(self) -> None:
        """Block until ``done``, without keeping other threads of the process from running.

        Raises:
            OSError: the device has failed.
        """


class Device(Protocol):
    """One GPU. Addresses are those of its address space, in which pinned host memory lies too.

    Any thread may call it; nothing waits for more than it says. All but ``open`` raise ``OSError``
    where the device refuses, with ``errno.ENOMEM`` where it has not enough memory.

    Attributes:
        granularity: allocations are a multiple of this many bytes. No two of them then lie in what
            one handle maps.
    """

    granularity: int

    def open(self) -> None:
        """Take the device into use; again does nothing.

        Raises:
            TierConfigError: there is no such device; the message says why.
        """

    def uuid(self) -> bytes:
        """16 bytes that name the device in every process of the host."""

    def free_bytes(self) -> int:
        """Memory that nobody has, of any process."""

    def allocate(self, size: int) -> int:
        """Memory of its own allocation, holding anything: its address."""

    def release(self, address: int) -> None:
        """Give an allocation back. May wait for all that this process has queued."""

    def handle(self, address: int) -> bytes:
        """``HANDLE_BYTES`` by which another process maps an allocation, to read and to write."""

    def stream(self) -> int:
        """A new stream, in step with no other."""

    def end_stream(self, stream: int) -> None:
        """Give a stream back, on which nothing is under way."""

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Queue a copy between device memory and device memory or pinned host memory."""

    def copy_all(self, moves: Iterable[tuple[int, int, int]], stream: int) -> None:
        """Queue copies, each as of ``copy``: where to, where from, bytes.

        Where one is refused, those before it have been queued.
        """

    def zero(self, address: int, size: int, stream: int) -> None:
        """Queue the clearing of device memory."""

    def record(self, stream: int) -> Event:
        """The point that a stream has been queued up to."""

    def register(self, address: int, size: int) -> None:
        """Pin memory of this process."""

    def unregister(self, address: int) -> None:
        """Undo ``register``."""

    def allocate_host(self, size: int) -> int:
        """New pinned memory of this process: its address."""

    def release_host(self, address: int) -> None:
        """Give pinned memory back."""
