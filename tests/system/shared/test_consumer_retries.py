"""`@retry_later` around a handler, through the whole pipeline: again later, and dead at last."""

import time
import uuid
from itertools import pairwise

import pytest
from confluent_kafka import Consumer
from tests.support.live import LATE_MS, PATIENCE_S, Arrived
from tests.support.topics import TRACE

from duetime.client.consumer_retries import RETRIED, exponential, retry_later
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.consumer_group import leave

pytestmark = pytest.mark.timeout(1_200)

#: The first wait is one of lanes, the second one of the wheel.
BACKOFF = exponential("3s", max="1h")

OWN = [*TRACE, ("h", b"\xff"), ("h", None)]


class Worker:
    """Reads a topic as a user of `retry_later` does, and notes what its handler was given."""

    def __init__(self, settings, topic, handle):
        self.given = []
        self._handle = handle
        group = {"group.id": f"worker-{uuid.uuid4().hex}", "enable.auto.commit": False}
        self._consumer = Consumer(
            librdkafka_properties(settings) | group | {"auto.offset.reset": "earliest"}
        )
        self._consumer.subscribe([topic])

    def work_until(self, enough):
        until_s = time.monotonic() + PATIENCE_S
        while not enough(self.given):
            assert time.monotonic() < until_s, f"only {len(self.given)} came"
            if (message := self._consumer.poll(0.1)) and not message.error():
                self.given.append(Arrived(message))
                self._handle(message)
                self._consumer.commit(message, asynchronous=False)

    def close(self):
        leave(self._consumer)


@pytest.fixture
def worker(live):
    """A worker of a topic whose handler fails for what says so; and the topic."""

    @retry_later(backoff=BACKOFF, max_attempts=3, settings=live.settings)
    def handle(message):
        if message.value() == b"bad":
            raise ZeroDivisionError

    topic = live.topic()
    opened = Worker(live.settings, topic, handle)
    yield opened, topic
    opened.close()


def own(arrived):
    return [each for each in arrived.headers if not each[0].startswith("due-")]


def test_what_fails_comes_again_each_time_when_it_is_to_and_dies_at_last(live, worker):
    worker, topic = worker
    live.send(topic, b"bad", b"\x00k", OWN)
    live.send(topic, b"good", b"k")
    live.flush()

    tries = lambda given: [each for each in given if each.value == b"bad"]  # noqa: E731 (a view)
    worker.work_until(lambda given: len(tries(given)) == 3)

    # Nothing is held up by what waits.
    assert [each.value for each in worker.given] == [b"bad", b"good", b"bad", b"bad"]
    first, *again = tries(worker.given)
    for attempt, each in enumerate(again, 1):
        assert (each.key, own(each)) == (b"\x00k", OWN)
        count, _, failed_ms = each.by_name[RETRIED].partition(b":")
        assert int(count) == attempt
        assert 0 <= int(failed_ms) - first.appended_ms < LATE_MS
        assert 0 <= each.late_ms < LATE_MS
    waits_ms = [late.due_ms - soon.appended_ms for soon, late in pairwise([first, *again])]
    assert all(0 <= waited - BACKOFF(number) < LATE_MS for number, waited in enumerate(waits_ms, 1))

    dead = live.inbox(live.names.dead_letter)
    of_topic = lambda: [  # noqa: E731 (as above)
        each for each in dead.arrived if each.by_name["due-topic"] == topic.encode()
    ]
    dead.until(of_topic, "the dead letter")
    (letter,) = of_topic()
    assert (letter.key, letter.value, own(letter)) == (b"\x00k", b"bad", OWN)
    assert letter.by_name["due-error"] == b"handler-failed"
    assert letter.by_name["due-attempts"] == b"3"
    assert int(letter.by_name["due-failed-first-ms"]) - first.appended_ms < LATE_MS
    assert int(letter.by_name["due-failed-last-ms"]) >= again[-1].appended_ms
