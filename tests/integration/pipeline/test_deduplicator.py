"""Deduplicator: which record of a message is the latest, and so which are dropped."""

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import functions as F
from tests.support.servers import RECORD

from duetime.core import headers as H
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline.delivery.rows import parsed
from duetime.pipeline.recovery.deduplicator import Deduplicator, ScanRange
from duetime.pipeline.recovery.read_back import hop_rank

SETTINGS = Settings(clusters={"eu": {"bootstrap": "eu:9092"}})
NAMES = TopicNames(SETTINGS)

SCOPE = ScanRange(since_ms=0, destinations={})


class Found:
    """A scan that has found these records."""

    settings, cluster = SETTINGS, None

    def __init__(self, records):
        self._ids = parsed(records).select(
            "id",
            F.lit(False).alias("is_delivered"),
            hop_rank(SETTINGS).alias("progress"),
            *("timestamp", "topic", "partition", "offset"),
        )

    def internal(self, _since_ms, _cache):
        return self._ids

    def destinations(self, _topics, _since_ms, _cache):
        return None


def record(place, later_ms=0, attempts=None, offset=5):
    """One of the message's records, appended so much later by the clock of its broker."""
    topic, partition = place
    state = f"1:::{attempts}" if attempts else "1"
    values = {"due-topic": "orders", "due-at-ms": "17", "due-id": "000000000011-m"}
    values["due-state"] = state
    headers = [(name, values[name].encode()) for name in H.SCHEDULED if name in values]
    headers.insert(1, ("due-partition", None))
    stamped = datetime.now(UTC) + timedelta(milliseconds=later_ms)
    return topic, partition, offset, stamped, None, b"x", headers


@pytest.fixture
def is_left(spark):
    """Return whether a record is kept, when another one of its message is found."""

    def asked(one, other):
        rows = (
            spark.createDataFrame(spark.sparkContext.parallelize([each], 1), RECORD)
            for each in (one, other)
        )
        mine, found = rows
        deduplicator = Deduplicator(Found(found))
        return deduplicator.drop_moved_on(parsed(mine), SCOPE).count() == 1

    return asked


LANES, FAILED, OUTBOX = NAMES.lanes, NAMES.retry, NAMES.outbox("eu")

#: Two records of one message, the later one last.
STEPS = [
    (record((NAMES.wheel(2), 7)), record((NAMES.wheel(0), 9))),
    (record((LANES, 9)), record((LANES, 3))),
    (record((LANES, 0)), record((OUTBOX, 0))),
    (record((NAMES.wheel(0), 7)), record((FAILED, 0))),
    (record((FAILED, 0)), record((NAMES.wheel(1), 7), attempts=1)),
    (record((OUTBOX, 0), attempts=1), record((FAILED, 0), attempts=1)),
    (record((FAILED, 0)), record((OUTBOX, 0), attempts=1)),
    (record((FAILED, 0), attempts=9), record((NAMES.dead_letter, 0))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), STEPS, ids=lambda each: each[0])
@pytest.mark.parametrize("ahead_ms", [-4_900, 0, 4_900])
def test_furthest_record_is_the_latest_whatever_the_brokers_clocks(
    is_left, before, after, ahead_ms
):
    stamped = (*before[:3], after[3] + timedelta(milliseconds=ahead_ms), *before[4:])
    assert not is_left(stamped, after)
    assert is_left(after, stamped)


def test_later_of_two_records_equally_far_is_the_latest(is_left):
    first, second = record((FAILED, 0)), record((FAILED, 1), later_ms=100)
    assert not is_left(first, second)
    assert is_left(second, first)


@pytest.mark.slow
@pytest.mark.parametrize("ahead_ms", [0, 1_900, 4_900])
def test_offset_decides_within_a_partition_and_not_the_clock(is_left, ahead_ms):
    """The longest lane may be taken twice. Between the two its leader may move to a slower clock.

    The record that is left is the one in flight: the other one is committed. If the timestamp
    decided, the message would be dropped as if it had gone on.
    """
    longest = LANES, SETTINGS.delay_lanes.lanes - 1
    first, second = record(longest, later_ms=ahead_ms, offset=10), record(longest, offset=20)
    assert not is_left(first, second)
    assert is_left(second, first)
