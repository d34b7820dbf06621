"""What ``import kvstore`` gives, and what it says when another file has one of our names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvstore


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(kvstore.__file__).parent.parent)
    start = f"import sys; sys.path.append({root!r}); "
    return subprocess.run(
        [sys.executable, "-c", start + code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("name", ["client", "rdma", "tiers"])
def test_a_module_in_the_way_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    done = run("import kvstore", tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(tmp_path / f"{name}.py") in done.stderr


def test_a_package_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "__init__.py").write_text("")
    done = run("import kvstore", tmp_path)
    assert done.returncode == 1
    assert str(tmp_path / "client") in done.stderr


def test_a_module_imported_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text("")
    done = run("import client; import os; os.unlink('client.py'); import kvstore", tmp_path)
    assert str(tmp_path / "client.py") in done.stderr


def test_a_folder_without_code_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    done = run("import kvstore; print(kvstore.prefix_hashes.__name__)", tmp_path)
    assert done.stdout.strip() == "prefix_hashes", done.stderr


def test_importing_kvstore_loads_no_client(tmp_path: Path) -> None:
    code = "import kvstore; print([n for n in ('client', 'msgpack', 'numpy') if n in sys.modules])"
    assert run(code, tmp_path).stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in kvstore.__all__:
        assert getattr(kvstore, name) is not None
    assert set(kvstore.__all__) <= set(dir(kvstore))
    with pytest.raises(AttributeError):
        _ = kvstore.nothing_of_the_kind
