"""A partition over a log in memory: what happens to a log, and to its files, while it is read."""

import pytest
from tests.delayed.test_index import damage, files_in

from duetime.delayed.cursor import Cursor
from duetime.delayed.index import Limits
from duetime.delayed.partition import DelayedPartition, Position
from duetime.delayed.payloads import Payloads, Room
from duetime.errors import KafkaError
from duetime.message import DELIVER_AFTER_MS

NOW_MS = 1_000_000
FAR_MS = NOW_MS + 60_000


class Record:
    def __init__(self, offset, time_ms):
        self._offset, self._time_ms = offset, time_ms

    def offset(self):
        return self._offset

    def headers(self):
        return [(DELIVER_AFTER_MS, str(self._time_ms).encode())]

    def timestamp(self):
        return 1, NOW_MS

    def key(self):
        return None

    def value(self):
        return b"%d" % self._offset


class Log:
    """As much of a LogReader as a partition asks for."""

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
        payloads=Payloads(Room(0)),
        files=files,
        limits=Limits(records=10),
    )
    partition.open(position or Position(0, Cursor.start(0)), NOW_MS)
    return partition


def taken(partition, now_ms):
    found = []
    while some := partition.take(now_ms, 100):
        for each in some:
            partition.returned(each)
            found.append(each.record.offset())
    return found


def test_a_log_that_is_away_while_a_lost_file_is_made_good_loses_nothing(tmp_path):
    log = Log([FAR_MS] * 45)
    partition = opened(log, files_in(str(tmp_path)))
    for path in tmp_path.rglob("*.parquet"):
        damage(path)
    log.is_away = True
    with pytest.raises(KafkaError, match="away"):
        partition.take(FAR_MS, 100)
    # What comes in meanwhile is behind what could not be read.
    log.records += [Record(45 + number, FAR_MS) for number in range(5)]
    partition.append(log.records[45:], NOW_MS)
    log.is_away = False
    assert taken(partition, FAR_MS) == list(range(50))


def test_a_file_of_what_the_log_has_lost_is_not_believed(tmp_path):
    opened(Log([FAR_MS] * 40), files_in(str(tmp_path)))
    # An unclean election: the end is gone, and written anew.
    shorter = Log([FAR_MS] * 15 + [NOW_MS] * 3)
    partition = opened(shorter, files_in(str(tmp_path)))
    assert taken(partition, NOW_MS) == [15, 16, 17]
    assert taken(partition, FAR_MS) == list(range(15))


def test_what_retention_removes_in_front_of_a_running_reader_is_counted():
    log = Log([NOW_MS] * 10)
    partition = opened(log)
    log.records += [Record(10 + number, NOW_MS) for number in range(500)]
    log.first = 400
    partition.append(log.records[400:], NOW_MS)
    assert partition.payloads.removed == 390


def test_offsets_of_a_transaction_are_no_removed_records():
    log = Log([NOW_MS] * 10)
    partition = opened(log)
    log.records += [Record(300 + number, NOW_MS) for number in range(10)]
    partition.append(log.records[10:], NOW_MS)
    assert partition.payloads.removed == 0
    assert partition.index.end == 310
