import logging
import time
from contextlib import closing

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.conftest import WheelWriter, eventually, small_settings

from duetime.admin import create_topics
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError
from duetime.local.broker import LocalBroker
from duetime.stores import ANY_TIME, OffsetRange
from duetime.stores.kafka import KafkaStore
from duetime.stores.keeping import Keeping
from duetime.stores.logs import LogNote
from duetime.stores.offsets import Offsets
from duetime.stores.reader import WheelReader
from duetime.topics import TopicNames

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


@pytest.fixture
def recreate(settings):
    """Deletes a topic of the wheel and creates it again, as somebody might."""
    admin = AdminClient(librdkafka_properties(settings))

    def again(topic):
        admin.delete_topics([topic])[topic].result()
        # Its name is free once the brokers have heard of it.
        eventually(lambda: topic not in admin.list_topics(timeout=30).topics, "the end of it")
        assert create_topics(settings) == [topic]

    return again


def settle_some(store, wheel, slot, due_ms, count):
    for _ in range(count):
        wheel.message("orders", due_ms, level=0)
    (claim,) = store.due(slot)
    assert claim.count == count
    store.begin([claim], due_ms)
    store.settle([claim])


@pytest.mark.parametrize("count", [2, 5, 7], ids=["fewer", "as many", "more"])
def test_a_topic_created_again_while_it_is_down_is_read_from_its_start(  # noqa: PLR0913, PLR0917 (fixtures)
    wheel, settings, now_ms, recreate, caplog, count
):
    """More records than were settled tell nothing: only the topic's id does.

    Kafka removes the offsets of a topic with it. A restore may bring them back, and so may a leader
    that commits what it has just settled.
    """
    due_ms = now_ms + 10 * SECOND
    slot = settings.wheel.place(due_ms, now_ms)
    place = wheel._slot(due_ms, 0)
    store = KafkaStore(settings)
    settle_some(store, wheel, slot, due_ms, 5)
    commit = store._offsets.commits([place])[place]
    recreate(place[0])
    store._offsets.commit({place: commit.offset}, {place: commit.note})
    store.close()
    for _ in range(count):
        wheel.message("orders", due_ms, level=0)
    with closing(WheelReader(settings)) as reader:
        assert sum(each.count for each in reader.pending(now_ms)) == count
    store = KafkaStore(settings)
    (told,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert f"topic={place[0]} partitions=1" in told.getMessage()
    (claim,) = store.due(slot)
    assert (claim.start, claim.end) == (0, count)
    # It is read back: for all that is known it was in the first log, too.
    assert now_ms <= claim.begun_ms <= now_ms + MINUTE
    store.close()
    # A stop before anything was taken up changes nothing.
    store = KafkaStore(settings)
    assert store.due(slot) == [claim]
    assert store.due(slot) == []
    store.close()
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("count", [2, 7], ids=["fewer", "more"])
def test_a_topic_created_again_while_it_runs_is_read_from_its_start(  # noqa: PLR0913, PLR0917 (fixtures)
    store, wheel, settings, now_ms, recreate, caplog, count
):
    due_ms = now_ms + 10 * SECOND
    slot = settings.wheel.place(due_ms, now_ms)
    settle_some(store, wheel, slot, due_ms, 5)
    recreate(f"{settings.namespace}.wheel.0")
    for _ in range(count):
        wheel.message("orders", due_ms, level=0)
    (claim,) = store.overdue(due_ms + 5 * SECOND)
    assert (claim.start, claim.end) == (0, count)
    assert claim.begun_ms is not None
    (told,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "created again" in told.getMessage()
    store.settle([claim])
    assert store.overdue(due_ms + 5 * SECOND) == []


def test_what_is_settled_of_a_topic_that_was_created_again_frees_nothing_of_the_new_one(  # noqa: PLR0913, PLR0917 (fixtures)
    store, wheel, settings, now_ms, recreate, caplog
):
    """A window was open meanwhile: its offsets are of records that are gone."""
    due_ms = now_ms + 10 * SECOND
    slot = settings.wheel.place(due_ms, now_ms)
    for _ in range(3):
        wheel.message("orders", due_ms, level=0)
    claims = store.due(slot)
    recreate(f"{settings.namespace}.wheel.0")
    for _ in range(4):
        wheel.message("orders", due_ms, level=0)
    store.settle(claims)
    (claim,) = store.overdue(due_ms + 5 * SECOND)
    assert (claim.start, claim.end) == (0, 4)
    assert {each.levelno for each in caplog.records} == {logging.ERROR}


def test_the_instant_that_an_earlier_version_noted_is_read(wheel, settings, now_ms):
    due_ms = now_ms + 10 * SECOND
    wheel.message("orders", due_ms)
    place = wheel._slot(due_ms, None)
    store = KafkaStore(settings)
    store._offsets.commit({place: 0}, {place: "1700000000000"})
    store.close()
    store = KafkaStore(settings)
    (claim,) = store.due(settings.wheel.place(due_ms, now_ms))
    assert claim.begun_ms == 1_700_000_000_000
    store.close()


def test_a_log_that_lost_its_end_is_read_from_its_start(tmp_path, now_ms, caplog):
    """As after a power cut: the broker has acknowledged what its disk does not have."""
    broker = LocalBroker(tmp_path)
    broker.start()
    settings = small_settings(broker.bootstrap)
    create_topics(settings)
    due_ms = now_ms + 10 * SECOND
    slot = settings.wheel.place(due_ms, now_ms)
    wheel = WheelWriter(settings, now_ms)
    store = KafkaStore(settings, Kept())
    settle_some(store, wheel, slot, due_ms, 5)
    store.close()
    topic, partition = wheel._slot(due_ms, None)
    broker.kill()
    (log,) = tmp_path.rglob(f"{topic}-{partition}/*.log")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 10)
    broker.start()
    try:
        wheel = WheelWriter(settings, now_ms)
        store = KafkaStore(settings)
        # The fifth is lost, as the disk lost it. What comes now has its offset.
        (told,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert f"topic={topic} partitions=1" in told.getMessage()
        wheel.message("orders", due_ms)
        (claim,) = store.due(slot)
        assert (claim.start, claim.end) == (0, 5)
        assert claim.begun_ms is not None
        store.close()
    finally:
        broker.stop()


class Kept(Keeping):
    """Frees nothing."""

    def free(self, *_):
        """Leave it."""


DAY_S = 86_400


def test_what_has_not_changed_is_committed_once_a_day(store, wheel, settings, now_ms, monkeypatch):
    """Brokers forget what nobody commits for a week. Another tool's commit stands for that here."""
    idle, busy = (now_ms + each * MINUTE for each in (20, 30))
    places = [wheel._slot(each, None) for each in (idle, busy)]
    for due_ms in (idle, busy):
        wheel.message("orders", due_ms)
    store.settle(store.due(settings.wheel.place(idle, now_ms)))
    claims = store.due(settings.wheel.place(busy, now_ms))
    store.begin(claims, now_ms)
    group = Offsets(settings, TopicNames(settings).release_group)
    group.commit(dict.fromkeys(places, 0))

    store.look_after(now_ms)
    assert group.committed(places) == dict.fromkeys(places, 0)
    monkeypatch.setattr(store, "_recommit_s", time.monotonic() - 1)
    store.look_after(now_ms)
    # What is being worked on is left alone.
    assert group.committed(places) == dict(zip(places, (1, 0), strict=True))
    store.look_after(now_ms + DAY_S * SECOND)
    store.settle(claims)
    assert group.committed(places) == dict.fromkeys(places, 1)
    group.close()


def begun(store, place):
    """Since when the partition is noted as taken up; None if it is not."""
    return LogNote.parse(store._offsets.notes([place])[place]).begun_ms


def test_who_does_not_lead_any_more_notes_nothing(settings, wheel, now_ms):
    """The group takes commits of anybody, also of a process that stood still between two lines."""
    place = wheel._slot(now_ms + MINUTE, None)
    wheel.message("orders", now_ms + MINUTE)
    leads = [True]
    store = KafkaStore(settings, may_commit=lambda: leads[0])
    claims = store.due(settings.wheel.place(now_ms + MINUTE, now_ms))
    leads[0] = False
    for step in (lambda: store.begin(claims, now_ms), lambda: store.settle(claims)):
        with pytest.raises(KafkaError, match="the lead is lost"):
            step()
    assert store._offsets.committed([place]) == {place: 0}
    assert begun(store, place) is None
    store.close()


def test_what_is_begun_is_noted_anew_when_the_clock_is_set_back(store, wheel, settings, now_ms):
    """What is sent after that is stamped earlier than it was begun, and would not be found."""
    place = wheel._slot(now_ms + MINUTE, None)
    wheel.message("orders", now_ms + MINUTE)
    store.look_after(now_ms)
    claims = store.due(settings.wheel.place(now_ms + MINUTE, now_ms))
    store.begin(claims, now_ms)
    store.look_after(now_ms + 10)
    assert begun(store, place) == now_ms
    store.look_after(now_ms - MINUTE)
    assert begun(store, place) == now_ms - MINUTE
    store.give_up(claims)
    (again,) = store.overdue(now_ms + 100 * MINUTE)
    assert again.begun_ms == now_ms - MINUTE
