"""Where cancels and replacements go, without a broker."""

from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest
from pyspark.sql import functions as F
from tests.support.servers import RECORD

from duetime.core.messages import REPLACING_MS, MessageId
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot
from duetime.core.topics import TopicNames
from duetime.pipeline.intake.query import Intake

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
    """Return the due time, topic and partition of each sink row for a cancel of each due time."""
    sent = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=NOW_MS)
    records = [
        (NAMES.control, 0, at, sent, str(MessageId(due_ms=due_ms, unique="m")).encode(), None, None)
        for at, due_ms in enumerate(DUE_MS)
    ]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(records, 1), RECORD)
    asks = F.array(F.struct(F.lit("due-op").alias("key"), F.lit(b"cancel").alias("value")))
    intake = Intake(settings)
    asked = intake.parse(frame.withColumn("headers", asks)).withColumn("now", F.lit(NOW_MS))
    rows = (
        asked.transform(intake.validate)
        .transform(intake.identify)
        .transform(intake.route)
        .collect()
    )
    return [(MessageId.parse(row.key.decode()).due_ms, row.topic, row.partition) for row in rows]


def slots(due_ms):
    """Where a message due then may be, if it was sent now or at any time before."""
    found = [WHEEL.place(due_ms, NOW_MS), *WHEEL.higher_slots(due_ms, NOW_MS)]
    return [(due_ms, NAMES.wheel(each.level), WHEEL.partitions_of(each)[0]) for each in found]


@pytest.mark.slow
def test_cancel_goes_to_each_slot_where_its_message_may_be(spark):
    in_time = [each for each in DUE_MS if each - NOW_MS >= KAFKA.short_delay_threshold_ms]
    late = [(each, NAMES.rejected, None) for each in DUE_MS if each not in in_time]
    expected = [slots(each) for each in in_time]
    assert {tuple(topic for _, topic, _ in each) for each in expected if len(each) > 1} == {
        (NAMES.wheel(0), NAMES.wheel(1)),
        (NAMES.wheel(1), NAMES.wheel(2)),
    }
    assert sorted(rows_of(spark, KAFKA), key=str) == sorted([*late, *chain(*expected)], key=str)


def test_cancel_for_another_store_is_one_record(spark):
    taken = [topic for _, topic, _ in rows_of(spark, REDIS) if topic != NAMES.rejected]
    in_time = [each for each in DUE_MS if each - NOW_MS >= KAFKA.short_delay_threshold_ms]
    assert taken == [NAMES.store_inbox] * len(in_time)


#: The nearest message that can be replaced by a record of that time.
NEAREST_MS = NOW_MS + KAFKA.short_delay_threshold_ms + REPLACING_MS

#: When the message is due that replaces another, in a slot of level 0.
NEW_MS = NOW_MS + 30 * SECOND_MS

NEW_SLOT = NAMES.wheel(0), WHEEL.partitions_of(WHEEL.place(NEW_MS, NOW_MS))[0]


def rows_of_replacing(spark, *records, settings=KAFKA, read_ms=NOW_MS):
    """Return the sink rows for records (topic, headers) with the timestamp NOW_MS."""
    sent = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=NOW_MS)
    rows = [
        (topic, 0, offset, sent, b"k", b"v", [(name, str(value).encode()) for name, value in said])
        for offset, (topic, said) in enumerate(records)
    ]
    intake = Intake(settings)
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), RECORD)
    asked = intake.parse(frame).withColumn("now", F.lit(read_ms))
    return (
        asked.transform(intake.validate)
        .transform(intake.identify)
        .transform(intake.route)
        .collect()
    )


def replacing(replaces, *others, due_ms=NEW_MS, topic=NAMES.native):
    address = ("due-topic", "orders"), ("due-at-ms", due_ms), ("due-replaces", replaces)
    return topic, [*address, *others]


def as_message(row):
    by_name = dict(row.headers)
    return row.topic, row.partition, bytes(row.value or b""), bytes(by_name["due-id"]).decode()


def as_cancels(rows):
    """Of cancels: the id, as key and header, that nothing else is said, and where they go."""
    for row in rows:
        address = [(name, value) for name, value in row.headers if name != "due-state"]
        identity = bytes(row.key)
        due_ms = MessageId.parse(identity.decode()).due_ms
        assert row.value is None
        assert address == [
            ("due-topic", None),
            ("due-partition", None),
            ("due-at-ms", str(due_ms).encode()),
            ("due-id", identity),
        ]
        yield due_ms, row.topic, row.partition


@pytest.mark.slow
@pytest.mark.parametrize("topic", [NAMES.native, NAMES.transactional])
def test_replacement_is_a_message_and_a_cancel_in_each_old_slot(spark, topic):
    old = [each for each in DUE_MS if each >= NEAREST_MS]
    own = ("due-id", "new"), ("due-partition", 3), ("due-cluster", "eu"), ("a", "b")
    own += (("due-expires-ms", NEW_MS + 1),)
    records = [replacing(MessageId(due_ms=each, unique="m"), *own, topic=topic) for each in old]
    rows = rows_of_replacing(spark, *records)
    messages = [row for row in rows if dict(row.headers)["due-topic"]]
    new = MessageId(due_ms=NEW_MS, unique="new")
    assert [as_message(row) for row in messages] == [(*NEW_SLOT, b"v", str(new))] * len(old)
    assert all("due-replaces" not in dict(row.headers) for row in messages)
    cancels = as_cancels(row for row in rows if row not in messages)
    assert sorted(cancels) == sorted(chain(*map(slots, old)))


@pytest.mark.slow
def test_replacement_in_another_store_is_a_message_and_one_cancel(spark):
    old = MessageId(due_ms=NEAREST_MS, unique="m")
    message, cancel = rows_of_replacing(spark, replacing(old, ("due-id", "n")), settings=REDIS)
    expected = NAMES.store_inbox, None, b"v", str(MessageId(due_ms=NEW_MS, unique="n"))
    assert as_message(message) == expected
    assert list(as_cancels([cancel])) == [(old.due_ms, NAMES.store_inbox, None)]


@pytest.mark.slow
def test_message_due_now_may_replace_a_scheduled_one(spark):
    old = MessageId(due_ms=NEAREST_MS, unique="m")
    message, cancel = rows_of_replacing(spark, replacing(old, due_ms=1))
    assert message.topic == "orders"
    assert list(as_cancels([cancel])) == slots(old.due_ms)


@pytest.mark.slow
def test_replacement_may_keep_the_unique_part_of_the_id(spark):
    old = MessageId(due_ms=NEAREST_MS, unique="order-17")
    message, _ = rows_of_replacing(spark, replacing(old, ("due-id", "order-17")))
    assert as_message(message)[-1] == str(MessageId(due_ms=NEW_MS, unique="order-17"))


REFUSED = {
    "no id": (replacing("order-17"), "bad-id"),
    "empty": (replacing(""), "bad-id"),
    "a schedule": (replacing(MessageId(due_ms=NEAREST_MS, unique="@schedule:daily")), "bad-id"),
    "by a schedule": (
        replacing(MessageId(due_ms=NEAREST_MS, unique="m"), ("due-cron", "@daily")),
        "bad-id",
    ),
    "itself": (replacing(MessageId(due_ms=NEW_MS, unique="m"), ("due-id", "m")), "bad-id"),
    "too near": (replacing(MessageId(due_ms=NEAREST_MS - 1, unique="m")), "too-late"),
    "past": (replacing(MessageId(due_ms=1, unique="m")), "too-late"),
    "bad otherwise": (
        replacing(MessageId(due_ms=NEAREST_MS, unique="m"), ("due-partition", "x")),
        "bad-partition",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("record", "reason"), REFUSED.values(), ids=REFUSED)
def test_invalid_replacement_is_rejected_and_the_old_message_stays(spark, record, reason):
    (row,) = rows_of_replacing(spark, record)
    assert row.topic == NAMES.rejected
    assert dict(row.headers)["due-error"] == reason.encode()
    assert (bytes(row.key), bytes(row.value)) == (b"k", b"v")


@pytest.mark.slow
def test_generated_id_cannot_replace_itself(spark):
    made = MessageId(due_ms=NEW_MS, unique="@in.0.0")
    (row,) = rows_of_replacing(spark, replacing(made))
    assert dict(row.headers)["due-error"] == b"bad-id"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [KAFKA, REDIS])
def test_replacement_is_decided_by_the_record_timestamp(spark, settings):
    """A record that is read a second time, after a crash, may have been taken in before."""
    old = MessageId(due_ms=NEAREST_MS, unique="m")
    record = replacing(old, due_ms=old.due_ms + 60 * SECOND_MS)
    planned_ms = old.due_ms - SECOND_MS
    _, cancel = rows_of_replacing(spark, record, settings=settings, read_ms=planned_ms)
    assert bytes(cancel.key) == str(old).encode()
    # No slot would drop it together with its message.
    (message,) = rows_of_replacing(spark, record, settings=settings, read_ms=old.due_ms)
    assert dict(message.headers)["due-topic"] == b"orders"
