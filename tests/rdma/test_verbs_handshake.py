import contextlib
from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdma.verbs.errors import HandshakeError
from rdma.verbs.handshake import Endpoint, describe, joint_mtu, parse

END = Endpoint(0x1234, 0xABCDEF, IPv6Address("::ffff:192.0.2.17"), 4096, 16)


def test_an_end_survives_the_telling() -> None:
    assert parse(describe(END)) == END
    telling = END._replace(proof=(1 << 40, 77))
    assert parse(describe(telling)) == telling


def test_what_is_not_known_is_ignored() -> None:
    assert parse({**describe(END), "colour": "blue"}) == END


def test_the_smaller_mtu_counts() -> None:
    assert joint_mtu(END, END._replace(mtu=1024)) == 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", 1),
        ("queue", 1 << 24),
        ("queue", True),
        ("queue", "17"),
        ("psn", -1),
        ("psn", 1 << 24),
        ("mtu", 1500),
        ("mtu", 4096.0),
        ("reads", -1),
        ("proof", [1]),
        ("proof", [1, 1 << 32]),
        ("proof", "12"),
        ("gid", "::1"),
        ("gid", b"\0" * 16),
        ("gid", b"\xff\x02" + b"\0" * 13 + b"\x01"),
        ("gid", b"\0" * 15),
    ],
)
def test_nonsense_is_refused(name: str, value: object) -> None:
    with pytest.raises(HandshakeError):
        parse({**describe(END), name: value})


@pytest.mark.parametrize("name", list(describe(END)))
def test_nothing_may_be_missing(name: str) -> None:
    details = describe(END)
    del details[name]
    with pytest.raises(HandshakeError):
        parse(details)


@given(
    st.dictionaries(
        st.sampled_from(["queue", "psn", "gid", "mtu", "reads"]),
        st.one_of(st.none(), st.integers(), st.binary(max_size=20), st.text(), st.floats()),
    )
)
def test_whatever_comes_is_read_or_refused(details: dict[str, object]) -> None:
    with contextlib.suppress(HandshakeError):
        parse(details)
