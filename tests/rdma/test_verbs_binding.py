import errno
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdma.verbs import binding
from rdma.verbs.errors import BindingError

FAKE_MODULES = ("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import pyverbs anew, and leave no trace of it."""
    kept = {name: module for name, module in sys.modules.items() if name.startswith("pyverbs")}
    for name in kept:
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "dist-packages" not in p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    binding.load.cache_clear()
    yield
    binding.load.cache_clear()
    for name in [name for name in sys.modules if name.startswith("pyverbs")]:
        del sys.modules[name]
    sys.modules.update(kept)


def make_package(place: Path, *, tag: str | None = None, enums: str = "enums") -> Path:
    """Make a package that looks like pyverbs, basicConfig and all."""
    package = place / "pyverbs"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import logging\nlogging.basicConfig(level=10)\n")
    for name in FAKE_MODULES:
        (package / f"{enums if name == 'enums' else name}.py").write_text("")
    (package / "pyverbs_error.py").write_text("class PyverbsRDMAError(Exception): pass\n")
    if tag is not None:
        (package / f"device{tag}").write_bytes(b"")
    return place


def test_one_on_the_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(make_package(tmp_path))
    assert binding.load().path == tmp_path / "pyverbs"


@pytest.mark.parametrize("enums", ["enums", "libibverbs_enums"])
def test_enums_are_found_under_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enums: str
) -> None:
    monkeypatch.syspath_prepend(make_package(tmp_path, enums=enums))
    assert binding.load().enums.__name__ == f"pyverbs.{enums}"


def test_importing_it_leaves_logging_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(make_package(tmp_path))
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for handler in handlers:
        root.removeHandler(handler)
    try:
        binding.load()
        assert root.handlers == []
        assert root.level == level
    finally:
        for handler in handlers:
            root.addHandler(handler)


def test_the_distributions_is_found_and_nothing_else_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sysconfig

    tag = sysconfig.get_config_var("EXT_SUFFIX")
    place = make_package(tmp_path / "dist-packages", tag=tag)
    (place / "pyverbs" / f"device{tag}").unlink()
    # An empty file is no extension module: stand in for it by its name alone.
    monkeypatch.setattr(Path, "exists", lambda self: self.name == f"device{tag}")
    monkeypatch.setattr(binding, "_PLACES", (place,))
    before = list(sys.path)
    assert binding.load().path == place / "pyverbs"
    assert sys.path == before


def test_one_for_another_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_package(tmp_path / "dist-packages", tag=".cpython-39-x86_64-linux-gnu.so")
    monkeypatch.setattr(binding, "_PLACES", (place,))
    with pytest.raises(BindingError, match="another Python"):
        binding.load()


def test_where_there_is_none_the_error_names_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_PLACES", (tmp_path,))
    with pytest.raises(BindingError) as raised:
        binding.load()
    assert "apt install python3-pyverbs" in str(raised.value)
    assert "dnf install python3-pyverbs" in str(raised.value)


@pytest.mark.parametrize(
    ("maps", "version"),
    [
        ("7f00-7f10 r-xp 0 fe:01 9 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n", "44.0"),
        ("7f00-7f10 r-xp 0 fe:01 9 /usr/lib64/libibverbs.so.1.15.57.1\n", "57.1"),
        ("7f00-7f10 r-xp 0 fe:01 9 /usr/lib64/libc.so.6\n", None),
    ],
)
def test_the_version_of_rdma_core_is_read_off_its_library(maps: str, version: str | None) -> None:
    assert binding.rdma_core_version(maps) == version


def test_an_event_descriptor_is_found_and_made_nonblocking() -> None:
    descriptors: list[int] = []

    class Told:
        def __init__(self) -> None:
            self.fd, other = os.pipe()
            descriptors.extend((self.fd, other))

    made, fd = binding.with_event_fd(Told)
    try:
        assert fd == made.fd
        assert not os.get_blocking(fd)
        with pytest.raises(BindingError):
            binding.with_event_fd(object)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_nothing_there_is_told_from_errors() -> None:
    class Failure(Exception):
        error_code = errno.EAGAIN

    assert binding.nothing_there(Failure())
    Failure.error_code = errno.EIO
    assert not binding.nothing_there(Failure())
    assert not binding.nothing_there(Exception())
