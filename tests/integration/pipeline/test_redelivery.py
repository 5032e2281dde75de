"""Batches of the tracker, also where its state is of an earlier configuration."""

from functools import partial

import pytest
from confluent_kafka import Producer
from tests.support.batches import process_available
from tests.support.live import Inbox
from tests.support.topics import created_topics

from duetime.core.clock import SystemClock
from duetime.core.messages import LATEST_MS
from duetime.core.settings import Settings
from duetime.kafka.connection import librdkafka_properties
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.redelivery import Redelivery
from duetime.pipeline.tracker import FOUND, TIMED_OUT, WakeUpTimer, tracked
from duetime.queue.message import MarkerKey, start_value

SCHEMA = ", ".join(f"{name} {kind}" for name, kind in FOUND.items())


KEY, START = MarkerKey(0, 0).encoded(), start_value(600_000)


def with_queues(settings, *queues, **others):
    own = {"queues": {name: {"partitions": 1} for name in queues}}
    return Settings(**(settings.model_dump() | own | others))


class Redelivering:
    """A queue of one partition with one message, and what its tracker calls."""

    def __init__(self, spark, settings):
        self._spark, self._settings = spark, settings
        (self.queue,) = settings.queues
        producer = Producer(librdkafka_properties(settings))
        producer.produce(self.queue, b"open", partition=0)
        assert producer.flush(30) == 0
        self._written = DeliveryLog(spark, settings)
        waking = WakeUpTimer(settings, SystemClock())
        self._redelivery = Redelivery(spark, settings, self._written, waking)
        self._numbers = iter(range(100))

    def batch(self, *due):
        """Handle a batch with these returned messages and no others in flight."""
        now_ms = SystemClock().now_ms()
        rows = [
            (queue, 0, offset, now_ms, now_ms, TIMED_OUT, None, None, None, None)
            for queue, offset in due
        ]
        known = [
            (queue, 0, None, None, None, None, 0, None, 1, None)
            for queue in {one[0] for one in due}
        ]
        self._redelivery(self._spark.createDataFrame(rows + known, SCHEMA), next(self._numbers))

    def inbox(self, topic):
        return Inbox(self._settings, [topic])

    def close(self):
        self._written.close()


@pytest.fixture
def redelivering(spark, settings):
    # A queue's topics have the same names in all namespaces.
    settings = with_queues(settings, f"jobs_{settings.namespace}")
    with created_topics(settings):
        found = Redelivering(spark, settings)
        yield found
        found.close()


def test_messages_of_a_removed_queue_do_not_stop_others(redelivering, caplog):
    for _ in range(2):
        redelivering.batch(("taken_out", 0), (redelivering.queue, 0))
    values = [each.value for each in redelivering.inbox(redelivering.queue).take(3)]
    assert values == [b"open"] * 3
    (told,) = [each for each in caplog.messages if "taken_out" in each]
    assert "put it back into queues" in told


@pytest.mark.slow
def test_an_impossible_offset_stops_no_other(redelivering):
    redelivering.batch(*((redelivering.queue, each) for each in (-1, -3, 2**63 - 1, 0)))
    assert len(redelivering.inbox(redelivering.queue).take(2)) == 2


# Spark would wait two minutes for what is just behind the end.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("offset", [1, 2, LATEST_MS, 2**63 - 2])
def test_an_offset_behind_the_end_is_a_dead_letter_at_once(redelivering, offset):
    redelivering.batch((redelivering.queue, 0), (redelivering.queue, offset))
    assert len(redelivering.inbox(redelivering.queue).take(2)) == 2
    (letter,) = redelivering.inbox(f"{redelivering.queue}__undelivered").take(1)
    assert letter.by_name["due-error"] == b"record-deleted"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_queue_that_is_added_again_is_read_from_its_first_marker(spark, settings, tmp_path):
    out, stays = (f"{name}_{settings.namespace}" for name in ("out", "stays"))
    of = partial(with_queues, settings, checkpoint=tmp_path.as_uri())
    with created_topics(of(out, stays)):
        producer = Producer(librdkafka_properties(settings))
        for queue in (out, stays):
            producer.produce(f"{queue}__markers", START, KEY, partition=0)
        assert producer.flush(30) == 0
        known = [followed(spark, of(*queues)) for queues in ((out, stays), (stays,), (out, stays))]
    assert known[0] == {out: 1, stays: 1}
    assert out not in known[1]
    assert known[2][out] == 1


def followed(spark, settings):
    """Return how many messages are in flight, of each queue that has had a marker."""
    known = {}

    def handle(batch, _):
        known.update((row.topic, row.open) for row in batch.collect() if row.open is not None)

    process_available(tracked(spark, settings), handle, settings, "redelivery")
    return known
