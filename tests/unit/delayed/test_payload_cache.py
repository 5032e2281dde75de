"""The cache of records, within its budget."""

import pytest

from duetime.core.errors import KafkaError
from duetime.delayed.partition import OBJECT_BYTES, CacheBudget, RecordCache
from duetime.delayed.segments import entries_of


class Record:
    """The part of a record that the cache uses."""

    def __init__(self, offset, size):
        self._offset, self._value = offset, bytes(size)

    def offset(self):
        return self._offset

    def key(self):
        return None

    def value(self):
        return self._value


def test_records_read_again_do_not_evict_those_taken_with_them():
    # All are due at the same time, so that none is due last; the small ones fit together.
    sizes = [0, 0, 0, 5_000, 0, 0]
    log = [Record(offset, size) for offset, size in enumerate(sizes)]
    entries = entries_of([7] * len(log), range(len(log)))
    cache = RecordCache(CacheBudget(4 * OBJECT_BYTES))
    cache.add(entries[:3], log[:3])
    batch, ahead = entries[:4], entries[4:]
    found = cache.take(batch, ahead, lambda start, end: [log[start:end]])
    assert found == log[:4]
    assert cache.removed == 0


def test_a_failed_read_can_be_repeated():
    log = [Record(0, 0)]
    cache = RecordCache(CacheBudget(0))

    def broken(_start, _end):
        raise KafkaError("away")

    with pytest.raises(KafkaError):
        cache.take(entries_of([7], [0]), entries_of([], []), broken)
    found = cache.take(entries_of([7], [0]), entries_of([], []), lambda *_: [log])
    assert (found, cache.removed) == (log, 0)
