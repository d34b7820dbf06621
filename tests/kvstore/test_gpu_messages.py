"""What client and node say to each other about GPUs: what travels, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import InvalidRequest, ProtocolError
from kvstore.protocol.messages import (
    DeviceSegments,
    DeviceSegmentsAnswer,
    Get,
    GpuOffer,
    Release,
    Unmapped,
    answer_header,
    parse_answer,
    parse_request,
    request_header,
    unmapped_header,
)

HANDLE = bytes(range(64))
NAME = b"0123456789abcdef"


def test_a_get_says_device_only_where_it_is_meant() -> None:
    plain, device = Get((bytes(32),)), Get((bytes(32),), device=True)
    assert len(request_header(1, 5, plain)) == 9
    assert parse_request(request_header(1, 5, plain)).request == plain
    assert parse_request(request_header(1, 5, device)).request == device
    assert device != plain


@pytest.mark.parametrize("more", [[1], [None], [True, True]])
def test_a_get_with_nonsense_behind_is_refused(more: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse_request([*request_header(1, 5, Get((bytes(32),))), *more])


def test_segments_and_their_handles() -> None:
    request = DeviceSegments([3, 0xF_FFFF])
    assert parse_request(request_header(1, 5, request)).request == request
    answer = DeviceSegmentsAnswer([(3, 1 << 30, HANDLE), (0xF_FFFF, 7, HANDLE[::-1])])
    assert parse_answer(request, answer_header(1, answer)) == answer


@pytest.mark.parametrize(
    "values",
    [
        [[3, 8, 4, 8], HANDLE],
        [[3, 8], HANDLE + b"!"],
        [[3, 8, 4], HANDLE],
        [[3, 8], "x" * 64],
        [[3, -8], HANDLE],
        [[4, 8], HANDLE],
        [[], b""],
        [[3, 8]],
    ],
)
def test_an_answer_that_does_not_fit_breaks_the_connection(values: list[object]) -> None:
    with pytest.raises(ProtocolError):
        parse_answer(DeviceSegments([3]), [1, 0, *values])


@pytest.mark.parametrize("numbers", [[1 << 20], [-1], [1, 1], "1", list(range(129)), [True]])
def test_numbers_that_are_none_are_refused(numbers: object) -> None:
    with pytest.raises(InvalidRequest):
        parse_request([1, DeviceSegments.op, 5, numbers])


def test_unmapped_is_said_one_way() -> None:
    header = unmapped_header([1, 2])
    assert parse_request(header).request == Unmapped([1, 2])
    assert header == [0, Unmapped.op, 0, [1, 2]]
    with pytest.raises(InvalidRequest, match="request id 0"):
        parse_request([1, Unmapped.op, 0, [1]])
    with pytest.raises(InvalidRequest, match="request id 0"):
        parse_request([0, DeviceSegments.op, 0, [1]])
    assert parse_request([0, Release.op, 0, [1]]).request == Release([1])


def test_an_offer_names_gpus() -> None:
    assert GpuOffer.parse(None) is None
    assert GpuOffer.parse({"of": "another version"}) is None
    offer = GpuOffer.parse({"gpu": NAME, "gpus": [NAME, bytes(16)], "more": 1})
    assert offer == GpuOffer(NAME, frozenset([NAME, bytes(16)]))


@pytest.mark.parametrize(
    "offer",
    [
        "gpu",
        {"gpu": NAME},
        {"gpu": NAME[1:], "gpus": []},
        {"gpu": NAME, "gpus": [NAME + b"!"]},
        {"gpu": NAME, "gpus": NAME},
        {"gpu": 1, "gpus": []},
        {"gpu": NAME, "gpus": [NAME] * 65},
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(offer: object) -> None:
    with pytest.raises(InvalidRequest):
        GpuOffer.parse(offer)
