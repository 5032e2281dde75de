"""schedule: every row of a DataFrame is a record that intake accepts."""

from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import functions as F

from duetime.core.errors import InvalidMessage
from duetime.dataframes import schedule
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange
from duetime.pipeline.intake.query import Intake
from duetime.spark.kafka_io import read_ranges

pytestmark = pytest.mark.usefixtures("topics")

LATER = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=5)


@pytest.fixture
def taken_in(settings):
    """The ranges of the native intake topic that have records."""
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": settings.namespace})
    topic = f"{settings.namespace}.in"

    def ranges():
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        found = {
            each: consumer.get_watermark_offsets(TopicPartition(topic, each), timeout=10)
            for each in partitions
        }
        return [OffsetRange(topic, each, *ends) for each, ends in found.items() if ends[1]]

    yield ranges
    consumer.close()


def test_rows_are_scheduled_as_records_that_intake_takes(spark, settings, taken_in):
    sent = spark.createDataFrame(
        [("a", "k", LATER, {"h": "1"}), ("b", None, LATER + timedelta(microseconds=1), None)],
        "value string, key string, at timestamp, headers map<string,string>",
    )

    assert schedule(sent, topic="orders", at="at", settings=settings) == 2
    assert schedule(sent, topic="orders", at="at", settings=settings) == 2
    rows = _judged(spark, settings, taken_in())

    assert [row.error for row in rows] == [None] * 4
    # The same DataFrame has the same ids again.
    assert len({row.id for row in rows}) == 2
    by_value = {row.request.value: row.request for row in rows}
    due_ms = int(LATER.timestamp() * 1_000)
    # Rounded up, so that nothing is early.
    assert (by_value[b"a"].due_ms, by_value[b"b"].due_ms) == (due_ms, due_ms + 1)
    assert (by_value[b"a"].key, by_value[b"b"].key) == (b"k", None)
    assert [tuple(one) for one in by_value[b"a"].headers] == [("h", b"1")]
    assert by_value[b"a"].topic == "orders"


def _judged(spark, settings, ranges):
    intake = Intake(settings)
    records = read_ranges(spark, settings, ranges)
    judged = records.transform(intake.parse).transform(intake.validate)
    return judged.transform(intake.identify).collect()


def test_nothing_is_sent_if_intake_would_reject_a_row(spark, settings, taken_in):
    rows = [
        ("orders", LATER, "17", {"mine": "1"}),
        ("no topic", LATER, "18", None),
        ("orders", None, "19", None),
        ("orders", LATER, "20", {"due-topic": "another"}),
        ("orders", LATER, "21", {"due-expires-ms": "tomorrow"}),
        ("orders", LATER, "22", {"due-expires-ms": "2000000000000"}),
    ]
    columns = "name string, at timestamp, own string, headers map<string,string>"
    wrong = spark.createDataFrame(rows, columns)

    with pytest.raises(InvalidMessage, match=r"none was sent: .*bad-topic 1 \(") as told:
        schedule(wrong, topic=F.col("name"), at="at", id="own", settings=settings)

    found = ("no-due-time 1 (", "bad-headers 1 (", "bad-expiry 1 (")
    assert all(each in told.value.detail for each in found)
    assert taken_in() == []


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ("17 as at", "column at is int: give a timestamp"),
        ("1.5 as value", r"column value is decimal\(2,1\): give text or bytes"),
        ("'h' as headers", "column headers is string"),
        ("7 as id", "column id is int: give text"),
    ],
)
def test_a_column_of_another_type_is_refused(spark, settings, column, says):
    name = column.rpartition(" ")[2]
    at = [] if name == "at" else ["current_timestamp() as at"]
    given = {"id": "id"} if name == "id" else {}
    with pytest.raises(InvalidMessage, match=says):
        schedule(
            spark.range(1).selectExpr(column, *at),
            topic="orders",
            at="at",
            settings=settings,
            **given,
        )
