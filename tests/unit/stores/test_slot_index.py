import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core.messages import MessageId
from duetime.kafka.offsets import OffsetRange
from duetime.stores import slot_index
from duetime.stores.slot_index import (
    DIRECTORY_ID,
    OFFSET_BITS,
    Block,
    Directory,
    IndexReader,
    fingerprint,
    index_headers,
    matches,
    page_of,
)

fingerprints = st.integers(0, 2**31 - 1)


@given(st.lists(st.tuples(fingerprints | st.integers(0, 3), st.integers(0, 2**32 - 1))))
def test_a_page_matches_exactly_one_fingerprint(entries):
    packed = sorted(one << OFFSET_BITS | offset for one, offset in entries)
    page = struct.pack(f"<{len(packed)}q", *packed)
    for wanted in {one for one, _ in entries} | {1}:
        assert matches(page, wanted) == sorted(at for one, at in entries if one == wanted)


@given(fingerprints, st.integers(0, 20))
def test_each_fingerprint_has_a_page(wanted, bits):
    assert 0 <= page_of(wanted, 1 << bits) < 1 << bits


def test_a_directory_round_trips():
    directory = Directory((Block(0, 5, (7,)), Block(5, 2**40, (2**40, None))))
    assert Directory.decode(directory.encoded()) == directory


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b'{"blocks": [1]}', b"\xff", b'{"blocks": 1}']
)
def test_an_invalid_directory_raises(value):
    with pytest.raises((ValueError, TypeError, LookupError)):
        Directory.decode(value)


def test_the_fingerprint_of_an_id_never_changes():
    """Slots wait for years: a later release looks up what an earlier one has indexed."""
    assert fingerprint(MessageId(due_ms=1, unique="a")) == 1_332_095_555


class Log:
    """A slot in memory, with its index, as a RangeReader reads it."""

    def __init__(self, slot, pages_in_a_row):
        self.records, self.blocks = list(slot), []
        self._pages_in_a_row = pages_in_a_row

    def index(self, start, end, bits):
        """Append a block as the pipeline does. Other records may come between its pages."""
        entries = sorted(
            fingerprint(each) << OFFSET_BITS | offset - start
            for offset, each in enumerate(self.records[start:end], start)
            if isinstance(each, MessageId)
        )
        offsets = []
        for number in range(1 << bits):
            page = [each for each in entries if page_of(each >> OFFSET_BITS, 1 << bits) == number]
            offsets.append(len(self.records))
            block = Block(start, end, (None,) * (1 << bits))
            self.records.append((block.page_id(number), struct.pack(f"<{len(page)}q", *page)))
            if not self._pages_in_a_row:
                self.records.append(MessageId(due_ms=7, unique=f"between-{len(self.records)}"))
        self.blocks.append(Block(start, end, tuple(offsets)))
        self.records.append((DIRECTORY_ID, Directory(tuple(self.blocks)).encoded()))
        self.committed_offset = len(self.records) - 1

    def committed(self, _):
        return self.committed_offset

    def read(self, ranges):
        (one,) = ranges
        for offset in range(one.start, min(one.end, len(self.records))):
            yield IndexRecord(offset, self.records[offset])


class IndexRecord:
    def __init__(self, offset, record):
        self._offset, self._record = offset, record

    def offset(self):
        return self._offset

    def headers(self):
        return index_headers(self._record[0]) if isinstance(self._record, tuple) else []

    def value(self):
        return self._record[1]


@given(st.data(), st.booleans(), st.integers(0, 4))
def test_a_look_up_reads_every_record_of_an_id(data, in_a_row, bits):
    slot = [MessageId(due_ms=7, unique=f"m{number % 70}") for number in range(90)]
    log = Log(slot, in_a_row)
    log.index(0, 40, bits)
    log.index(40, data.draw(st.integers(41, 90)), bits)
    log.records += slot[:5]
    broken = data.draw(st.sets(st.integers(90, len(log.records) - 6), max_size=3))
    for offset in broken:
        log.records[offset] = slot[0]
    start, wanted = data.draw(st.integers(0, 89)), data.draw(st.sampled_from(slot))
    waiting = OffsetRange("wheel", 3, start, len(log.records))
    reader = SimpleNamespace(committed=log.committed, records=log.read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_index, "MIN_SKIPPED_PAGES", 1)
        patch.setattr(slot_index, "NEAR_OFFSETS", 0)
        parts = IndexReader(reader).narrowed(wanted, waiting)
    read = [offset for each in parts for offset in range(each.start, each.end)]
    assert read == sorted(set(read))
    there = {at for at, each in enumerate(log.records) if each == wanted and at >= start}
    # Where a page is overwritten, its records are found by reading the block.
    assert there - broken <= set(read)
    assert not broken or set(read) <= set(range(start, len(log.records)))
    if not broken:
        indexed = log.blocks[-1].end
        assert {at for at in read if at < indexed} == {at for at in there if at < indexed}
