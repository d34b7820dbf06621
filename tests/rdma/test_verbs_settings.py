import pytest

from rdma.errors import TransportError
from rdma.verbs.errors import (
    DeviceError,
    LocalAccessError,
    PeerLost,
    QueueBroken,
    RemoteAccessError,
    error_of_status,
    name_of_status,
)
from rdma.verbs.settings import QueueSettings, retry_seconds


def test_a_silent_peer_counts_as_lost_well_within_a_second() -> None:
    assert 0.4 < retry_seconds(QueueSettings()) < 0.6


@pytest.mark.parametrize(
    "wrong",
    [
        {"mtu": 1500},
        {"retry_count": 7},
        {"rnr_retry": 7},
        {"traffic_class": 256},
        {"service_level": 16},
        {"timeout": 0},
        {"timeout": 32},
        {"depth": 0},
        {"chain": 0},
        {"reads": 0},
        {"bytes_in_flight": 1 << 16},
    ],
)
def test_settings_that_no_device_takes_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(DeviceError):
        QueueSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "kind", "retry", "word"),
    [
        (4, LocalAccessError, False, "LOC_PROT_ERR"),
        (5, QueueBroken, True, "WR_FLUSH_ERR"),
        (10, RemoteAccessError, False, "REM_ACCESS_ERR"),
        (12, PeerLost, True, "RETRY_EXC_ERR"),
        (13, PeerLost, True, "RNR_RETRY_EXC_ERR"),
        (21, QueueBroken, True, "GENERAL_ERR"),
        (99, QueueBroken, True, "status 99"),
    ],
)
def test_each_status_is_an_error_of_its_kind(
    status: int, kind: type[TransportError], retry: bool, word: str
) -> None:
    error = error_of_status(status)
    assert type(error) is kind
    assert error.retry is retry
    assert word in str(error)


def test_every_status_has_an_error_and_a_name() -> None:
    for status in range(1, 30):
        assert isinstance(error_of_status(status), QueueBroken)
    assert name_of_status(0) == "SUCCESS"
