"""Recovery of intake: records in flight, and the cancels that apply to them."""

from contextlib import closing
from datetime import UTC, datetime

import pytest
from confluent_kafka import Producer
from tests.support.batches import process_available
from tests.support.servers import RECORD

from duetime.core.clock import SystemClock
from duetime.core.messages import REPLACING_MS, MessageId
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.range_reader import RangeReader
from duetime.pipeline import INTAKE, INTAKE_TX
from duetime.pipeline.intake.query import Intake, cancelled_ids, first_of_each_id, intake_recovery
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.kafka_io import read_stream
from duetime.stores.wheel_reader import WheelReader

SETTINGS = Settings()

#: When all that is sent here was sent, and a while later.
SENT, LATER_MS = datetime(2026, 1, 1, tzinfo=UTC), 3_600_000
SENT_MS = int(SENT.timestamp()) * 1_000


@pytest.fixture(scope="module")
def intake(spark):  # noqa: ARG001 (its columns need one)
    return Intake(SETTINGS)


def cancels(spark, *of):
    """Records of the control topic; each cancels an id, or its retry at an instant."""
    rows = []
    for offset, (identity, retry_ms) in enumerate(of):
        at = [] if retry_ms is None else [("due-at-ms", b"%d" % retry_ms)]
        headers = [("due-op", b"cancel"), *at]
        place = TopicNames(SETTINGS).control, 0, offset, SENT
        rows.append((*place, str(identity).encode(), None, headers))
    return spark.createDataFrame(rows, RECORD)


class Deduplicator:
    """What was sent to the control topic, or to another."""

    def __init__(self, sent, topic=None):
        self._sent, self._topic = sent, topic or TopicNames(SETTINGS).control

    def new_records(self, topic, _since_ms, earlier_ms=0):  # noqa: ARG002 (as it is called)
        return self._sent if topic == self._topic else None


@pytest.mark.slow
def test_cancel_of_a_retry_cancels_no_ingested_message(spark, intake):
    first, second = (MessageId(due_ms=SENT_MS + ms, unique="daily") for ms in (10_000, LATER_MS))
    # The second message is due when the first one is tried again.
    sent = cancels(spark, (first, second.due_ms))
    assert cancelled_ids(Deduplicator(sent), SETTINGS, intake.requests, SENT_MS).collect() == []
    sent = cancels(spark, (first, second.due_ms), (second, None), (second, second.due_ms))
    found = cancelled_ids(Deduplicator(sent), SETTINGS, intake.requests, SENT_MS).collect()
    assert [row.id for row in found] == [str(second)]


def test_cancel_that_came_too_late_is_ignored(spark, intake):
    near = MessageId(due_ms=SENT_MS + SETTINGS.short_delay_threshold_ms - 1, unique="near")
    far = MessageId(due_ms=SENT_MS + SETTINGS.short_delay_threshold_ms, unique="far")
    sent = cancels(spark, (near, None), (far, None))
    found = cancelled_ids(Deduplicator(sent), SETTINGS, intake.requests, SENT_MS).collect()
    assert [row.id for row in found] == [str(far)]


@pytest.mark.slow
def test_cancels_of_one_id_for_other_instants_are_kept(spark, intake, now_ms):
    identity = MessageId(due_ms=now_ms + LATER_MS, unique="m")
    instants = [None, now_ms + 2 * LATER_MS, now_ms + 3 * LATER_MS, now_ms + 2 * LATER_MS, None]
    sent = cancels(spark, *((identity, each) for each in instants))
    asked = intake.requests(sent)
    left = asked.where("is_cancel").transform(first_of_each_id)
    assert sorted(row.offset for row in left.collect()) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("topic", [TopicNames(SETTINGS).native, TopicNames(SETTINGS).transactional])
def test_message_replaced_in_time_counts_as_cancelled(spark, intake, topic):
    nearest_ms = SENT_MS + SETTINGS.short_delay_threshold_ms + REPLACING_MS
    near, far = (MessageId(due_ms=nearest_ms + ms, unique="m") for ms in (-1, 0))
    address = ("due-topic", b"orders"), ("due-at-ms", str(SENT_MS + LATER_MS).encode())
    rows = [
        (topic, 0, offset, SENT, None, None, [*address, *more])
        for offset, more in enumerate(
            (
                [("due-replaces", str(near).encode())],
                [("due-replaces", str(far).encode())],
                [("due-replaces", str(far).encode()), ("due-partition", b"x")],
                [],
            )
        )
    ]
    sent = spark.createDataFrame(rows, RECORD)
    found = cancelled_ids(Deduplicator(sent, topic), SETTINGS, intake.requests, SENT_MS).collect()
    assert [row.id for row in found] == [str(far)]


class TestReplacing:
    """A record that replaces a message was in flight: some of its rows were written, or all."""

    @pytest.fixture
    def replaced(self, wheel, now_ms):
        """The old message, which waits, and the id that a record gives it at another time."""
        old = wheel.message("orders", now_ms + 40_000, unique="order-17")
        return old, MessageId(due_ms=now_ms + 60_000, unique="order-17~1")

    @pytest.fixture(params=[INTAKE, pytest.param(INTAKE_TX, marks=pytest.mark.slow)])
    def recover(self, request, spark, settings, replaced, tmp_path):
        """Sends the record that replaces, to the topic of one of the queries, and recovers that."""
        (old, new), names = replaced, TopicNames(settings)
        headers = {
            "due-topic": "orders",
            "due-at-ms": str(new.due_ms),
            "due-id": new.unique,
            "due-replaces": str(old),
        }
        producer = Producer(librdkafka_properties(settings))
        topic = names.transactional if request.param == INTAKE_TX else names.native
        producer.produce(topic, "x", headers=headers)
        assert producer.flush(30) == 0
        kept = settings.model_copy(update={"checkpoint": tmp_path.as_uri()})

        def recovered():
            with closing(DeliveryLog(spark, kept)) as written:
                handle = intake_recovery(spark, kept, written, Intake(kept))
                is_tx = request.param == INTAKE_TX
                records = read_stream(spark, kept, [topic], batch=100, committed_only=is_tx)
                process_available(records, handle, kept, request.param)

        return recovered

    @pytest.mark.slow
    @pytest.mark.parametrize("written", ["nothing", "message", "cancel", "message and cancel"])
    def test_recovery_writes_what_is_missing(self, settings, wheel, replaced, recover, written):
        old, new = replaced
        if "message" in written:
            wheel.message("orders", new.due_ms, unique=new.unique)
        if "cancel" in written:
            wheel.cancel(old)
        recover()
        now_ms = SystemClock().now_ms()
        with closing(WheelReader(settings)) as reader, RangeReader(settings) as ranges:
            assert reader.find(old, now_ms).cancelled
            assert not reader.find(new, now_ms).cancelled
            messages = [each.id for each in ranges.entries(reader.ranges()) if each.topic]
        assert sorted(map(str, messages)) == sorted(map(str, replaced))


@pytest.mark.slow
def test_later_batches_leave_out_what_was_written_since_the_first(
    spark, settings, wheel, now_ms, tmp_path
):
    """The steps behind the first batch were planned without anything that was read back."""
    names, ids = TopicNames(settings), ("first", "written", "last")
    producer = Producer(librdkafka_properties(settings) | {"partitioner": "murmur2_random"})
    for unique in ids:
        headers = {"due-topic": "orders", "due-at-ms": str(now_ms + 60_000), "due-id": unique}
        producer.produce(names.native, "x", key="k", headers=headers)
    assert producer.flush(30) == 0
    kept = settings.model_copy(update={"checkpoint": tmp_path.as_uri()})
    batches = []
    with closing(DeliveryLog(spark, kept)) as written:
        handle = intake_recovery(spark, kept, written, Intake(kept))

        def handled(batch, number):
            handle(batch, number)
            batches.append(number)
            if len(batches) == 1:
                wheel.message("orders", now_ms + 60_000, unique="written")

        records = read_stream(spark, kept, [names.native], batch=1)
        process_available(records, handled, kept, INTAKE)
    assert len(batches) == len(ids)
    with closing(WheelReader(settings)) as reader, RangeReader(settings) as ranges:
        found = [each.id.unique for each in ranges.entries(reader.ranges())]
    assert sorted(found) == sorted(ids)
