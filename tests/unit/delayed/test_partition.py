"""A partition over a log in memory: the log and its files change while they are read."""

import pytest
from tests.support.index_files import damage, files_in

from duetime.core import headers as H
from duetime.core.errors import KafkaError
from duetime.delayed.index import Cursor, SegmentLimits
from duetime.delayed.partition import CacheBudget, CommittedPosition, DelayedPartition, RecordCache

NOW_MS = 1_000_000
FAR_MS = NOW_MS + 60_000


class Record:
    def __init__(self, offset, time_ms):
        self._offset, self._time_ms = offset, time_ms

    def offset(self):
        return self._offset

    def headers(self):
        return [(H.DELIVER_AFTER_MS, str(self._time_ms).encode())]

    def timestamp(self):
        return 1, NOW_MS

    def key(self):
        return None

    def value(self):
        return b"%d" % self._offset


class Log:
    """The part of a LogReader that a partition uses."""

    def __init__(self, times):
        self.records = [Record(offset, time_ms) for offset, time_ms in enumerate(times)]
        self.first = 0
        self.is_away = False

    def bounds(self, _place):
        return self.first, len(self.records)

    def batches(self, _place, start, end):
        for at in range(start, end, 10):
            if self.is_away and at > start:
                raise KafkaError("away")
            yield self.records[max(at, self.first) : min(at + 10, end)]


def opened(log, files=None, position=None):
    partition = DelayedPartition(
        place=("topic", 0),
        reader=log,
        cache=RecordCache(CacheBudget(0)),
        files=files,
        limits=SegmentLimits(records=10),
    )
    partition.open(position or CommittedPosition(0, Cursor.start(0)), NOW_MS)
    return partition


def taken(partition, now_ms):
    found = []
    while some := partition.take(now_ms, 100):
        for each in some:
            partition.returned(each)
            found.append(each.record.offset())
    return found


def test_a_log_unavailable_during_a_reopening_loses_nothing(tmp_path):
    log = Log([FAR_MS] * 45)
    partition = opened(log, files_in(str(tmp_path)))
    for path in tmp_path.rglob("*.parquet"):
        damage(path)
    log.is_away = True
    with pytest.raises(KafkaError, match="away"):
        partition.take(FAR_MS, 100)
    # Records that arrive now are behind those that could not be read.
    log.records += [Record(45 + number, FAR_MS) for number in range(5)]
    partition.append(log.records[45:], NOW_MS)
    log.is_away = False
    assert taken(partition, FAR_MS) == list(range(50))


def test_a_file_beyond_the_end_of_the_log_is_ignored(tmp_path):
    opened(Log([FAR_MS] * 40), files_in(str(tmp_path)))
    # An unclean election: the end was lost, and written again.
    shorter = Log([FAR_MS] * 15 + [NOW_MS] * 3)
    partition = opened(shorter, files_in(str(tmp_path)))
    assert taken(partition, NOW_MS) == [15, 16, 17]
    assert taken(partition, FAR_MS) == list(range(15))


def test_records_removed_ahead_of_a_reader_are_counted():
    log = Log([NOW_MS] * 10)
    partition = opened(log)
    log.records += [Record(10 + number, NOW_MS) for number in range(500)]
    log.first = 400
    partition.append(log.records[400:], NOW_MS)
    assert partition.cache.removed == 390


def test_transaction_markers_are_no_removed_records():
    log = Log([NOW_MS] * 10)
    partition = opened(log)
    log.records += [Record(300 + number, NOW_MS) for number in range(10)]
    partition.append(log.records[10:], NOW_MS)
    assert partition.cache.removed == 0
    assert partition.index.end == 310
