"""Retries of failed messages, also where records are read again."""

from datetime import UTC, datetime

import pytest
from confluent_kafka import Producer
from tests.support.servers import RECORD

from duetime.client import Producer as Client
from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.messages import MessageId
from duetime.core.records import cancel_record
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange, Offsets
from duetime.pipeline.delivery.rows import parsed
from duetime.pipeline.recovery.read_back import DeliveryLog, hop_rank
from duetime.pipeline.retries import retried, retry_handler
from duetime.spark.kafka_io import read_ranges
from duetime.spark.session import jvm

SETTINGS = Settings(namespace="failing", clusters={"eu": {"bootstrap": "eu:9092"}})
NAMES = TopicNames(SETTINGS)

TOPIC = "orders"


def headers_of_failed(reason, state, identity="000000000011-m", to=TOPIC):
    """Those of a message that waited with this state."""
    values = {"due-topic": to, "due-state": state, "due-at-ms": "17", "due-id": identity}
    own = [(name, values.get(name)) for name in H.SCHEDULED]
    headers = [*own, ("a", "b"), ("due-error", reason), ("due-error-detail", "so it is")]
    return [(name, value and value.encode()) for name, value in headers]


def failed(reason, state):
    """The record of such a message."""
    headers = headers_of_failed(reason, state)
    return NAMES.retry, 0, 5, datetime.now(UTC), b"k", b"x", headers


@pytest.fixture
def known(spark):
    """Puts into the JVM what is known of TOPIC on a cluster."""
    properties = jvm(spark).java.lang.System

    def put(cluster, said):
        properties.setProperty(f"{SETTINGS.at(cluster).namespace}.to", "unknown")
        properties.setProperty(f"{SETTINGS.at(cluster).namespace}.to.{TOPIC}", said)

    return put


@pytest.mark.slow
@pytest.mark.parametrize("state", ["1:::::eu", "1::2000:3:1000:eu"], ids=["first", "fourth"])
def test_a_message_for_a_topic_created_since_on_another_cluster_goes_on(spark, known, state):
    known("eu", "1")
    record = failed("unknown-topic", state)
    before = spark.createDataFrame(spark.sparkContext.parallelize([record], 1), RECORD)
    (row,) = retried(parsed(before), SETTINGS).collect()
    assert row.topic == NAMES.outbox("eu")
    kept = {one.key: one.value for one in row.headers}
    assert (kept["due-topic"], kept["due-at-ms"], kept["a"]) == (TOPIC.encode(), b"17", b"b")
    after = (row.topic, 0, 9, record[3], row.key, row.value, row.headers)
    places = spark.createDataFrame(spark.sparkContext.parallelize([record, after], 1), RECORD)
    (was,), (now,) = places.select(hop_rank(SETTINGS)).collect()
    # Who recovers the outbox finds both, and takes this for where the message is.
    assert now > was


def test_a_message_for_a_missing_topic_waits_for_a_retry(spark, known):
    known("eu", "unknown")
    record = failed("unknown-topic", "1:::::eu")
    before = spark.createDataFrame(spark.sparkContext.parallelize([record], 1), RECORD)
    (row,) = retried(
        parsed(before), SETTINGS.model_copy(update={"retry_backoff_ms": 600_000})
    ).collect()
    assert row.topic.startswith(f"{SETTINGS.namespace}.wheel.")
    (attempts,) = {one.value.split(b":")[3] for one in row.headers if one.key == "due-state"}
    assert attempts == b"1"


class Failing:
    """The failed topic of a broker, and a query that reads it without its checkpoint."""

    def __init__(self, spark, settings):
        self._spark, self.settings, self.names = spark, settings, TopicNames(settings)
        self._offsets = Offsets(settings, "failing")
        self._written = DeliveryLog(spark, settings)
        self._producer = Producer(librdkafka_properties(settings))
        self.to = f"to_{settings.namespace}"

    def append(self, topic, headers):
        self._producer.produce(topic, b"x", partition=0, headers=headers)
        assert self._producer.flush(30) == 0

    def fail(self, identity):
        headers = headers_of_failed("no-such-partition", "1", identity, self.to)
        self.append(self.names.retry, headers)

    def query(self, started_ms):
        """Handles each record as a batch of its own; gives how many are tried again."""
        handle = retry_handler(self._spark, self.settings, {}, self._written, started_ms)
        before = self._tried_again()
        for number, record in enumerate(self._records()):
            handle(record, number)
        return self._tried_again() - before

    def retries_ms(self):
        """When each is tried again."""
        rows = [retried(parsed(each), self.settings).first() for each in self._records()]
        states = [{one.key: one.value for one in row.headers}["due-state"] for row in rows]
        return [int(each.split(b":")[H.STATE.index("retry")]) for each in states]

    def _records(self):
        place = self.names.retry, 0
        for number in range(self._offsets.ends([place])[place]):
            one = OffsetRange(*place, number, number + 1)
            yield read_ranges(self._spark, self.settings, [one])

    def _tried_again(self):
        levels = range(self.settings.wheel_levels)
        topics = [self.names.lanes, self.names.dead_letter, *map(self.names.wheel, levels)]
        return sum(self._offsets.appended(topics).values())

    def close(self):
        self._offsets.close()
        self._written.close()


@pytest.fixture
def failing(spark, settings, topics):  # noqa: ARG001 (the topics must be there)
    slow = {"retry_backoff_ms": 600_000, "retry_backoff_max_ms": 600_000}
    found = Failing(spark, settings.model_copy(update=slow))
    yield found
    found.close()


IDS = [f"{17:012x}-{name}" for name in "abc"]


@pytest.mark.slow
def test_without_a_checkpoint_messages_that_went_on_are_not_retried(failing):
    for each in IDS:
        failing.fail(each)
    # Two of them were delivered by a retry, or could not be: those are in no slot any more.
    failing.append(failing.to, [("due-at-ms", "17"), ("due-id", IDS[1])])
    failing.append(failing.names.dead_letter, [("due-topic", failing.to), ("due-id", IDS[2])])
    started_ms = SystemClock().now_ms()
    assert failing.query(started_ms) == 1
    # What waits for its retry by now does so once.
    assert failing.query(started_ms) == 0
    # After the first batch nobody has seen what came later.
    assert failing.query(started_ms - 3_600_000) == 2


@pytest.mark.slow
def test_a_cancelled_retry_is_not_repeated_before_its_commit(failing):
    for each in IDS:
        failing.fail(each)
    with Client(failing.settings) as client:
        # Of the last, another one was cancelled.
        for identity, retry_ms, later_ms in zip(
            IDS[1:], failing.retries_ms()[1:], (0, 1), strict=True
        ):
            retry = MessageId.parse(identity), failing.settings, retry_ms + later_ms
            client.send(cancel_record(*retry))
    assert failing.query(SystemClock().now_ms()) == 2
