"""The one place that imports pyverbs, late, and evens out its versions 44 to 65.

pyverbs belongs to the distribution's rdma-core: what PyPI has under that name does not build or
does not match the system's libibverbs. So it is often not on the path of a virtual environment.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import importlib.util
import logging
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final, TypeVar

from rdma.verbs.errors import BindingError

__all__ = [
    "Binding",
    "load",
    "make_nonblocking",
    "nothing_there",
    "rdma_core_version",
    "with_event_fd",
]

T = TypeVar("T")

_PLACES: Final = (
    Path("/usr/lib/python3/dist-packages"),
    Path(f"/usr/lib64/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"),
)
"""Where distributions put it: Debian and Ubuntu; RHEL and Fedora."""

_EVENT_FD: Final = "anon_inode:[infinibandevent]"

_opening = threading.Lock()


@dataclass(frozen=True, slots=True)
class Binding:
    """pyverbs, as this package uses it.

    Attributes:
        path: where it was found.
        addr: GIDs and routes.
        cq: completion queues and channels.
        device: devices and contexts.
        enums: the constants of libibverbs, under whichever name this version has them.
        mr: memory regions.
        pd: protection domains.
        qp: queue pairs.
        wr: work requests.
        Error: what it raises when a verb fails; has ``error_code``.
    """

    path: Path
    addr: Any
    cq: Any
    device: Any
    enums: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    Error: type[Exception]


@lru_cache(maxsize=1)
def load() -> Binding:
    """Import pyverbs.

    Raises:
        BindingError: it is not installed, or is for another interpreter or libibverbs.
    """
    with _root_logger_kept():
        try:
            package = _find()
            return _bind(package)
        except ImportError as error:
            raise BindingError(_advice(error)) from error


def _bind(package: Any) -> Binding:
    def module(name: str) -> Any:
        return importlib.import_module(f"pyverbs.{name}")

    try:
        enums = module("libibverbs_enums")
    except ModuleNotFoundError:
        enums = module("enums")
    return Binding(
        path=Path(package.__file__).parent,
        addr=module("addr"),
        cq=module("cq"),
        device=module("device"),
        enums=enums,
        mr=module("mr"),
        pd=module("pd"),
        qp=module("qp"),
        wr=module("wr"),
        Error=module("pyverbs_error").PyverbsRDMAError,
    )


def _find() -> Any:
    """Import the package: the ordinary way, or else from where the distribution has it."""
    try:
        return importlib.import_module("pyverbs")
    except ModuleNotFoundError as error:
        if error.name != "pyverbs":
            raise
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = [place for place in _PLACES if (place / "pyverbs").is_dir()]
    for place in found:
        if (place / "pyverbs" / f"device{suffix}").exists():
            return _import_from(place)
    if found:
        raise ImportError(f"the one in {found[0]} is for another Python than this ({suffix})")
    raise ImportError("it is not installed")


def _import_from(place: Path) -> Any:
    """Import pyverbs alone from ``place``, whose other packages stay out of reach."""
    spec = PathFinder.find_spec("pyverbs", [str(place)])
    if spec is None or spec.loader is None:
        raise ImportError(f"nothing to import in {place}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["pyverbs"]
        raise
    return package


def _advice(error: ImportError) -> str:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"the rdma transport needs pyverbs, which cannot be imported by Python {version} "
        f"({sys.executable}): {error}. Install it with 'apt install python3-pyverbs "
        "ibverbs-providers' (Debian, Ubuntu) or 'dnf install python3-pyverbs libibverbs' (RHEL, "
        "Fedora), and use the distribution's own Python version"
    )


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Undo the ``logging.basicConfig`` that importing pyverbs does."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in list(root.handlers):
            if handler not in handlers:
                root.removeHandler(handler)
                handler.close()


def rdma_core_version(maps: str | None = None) -> str | None:
    """Return the version of the libibverbs that this process has loaded, such as ``44.0``.

    Args:
        maps: what to read it from; by default what the kernel says of this process.
    """
    if maps is None:
        maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/libibverbs\.so\.\d+\.\d+\.(\d+\.\d+)", maps)
    return found.group(1) if found else None


def nothing_there(error: Exception) -> bool:
    """Whether ``error``, raised by a verb on a non-blocking descriptor, says: nothing yet."""
    return getattr(error, "error_code", None) in (errno.EAGAIN, errno.EWOULDBLOCK)


def make_nonblocking(fd: int) -> None:
    """Make reads of ``fd`` return at once."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)


def with_event_fd(make: Callable[[], T]) -> tuple[T, int]:
    """Make an object that has an event descriptor inside, and find that descriptor.

    pyverbs tells a completion channel's only from version 57 on, and a context's not at all.

    Args:
        make: makes it; must open exactly one event descriptor.

    Returns:
        The object and the descriptor, which belongs to the object and doesn't block.

    Raises:
        BindingError: no new descriptor appeared, or several.
    """
    with _opening:
        before = _event_fds()
        made = make()
        new = _event_fds() - before
    told = getattr(made, "fd", None)
    if isinstance(told, int):
        new = {told}
    if len(new) != 1:
        raise BindingError(f"{len(new)} event descriptors appeared where one was expected")
    fd = new.pop()
    make_nonblocking(fd)
    return made, fd


def _event_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENT_FD:
                found.add(int(name))
        except FileNotFoundError:
            continue
    return found
