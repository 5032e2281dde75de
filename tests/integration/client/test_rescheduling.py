from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Consumer, TopicPartition
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clocks import SetClock
from tests.support.topics import TRACE

from duetime.client.rescheduling import next_unique, reschedule
from duetime.core.errors import InvalidMessage, Reason, TooLate, UnknownMessage
from duetime.core.messages import REPLACING_MS, MessageId, check_unique
from duetime.kafka.connection import librdkafka_properties
from duetime.stores.wheel_reader import WheelReader

SECOND = 1_000
MINUTE = 60 * SECOND


def committed(settings, name):
    """Return the committed records of the topic."""
    topic = f"{settings.namespace}.{name}"
    consumer = Consumer(
        librdkafka_properties(settings)
        | {"group.id": "test", "isolation.level": "read_committed", "enable.partition.eof": True}
    )
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, each, 0) for each in partitions])
    records, ends = [], 0
    while ends < len(partitions):
        record = consumer.poll(30)
        if record.error():
            ends += 1
        else:
            records.append(record)
    consumer.close()
    return records


def test_a_rescheduled_message_expires_when_it_did(wheel, settings, now_ms):
    expires_ms = now_ms + 10 * MINUTE
    old = wheel.message("orders", now_ms + MINUTE, state=f"{now_ms}:{expires_ms}")
    reschedule(str(old), in_=timedelta(minutes=5), settings=settings)
    (again,) = committed(settings, "in")
    assert dict(again.headers())["due-expires-ms"] == str(expires_ms).encode()


@pytest.mark.slow
def test_a_rescheduled_message_is_the_same_byte_for_byte(wheel, settings, now_ms):
    every = bytes(range(256))
    headers = [("a", every), ("a", b""), ("b", None), *TRACE]
    parts = {"key": every, "value": every, "headers": headers, "partition": 3}
    old = wheel.message("orders", now_ms + MINUTE, unique="order-17", **parts)
    new = reschedule(str(old), in_=timedelta(minutes=5), settings=settings)
    assert committed(settings, "control") == []
    (again,) = committed(settings, "in")
    due_ms = MessageId.parse(new).due_ms
    assert now_ms + 5 * MINUTE <= due_ms < now_ms + 6 * MINUTE
    assert new == str(MessageId(due_ms=due_ms, unique="order-17~1"))
    assert (again.key(), again.value()) == (every, every)
    assert again.headers() == [
        ("due-topic", b"orders"),
        ("due-at-ms", str(due_ms).encode()),
        ("due-id", b"order-17~1"),
        ("due-partition", b"3"),
        ("due-replaces", str(old).encode()),
        *headers,
    ]


@pytest.mark.slow
def test_null_and_empty_stay_apart_when_rescheduled(wheel, settings, now_ms):
    for payload in (None, b""):
        old = wheel.message("orders", now_ms + MINUTE, key=payload, value=payload)
        reschedule(str(old), in_=timedelta(minutes=5), settings=settings)
    found = {(each.key(), each.value()) for each in committed(settings, "in")}
    assert found == {(None, None), (b"", b"")}


@pytest.mark.slow
def test_a_message_for_another_cluster_stays_so(wheel, settings, now_ms):
    state = f"{now_ms}:::::eu"
    old = wheel.message("orders", now_ms + MINUTE, state=state)
    reschedule(str(old), in_=timedelta(minutes=5), settings=settings)
    (again,) = committed(settings, "in")
    assert dict(again.headers())["due-cluster"] == b"eu"


@pytest.mark.slow
def test_a_rescheduled_message_has_no_reserved_headers(wheel, settings, now_ms):
    names = "due-in-ms", "due-cron", "due-zone", "due-misfire", "due-replaces"
    taken = [(name, b"1") for name in names]
    headers = [("due-callback", b"http://x"), ("a", b"b")]
    old = wheel.message("orders", now_ms + MINUTE, passed_on=[*taken, *headers])
    reschedule(str(old), in_=timedelta(minutes=5), settings=settings)
    (again,) = committed(settings, "in")
    assert again.headers()[3:] == [("due-replaces", str(old).encode()), *headers]


@pytest.mark.slow
def test_a_message_that_is_not_pending_is_unknown(wheel, settings, now_ms):
    cancelled = wheel.message("orders", now_ms + MINUTE)
    wheel.cancel(cancelled)
    for identity in (cancelled, MessageId(due_ms=now_ms + MINUTE, unique="none")):
        with pytest.raises(UnknownMessage):
            reschedule(str(identity), in_=timedelta(minutes=5), settings=settings)
    assert committed(settings, "control") == []
    assert committed(settings, "in") == []


def test_a_new_time_that_is_refused_changes_nothing(wheel, settings, now_ms):
    old = wheel.message("orders", now_ms + MINUTE)
    for times, reason in (
        ({"in_": timedelta(days=30)}, Reason.DELAY_TOO_LONG),
        ({"in_": timedelta(-1)}, Reason.BAD_DUE_TIME),
        ({}, Reason.NO_DUE_TIME),
        ({"in_": timedelta(0), "at": datetime.now(UTC)}, Reason.TWO_DUE_TIMES),
    ):
        with pytest.raises(InvalidMessage) as refused:
            reschedule(str(old), settings=settings, **times)
        assert refused.value.reason == reason
    assert committed(settings, "control") == []
    reader = WheelReader(settings)
    assert not reader.find(old, now_ms).cancelled
    reader.close()


@pytest.mark.slow
def test_a_message_about_to_be_released_is_too_late(wheel, settings, now_ms):
    old = wheel.message("orders", now_ms + 20 * SECOND)
    for clock_ms in (now_ms + 16 * SECOND, now_ms + 20 * SECOND, now_ms + MINUTE):
        with pytest.raises(TooLate):
            reschedule(
                str(old), in_=timedelta(minutes=5), settings=settings, clock=SetClock(clock_ms)
            )
    assert committed(settings, "control") == []


def test_a_record_appended_too_late_is_an_error_and_the_old_one_stays(wheel, settings, now_ms):
    """Intake decides by the timestamp of the record, which the caller sees as well."""
    old = wheel.message("orders", now_ms + 6 * SECOND)
    before = SetClock(now_ms - 3 * SECOND)
    with pytest.raises(TooLate):
        reschedule(str(old), in_=timedelta(minutes=5), settings=settings, clock=before)
    (again,) = committed(settings, "in")
    assert old.due_ms - again.timestamp()[1] < settings.short_delay_threshold_ms + REPLACING_MS


@pytest.mark.slow
def test_two_reschedules_of_a_message_are_both_done(wheel, settings, now_ms):
    old = wheel.message("orders", now_ms + MINUTE, unique="order-17")
    new = [reschedule(str(old), in_=timedelta(minutes=each), settings=settings) for each in (5, 7)]
    sent = [dict(each.headers()) for each in committed(settings, "in")]
    assert {each["due-replaces"] for each in sent} == {str(old).encode()}
    assert {each["due-id"] for each in sent} == {b"order-17~1"}
    due_ms = {MessageId.parse(each).due_ms for each in new}
    assert {int(each["due-at-ms"]) for each in sent} == due_ms


def test_each_rescheduling_counts_on():
    assert next_unique("order-17") == "order-17~1"
    assert next_unique("order-17~1") == "order-17~2"
    assert next_unique("order-17~99") == "order-17~100"
    assert next_unique("order~x") == "order~x~1"
    assert next_unique("~7") == "~7~1"


@given(st.from_regex(r"\A[A-Za-z0-9._:=~+@-]{1,200}\Z"))
def test_the_next_id_is_valid_and_new(unique):
    ids = [unique]
    for _ in range(3):
        ids.append(next_unique(ids[-1]))
    assert len(set(ids)) == len(ids)
    assert all(check_unique(each) for each in ids[1:])
