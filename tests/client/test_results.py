"""What results look like to somebody at a prompt."""

from __future__ import annotations

import pytest

from client.results import FAILED, HELD, STORED, Change, Changes, GetResult, Match, PutResult
from kvstore.protocol.messages import ABSENT, DRAM, SSD


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (Match(bytes([DRAM, DRAM, SSD])), "Match(blocks=3, dram=2, ssd=1)"),
        (Match(b""), "Match(blocks=0)"),
        (Match(b"", "unavailable"), "Match(blocks=0, failure='unavailable')"),
        (GetResult(bytes([SSD, ABSENT])), "GetResult(blocks=2, ssd=1, absent=1)"),
        (PutResult(bytes([STORED, HELD, HELD])), "PutResult(stored=1, held=2)"),
        (PutResult(bytes([FAILED]), "deadline"), "PutResult(failed=1, failure='deadline')"),
        (Changes(9, True, [Change(b"", True)] * 2), "Changes(sequence=9, complete=True, stored=2)"),
        (
            Changes(0, True, failure="unavailable"),
            "Changes(sequence=0, complete=True, failure='unavailable')",
        ),
    ],
)
def test_results_show_counts_instead_of_codes(result: object, shown: str) -> None:
    assert repr(result) == shown
