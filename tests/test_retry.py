"""A handler that fails: again later, then a dead letter."""

import asyncio
import re
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.conftest import SetClock, configure

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.dead import DeadLetters, Selection
from duetime.errors import ClientFailed
from duetime.message import UNIQUE_PATTERN
from duetime.retry import Failure, exponential, retry_later


def test_a_backoff_doubles_up_to_the_longest():
    backoff = exponential("1s", max="1h")
    by_default = exponential("1s")
    assert [backoff(each) for each in (1, 13)] == [by_default(each) for each in (1, 13)]
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
    clock = SetClock(now_ms)

    @retry_later(backoff=exponential("1m", max="1h"), attempts=3, settings=settings, clock=clock)
    def handle(_):
        raise ZeroDivisionError("with a payload")

    topic = f"{settings.namespace}-orders"
    failed = sent(settings, topic, headers=[("a", b"1"), ("due-id", b"x"), ("due-at-ms", b"1")])
    handle(failed)
    again = taken(settings, f"{settings.namespace}.in", settings.intake_partitions, 1)[0]
    headers = dict(again.headers())
    assert (headers["due-topic"], headers["due-retried"]) == (
        topic.encode(),
        f"1:{now_ms}".encode(),
    )
    assert headers["due-at-ms"] == str(failed.timestamp()[1] + 60_000).encode()
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


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_a_message_that_is_larger_than_a_dead_letter_leaves_its_place_and_is_not_handled_for_ever(
    settings, now_ms
):
    small = settings.model_copy(update={"max_message_bytes": 20_000})

    @retry_later(backoff=exponential("1m", max="1h"), attempts=3, settings=small)
    def handle(_):
        raise ZeroDivisionError

    topic, large = f"{settings.namespace}-orders", b"x" * 200_000
    handle(sent(settings, topic, headers=[("a", b"1")], value=large))
    handle(sent(settings, topic, headers=[("a", large)]))
    without_value, bare = DeadLetters(settings).latest(Selection(), 9)
    assert (without_value.key, without_value.headers) == (b"k", (("a", b"1"),))
    assert (bare.key, bare.headers) == (None, ())
    for offset, letter in enumerate((without_value, bare)):
        assert (letter.topic, letter.reason, letter.value) == (topic, "gone", None)
        assert letter.detail.endswith(f"its record is {topic}/0/{offset}")
    # There is nothing to bring back: a record without its value would be another message.
    assert DeadLetters(settings).redrive(Selection(), SetClock(now_ms)) == 0


@pytest.mark.system
@pytest.mark.usefixtures("topics")
def test_what_fails_again_after_a_crash_is_the_same_message(settings, now_ms):
    clock = SetClock(now_ms)

    @retry_later(backoff=exponential("1m", max="1h"), attempts=3, settings=settings, clock=clock)
    def handle(_):
        raise ZeroDivisionError

    topic = f"{settings.namespace}-orders"
    failed, other = (sent(settings, topic, headers=[]) for _ in range(2))
    sent_ms = failed.timestamp()[1]
    # It was not committed, and is handled again.
    for handled_ms in (sent_ms + 5, sent_ms + 30_000, sent_ms + 30_001):
        clock.ms = handled_ms
        handle(failed)
    handle(other)
    again = taken(settings, f"{settings.namespace}.in", settings.intake_partitions, 4)
    headers = [dict(each.headers()) for each in again]
    told = [(each["due-id"].decode(), int(each["due-at-ms"])) for each in headers]
    assert told.count((f"retried:{topic}.0.{failed.offset()}:1", sent_ms + 60_000)) == 2
    # No wait is shorter than half of what it is to be.
    assert len(set(told)) == 3
    assert max(due_ms for _, due_ms in told) >= sent_ms + 90_001


def test_the_id_of_what_fails_in_a_topic_with_a_long_name_is_one():
    failure = Failure(message=Record("t" * 249, 0, 7), at_ms=5, attempts=1, first_ms=5)
    assert re.match(UNIQUE_PATTERN, failure.unique)
    other = Failure(message=Record("t" * 249, 0, 8), at_ms=5, attempts=1, first_ms=5)
    assert failure.unique != other.unique


class Record:
    """Where a record is."""

    def __init__(self, *place):
        self._place = place

    def topic(self):
        return self._place[0]

    def partition(self):
        return self._place[1]

    def offset(self):
        return self._place[2]

    def timestamp(self):
        return (1, 5)

    def key(self):
        return None

    value = headers = key


def test_a_coroutine_function_is_no_handler():
    async def handle(_):
        """It would be done with before it has begun."""

    with pytest.raises(TypeError, match="coroutine"):
        retry_later(backoff=exponential("1s", max="1h"), attempts=3, settings=Settings())(handle)


class Coroutine:
    """Something to call whose call is a coroutine."""

    async def __call__(self, _):
        """Nobody awaits it."""


def test_a_handler_that_returns_something_to_be_awaited_has_handled_nothing():
    decorate = retry_later(backoff=exponential("1s", max="1h"), attempts=3, settings=Settings())
    with closing(asyncio.new_event_loop()) as loop:
        for handler in (Coroutine(), lambda _: loop.create_future()):
            with pytest.raises(TypeError, match="to be awaited"):
                decorate(handler)(Record("orders", 0, 7))


class Deserialised(Record):
    """As a DeserializingConsumer gives it."""

    def value(self):
        return {"order": 17}


class Named(Record):
    """With a key that is no bytes any more."""

    def key(self):
        return "order-17"


@pytest.mark.parametrize(("kind", "what"), [(Deserialised, "value"), (Named, "key")])
def test_a_message_that_cannot_be_sent_again_as_it_came_is_refused_before_it_is_handled(kind, what):
    handled = []
    decorate = retry_later(backoff=exponential("1s", max="1h"), attempts=3, settings=Settings())
    with pytest.raises(TypeError, match=f"the {what} of a message .* take messages from a Consum"):
        decorate(handled.append)(kind("orders", 0, 7))
    assert handled == []


class FailedClient:
    """Fails for good with the first record; another one does not."""

    def __init__(self, *, at_once):
        self.at_once, self.made, self.taken = at_once, 0, []

    def __call__(self, _):
        self.made += 1
        return self

    def send(self, record, report):
        failed = ClientFailed("out of sequence") if self.made == 1 else None
        if failed and self.at_once:
            raise failed
        report(failed, str(record.id))
        if not failed:
            self.taken.append(record.id)

    def flush(self):
        """All is reported."""


@pytest.mark.parametrize("at_once", [True, False])
def test_a_client_that_fails_for_good_is_replaced_for_the_next_failure(monkeypatch, at_once):
    client = FailedClient(at_once=at_once)
    monkeypatch.setattr("duetime.retry.Producer", client)
    settings = Settings(bootstrap="127.0.0.1:1")

    @retry_later(backoff=exponential("1m", max="1h"), attempts=3, settings=settings)
    def handle(_):
        raise ZeroDivisionError

    failed = Record("orders", 0, 7)
    with pytest.raises(ClientFailed):
        handle(failed)
    for _ in range(2):
        handle(failed)
    assert (client.made, len(client.taken)) == (2, 2)


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
