from __future__ import annotations

import hashlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tiers.ssd import format as fmt
from tiers.ssd.format import PAGE
from tiers.tier import Record

hashes = st.binary(min_size=32, max_size=32)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
records = st.builds(Record, hashes, u32, hashes, hashes, u32)
headers = st.builds(fmt.RecordHeader, records, u64, u64, u64, u32)
superblocks = st.builds(fmt.Superblock, u64, u64, st.binary(min_size=16, max_size=16))
heads = st.builds(fmt.RegionHead, u32, u64, u64, st.booleans(), st.binary(min_size=16, max_size=16))


def flipped(page: bytes, bit: int) -> bytes:
    changed = bytearray(page)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(headers)
def test_a_record_header_comes_back(header: fmt.RecordHeader) -> None:
    encoded, crc = fmt.encode_record(header)
    assert fmt.decode_record(encoded.ljust(PAGE, b"\0")) == (header, crc)


@given(headers, st.data())
def test_a_flipped_bit_in_a_record_header_is_noticed(
    header: fmt.RecordHeader, data: st.DataObject
) -> None:
    encoded, _ = fmt.encode_record(header)
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    assert fmt.decode_record(flipped(encoded.ljust(PAGE, b"\0"), bit)) is None


@given(superblocks, st.integers(0, 8 * PAGE - 1))
def test_a_superblock_survives_a_flipped_bit(superblock: fmt.Superblock, bit: int) -> None:
    page = fmt.encode_superblock(superblock)
    assert len(page) == PAGE
    assert fmt.decode_superblock(flipped(page, bit)) == superblock


@given(heads, st.integers(0, 8 * PAGE - 1))
def test_a_head_survives_a_flipped_bit(head: fmt.RegionHead, bit: int) -> None:
    page = fmt.encode_head(head)
    assert len(page) == PAGE
    assert fmt.decode_head(flipped(page, bit)) == head


@given(heads, heads, st.integers(0, PAGE))
def test_a_torn_head_is_the_old_or_the_new_one(
    old: fmt.RegionHead, new: fmt.RegionHead, cut: int
) -> None:
    torn = fmt.encode_head(new)[:cut] + fmt.encode_head(old)[cut:]
    assert fmt.decode_head(torn) in (old, new)


def test_of_two_sound_heads_the_later_counts() -> None:
    old = fmt.encode_head(fmt.RegionHead(1, 10, 5, True, bytes(16)))
    new = fmt.RegionHead(1, 11, 6, False, bytes(16))
    half = PAGE // 2
    assert fmt.decode_head(fmt.encode_head(new)[:half] + old[half:]) == new
    assert fmt.decode_head(old[:half] + fmt.encode_head(new)[half:]) == new


@given(st.binary(max_size=2 * PAGE))
@example(b"")
@example(b"kvs.ssd\0")
@example(b"kvs.rec\0" + bytes(PAGE))
def test_garbage_is_none(data: bytes) -> None:
    assert fmt.decode_superblock(data) is None
    assert fmt.decode_head(data) is None
    assert fmt.decode_record(data) is None
    assert fmt.decode_footer(data) is None


def test_another_format_version_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(bytes(32), 0, bytes(32), bytes(32), 1)
    monkeypatch.setattr(fmt, "FORMAT_VERSION", fmt.FORMAT_VERSION + 1)
    superblock = fmt.encode_superblock(fmt.Superblock(1 << 20, 1, bytes(16)))
    head = fmt.encode_head(fmt.RegionHead(0, 1, 1, True, bytes(16)))
    header, _ = fmt.encode_record(fmt.RecordHeader(record, 1, 1, 1, 1))
    footer = fmt.encode_summary(fmt.make_footer(0, 1, 1, 1, b""), b"")
    monkeypatch.undo()
    assert fmt.decode_superblock(superblock) is None
    assert fmt.decode_head(head) is None
    assert fmt.decode_record(header) is None
    assert fmt.decode_footer(footer) is None


def entries_of(*spans: tuple[int, int]) -> bytes:
    """Summary entries of records at (page, size)."""
    entries = b""
    for page, size in spans:
        name = hashlib.sha256(b"%d" % page).digest()
        record = Record(bytes(32), 7, name, bytes(32), size)
        header = fmt.RecordHeader(record, 1, page, 100 + page, 3)
        entries += fmt.encode_entry(header, 4, page)
    return entries


def test_a_summary_comes_back() -> None:
    entries = entries_of((1, 5000), (4, 1), (6, PAGE))
    summary = fmt.encode_summary(fmt.make_footer(3, 9, 12, 8, entries), entries)
    assert len(summary) == fmt.summary_pages(3) * PAGE
    footer = fmt.decode_footer(summary[-PAGE:])
    assert footer is not None
    assert (footer.number, footer.generation, footer.sequence, footer.cursor) == (3, 9, 12, 8)
    assert fmt.sound_entries(entries, footer, 16)
    assert [page for page, _ in fmt.entry_records(entries)] == [1, 4, 6]
    assert next(fmt.entry_records(entries))[1].size == 5000
    assert fmt.read_entries(entries)["checksum"].tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "entries",
    [
        entries_of((0, 1)),
        entries_of((1, PAGE + 1), (3, 1)),
        entries_of((4, 1), (1, 1)),
        entries_of((1, 1), (7, 2 * PAGE)),
        entries_of((1, (1 << 32) - 1)),
        entries_of((1, 1))[:-1],
    ],
    ids=["on the head", "overlapping", "backwards", "beyond the cursor", "huge", "short"],
)
def test_impossible_entries_are_not_sound(entries: bytes) -> None:
    assert not fmt.sound_entries(entries, fmt.make_footer(0, 1, 1, 9, entries), 16)


@given(st.integers(0, 8 * len(entries_of((1, 1), (3, 1))) - 1))
def test_a_flipped_bit_in_the_entries_is_noticed(bit: int) -> None:
    entries = entries_of((1, 1), (3, 1))
    footer = fmt.make_footer(0, 1, 1, 5, entries)
    assert fmt.sound_entries(entries, footer, 16)
    assert not fmt.sound_entries(flipped(entries, bit), footer, 16)


def test_the_format_changes_only_with_its_version() -> None:
    one = Record(b"n" * 32, 2, b"h" * 32, b"p" * 32, 5000)
    header, crc = fmt.encode_record(fmt.RecordHeader(one, 3, 4, 5, 6))
    entry = fmt.encode_entry(fmt.RecordHeader(one, 3, 4, 5, 6), crc, 1)
    pages = [
        fmt.encode_superblock(fmt.Superblock(1 << 26, 9, b"s" * 16)),
        fmt.encode_head(fmt.RegionHead(1, 3, 4, True, b"s" * 16)),
        header,
        fmt.encode_summary(fmt.make_footer(1, 3, 7, 4, entry), entry),
    ]
    assert (fmt.FORMAT_VERSION, hashlib.sha256(b"".join(pages)).hexdigest()) == (
        1,
        "1dc03964b8b1e33bca9b82238e0964167d2ee11182ea33d986d9bebe5db00031",
    )
