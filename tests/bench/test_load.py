"""The load generator's process and the reader, on a real broker."""

import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from duetime.bench.load import LoadPlan, start_load
from duetime.bench.report import measure
from duetime.bench.sender import bursts
from duetime.bench.testbed import create_destinations
from duetime.connection import librdkafka_properties
from duetime.errors import ConfigError, KafkaError

#: Seconds; only a test that fails waits as long.
PATIENCE = 30


def plan(**others):
    return LoadPlan(**{"messages": 100, "rate": 1_000, "delay_ms": (50, 90)} | others)


def test_bursts_hold_every_number_once_at_the_rate():
    began = time.monotonic()
    numbers = [number for burst, _ in bursts(200, 1_000) for number in burst]
    assert numbers == list(range(200))
    assert time.monotonic() - began >= 0.19


def test_bursts_without_a_rate_come_at_once():
    assert [len(burst) for burst, _ in bursts(1_200, 0)] == [500, 500, 200]


@pytest.mark.system
def test_the_generator_sends_what_it_says(settings, topics, now_ms):  # noqa: ARG001 (topics must be there)
    with start_load(settings, plan(destinations=("one", "two"))) as load:
        sent = load.wait()
    assert (sent.sent, sent.failed) == (100, 0)
    assert 0 < sent.rate_reached <= 1_100
    records = read(settings, f"{settings.namespace}.in", 100)
    headers = [dict(record.headers()) for record in records]
    assert {each["due-id"] for each in headers} == {f"bench-{n}".encode() for n in range(100)}
    assert {each["due-topic"] for each in headers} == {b"one", b"two"}
    due_ms = [int(each["due-at-ms"]) for each in headers]
    assert min(due_ms) >= now_ms + 50
    assert max(due_ms) == sent.last_due_ms


@pytest.mark.system
def test_a_generator_that_fails_says_so(settings):
    impossible = settings.model_copy(update={"librdkafka_properties": {"compression.type": "some"}})
    with start_load(impossible, plan(destinations=("one",))) as load, pytest.raises(KafkaError):
        load.wait()


@pytest.mark.system
def test_a_generator_that_is_no_longer_wanted_ends(settings):
    with start_load(settings, plan(destinations=("one",), messages=1_000_000, rate=1)) as load:
        assert load.running
    assert not load.running


@pytest.mark.system
def test_a_destination_is_measured_by_the_brokers_stamps(settings, now_ms):
    topics = create_destinations(settings, ["a", "b"], partitions=2)
    hour_ms = 3_600_000
    deliver(settings, topics[0], b"on-time", now_ms - 500)
    deliver(settings, topics[1], b"twice", now_ms - 500)
    deliver(settings, topics[1], b"twice", now_ms - 500)
    deliver(settings, topics[1], b"early", now_ms + hour_ms)
    made = measure(settings, topics, sent=4)
    assert (made.delivered, made.lost, made.duplicated, made.early) == (3, 1, 1, 1)
    assert 500 <= made.max_ms < 500 + PATIENCE * 1_000
    assert made.p50_ms >= 500


@pytest.mark.system
def test_a_destination_that_senders_stamp_is_refused(settings):
    topic = f"{settings.namespace}-stamped-by-sender"
    admin = AdminClient(librdkafka_properties(settings))
    config = {"message.timestamp.type": "CreateTime"}
    for future in admin.create_topics([NewTopic(topic, 1, config=config)]).values():
        future.result()
    deliver(settings, topic, b"any", 0)
    with pytest.raises(ConfigError, match=r"message\.timestamp\.type"):
        measure(settings, [topic], sent=1)


def deliver(settings, topic, message_id, due_ms):
    producer = Producer(librdkafka_properties(settings))
    headers = [("due-at-ms", str(due_ms)), ("due-id", message_id)]
    producer.produce(topic, b"value", headers=headers)
    assert producer.flush(PATIENCE) == 0


def read(settings, topic, count):
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": "reader"})
    partitions = consumer.list_topics(topic, timeout=PATIENCE).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    records = consumer.consume(count, timeout=PATIENCE)
    consumer.close()
    return records
