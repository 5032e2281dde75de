import logging
import time
from contextlib import closing

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.support.clocks import eventually

from duetime.core.errors import KafkaError
from duetime.core.topics import TopicNames
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.leadership import Generations
from duetime.kafka.offsets import ANY_TIME, LogIdentity, OffsetRange, Offsets
from duetime.stores.wheel_reader import WheelReader
from duetime.stores.wheel_store import KafkaStore

SECOND = 1_000
MINUTE = 60 * SECOND


@pytest.fixture
def store(settings, topics):  # noqa: ARG001 (the topics must be there)
    opened = KafkaStore(settings)
    yield opened
    opened.close()


@pytest.fixture
def remove(settings):
    """Remove the records of a partition before an offset, as retention would."""
    admin = AdminClient(librdkafka_properties(settings))

    def before(place, offset):
        for answer in admin.delete_records([TopicPartition(*place, offset)]).values():
            answer.result()

    return before


def test_a_reader_claims_nothing(store, wheel, settings, now_ms):
    identity = wheel.message("orders", now_ms + 10 * SECOND)
    with closing(WheelReader(settings)) as reader:
        assert reader.find(identity, now_ms).id == identity
        (pending,) = reader.pending(now_ms)
        assert (pending.slot, pending.count) == (settings.wheel.place(identity.due_ms, now_ms), 1)
    (claimed,) = store.acquire(settings.wheel.place(identity.due_ms, now_ms))
    assert claimed.count == 1


def test_records_removed_while_down_are_logged(wheel, settings, now_ms, remove, caplog):
    KafkaStore(settings).close()
    due_ms = now_ms + 10 * SECOND
    for _ in range(5):
        wheel.message("orders", due_ms)
    topic, partition = wheel.partition(due_ms)
    remove((topic, partition), 3)
    store = KafkaStore(settings)
    (told,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert f"topic={topic} partition={partition} records=3" in told.getMessage()
    slot = settings.wheel.place(due_ms, now_ms)
    assert store.acquire(slot) == [OffsetRange(topic, partition, 3, 5)]
    store.close()


def test_records_removed_while_running_are_logged_once(store, wheel, now_ms, remove, caplog):
    due_ms = now_ms + 10 * SECOND
    for _ in range(5):
        wheel.message("orders", due_ms)
    topic, partition = wheel.partition(due_ms)
    remove((topic, partition), 3)
    overdue = store.acquire_overdue(due_ms + 5 * SECOND)
    assert overdue == [OffsetRange(topic, partition, 3, 5)]
    store.release(overdue)
    assert store.acquire_overdue(due_ms + 5 * SECOND) == overdue
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


@pytest.mark.slow
def test_due_times_begin_with_the_slot_of_the_oldest_record(store, wheel, settings, now_ms):
    slot = settings.wheel.place(now_ms + 10 * SECOND, now_ms)
    wheel.message("orders", now_ms + 10 * SECOND)
    later_ms = now_ms + 17 * MINUTE
    (claim,) = store.acquire_overdue(later_ms)
    assert claim.due.from_ms == settings.wheel.start_ms(slot)
    assert later_ms - settings.wheel.ring * SECOND <= claim.due.to_ms <= later_ms + 2 * SECOND


@pytest.mark.slow
def test_due_times_are_unknown_while_settled_records_remain(store, wheel, settings, now_ms):
    slot = settings.wheel.place(now_ms + 10 * SECOND, now_ms)
    wheel.message("orders", now_ms + 10 * SECOND)
    store._deletion_guard.delete = lambda *_: None
    store.settle(store.acquire(slot))
    wheel.message("orders", now_ms + 10 * SECOND, level=0)
    (claim,) = store.acquire_overdue(now_ms + 17 * MINUTE)
    assert (claim.count, claim.due) == (1, ANY_TIME)


def test_overdue_messages_are_claimed_without_due_times(store, wheel, now_ms, monkeypatch, caplog):
    wheel.message("orders", now_ms + 10 * SECOND)

    def refuse(_places):
        raise KafkaError("is the broker up?")

    monkeypatch.setattr(store._offsets, "first_appended_ms", refuse)
    (claim,) = store.acquire_overdue(now_ms + 17 * MINUTE)
    assert (claim.count, claim.due) == (1, ANY_TIME)
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


def test_records_just_removed_have_no_due_times(store, wheel, now_ms, monkeypatch):
    wheel.message("orders", now_ms + 10 * SECOND)
    gone = lambda places: dict.fromkeys(places, -1)  # noqa: E731 (as Kafka says it)
    monkeypatch.setattr(store._offsets, "first_appended_ms", gone)
    (claim,) = store.acquire_overdue(now_ms + 17 * MINUTE)
    assert claim.due == ANY_TIME


def test_settled_records_are_not_logged_as_lost(store, wheel, settings, now_ms, caplog):
    due_ms = now_ms + 10 * SECOND
    for _ in range(5):
        wheel.message("orders", due_ms)
    slot = settings.wheel.place(due_ms, now_ms)
    store.settle(store.acquire(slot))
    again = KafkaStore(settings)
    assert again.acquire(slot) == []
    assert caplog.records == []
    again.close()


@pytest.fixture
def recreate(settings):
    """Delete a topic of the wheel and create it again."""
    admin = AdminClient(librdkafka_properties(settings))

    def again(topic):
        admin.delete_topics([topic])[topic].result()
        # The name is free once every broker has deleted the topic.
        eventually(lambda: topic not in admin.list_topics(timeout=30).topics, "the end of it")
        assert create_topics(settings) == [topic]

    return again


def settle_some(store, wheel, slot, due_ms, count):
    for _ in range(count):
        wheel.message("orders", due_ms, level=0)
    (claim,) = store.acquire(slot)
    assert claim.count == count
    store.mark_started([claim], due_ms)
    store.settle([claim])


@pytest.mark.parametrize("count", [2, 5, 7], ids=["fewer", "as many", "more"])
def test_a_topic_recreated_while_down_is_read_from_its_start(  # noqa: PLR0913, PLR0917 (fixtures)
    wheel, settings, now_ms, recreate, caplog, count
):
    """More records than were settled prove nothing: only the topic's id does.

    Kafka removes the offsets of a topic with it. A restore may bring them back, and so may a leader
    that commits what it has just settled.
    """
    due_ms = now_ms + 10 * SECOND
    slot = settings.wheel.place(due_ms, now_ms)
    place = wheel.partition(due_ms, 0)
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
    (claim,) = store.acquire(slot)
    assert (claim.start, claim.end) == (0, count)
    # It is read back: its records may have been in the first log.
    assert now_ms <= claim.started_ms <= now_ms + MINUTE
    store.close()
    # A restart before a release job changes nothing.
    store = KafkaStore(settings)
    assert store.acquire(slot) == [claim]
    assert store.acquire(slot) == []
    store.close()
    assert [each.levelno for each in caplog.records] == [logging.ERROR]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 7], ids=["fewer", "more"])
def test_a_topic_recreated_while_running_is_read_from_its_start(  # noqa: PLR0913, PLR0917 (fixtures)
    store, wheel, settings, now_ms, recreate, caplog, count
):
    due_ms = now_ms + 10 * SECOND
    slot = settings.wheel.place(due_ms, now_ms)
    settle_some(store, wheel, slot, due_ms, 5)
    recreate(f"{settings.namespace}.wheel.0")
    for _ in range(count):
        wheel.message("orders", due_ms, level=0)
    (claim,) = store.acquire_overdue(due_ms + 5 * SECOND)
    assert (claim.start, claim.end) == (0, count)
    assert claim.started_ms is not None
    (told,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "created again" in told.getMessage()
    store.settle([claim])
    assert store.acquire_overdue(due_ms + 5 * SECOND) == []


def test_settling_deletes_nothing_from_a_recreated_topic(  # noqa: PLR0913, PLR0917 (fixtures)
    store, wheel, settings, now_ms, recreate, caplog
):
    """The claim was acquired before: its offsets belong to records that are gone."""
    due_ms = now_ms + 10 * SECOND
    slot = settings.wheel.place(due_ms, now_ms)
    for _ in range(3):
        wheel.message("orders", due_ms, level=0)
    claims = store.acquire(slot)
    recreate(f"{settings.namespace}.wheel.0")
    for _ in range(4):
        wheel.message("orders", due_ms, level=0)
    store.settle(claims)
    (claim,) = store.acquire_overdue(due_ms + 5 * SECOND)
    assert (claim.start, claim.end) == (0, 4)
    assert {each.levelno for each in caplog.records} == {logging.ERROR}


def test_the_note_of_an_earlier_version_is_read(wheel, settings, now_ms):
    due_ms = now_ms + 10 * SECOND
    wheel.message("orders", due_ms)
    place = wheel.partition(due_ms)
    store = KafkaStore(settings)
    store._offsets.commit({place: 0}, {place: "1700000000000"})
    store.close()
    store = KafkaStore(settings)
    (claim,) = store.acquire(settings.wheel.place(due_ms, now_ms))
    assert claim.started_ms == 1_700_000_000_000
    store.close()


DAY_S = 86_400


def test_unchanged_offsets_are_committed_daily(store, wheel, settings, now_ms, monkeypatch):
    """Brokers forget an unchanged offset after a week. Here another tool overwrites it."""
    idle, busy = (now_ms + each * MINUTE for each in (20, 30))
    places = [wheel.partition(each) for each in (idle, busy)]
    for due_ms in (idle, busy):
        wheel.message("orders", due_ms)
    store.settle(store.acquire(settings.wheel.place(idle, now_ms)))
    claims = store.acquire(settings.wheel.place(busy, now_ms))
    store.mark_started(claims, now_ms)
    group = Offsets(settings, TopicNames(settings).release_group)
    group.commit(dict.fromkeys(places, 0))

    store.refresh_commits(now_ms)
    assert group.committed(places) == dict.fromkeys(places, 0)
    monkeypatch.setattr(store, "_recommit_at_s", time.monotonic() - 1)
    store.refresh_commits(now_ms)
    # A claimed partition is not committed.
    assert group.committed(places) == dict(zip(places, (1, 0), strict=True))
    store.refresh_commits(now_ms + DAY_S * SECOND)
    store.settle(claims)
    assert group.committed(places) == dict.fromkeys(places, 1)
    group.close()


def begun(store, place):
    """Return when the partition's claim was started, as committed; None if it was not."""
    return LogIdentity.parse(store._offsets.notes([place])[place]).started_ms


def test_a_former_leader_commits_nothing(settings, wheel, now_ms):
    """The group accepts commits of any process, such as one that was paused between two lines."""
    place = wheel.partition(now_ms + MINUTE)
    wheel.message("orders", now_ms + MINUTE)
    leads = [True]
    store = KafkaStore(settings, may_commit=lambda: leads[0])
    claims = store.acquire(settings.wheel.place(now_ms + MINUTE, now_ms))
    leads[0] = False
    for step in (lambda: store.mark_started(claims, now_ms), lambda: store.settle(claims)):
        with pytest.raises(KafkaError, match="leadership is lost"):
            step()
    assert store._offsets.committed([place]) == {place: 0}
    assert begun(store, place) is None
    store.close()


def test_a_former_leader_deletes_nothing(settings, wheel, now_ms, monkeypatch):
    """It stood still since its commit: by now the topic may have been created again."""
    wheel.message("orders", now_ms + MINUTE)
    leads = [True]
    with closing(KafkaStore(settings, may_commit=lambda: leads[0])) as store:
        (claim,) = store.acquire(settings.wheel.place(now_ms + MINUTE, now_ms))
        commit = store._offsets.commit

        def lose_the_lead(*given):
            commit(*given)
            leads[0] = False

        monkeypatch.setattr(store._offsets, "commit", lose_the_lead)
        deleted = []
        monkeypatch.setattr(store._offsets, "delete_before", deleted.append)
        store.settle([claim])
        assert store._offsets.committed([claim.place]) == {claim.place: claim.end}
    assert not deleted


def test_what_a_former_leader_commits_late_is_read_back(settings, wheel, now_ms, caplog):
    """It stood still between its look at the lease and the commit. Its successor is killed."""
    due_ms = now_ms + MINUTE
    slot = settings.wheel.place(due_ms, now_ms)
    wheel.message("orders", due_ms)
    with closing(KafkaStore(settings)) as former:
        claims = former.acquire(slot)
        former.mark_started(claims, now_ms)
        with closing(KafkaStore(settings)) as successor:
            wheel.message("orders", due_ms)
            (claim,) = successor.acquire(slot)
            assert (claim.count, claim.started_ms) == (2, now_ms)
            successor.mark_started([claim], now_ms + SECOND)
        # The successor's note is gone, and of its two records the second may have been sent.
        former.settle(claims)
    # It is read back by the next leader, and by the one after that until it is settled.
    for warnings in (1, 0):
        caplog.clear()
        with closing(KafkaStore(settings)) as store:
            (claim,) = store.acquire(slot)
            assert (claim.start, claim.end) == (1, 2)
            assert now_ms <= claim.started_ms < due_ms
        assert len(caplog.records) == warnings


@pytest.fixture
def overwritten(settings, wheel, now_ms, monkeypatch):
    """A late commit of one that stood still as it took the lead; its successor's are all gone.

    Returns a slot that the successor has begun to release, and the generations it knows. What it
    has released of another is deleted.
    """
    slots = [settings.wheel.place(now_ms + ahead, now_ms) for ahead in (MINUTE, 2 * MINUTE)]
    for ahead in (MINUTE, 2 * MINUTE):
        wheel.message("orders", now_ms + ahead)
    former = Generations()
    KafkaStore(settings, generations=former).close()
    held = []
    with monkeypatch.context() as patches:
        patches.setattr(Offsets, "commit", lambda *given: held.append(given))
        late = KafkaStore(settings, generations=Generations(former.present))
    known = Generations(former.present)
    with closing(late), closing(KafkaStore(settings, generations=known)) as successor:
        successor.mark_started(successor.acquire(slots[0]), now_ms)
        successor.settle(successor.acquire(slots[1]))
        for given in held:
            Offsets.commit(*given)
    return slots[0], known


@pytest.mark.parametrize("is_another", [True, False], ids=["another", "its next try to start"])
def test_a_commit_of_one_that_stood_still_as_it_took_the_lead(
    settings, now_ms, overwritten, is_another, caplog
):
    slot, known = overwritten
    after = Generations(known.present) if is_another else known
    with closing(KafkaStore(settings, generations=after)) as store:
        (claim,) = store.acquire(slot)
        assert claim.count == 1
        assert now_ms <= claim.started_ms < now_ms + MINUTE
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


def test_claims_restart_when_the_clock_is_set_back(store, wheel, settings, now_ms):
    """Records sent later have earlier timestamps than the start: a search from it misses them."""
    place = wheel.partition(now_ms + MINUTE)
    wheel.message("orders", now_ms + MINUTE)
    store.refresh_commits(now_ms)
    claims = store.acquire(settings.wheel.place(now_ms + MINUTE, now_ms))
    store.mark_started(claims, now_ms)
    store.refresh_commits(now_ms + 10)
    assert begun(store, place) == now_ms
    store.refresh_commits(now_ms - MINUTE)
    assert begun(store, place) == now_ms - MINUTE
    store.release(claims)
    (again,) = store.acquire_overdue(now_ms + 100 * MINUTE)
    assert again.started_ms == now_ms - MINUTE
