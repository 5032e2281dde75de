"""A cancel's definite answer for what waits for a retry; the clock stands where a test wants it."""

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.conftest import SetClock, eventually

from duetime.cancelling import MARGIN_MS, cancel_surely, closes_ms, find_waiting
from duetime.connection import librdkafka_properties
from duetime.errors import KafkaError, TooLate
from duetime.failed import find_failed
from duetime.message import DUE_AT_MS, DUE_ERROR, DUE_ERROR_DETAIL, WAITING_HEADERS, MessageId
from duetime.stores.offsets import Offsets
from duetime.stores.opening import open_reader
from duetime.stores.records import RangeReader
from duetime.topics import TopicNames

pytestmark = pytest.mark.system

MINUTE_MS = 60_000


@pytest.fixture
def settings(settings):
    """Under which the first retry is far enough away to be cancelled."""
    return settings.model_copy(update={"retry_backoff_ms": 20_000})


@pytest.fixture
def fails(settings, wheel, now_ms):  # noqa: ARG001 (the topics must be there)
    """Writes down that a message has failed, as the pipeline does; returns its retries."""
    producer = Producer(librdkafka_properties(settings))

    def fail(identity, reason="not-authorised", *, retried_ms="", attempts=None, failed_ms=now_ms):
        retry = "" if attempts is None else f"::{retried_ms}:{attempts}:{failed_ms}"
        values = ("orders", None, f"{now_ms}{retry}", str(identity.due_ms), str(identity))
        headers = list(zip(WAITING_HEADERS, values, strict=True))
        said = [(DUE_ERROR, reason), (DUE_ERROR_DETAIL, "so it is")]
        producer.produce(TopicNames(settings).failed, b"v", headers=[*headers, *said])
        assert producer.flush(30) == 0
        return find_failed(identity, settings, now_ms).retries_ms

    return fail


@pytest.fixture
def waits(wheel, now_ms):
    """Writes a retry into the wheel, or its cancel."""

    def write(identity, retry_ms, *, is_cancel=False):
        state = f"{now_ms}::{retry_ms}:1:{now_ms}"
        retry = ("orders", None, state, str(identity.due_ms), str(identity))
        cancel = (None, None, None, str(retry_ms), str(identity))
        values = cancel if is_cancel else retry
        wheel.foreign(retry_ms, list(zip(WAITING_HEADERS, values, strict=True)))

    return write


@pytest.fixture
def _impatient(monkeypatch):
    """There is no pipeline that would take a cancel in."""
    monkeypatch.setattr("duetime.cancelling.CONFIRM_MS", 0)


@pytest.fixture
def identity(now_ms):
    return MessageId(due_ms=now_ms - 1_000, unique="failed")


@pytest.fixture
def failed(identity, fails, waits):
    """A message that has failed once and waits for its retry; and when that is."""
    (retry_ms,) = fails(identity)
    waits(identity, retry_ms)
    return identity, retry_ms


@pytest.fixture
def cancelled(waits, failed):
    """The same, cancelled."""
    identity, retry_ms = failed
    waits(identity, retry_ms, is_cancel=True)
    return failed


def test_a_retry_that_is_cancelled_is_so_until_its_window_is_planned(settings, cancelled):
    identity, retry_ms = cancelled
    last_ms = closes_ms(retry_ms, settings) - MARGIN_MS
    for clock_ms in (retry_ms - 8_000, retry_ms - settings.horizon_ms + 1, last_ms - 1):
        cancel_surely(identity, settings, SetClock(clock_ms))
    with pytest.raises(TooLate, match="tried again just now"):
        cancel_surely(identity, settings, SetClock(last_ms))


def test_a_retry_that_is_near_is_too_late_to_cancel(settings, failed):
    identity, retry_ms = failed
    with pytest.raises(TooLate, match="tried again just now"):
        cancel_surely(identity, settings, SetClock(retry_ms - settings.horizon_ms + 1))


def test_of_a_retry_that_was_delivered_long_ago_nobody_says_that_it_is_tried_just_now(
    settings, identity, fails
):
    (retry_ms,) = fails(identity)
    later_ms = retry_ms + 10 * MINUTE_MS
    said = "was to be tried again 10m ago: it is delivered, or will be at once"
    with pytest.raises(TooLate, match=said):
        cancel_surely(identity, settings, SetClock(later_ms))
    with closing(open_reader(settings)) as reader, pytest.raises(TooLate, match=said):
        find_waiting(identity, reader, settings, later_ms)


@pytest.mark.usefixtures("_impatient")
def test_where_no_retry_was_needed_because_the_topic_was_there_the_answer_is_definite(
    settings, identity, fails, now_ms
):
    fails(identity, "unknown-topic")
    with pytest.raises(TooLate, match="if there was the topic by then, it is delivered"):
        cancel_surely(identity, settings, SetClock(now_ms))
    other = MessageId(due_ms=identity.due_ms, unique="other")
    fails(other)
    with pytest.raises(KafkaError, match="nobody took it in"):
        cancel_surely(other, settings, SetClock(now_ms))


@pytest.mark.usefixtures("_impatient")
def test_of_two_copies_that_have_failed_each_retry_is_cancelled(
    settings, identity, fails, waits, now_ms
):
    fails(identity)
    first_ms, second_ms = eventually(lambda: found if len(found := fails(identity)) > 1 else None)
    for retry_ms in (first_ms, second_ms):
        waits(identity, retry_ms)
    waits(identity, second_ms, is_cancel=True)
    with pytest.raises(KafkaError, match="nobody took it in"):
        cancel_surely(identity, settings, SetClock(now_ms))
    assert instants_of_cancels(settings) == [first_ms]
    waits(identity, first_ms, is_cancel=True)
    cancel_surely(identity, settings, SetClock(now_ms))


@pytest.mark.usefixtures("_impatient")
def test_of_two_copies_the_far_one_is_cancelled_where_the_other_one_is_too_near(
    settings, identity, fails, waits
):
    fails(identity)
    near_ms, far_ms = fails(identity, retried_ms=1, attempts=2)
    waits(identity, near_ms)
    waits(identity, far_ms)
    clock = SetClock(near_ms - settings.horizon_ms + 1)
    with pytest.raises(KafkaError, match="nobody took it in"):
        cancel_surely(identity, settings, clock)
    assert instants_of_cancels(settings) == [far_ms]
    waits(identity, far_ms, is_cancel=True)
    with pytest.raises(TooLate, match="tried again just now"):
        cancel_surely(identity, settings, clock)


def instants_of_cancels(settings):
    """What the control topic has."""
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": settings.namespace})
    topic = TopicNames(settings).control
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
    (record,) = consumer.consume(1, timeout=20)
    further = consumer.consume(1, timeout=1)
    consumer.close()
    return [int(dict(each.headers())[DUE_AT_MS]) for each in (record, *further)]


def test_a_retry_that_has_failed_again_is_over_and_the_next_one_waits(identity, fails):
    (first_ms,) = fails(identity)
    (second_ms,) = fails(identity, retried_ms=first_ms, attempts=1)
    assert second_ms > first_ms
    assert fails(identity, retried_ms=second_ms, attempts=9) == ()


def test_what_was_delivered_at_once_and_failed_again_waits_for_that_retry_alone(
    settings, identity, fails
):
    fails(identity, "unknown-topic")
    # There was the topic then: no retry of it was made.
    again = fails(identity, attempts=1, failed_ms=appended_ms(settings))
    assert len(again) == 1
    # Another copy, which has failed for the first time.
    assert len(fails(identity)) == 2


def appended_ms(settings):
    """When the first failure was written down."""
    place = TopicNames(settings).failed, 0
    with closing(Offsets(settings, settings.namespace)) as offsets:
        return offsets.first_appended_ms([place])[place]


@pytest.fixture
def read(monkeypatch):
    """How many records were read each time."""
    counts, records = [], RangeReader.records

    def counted(self, ranges):
        counts.append(sum(each.count for each in ranges))
        return records(self, ranges)

    monkeypatch.setattr(RangeReader, "records", counted)
    return counts


def test_a_cancel_is_confirmed_however_long_its_slot_takes_to_read(
    settings, wheel, now_ms, monkeypatch
):
    """A look of 20 s is longer than the 10 s in which the cancel is to be seen."""
    due_ms, clock, others = now_ms + 40 * MINUTE_MS, SetClock(now_ms), 200
    with wheel.at_once():
        for _ in range(others):
            wheel.message("orders", due_ms)
        wanted = wheel.message("orders", due_ms, unique="wanted")
    counts, records = [], RangeReader.records

    def slowly(self, ranges):
        counts.append(sum(each.count for each in ranges))
        yield from records(self, ranges)
        # The first look ends before the cancel is sent, and the second before it is taken in.
        clock.ms += 20_000
        if len(counts) == 2:
            wheel.cancel(wanted)

    def send(*_):
        wheel.message("orders", due_ms, unique="another")

    monkeypatch.setattr(RangeReader, "records", slowly)
    monkeypatch.setattr("duetime.cancelling.Producer.send", send)
    cancel_surely(wanted, settings, clock)
    # The slot is read once, and then what came since.
    assert counts == [others + 1, 1, 1]


def test_what_has_failed_is_read_once_for_all_who_ask(settings, fails, identity, now_ms, read):
    others = [MessageId(due_ms=identity.due_ms, unique=f"m{each}") for each in range(4)]
    retries = [fails(each) for each in others]
    read.clear()
    found = [find_failed(each, settings, now_ms).retries_ms for each in others]
    assert found == retries
    # Only what each of them is itself.
    assert set(read) == {0, 1}
    assert sum(read) == len(others)
    assert find_failed(identity, settings, now_ms) is None


def test_who_is_overtaken_by_another_who_asks_does_not_read_all_again(
    fails, identity, read, monkeypatch
):
    for _ in range(3):
        fails(identity)
    ends = Offsets.ends
    with ThreadPoolExecutor() as pool:

        def overtaken(self, places):
            found = ends(self, places)
            monkeypatch.setattr(Offsets, "ends", ends)
            # It comes first if it can.
            wait([pool.submit(fails, identity)], timeout=2)
            return found

        monkeypatch.setattr(Offsets, "ends", overtaken)
        read.clear()
        assert len(fails(identity)) == 4
    assert max(read) == 1


def test_what_is_freed_or_was_not_asked_for_before_is_no_matter(settings, fails, now_ms, read):
    old, new = (MessageId(due_ms=now_ms + ms, unique=f"{ms}") for ms in (-1_000, 62_000))
    fails(old)
    assert find_failed(new, settings, now_ms) is None
    for _ in range(2):
        fails(old)
    admin = AdminClient(librdkafka_properties(settings))
    place = TopicPartition(TopicNames(settings).failed, 0, 2)
    for freed in admin.delete_records([place]).values():
        freed.result()
    read.clear()
    assert len(find_failed(old, settings, now_ms).retries_ms) == 1
    assert sum(read) == 1
