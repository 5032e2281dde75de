import logging

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError
from duetime.stores import ANY_TIME, OffsetRange
from duetime.stores.kafka import KafkaStore

pytestmark = pytest.mark.system

SECOND = 1_000
MINUTE = 60 * SECOND


@pytest.fixture
def store(settings, topics):  # noqa: ARG001 (the topics must be there)
    opened = KafkaStore(settings)
    yield opened
    opened.close()


@pytest.fixture
def remove(settings):
    """Removes the records of a partition before an offset, as retention would."""
    admin = AdminClient(librdkafka_properties(settings))

    def before(place, offset):
        for answer in admin.delete_records([TopicPartition(*place, offset)]).values():
            answer.result()

    return before


def test_what_is_found_and_counted_is_the_readers(store, wheel, settings, now_ms):
    identity = wheel.message("orders", now_ms + MINUTE)
    (pending,) = store.pending(now_ms)
    assert (pending.slot, pending.count) == (settings.wheel.place(now_ms + MINUTE, now_ms), 1)
    assert store.find(identity, now_ms).id == identity


def test_looking_claims_nothing(store, wheel, settings, now_ms):
    identity = wheel.message("orders", now_ms + 10 * SECOND)
    store.find(identity, now_ms)
    list(store.pending(now_ms))
    (claimed,) = store.due(settings.wheel.place(identity.due_ms, now_ms))
    assert claimed.count == 1


def test_records_removed_while_it_was_down_are_told_and_the_rest_goes_on(
    wheel, settings, now_ms, remove, caplog
):
    KafkaStore(settings).close()
    due_ms = now_ms + 10 * SECOND
    for _ in range(5):
        wheel.message("orders", due_ms)
    topic, partition = wheel._slot(due_ms, None)
    remove((topic, partition), 3)
    store = KafkaStore(settings)
    (told,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert f"topic={topic} partition={partition} records=3" in told.getMessage()
    slot = settings.wheel.place(due_ms, now_ms)
    assert store.due(slot) == [OffsetRange(topic, partition, 3, 5)]
    store.close()


def test_records_removed_while_it_runs_are_told_once_and_the_rest_is_overdue(
    store, wheel, now_ms, remove, caplog
):
    due_ms = now_ms + 10 * SECOND
    for _ in range(5):
        wheel.message("orders", due_ms)
    topic, partition = wheel._slot(due_ms, None)
    remove((topic, partition), 3)
    overdue = store.overdue(due_ms + 5 * SECOND)
    assert overdue == [OffsetRange(topic, partition, 3, 5)]
    store.give_up(overdue)
    assert store.overdue(due_ms + 5 * SECOND) == overdue
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


def test_what_is_overdue_for_many_turns_of_the_ring_was_due_from_its_own_slot_on(
    store, wheel, settings, now_ms
):
    slot = settings.wheel.place(now_ms + 10 * SECOND, now_ms)
    wheel.message("orders", now_ms + 10 * SECOND)
    later_ms = now_ms + 17 * MINUTE
    (claim,) = store.overdue(later_ms)
    assert claim.due.from_ms == settings.wheel.start_ms(slot)
    assert later_ms - settings.wheel.ring * SECOND <= claim.due.to_ms <= later_ms + 2 * SECOND


def test_where_what_is_settled_is_not_freed_it_is_not_known_when_the_rest_was_due(
    store, wheel, settings, now_ms
):
    slot = settings.wheel.place(now_ms + 10 * SECOND, now_ms)
    wheel.message("orders", now_ms + 10 * SECOND)
    store._keeping.free = lambda *_: None
    store.settle(store.due(slot))
    wheel.message("orders", now_ms + 10 * SECOND, level=0)
    (claim,) = store.overdue(now_ms + 17 * MINUTE)
    assert (claim.count, claim.due) == (1, ANY_TIME)


def test_what_is_overdue_is_taken_up_though_nobody_can_say_when_it_was_due(
    store, wheel, now_ms, monkeypatch, caplog
):
    wheel.message("orders", now_ms + 10 * SECOND)

    def refuse(_places):
        raise KafkaError("is the broker up?")

    monkeypatch.setattr(store._offsets, "first_appended_ms", refuse)
    (claim,) = store.overdue(now_ms + 17 * MINUTE)
    assert (claim.count, claim.due) == (1, ANY_TIME)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


def test_what_someone_removes_just_now_was_due_at_no_time_before_1970(
    store, wheel, now_ms, monkeypatch
):
    wheel.message("orders", now_ms + 10 * SECOND)
    gone = lambda places: dict.fromkeys(places, -1)  # noqa: E731 (as Kafka says it)
    monkeypatch.setattr(store._offsets, "first_appended_ms", gone)
    (claim,) = store.overdue(now_ms + 17 * MINUTE)
    assert claim.due == ANY_TIME


def test_what_was_settled_is_no_loss_at_the_next_start(store, wheel, settings, now_ms, caplog):
    due_ms = now_ms + 10 * SECOND
    for _ in range(5):
        wheel.message("orders", due_ms)
    slot = settings.wheel.place(due_ms, now_ms)
    store.settle(store.due(slot))
    again = KafkaStore(settings)
    assert again.due(slot) == []
    assert caplog.records == []
    again.close()
