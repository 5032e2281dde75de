"""Slots of several partitions: a window is a task for each, and a repeated one is a single task."""

from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.live import Inbox
from tests.support.topics import small_settings

from duetime.core.timer_wheel import Slot
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release.job import ReleaseJob
from duetime.stores.wheel_store import KafkaStore

SHARDS = 3

#: Messages of a slot: some for each shard, whatever their ids.
MESSAGES = 60


@pytest.fixture
def settings(broker):
    return small_settings(broker.bootstrap, slot_partitions=SHARDS)


class Destination:
    """A new topic of one partition."""

    def __init__(self, settings):
        self.name = f"to-{settings.namespace}"
        admin = AdminClient(librdkafka_properties(settings))
        admin.create_topics([NewTopic(self.name, 1)])[self.name].result()
        self._inbox, self._offsets = Inbox(settings, [self.name]), Offsets(settings)

    def ids(self):
        """Return the ids of all records. A job returns once its records are acknowledged."""
        ((_, end),) = self._offsets.ends([(self.name, 0)]).items()
        return sorted(each.id for each in self._inbox.take(end))


@pytest.fixture
def destination(settings):
    return Destination(settings)


@pytest.fixture
def store(settings, topics):  # noqa: ARG001 (they must be there)
    with closing(KafkaStore(settings)) as opened:
        yield opened


@pytest.fixture
def job(spark, settings):
    with closing(DeliveryLog(spark, settings)) as written:
        yield ReleaseJob(spark, settings, written)


@pytest.fixture
def fill(wheel, settings, now_ms, destination):
    """Fill slots that are due, each with a cancelled message too; returns slots and the ids."""

    def filled(*ago):
        slots = [Slot(0, settings.wheel.number(0, now_ms) - each) for each in ago]
        ids = []
        for slot in slots:
            due_ms = settings.wheel.start_ms(slot)
            cancelled, *sent = [
                wheel.message(destination.name, due_ms, level=0) for _ in range(MESSAGES + 1)
            ]
            wheel.cancel(cancelled, level=0)
            ids += map(str, sent)
        return slots, sorted(ids)

    return filled


def claims_of(store, slots):
    return [claim for slot in slots for claim in store.acquire(slot)]


@pytest.mark.parametrize("ago", [(3,), (3, 2)], ids=["a window", "overdue windows"])
def test_each_message_of_several_shards_is_sent_once(store, job, fill, destination, ago):
    slots, ids = fill(*ago)
    claims = claims_of(store, slots)
    assert len(claims) == SHARDS * len(ago)
    job(claims)
    assert destination.ids() == ids


@pytest.mark.slow
def test_job_that_was_killed_is_repeated_without_what_it_has_sent(
    store, job, fill, destination, now_ms
):
    slots, ids = fill(3)
    claims = claims_of(store, slots)
    # One of its tasks had ended.
    job(claims[:1])
    assert set(destination.ids()) < set(ids)
    job([replace(each, started_ms=now_ms - 60_000) for each in claims])
    assert destination.ids() == ids
