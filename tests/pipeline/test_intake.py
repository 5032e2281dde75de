"""Where cancels and replacements go, without a broker."""

from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest
from pyspark.sql import functions as F
from tests.conftest import RECORD

from duetime.config import Settings
from duetime.message import REPLACING_MS, MessageId
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


#: The nearest message that can be replaced by a record of that time.
NEAREST_MS = NOW_MS + KAFKA.horizon_ms + REPLACING_MS

#: When the message is due that replaces another, in a slot of level 0.
NEW_MS = NOW_MS + 30 * SECOND_MS

NEW_SLOT = NAMES.wheel(0), WHEEL.partition(WHEEL.place(NEW_MS, NOW_MS))


def rows_of_replacing(spark, *records, settings=KAFKA, read_ms=NOW_MS):
    """What the sink would get for each of these records of the time NOW_MS, as headers."""
    sent = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=NOW_MS)
    rows = [
        (topic, 0, offset, sent, b"k", b"v", [(name, str(value).encode()) for name, value in said])
        for offset, (topic, said) in enumerate(records)
    ]
    intake = Intake(settings)
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, 1), RECORD)
    asked = intake.understood(frame).withColumn("now", F.lit(read_ms))
    return asked.transform(intake.judged).transform(intake.routed).collect()


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


@pytest.mark.parametrize("topic", [NAMES.native, NAMES.transactional])
def test_a_record_that_replaces_is_its_message_and_a_cancel_in_each_slot_of_the_old(spark, topic):
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


def test_what_replaces_in_another_store_is_its_message_and_one_cancel(spark):
    old = MessageId(due_ms=NEAREST_MS, unique="m")
    message, cancel = rows_of_replacing(spark, replacing(old, ("due-id", "n")), settings=REDIS)
    expected = NAMES.store, None, b"v", str(MessageId(due_ms=NEW_MS, unique="n"))
    assert as_message(message) == expected
    assert list(as_cancels([cancel])) == [(old.due_ms, NAMES.store, None)]


def test_what_is_due_at_once_may_replace_what_waits(spark):
    old = MessageId(due_ms=NEAREST_MS, unique="m")
    message, cancel = rows_of_replacing(spark, replacing(old, due_ms=1))
    assert message.topic == "orders"
    assert list(as_cancels([cancel])) == slots(old.due_ms)


def test_an_id_of_another_time_may_be_kept(spark):
    old = MessageId(due_ms=NEAREST_MS, unique="order-17")
    message, _ = rows_of_replacing(spark, replacing(old, ("due-id", "order-17")))
    assert as_message(message)[-1] == str(MessageId(due_ms=NEW_MS, unique="order-17"))


REFUSED = {
    "no id": (replacing("order-17"), "bad-id"),
    "empty": (replacing(""), "bad-id"),
    "a series": (replacing(MessageId(due_ms=NEAREST_MS, unique="@series:daily")), "bad-id"),
    "by a series": (
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


@pytest.mark.parametrize(("record", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_replace_is_rejected_as_a_whole_and_the_old_one_stays(spark, record, reason):
    (row,) = rows_of_replacing(spark, record)
    assert row.topic == NAMES.rejected
    assert dict(row.headers)["due-error"] == reason.encode()
    assert (bytes(row.key), bytes(row.value)) == (b"k", b"v")


def test_the_id_that_intake_would_make_cannot_be_replaced_by_itself(spark):
    made = MessageId(due_ms=NEW_MS, unique="@in.0.0")
    (row,) = rows_of_replacing(spark, replacing(made))
    assert dict(row.headers)["due-error"] == b"bad-id"


@pytest.mark.parametrize("settings", [KAFKA, REDIS])
def test_what_is_read_late_is_decided_as_when_it_came(spark, settings):
    """A record that is read a second time, after a crash, may have been taken in before."""
    old = MessageId(due_ms=NEAREST_MS, unique="m")
    record = replacing(old, due_ms=old.due_ms + 60 * SECOND_MS)
    planned_ms = old.due_ms - SECOND_MS
    _, cancel = rows_of_replacing(spark, record, settings=settings, read_ms=planned_ms)
    assert bytes(cancel.key) == str(old).encode()
    # Nobody would drop it beside its message any more.
    (message,) = rows_of_replacing(spark, record, settings=settings, read_ms=old.due_ms)
    assert dict(message.headers)["due-topic"] == b"orders"
