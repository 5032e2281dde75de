"""Cancelling a pending retry, with a clock that the test sets."""

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.support.clocks import SetClock, eventually

from duetime.client.cancellation import (
    CANCEL_MARGIN_MS,
    cancel_and_confirm,
    closes_ms,
    find_failed_message,
    find_pending,
)
from duetime.core import headers as H
from duetime.core.errors import KafkaError, TooLate
from duetime.core.messages import MessageId
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.kafka.range_reader import RangeReader
from duetime.stores.factory import open_reader

MINUTE_MS = 60_000


@pytest.fixture
def settings(settings):
    """Settings whose first retry is late enough to be cancelled."""
    return settings.model_copy(update={"retry_backoff_ms": 20_000})


@pytest.fixture
def fails(settings, wheel, now_ms):  # noqa: ARG001 (the topics must be there)
    """Write a failure like the pipeline does; return the pending retries of the message."""
    producer = Producer(librdkafka_properties(settings))

    def fail(identity, reason="not-authorised", *, retried_ms="", attempts=None, failed_ms=now_ms):
        retry = "" if attempts is None else f"::{retried_ms}:{attempts}:{failed_ms}"
        values = ("orders", None, f"{now_ms}{retry}", str(identity.due_ms), str(identity))
        headers = list(zip(H.SCHEDULED, values, strict=True))
        said = [(H.DUE_ERROR, reason), (H.DUE_ERROR_DETAIL, "so it is")]
        producer.produce(TopicNames(settings).retry, b"v", headers=[*headers, *said])
        assert producer.flush(30) == 0
        return find_failed_message(identity, settings, now_ms).retries_ms

    return fail


@pytest.fixture
def waits(wheel, now_ms):
    """Writes a retry into the wheel, or its cancel."""

    def write(identity, retry_ms, *, is_cancel=False):
        state = f"{now_ms}::{retry_ms}:1:{now_ms}"
        retry = ("orders", None, state, str(identity.due_ms), str(identity))
        cancel = (None, None, None, str(retry_ms), str(identity))
        values = cancel if is_cancel else retry
        wheel.foreign(retry_ms, list(zip(H.SCHEDULED, values, strict=True)))

    return write


@pytest.fixture
def _impatient(monkeypatch):
    """Do not wait: no pipeline runs that would apply a cancel."""
    monkeypatch.setattr("duetime.client.cancellation.CONFIRM_MS", 0)


@pytest.fixture
def identity(now_ms):
    return MessageId(due_ms=now_ms - 1_000, unique="failed")


@pytest.fixture
def failed(identity, fails, waits):
    """A message that has failed once, and the instant of its pending retry."""
    (retry_ms,) = fails(identity)
    waits(identity, retry_ms)
    return identity, retry_ms


@pytest.fixture
def cancelled(waits, failed):
    """A failed message whose retry is cancelled."""
    identity, retry_ms = failed
    waits(identity, retry_ms, is_cancel=True)
    return failed


@pytest.mark.slow
def test_a_cancelled_retry_is_confirmed_until_its_window_is_planned(settings, cancelled):
    identity, retry_ms = cancelled
    last_ms = closes_ms(retry_ms, settings) - CANCEL_MARGIN_MS
    for clock_ms in (
        retry_ms - 8_000,
        retry_ms - settings.short_delay_threshold_ms + 1,
        last_ms - 1,
    ):
        cancel_and_confirm(identity, settings, SetClock(clock_ms))
    with pytest.raises(TooLate, match="just being retried"):
        cancel_and_confirm(identity, settings, SetClock(last_ms))


def test_a_retry_that_is_near_is_too_late_to_cancel(settings, failed):
    identity, retry_ms = failed
    with pytest.raises(TooLate, match="just being retried"):
        cancel_and_confirm(
            identity, settings, SetClock(retry_ms - settings.short_delay_threshold_ms + 1)
        )


def test_a_retry_due_long_ago_is_not_called_pending(settings, identity, fails):
    (retry_ms,) = fails(identity)
    later_ms = retry_ms + 10 * MINUTE_MS
    said = "its retry was due 10m ago: it is delivered, or will be at once"
    with pytest.raises(TooLate, match=said):
        cancel_and_confirm(identity, settings, SetClock(later_ms))
    with closing(open_reader(settings)) as reader, pytest.raises(TooLate, match=said):
        find_pending(identity, reader, settings, later_ms)


@pytest.mark.usefixtures("_impatient")
def test_a_message_whose_topic_exists_by_now_is_too_late_to_cancel(
    settings, identity, fails, now_ms
):
    fails(identity, "unknown-topic")
    with pytest.raises(TooLate, match="if the topic existed by then, it is delivered"):
        cancel_and_confirm(identity, settings, SetClock(now_ms))
    other = MessageId(due_ms=identity.due_ms, unique="other")
    fails(other)
    with pytest.raises(KafkaError, match="no pipeline has applied it"):
        cancel_and_confirm(other, settings, SetClock(now_ms))


@pytest.mark.slow
@pytest.mark.usefixtures("_impatient")
def test_the_retries_of_two_failed_copies_are_cancelled(settings, identity, fails, waits, now_ms):
    fails(identity)
    first_ms, second_ms = eventually(lambda: found if len(found := fails(identity)) > 1 else None)
    for retry_ms in (first_ms, second_ms):
        waits(identity, retry_ms)
    waits(identity, second_ms, is_cancel=True)
    with pytest.raises(KafkaError, match="no pipeline has applied it"):
        cancel_and_confirm(identity, settings, SetClock(now_ms))
    assert instants_of_cancels(settings) == [first_ms]
    waits(identity, first_ms, is_cancel=True)
    cancel_and_confirm(identity, settings, SetClock(now_ms))


@pytest.mark.slow
@pytest.mark.usefixtures("_impatient")
def test_the_far_copy_is_cancelled_if_the_other_is_too_near(settings, identity, fails, waits):
    fails(identity)
    near_ms, far_ms = fails(identity, retried_ms=1, attempts=2)
    waits(identity, near_ms)
    waits(identity, far_ms)
    clock = SetClock(near_ms - settings.short_delay_threshold_ms + 1)
    with pytest.raises(KafkaError, match="no pipeline has applied it"):
        cancel_and_confirm(identity, settings, clock)
    assert instants_of_cancels(settings) == [far_ms]
    waits(identity, far_ms, is_cancel=True)
    with pytest.raises(TooLate, match="just being retried"):
        cancel_and_confirm(identity, settings, clock)


def instants_of_cancels(settings):
    """Return the instants in the records of the control topic."""
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": settings.namespace})
    topic = TopicNames(settings).control
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
    (record,) = consumer.consume(1, timeout=20)
    further = consumer.consume(1, timeout=1)
    consumer.close()
    return [int(dict(each.headers())[H.DUE_AT_MS]) for each in (record, *further)]


@pytest.mark.slow
def test_a_retry_that_failed_is_over_and_the_next_is_pending(identity, fails):
    (first_ms,) = fails(identity)
    (second_ms,) = fails(identity, retried_ms=first_ms, attempts=1)
    assert second_ms > first_ms
    assert fails(identity, retried_ms=second_ms, attempts=9) == ()


def test_a_second_failure_without_a_retry_replaces_the_first(settings, identity, fails):
    fails(identity, "unknown-topic")
    # The topic existed then: it was delivered without a retry.
    again = fails(identity, attempts=1, failed_ms=appended_ms(settings))
    assert len(again) == 1
    # Another copy that fails for the first time.
    assert len(fails(identity)) == 2


def appended_ms(settings):
    """Return when the first failure was appended."""
    place = TopicNames(settings).retry, 0
    with closing(Offsets(settings, settings.namespace)) as offsets:
        return offsets.first_appended_ms([place])[place]


def test_a_cancel_is_confirmed_if_its_slot_takes_long_to_read(settings, wheel, now_ms, monkeypatch):
    """A read of 20 s is longer than the 10 s in which the cancel must be seen."""
    due_ms, clock, others = now_ms + 40 * MINUTE_MS, SetClock(now_ms), 200
    with wheel.at_once():
        for _ in range(others):
            wheel.message("orders", due_ms)
        wanted = wheel.message("orders", due_ms, unique="wanted")
    counts, records = [], RangeReader.records

    def slowly(self, ranges):
        counts.append(sum(each.count for each in ranges))
        yield from records(self, ranges)
        # The first read ends before the cancel is sent, and the second before it is applied.
        clock.ms += 20_000
        if len(counts) == 2:
            wheel.cancel(wanted)

    def send(*_):
        wheel.message("orders", due_ms, unique="another")

    monkeypatch.setattr(RangeReader, "records", slowly)
    monkeypatch.setattr("duetime.client.cancellation.Producer.send", send)
    cancel_and_confirm(wanted, settings, clock)
    # The slot is read once, and then what came since.
    assert counts == [others + 1, 1, 1]


@pytest.mark.slow
def test_failures_are_read_once_a_process(settings, fails, identity, now_ms, reads):
    others = [MessageId(due_ms=identity.due_ms, unique=f"m{each}") for each in range(4)]
    retries = [fails(each) for each in others]
    reads.clear()
    found = [find_failed_message(each, settings, now_ms).retries_ms for each in others]
    assert found == retries
    # Only the record of each.
    assert set(reads) == {1}
    assert sum(reads) == len(others)
    assert find_failed_message(identity, settings, now_ms) is None


@pytest.mark.slow
def test_an_overtaken_reader_does_not_read_all_again(fails, identity, reads, monkeypatch):
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
        reads.clear()
        assert len(fails(identity)) == 4
    assert max(reads) == 1


@pytest.mark.slow
def test_the_failure_index_follows_deletions_and_earlier_starts(settings, fails, now_ms, reads):
    old, new = (MessageId(due_ms=now_ms + ms, unique=f"{ms}") for ms in (-1_000, 62_000))
    fails(old)
    assert find_failed_message(new, settings, now_ms) is None
    for _ in range(2):
        fails(old)
    admin = AdminClient(librdkafka_properties(settings))
    place = TopicPartition(TopicNames(settings).retry, 0, 2)
    for freed in admin.delete_records([place]).values():
        freed.result()
    reads.clear()
    assert len(find_failed_message(old, settings, now_ms).retries_ms) == 1
    assert sum(reads) == 1
