"""The load generator's process and the reader, on a real broker."""

import multiprocessing
import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.topics import taken_in

from duetime.bench.loadgen import LoadPlan, bursts, start_load
from duetime.bench.testbed import Appends, create_destinations
from duetime.core.errors import ConfigError, KafkaError
from duetime.kafka.connection import librdkafka_properties

#: Seconds; only a failing test waits this long.
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


def test_the_generator_sends_its_plan(settings, topics, now_ms):  # noqa: ARG001 (topics must be there)
    with start_load(settings, plan(destinations=("one", "two"))) as load:
        sent = load()
    assert 0 < sent.figures["rate_reached"] <= 1_100
    records = taken_in(settings, 100)
    headers = [dict(record.headers()) for record in records]
    assert {each["due-id"] for each in headers} == {f"bench-{n}".encode() for n in range(100)}
    assert {each["due-topic"] for each in headers} == {b"one", b"two"}
    due_ms = [int(each["due-at-ms"]) for each in headers]
    assert min(due_ms) >= now_ms + 50
    assert max(due_ms) == sent.last_due_ms


def test_a_failing_generator_raises(settings):
    impossible = settings.model_copy(update={"librdkafka_properties": {"compression.type": "some"}})
    with start_load(impossible, plan(destinations=("one",))) as load, pytest.raises(KafkaError):
        load()


def test_the_generator_ends_with_its_block(settings):
    with start_load(settings, plan(destinations=("one",), messages=1_000_000, rate=1)):
        (generator,) = multiprocessing.active_children()
        assert generator.is_alive()
    assert not generator.is_alive()


def test_a_destination_is_measured_by_the_brokers_stamps(settings, now_ms):
    topics = create_destinations(settings, ["a", "b"], partitions=2)
    arrived, hour_ms = Appends(settings, topics), 3_600_000
    deliver(settings, topics[0], b"on-time", now_ms - 500)
    deliver(settings, topics[1], b"twice", now_ms - 500)
    deliver(settings, topics[1], b"twice", now_ms - 500)
    deliver(settings, topics[1], b"early", now_ms + hour_ms)
    made = arrived.report(sent=4)
    assert [made[each] for each in ("delivered", "lost", "duplicated", "early")] == [3, 1, 1, 1]
    assert 500 <= made["max_ms"] < 500 + PATIENCE * 1_000
    assert made["p50_ms"] >= 500


def test_a_destination_with_senders_timestamps_is_refused(settings):
    topic = f"{settings.namespace}-stamped-by-sender"
    admin = AdminClient(librdkafka_properties(settings))
    config = {"message.timestamp.type": "CreateTime"}
    for future in admin.create_topics([NewTopic(topic, 1, config=config)]).values():
        future.result()
    arrived = Appends(settings, [topic])
    deliver(settings, topic, b"any", 0)
    with pytest.raises(ConfigError, match=r"message\.timestamp\.type"):
        arrived.report(sent=1)


def deliver(settings, topic, message_id, due_ms):
    producer = Producer(librdkafka_properties(settings))
    headers = [("due-at-ms", str(due_ms)), ("due-id", message_id)]
    producer.produce(topic, b"value", headers=headers)
    assert producer.flush(PATIENCE) == 0
