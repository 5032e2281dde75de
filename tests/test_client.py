import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Consumer, TopicPartition
from tests.conftest import SetClock, eventually

from duetime.client import Producer
from duetime.connection import librdkafka_properties
from duetime.errors import InvalidMessage, KafkaError, TooLate
from duetime.message import MessageId

#: Nobody listens there, and nothing waits for it for long.
NOWHERE = {"bootstrap": "127.0.0.1:1", "delivery.timeout.ms": 50, "linger.ms": 0}

#: Java's hashes of keys, from the tests of Kafka's own Utils.murmur2.
MURMUR2 = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}


@pytest.fixture
def producer(settings, topics):  # noqa: ARG001 (the topics must be there)
    with Producer(settings) as sending:
        yield sending


def read_all(settings, topic, number):
    """The first so many records of the topic, whatever their partition."""
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": "test"})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
    records = consumer.consume(number, timeout=30)
    consumer.close()
    return records


@pytest.mark.parametrize(
    "module",
    [
        "client",
        "reschedule",
        "admin",
        "doctor",
        "stores.reader",
        "stores.kafka",
        "cli",
        "delayed",
        # The package imports what is in it when it is asked for.
        "kmq.queue",
        "kmq.stats",
    ],
)
def test_scheduling_and_looking_start_without_spark(module):
    program = f"import sys, duetime.{module}; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.system
def test_a_message_arrives_as_the_contract_says(producer, settings):
    at = datetime(2020, 1, 1, tzinfo=UTC)
    parts = {"headers": {"a": "b"}, "partition": 2, "id": "order-17"}
    full_id = producer.produce("orders", "hello", key="k", at=at, **parts)
    assert producer.flush() == 0
    assert full_id == str(MessageId(due_ms=1_577_836_800_000, unique="order-17"))
    (record,) = read_all(settings, f"{settings.namespace}.in", 1)
    assert (record.key(), record.value()) == (b"k", b"hello")
    assert record.headers() == [
        ("due-topic", b"orders"),
        ("due-at-ms", b"1577836800000"),
        ("due-id", b"order-17"),
        ("due-partition", b"2"),
        ("a", b"b"),
    ]


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_delay_counts_from_the_clients_clock_and_the_id_is_known_at_once(settings):
    now_ms = 1_800_000_000_000
    with Producer(settings, clock=SetClock(now_ms)) as producer:
        ids = [producer.produce("orders", in_=timedelta(seconds=10)) for _ in range(2)]
    assert len(set(ids)) == 2
    records = read_all(settings, f"{settings.namespace}.in", 2)
    headers = [dict(each.headers()) for each in records]
    assert {each["due-at-ms"] for each in headers} == {b"1800000010000"}
    made = {
        str(MessageId(due_ms=now_ms + 10_000, unique=each["due-id"].decode())) for each in headers
    }
    assert made == set(ids)


@pytest.mark.system
def test_keys_land_where_java_senders_put_them(producer, settings):
    for key in MURMUR2:
        producer.produce("orders", key=key, in_=timedelta(seconds=10))
    producer.flush()
    records = read_all(settings, f"{settings.namespace}.in", len(MURMUR2))
    landed = {each.key().decode(): each.partition() for each in records}
    partitions = settings.intake_partitions
    assert landed == {key: (it & 0x7FFFFFFF) % partitions for key, it in MURMUR2.items()}


@pytest.mark.system
def test_a_delivery_is_reported_with_the_full_id(producer):
    reports = []
    full_id = producer.produce(
        "orders", in_=timedelta(0), on_delivery=lambda *report: reports.append(report)
    )
    producer.flush()
    assert reports == [(None, full_id)]


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_full_local_queue_is_waited_for(settings):
    with Producer(settings, **{"queue.buffering.max.messages": 10}) as producer:
        for _ in range(100):
            producer.produce("orders", in_=timedelta(seconds=10))
    assert len(read_all(settings, f"{settings.namespace}.in", 100)) == 100


@pytest.mark.system
def test_a_cancel_arrives_as_the_contract_says(producer, settings):
    full_id = producer.produce("orders", in_=timedelta(minutes=1))
    producer.cancel(full_id)
    producer.flush()
    (record,) = read_all(settings, f"{settings.namespace}.control", 1)
    assert (record.key(), record.value()) == (full_id.encode(), None)
    assert record.headers() == [("due-op", b"cancel")]


def test_a_cancel_that_cannot_come_in_time_is_refused():
    now_ms = 1_800_000_000_000
    producer = Producer(clock=SetClock(now_ms), **NOWHERE)
    # What is due in less than 4 s may be in a lane, or its window planned.
    for due_ms in (now_ms - 1, now_ms, now_ms + 3_999):
        with pytest.raises(TooLate):
            producer.cancel(str(MessageId(due_ms=due_ms, unique="1")))
    producer.cancel(str(MessageId(due_ms=now_ms + 4_000, unique="1")))
    with pytest.raises(InvalidMessage, match="no message id"):
        producer.cancel("order-17")


def test_a_failed_delivery_is_reported_with_what_to_do():
    reports = []
    with Producer(**NOWHERE) as producer:
        full_id = producer.produce(
            "orders", in_=timedelta(0), on_delivery=lambda *report: reports.append(report)
        )
    ((error, reported),) = reports
    assert reported == full_id
    assert isinstance(error, KafkaError)
    assert "send it again with the same id" in str(error)


def test_who_only_produces_hears_of_what_became_of_earlier_messages():
    reports = []

    def is_told():
        # Its own report comes in later.
        producer.produce("orders", in_=timedelta(0), on_delivery=lambda *_: None)
        return reports

    producer = Producer(**NOWHERE)
    producer.produce("orders", in_=timedelta(0), on_delivery=lambda *each: reports.append(each))
    ((error, _),) = eventually(is_told)
    assert isinstance(error, KafkaError)
    producer.flush()


def test_a_report_that_sends_again_may_do_so_for_any_number_of_messages():
    reports = []

    def again(error, _):
        reports.append(error)
        if len(reports) <= 3_000:
            producer.produce("orders", in_=timedelta(0), on_delivery=again)

    # All fail at once.
    producer = Producer(**NOWHERE)
    for _ in range(3_000):
        producer.produce("orders", in_=timedelta(0), on_delivery=again)
    producer.flush()
    assert len(reports) == 6_000


def test_a_report_that_finds_no_room_for_another_message_is_told_so():
    raised, one = [], {"queue.buffering.max.messages": 1}

    def send():
        producer.produce("orders", in_=timedelta(0), on_delivery=lambda *_: None)

    def again(*_):
        # What is reported takes up the room until its report has returned.
        with pytest.raises(KafkaError, match="cannot wait for others") as refused:
            send()
        raised.append(refused.value)

    producer = Producer(**NOWHERE | one)
    producer.produce("orders", in_=timedelta(0), on_delivery=again)
    producer.flush()
    assert len(raised) == 1


def test_a_report_that_waits_for_others_is_told_that_it_cannot():
    raised = []

    def wait(*_):
        with pytest.raises(KafkaError, match="cannot wait for others") as refused:
            producer.poll()
        raised.append(refused.value)

    producer = Producer(**NOWHERE)
    producer.produce("orders", in_=timedelta(0), on_delivery=wait)
    producer.flush()
    assert len(raised) == 1


def test_a_failed_delivery_that_nobody_was_told_of_raises_at_the_end():
    producer = Producer(**NOWHERE)
    for _ in range(2):
        producer.produce("orders", in_=timedelta(0))
    with pytest.raises(KafkaError, match="2 messages did not arrive"), producer:
        pass


def test_an_error_inside_is_not_hidden_by_what_did_not_arrive():
    producer = Producer(**NOWHERE)
    producer.produce("orders", in_=timedelta(0))
    with pytest.raises(ZeroDivisionError), producer:
        raise ZeroDivisionError


def test_what_is_refused_is_not_sent():
    with Producer(**NOWHERE) as producer:
        with pytest.raises(InvalidMessage):
            producer.produce("orders", {"no": "bytes"}, in_=timedelta(0))
        assert producer.flush(0) == 0
