"""Where cancels go, without a broker: to each slot where their message may wait."""

from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest
from pyspark.sql import functions as F
from tests.conftest import RECORD

from duetime.config import Settings
from duetime.message import MessageId
from duetime.pipeline.intake import Intake
from duetime.topics import TopicNames
from duetime.wheel import Slot

pytestmark = pytest.mark.system

KAFKA, REDIS = Settings(), Settings(store="redis://127.0.0.1")
WHEEL, NAMES = KAFKA.wheel, TopicNames(KAFKA)

SECOND_MS = 1_000

#: A while before a slot of level 2 begins, and that of level 1 with it: both are to be cascaded.
NOW_MS = WHEEL.start_ms(Slot(2, 439_453)) - 272 * SECOND_MS

#: On one level, on two (0 and 1, 1 and 2), and refused as too late.
DUE_MS = [
    NOW_MS + delay_s * SECOND_MS
    for delay_s in (*range(2, 120), *range(250, 400, 7), *range(4_000, 5_000, 7), 10**7)
]


def rows_of(spark, settings):
    """What the sink would get for a cancel of each, with the due times of each row."""
    sent = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=NOW_MS)
    records = [
        (NAMES.control, 0, at, sent, str(MessageId(due_ms=due_ms, unique="m")).encode(), None, None)
        for at, due_ms in enumerate(DUE_MS)
    ]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    asks = F.array(F.struct(F.lit("due-op").alias("key"), F.lit(b"cancel").alias("value")))
    intake = Intake(settings)
    asked = intake.understood(frame.withColumn("headers", asks)).withColumn("now", F.lit(NOW_MS))
    rows = asked.transform(intake.judged).transform(intake.routed).collect()
    return [(MessageId.parse(row.key.decode()).due_ms, row.topic, row.partition) for row in rows]


def slots(due_ms):
    """Where a message due then may be, if it was sent now or at any time before."""
    found = [WHEEL.place(due_ms, NOW_MS), *WHEEL.open_above(due_ms, NOW_MS)]
    return [(due_ms, NAMES.wheel(each.level), WHEEL.partition(each)) for each in found]


def test_a_cancel_goes_to_each_slot_where_its_message_may_wait(spark):
    in_time = [each for each in DUE_MS if each - NOW_MS >= KAFKA.horizon_ms]
    late = [(each, NAMES.rejected, None) for each in DUE_MS if each not in in_time]
    expected = [slots(each) for each in in_time]
    assert {tuple(topic for _, topic, _ in each) for each in expected if len(each) > 1} == {
        (NAMES.wheel(0), NAMES.wheel(1)),
        (NAMES.wheel(1), NAMES.wheel(2)),
    }
    assert sorted(rows_of(spark, KAFKA), key=str) == sorted([*late, *chain(*expected)], key=str)


def test_a_cancel_for_another_store_is_one_record(spark):
    taken = [topic for _, topic, _ in rows_of(spark, REDIS) if topic != NAMES.rejected]
    in_time = [each for each in DUE_MS if each - NOW_MS >= KAFKA.horizon_ms]
    assert taken == [NAMES.store] * len(in_time)
