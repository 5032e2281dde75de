"""A handler that fails: again later, then a dead letter."""

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.conftest import configure

from duetime.connection import librdkafka_properties
from duetime.dead import DeadLetters, Selection
from duetime.retry import exponential, retry_later


def test_a_backoff_doubles_up_to_the_longest():
    backoff = exponential("1s", max="1h")
    assert [backoff(each) for each in (1, 2, 3, 12, 13, 10_000)] == [
        1_000,
        2_000,
        4_000,
        2_048_000,
        3_600_000,
        3_600_000,
    ]


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_message_whose_handler_fails_is_scheduled_anew_and_dies_at_last(settings, now_ms, caplog):
    class Stopped:
        def now_ms(self):
            return now_ms

    @retry_later(
        backoff=exponential("1m", max="1h"), attempts=3, settings=settings, clock=Stopped()
    )
    def handle(_):
        raise ZeroDivisionError("with a payload")

    topic = f"{settings.namespace}-orders"
    handle(sent(settings, topic, headers=[("a", b"1"), ("due-id", b"x"), ("due-at-ms", b"1")]))
    again = taken(settings, f"{settings.namespace}.in", settings.intake_partitions, 1)[0]
    headers = dict(again.headers())
    assert (headers["due-topic"], headers["due-retried"]) == (
        topic.encode(),
        f"1:{now_ms}".encode(),
    )
    assert headers["due-at-ms"] == str(now_ms + 60_000).encode()
    assert (headers["a"], again.key(), again.value()) == (b"1", b"k", b"v")

    handle(
        sent(settings, topic, headers=[("a", b"1"), ("due-retried", f"2:{now_ms - 9}".encode())])
    )
    (letter,) = DeadLetters(settings).latest(Selection(), 9)
    assert (letter.topic, letter.reason, letter.attempts) == (topic, "handler-failed", 3)
    assert (letter.first_ms, letter.last_ms) == (now_ms - 9, now_ms)
    assert letter.detail == "its handler raised ZeroDivisionError"
    assert (letter.key, letter.value, letter.headers) == (b"k", b"v", (("a", b"1"),))
    assert caplog.text.count("ZeroDivisionError") == 2
    assert "with a payload" not in caplog.text


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_message_that_cannot_be_scheduled_dies_at_once_and_is_not_handled_for_ever(settings):
    @retry_later(backoff=exponential("1m", max="1h"), attempts=3, settings=settings)
    def handle(_):
        raise ZeroDivisionError

    topic = f"{settings.namespace}-orders"
    # It did not come by way of duetime, which would have refused it.
    handle(sent(settings, topic, headers=[("due-expires-ms", b"soon")]))
    (letter,) = DeadLetters(settings).latest(Selection(), 9)
    assert (letter.topic, letter.attempts, letter.value) == (topic, 1, b"v")
    assert "ZeroDivisionError, and it cannot be scheduled: header due-expires-ms" in letter.detail


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_message_that_kafka_refuses_for_good_dies_at_once_and_is_not_handled_for_ever(settings):
    @retry_later(backoff=exponential("1m", max="1h"), attempts=3, settings=settings)
    def handle(_):
        raise ZeroDivisionError

    admin = AdminClient(librdkafka_properties(settings))
    configure(admin, f"{settings.namespace}.in", "max.message.bytes", "20000")
    topic, large = f"{settings.namespace}-orders", b"x" * 30_000
    handle(sent(settings, topic, headers=[], value=large))
    (letter,) = DeadLetters(settings).latest(Selection(), 9)
    assert (letter.topic, letter.attempts, letter.value) == (topic, 1, large)
    assert "ZeroDivisionError, and it cannot be scheduled: Kafka refuses message" in letter.detail


def sent(settings, topic, headers, value=b"v"):
    """A message as a consumer of this topic gets it."""
    admin = AdminClient(librdkafka_properties(settings))
    for made in admin.create_topics([NewTopic(topic, 1)]).values():
        made.exception()
    producer, reports = Producer(librdkafka_properties(settings)), []
    producer.produce(
        topic, value, b"k", headers=headers, on_delivery=lambda *each: reports.append(each)
    )
    producer.flush()
    offset = reports[0][1].offset()
    return taken(settings, topic, 1, 1, offset)[0]


def taken(settings, topic, partitions, count, offset=0):
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": settings.namespace})
    consumer.assign([TopicPartition(topic, each, offset) for each in range(partitions)])
    records = consumer.consume(count, timeout=20)
    consumer.close()
    return records
