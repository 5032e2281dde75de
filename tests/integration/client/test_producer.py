"""The producer on a real broker."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.clocks import SetClock
from tests.support.topics import first_records, taken_in

from duetime.client.producer import Producer
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.delayed.segments import deliver_after_ms
from duetime.kafka.range_reader import LogReader

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


def test_a_message_arrives_as_the_contract_says(producer, settings):
    at = datetime(2020, 1, 1, tzinfo=UTC)
    parts = {"headers": {"a": "b"}, "partition": 2, "id": "order-17"}
    full_id = producer.produce("orders", "hello", key="k", at=at, **parts)
    assert producer.flush() == 0
    assert full_id == str(MessageId(due_ms=1_577_836_800_000, unique="order-17"))
    (record,) = taken_in(settings, 1)
    assert (record.key(), record.value()) == (b"k", b"hello")
    assert record.headers() == [
        ("due-topic", b"orders"),
        ("due-at-ms", b"1577836800000"),
        ("due-id", b"order-17"),
        ("due-partition", b"2"),
        ("a", b"b"),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
def test_a_delay_counts_from_the_clock_of_the_producer(settings):
    now_ms = 1_800_000_000_000
    with Producer(settings, clock=SetClock(now_ms)) as producer:
        ids = [producer.produce("orders", in_=timedelta(seconds=10)) for _ in range(2)]
    assert len(set(ids)) == 2
    records = taken_in(settings, 2)
    headers = [dict(each.headers()) for each in records]
    assert {each["due-at-ms"] for each in headers} == {b"1800000010000"}
    made = {
        str(MessageId(due_ms=now_ms + 10_000, unique=each["due-id"].decode())) for each in headers
    }
    assert made == set(ids)


def test_keys_land_where_java_senders_put_them(producer, settings):
    for key in MURMUR2:
        producer.produce("orders", key=key, in_=timedelta(seconds=10))
    producer.flush()
    records = taken_in(settings, len(MURMUR2))
    landed = {each.key().decode(): each.partition() for each in records}
    partitions = settings.intake_partitions
    assert landed == {key: (it & 0x7FFFFFFF) % partitions for key, it in MURMUR2.items()}


@pytest.mark.slow
def test_a_delivery_is_reported_with_the_full_id(producer):
    reports = []
    full_id = producer.produce(
        "orders", in_=timedelta(0), on_delivery=lambda *report: reports.append(report)
    )
    producer.flush()
    assert reports == [(None, full_id)]


@pytest.mark.usefixtures("topics")
def test_a_full_local_queue_is_waited_for(settings):
    with Producer(settings, **{"queue.buffering.max.messages": 10}) as producer:
        for _ in range(100):
            producer.produce("orders", in_=timedelta(seconds=10))
    assert len(taken_in(settings, 100)) == 100


@pytest.mark.slow
def test_a_cancel_arrives_as_the_contract_says(producer, settings):
    full_id = producer.produce("orders", in_=timedelta(minutes=1))
    producer.cancel(full_id)
    producer.flush()
    (record,) = first_records(settings, f"{settings.namespace}.control", 1)
    assert (record.key(), record.value()) == (full_id.encode(), None)
    assert record.headers() == [("due-op", b"cancel")]


def refusal(producer, topic, after):
    """Return the reason of a refusal. A broker knows a topic a moment after it is created.

    What is sent until then is not kept by a compacted topic: it has no key.
    """
    until_s = time.monotonic() + 30
    while True:
        try:
            producer.produce(topic, "v", deliver_after=after, on_delivery=lambda *_: None)
        except InvalidMessage as error:
            return error.reason
        assert time.monotonic() < until_s


def test_the_producer_refuses_a_compacted_delayed_topic(broker):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    compacted = NewTopic("compact.delayed", num_partitions=1, config={"cleanup.policy": "compact"})
    for created in admin.create_topics([NewTopic("plain.delayed", 2), compacted]).values():
        created.result()
    topics = {name: {} for name in ("plain.delayed", "compact.delayed")}
    settings = Settings(bootstrap=broker.bootstrap, delayed_topics=topics)
    after = datetime.now(UTC) + timedelta(minutes=1)
    with Producer(settings, batch_window=timedelta(seconds=1)) as producer:
        id_ = producer.produce("plain", "v", partition=1, deliver_after=after)
        assert refusal(producer, "compact", after) == Reason.COMPACTED
    with LogReader({"bootstrap.servers": broker.bootstrap}) as reader:
        ((record,),) = reader.batches(("plain.delayed", 1), 0, 1)
    assert dict(record.headers())["deliver-id"].decode() == id_
    time_ms = deliver_after_ms(record, None)
    assert (time_ms, time_ms % 1_000) == (int(id_[:12], 16), 0)
