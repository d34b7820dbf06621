"""Where Redis is, as people write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.directory.address import PASSWORD_VARIABLE, Access, Address
from kvstore.directory.link import Link
from kvstore.errors import ConfigError

_GOOD = {
    "redis://cache": Address("single", (("cache", 6379),)),
    "redis://me@cache:7000/3": Address("single", (("cache", 7000),), database=3, user="me"),
    "redis://[::1]:7000": Address("single", (("::1", 7000),)),
    "redis://[::1]": Address("single", (("::1", 6379),)),
    "rediss://cache": Address("single", (("cache", 6379),), tls=True),
    "unix:///run/redis.sock": Address("unix", path="/run/redis.sock"),
    "unix://me@/run/redis.sock?database=2": Address(
        "unix", path="/run/redis.sock", database=2, user="me"
    ),
    "redis+sentinel://a,b:7000/main": Address(
        "sentinel", (("a", 26379), ("b", 7000)), service="main"
    ),
    "rediss+sentinel://me@a/main/4": Address(
        "sentinel", (("a", 26379),), service="main", database=4, user="me", tls=True
    ),
    "redis+cluster://a,b:7000": Address("cluster", (("a", 6379), ("b", 7000))),
    "rediss+cluster://a": Address("cluster", (("a", 6379),), tls=True),
}


@pytest.mark.parametrize("url", _GOOD)
def test_addresses(url: str) -> None:
    assert Address.parse(url) == _GOOD[url]
    assert "me" not in str(Address.parse(url)).replace("me@", "")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "begins with"),
        ("http://cache", "begins with"),
        ("cache:6379", "begins with"),
        ("redis://", "no host"),
        ("redis://cache:port", "port"),
        ("redis://cache:70000", "port"),
        ("redis://cache/x", "database"),
        ("redis://cache/1/2", "at most one"),
        ("redis://cache?timeout=3", "options"),
        ("redis://cache#x", "options"),
        ("redis+sentinel://a,b", "SERVICE"),
        ("redis+cluster://a/1", "one database"),
        ("redis+cluster://a,,b", "no host"),
        ("unix://redis.sock", "unix:///PATH"),
        ("unix:///run/redis.sock?database=-1", "database"),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Address.parse(url)


@pytest.mark.parametrize("url", ["redis://me:hush@cache", "redis+cluster://:hush@a,b"])
def test_a_password_in_the_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=PASSWORD_VARIABLE) as caught:
        Address.parse(url)
    assert "hush" not in str(caught.value)


def test_a_password_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert Access().password() is None
    monkeypatch.setenv(PASSWORD_VARIABLE, "from the environment")
    assert Access().password() == "from the environment"
    path = tmp_path / "password"
    access = Access(password_file=path)
    with pytest.raises(ConfigError, match="can't be read"):
        access.password()
    path.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        access.password()
    path.write_text("hush\nmore\n")
    assert access.password() == "hush"
    assert "hush" not in repr(access)


async def test_a_user_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="'me' needs a password"):
        Link(Address.parse("redis://me@cache"), Access())
