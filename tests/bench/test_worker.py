"""A queue's worker, and what the benchmark makes of what it did."""

import pytest
from confluent_kafka import Producer
from tests.conftest import created_topics, small_settings

from duetime.bench.queue import Plan, _work, is_wrong
from duetime.bench.worker import Pace, Task, work
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError
from duetime.kmq.markers import REDELIVERY_COUNT, encoded_count
from duetime.tables import QueueSettings

TASK = Task(queue="jobs", messages=3, drop_every=3, timeout_ms=1_000, patience_s=15)


class Again:
    """A record that came again."""

    def __init__(self, number, count=1, topic="drop"):
        self._number, self._count, self._topic = number, count, topic

    def topic(self):
        return self._topic

    def value(self):
        return f"{self._number}   ".encode()

    def headers(self):
        return [(REDELIVERY_COUNT, encoded_count(self._count))]


@pytest.mark.parametrize(
    ("again", "wanted"),
    [
        (Again(100), False),
        (Again(101), True),
        (Again(100, count=2), True),
        (Again(100, topic="pace"), True),
    ],
)
def test_what_came_again_although_it_was_acknowledged_is_wrong(again, wanted):
    assert is_wrong(again, "pace", 100) is wanted


def test_a_pace_is_from_the_first_message_to_the_last_however_they_come():
    one_by_one, at_once = Pace(), Pace()
    for number in range(1, 101):
        one_by_one.count(1, now_s=10 + number / 50)
    at_once.count(50, now_s=10)
    at_once.count(50, now_s=12)
    assert (one_by_one.per_s(), at_once.per_s()) == (51, 50)
    assert Pace().per_s() == 0


def test_a_worker_that_hangs_is_ended_and_told():
    with pytest.raises(KafkaError, match="did not end"):
        _work(Settings(), TASK, 0.01)


def test_a_worker_waits_for_a_minute_after_the_timeout():
    plan = Plan(messages=1_000, rate=50, drop_every=2, timeout_ms=5_000, value_bytes=1)
    assert plan.task("jobs").patience_s == 65
    assert plan.most_s > 1_000 / 50 + 65


@pytest.mark.system
@pytest.mark.slow
def test_what_never_comes_again_is_not_waited_for_and_not_counted(broker):
    settings = small_settings(broker.bootstrap, queues={"jobs": QueueSettings(partitions=1)})
    with created_topics(settings):
        producer = Producer(librdkafka_properties(settings))
        for number in range(3):
            producer.produce("jobs", str(number))
        assert producer.flush(30) == 0
        # There is no tracker: what is dropped is lost.
        assert work(settings, TASK).acknowledged == 2
