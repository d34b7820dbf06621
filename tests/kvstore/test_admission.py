"""Which token opens which tenant."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from kvstore.admission import Admission
from kvstore.errors import AccessDenied, ConfigError

TOKENS = {"a": "a's", "b": "b's"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    files = {tenant: tmp_path / tenant for tenant in TOKENS}
    for tenant, file in files.items():
        file.write_text(f"{TOKENS[tenant]}\nmore\n")
    return files


def lets_in(admission: Admission, tenant: str, token: str | None) -> bool:
    try:
        admission.admit(tenant, token)
    except AccessDenied as error:
        assert str(error) == "the session token is missing or wrong"
        return False
    return True


@pytest.mark.parametrize("general", [None, "general"])
def test_a_token_opens_its_tenant_and_no_other(files: dict[str, Path], general: str | None) -> None:
    admission = Admission(general, files)
    opened = {
        (tenant, token)
        for tenant, token in product(
            ["a", "b", "c", "*", ""], [*TOKENS.values(), "general", "", None, "\ud800"]
        )
        if lets_in(admission, tenant, token)
    }
    own = {("a", "a's"), ("b", "b's")}
    if general is None:
        assert {pair for pair in opened if pair[0] in TOKENS} == own
        assert len(opened) == 2 + 3 * 6
    else:
        assert opened == own | {("c", "general"), ("*", "general"), ("", "general")}


def test_a_token_changes_with_its_file(files: dict[str, Path]) -> None:
    admission = Admission("general", files)
    files["a"].write_text("new")
    assert admission.token_of("a") == "new"
    assert lets_in(admission, "a", "new")
    assert not lets_in(admission, "a", "a's")


@pytest.mark.parametrize("broken", ["gone", "empty", "binary"])
def test_a_tenant_without_a_readable_token_is_closed(files: dict[str, Path], broken: str) -> None:
    admission = Admission(None, files)
    admission.check_files()
    if broken == "gone":
        files["a"].unlink()
    else:
        files["a"].write_bytes(b"\n" if broken == "empty" else b"\xff\xfe")
    for token in ("a's", "", None):
        assert not lets_in(admission, "a", token)
    assert lets_in(admission, "b", "b's")
    with pytest.raises(ConfigError, match=r"tenants\.a\.token_file: .*/a "):
        admission.check_files()


def test_no_token_is_printed(files: dict[str, Path]) -> None:
    assert "a's" not in repr(Admission("general", files))
    assert "general" not in repr(Admission("general", files))
