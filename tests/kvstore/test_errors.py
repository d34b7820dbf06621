import pytest

from kvstore import errors
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    MissingExtra,
    ParentAbsent,
    ProtocolError,
    ShadowedPackage,
    StateLocked,
    Unavailable,
    UnknownError,
    from_code,
)

KINDS = [
    getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)
]


def test_every_kind_has_its_own_code() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_after_the_wire(kind: type[KVStoreError]) -> None:
    rebuilt = from_code(kind.code, "what happened", kind.retry)
    assert type(rebuilt) is kind
    assert str(rebuilt) == "what happened"
    assert rebuilt.retry is kind.retry


def test_a_kind_of_a_newer_node_keeps_what_it_said() -> None:
    rebuilt = from_code("too_hot", "the room is on fire", retry=True)
    assert type(rebuilt) is UnknownError
    assert rebuilt.retry
    assert not UnknownError.retry
    assert "too_hot" in str(rebuilt)
    assert "fire" in str(rebuilt)


def test_what_may_be_retried() -> None:
    assert Unavailable.retry
    assert DeadlineExceeded.retry
    assert not ProtocolError.retry
    assert issubclass(ParentAbsent, InvalidRequest)


def test_messages_name_what_is_in_the_way() -> None:
    assert "4711" in str(StateLocked.held("/var/lib/x", 4711))
    assert "/var/lib/x" in str(StateLocked.held("/var/lib/x", None))
    assert "tiered-kvstore[plot]" in str(MissingExtra.named("plot", "A plot"))
    assert "/home/me/client.py" in str(ShadowedPackage.by("client", "/home/me/client.py"))
