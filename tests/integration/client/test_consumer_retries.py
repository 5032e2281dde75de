"""A handler that fails: retries, then a dead letter."""

import asyncio
import re
from contextlib import closing

import pytest
from confluent_kafka.admin import AdminClient
from tests.support.clocks import SetClock
from tests.support.handled import sent
from tests.support.topics import configure, taken_in

from duetime.client.consumer_retries import HandlerFailure, exponential, retry_later
from duetime.client.dead_letters import DeadLetterFilter, DeadLetters
from duetime.core.errors import ClientFailed
from duetime.core.messages import UNIQUE_PATTERN
from duetime.core.settings import Settings
from duetime.kafka.connection import librdkafka_properties


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


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
def test_a_failing_message_is_retried_and_then_a_dead_letter(settings, now_ms, caplog):
    clock = SetClock(now_ms)

    @retry_later(
        backoff=exponential("1m", max="1h"), max_attempts=3, settings=settings, clock=clock
    )
    def handle(_):
        raise ZeroDivisionError("with a payload")

    topic = f"{settings.namespace}-orders"
    failed = sent(settings, topic, headers=[("a", b"1"), ("due-id", b"x"), ("due-at-ms", b"1")])
    handle(failed)
    again = taken_in(settings, 1)[0]
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
    (letter,) = DeadLetters(settings).latest(DeadLetterFilter(), 9)
    assert (letter.topic, letter.reason, letter.attempts) == (topic, "handler-failed", 3)
    assert (letter.first_ms, letter.last_ms) == (now_ms - 9, now_ms)
    assert letter.detail == "its handler raised ZeroDivisionError"
    assert (letter.key, letter.value, letter.headers) == (b"k", b"v", (("a", b"1"),))
    assert caplog.text.count("ZeroDivisionError") == 2
    assert "with a payload" not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
def test_a_message_that_cannot_be_scheduled_becomes_a_dead_letter(settings):
    @retry_later(backoff=exponential("1m", max="1h"), max_attempts=3, settings=settings)
    def handle(_):
        raise ZeroDivisionError

    topic = f"{settings.namespace}-orders"
    # Its sender did not use duetime, which would have refused it.
    handle(sent(settings, topic, headers=[("due-expires-ms", b"soon")]))
    (letter,) = DeadLetters(settings).latest(DeadLetterFilter(), 9)
    assert (letter.topic, letter.attempts, letter.value) == (topic, 1, b"v")
    assert "ZeroDivisionError, and it cannot be scheduled: header due-expires-ms" in letter.detail


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
def test_a_message_that_kafka_refuses_for_good_becomes_a_dead_letter(settings):
    @retry_later(backoff=exponential("1m", max="1h"), max_attempts=3, settings=settings)
    def handle(_):
        raise ZeroDivisionError

    admin = AdminClient(librdkafka_properties(settings))
    configure(admin, f"{settings.namespace}.in", "max.message.bytes", "20000")
    topic, large = f"{settings.namespace}-orders", b"x" * 30_000
    handle(sent(settings, topic, headers=[], value=large))
    (letter,) = DeadLetters(settings).latest(DeadLetterFilter(), 9)
    assert (letter.topic, letter.attempts, letter.value) == (topic, 1, large)
    assert "ZeroDivisionError, and it cannot be scheduled: Kafka refuses message" in letter.detail


@pytest.mark.usefixtures("topics")
def test_a_message_larger_than_a_dead_letter_leaves_its_place(settings, now_ms):
    small = settings.model_copy(update={"max_message_bytes": 20_000})

    @retry_later(backoff=exponential("1m", max="1h"), max_attempts=3, settings=small)
    def handle(_):
        raise ZeroDivisionError

    topic, large = f"{settings.namespace}-orders", b"x" * 200_000
    handle(sent(settings, topic, headers=[("a", b"1")], value=large))
    handle(sent(settings, topic, headers=[("a", large)]))
    without_value, bare = DeadLetters(settings).latest(DeadLetterFilter(), 9)
    assert (without_value.key, without_value.headers) == (b"k", (("a", b"1"),))
    assert (bare.key, bare.headers) == (None, ())
    for offset, letter in enumerate((without_value, bare)):
        assert (letter.topic, letter.reason, letter.value) == (topic, "record-deleted", None)
        assert letter.detail.endswith(f"its record is {topic}/0/{offset}")
    # Without its value it would be another message.
    assert DeadLetters(settings).redrive(DeadLetterFilter(), SetClock(now_ms)) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("topics")
def test_a_failure_repeated_after_a_crash_is_the_same_message(settings, now_ms):
    clock = SetClock(now_ms)

    @retry_later(
        backoff=exponential("1m", max="1h"), max_attempts=3, settings=settings, clock=clock
    )
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
    again = taken_in(settings, 4)
    headers = [dict(each.headers()) for each in again]
    told = [(each["due-id"].decode(), int(each["due-at-ms"])) for each in headers]
    assert told.count((f"retried:{topic}.0.{failed.offset()}:1", sent_ms + 60_000)) == 2
    # No delay is shorter than half of the back-off.
    assert len(set(told)) == 3
    assert max(due_ms for _, due_ms in told) >= sent_ms + 90_001


def test_the_id_of_a_retry_of_a_long_topic_is_valid():
    failure = HandlerFailure(message=Record("t" * 249, 0, 7), at_ms=5, attempts=1, first_ms=5)
    assert re.match(UNIQUE_PATTERN, failure.unique)
    other = HandlerFailure(message=Record("t" * 249, 0, 8), at_ms=5, attempts=1, first_ms=5)
    assert failure.unique != other.unique


class Record:
    """A record with nothing but its place."""

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
        """Never called."""

    with pytest.raises(TypeError, match="coroutine"):
        retry_later(backoff=exponential("1s", max="1h"), max_attempts=3, settings=Settings())(
            handle
        )


class Coroutine:
    """A callable that returns a coroutine."""

    async def __call__(self, _):
        """Never awaited."""


def test_a_handler_that_returns_an_awaitable_is_refused():
    decorate = retry_later(backoff=exponential("1s", max="1h"), max_attempts=3, settings=Settings())
    with closing(asyncio.new_event_loop()) as loop:
        for handler in (Coroutine(), lambda _: loop.create_future()):
            with pytest.raises(TypeError, match="to be awaited"):
                decorate(handler)(Record("orders", 0, 7))


class Deserialised(Record):
    """A record of a DeserializingConsumer."""

    def value(self):
        return {"order": 17}


class Named(Record):
    """A record whose key is deserialised."""

    def key(self):
        return "order-17"


@pytest.mark.parametrize(("kind", "what"), [(Deserialised, "value"), (Named, "key")])
def test_a_deserialised_message_is_refused_before_it_is_handled(kind, what):
    handled = []
    decorate = retry_later(backoff=exponential("1s", max="1h"), max_attempts=3, settings=Settings())
    with pytest.raises(TypeError, match=f"the {what} of a message .* take messages from a Consum"):
        decorate(handled.append)(kind("orders", 0, 7))
    assert handled == []


class FailedClient:
    """A producer that fails for good with the first record; the next one works."""

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
def test_a_client_that_failed_for_good_is_replaced(monkeypatch, at_once):
    client = FailedClient(at_once=at_once)
    monkeypatch.setattr("duetime.client.consumer_retries.Producer", client)
    settings = Settings(bootstrap="127.0.0.1:1")

    @retry_later(backoff=exponential("1m", max="1h"), max_attempts=3, settings=settings)
    def handle(_):
        raise ZeroDivisionError

    failed = Record("orders", 0, 7)
    with pytest.raises(ClientFailed):
        handle(failed)
    for _ in range(2):
        handle(failed)
    assert (client.made, len(client.taken)) == (2, 2)
