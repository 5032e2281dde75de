from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import MessageId
from duetime.core.records import (
    MessageSpec,
    cancel_record,
    due_time_ms,
    encoded_headers,
    message_record,
)
from duetime.core.settings import Settings

NOW_MS = 1_800_000_000_000

SETTINGS = Settings(namespace="test", max_message_bytes=2_000)


def refusal(**parts):
    """Why such a message is refused."""
    wanted = {"topic": "orders", **parts}
    times = {name: wanted.pop(name, NOW_MS) for name in ("due_ms", "now_ms")}
    unique = wanted.pop("unique", "1")
    with pytest.raises(InvalidMessage) as refused:
        message_record(MessageSpec(**wanted), SETTINGS, unique=unique, **times)
    return refused.value.reason


def due(at=None, in_=None):
    return due_time_ms(at, in_, NOW_MS)


def test_a_scheduled_message_is_the_native_contract():
    wanted = MessageSpec(
        topic="orders", key="k", value="ü", headers={"a": "b", "n": None}, partition=7
    )
    record = message_record(wanted, SETTINGS, due_ms=NOW_MS + 5, now_ms=NOW_MS, unique="order-17")
    assert record.topic == "test.in"
    assert (record.key, record.value) == (b"k", "ü".encode())
    assert record.id == MessageId(due_ms=NOW_MS + 5, unique="order-17")
    assert dict(record.headers) == {
        "due-topic": b"orders",
        "due-at-ms": b"1800000000005",
        "due-id": b"order-17",
        "due-partition": b"7",
        "a": b"b",
        "n": None,
    }


def test_a_cancel_is_the_id_and_nothing_else():
    record = cancel_record(MessageId.parse("0123456789ab-order-17"), SETTINGS)
    assert (record.topic, record.key, record.value) == (
        "test.control",
        b"0123456789ab-order-17",
        None,
    )
    assert record.headers == (("due-op", b"cancel"),)


def test_null_and_empty_stay_apart():
    wanted = MessageSpec(topic="orders", key="", value=b"")
    record = message_record(wanted, SETTINGS, due_ms=NOW_MS, now_ms=NOW_MS, unique="1")
    assert (record.key, record.value) == (b"", b"")
    nothing = message_record(
        MessageSpec(topic="o"), SETTINGS, due_ms=NOW_MS, now_ms=NOW_MS, unique="1"
    )
    assert (nothing.key, nothing.value) == (None, None)


def test_a_payload_is_not_in_a_record_as_text():
    wanted = MessageSpec(topic="orders", key="hush", value="hush", headers={"a": "hush"})
    record = message_record(wanted, SETTINGS, due_ms=NOW_MS, now_ms=NOW_MS, unique="1")
    assert "hush" not in repr(wanted) + repr(record)


@pytest.mark.parametrize("text", ["soon", "-1", "", "1" * 19])
def test_an_expiry_that_intake_would_reject_is_refused(text):
    assert refusal(headers={"due-expires-ms": text}) == Reason.BAD_EXPIRY


@pytest.mark.parametrize("texts", [["17"], [None], ["soon", "17"]])
def test_an_expiry_that_intake_takes_is_taken(texts):
    wanted = MessageSpec(topic="orders", headers=[("due-expires-ms", each) for each in texts])
    record = message_record(wanted, SETTINGS, due_ms=NOW_MS, now_ms=NOW_MS, unique="1")
    assert len(record.headers) == 3 + len(texts)


def test_message_too_large_for_the_store_is_refused():
    smaller = Settings(store="aerospike://host/test")
    wanted = MessageSpec(topic="orders", value=bytes(smaller.largest_bytes + 1))
    with pytest.raises(InvalidMessage) as refused:
        message_record(wanted, smaller, due_ms=NOW_MS, now_ms=NOW_MS, unique="1")
    assert refused.value.reason == Reason.TOO_LARGE


def test_the_past_is_taken_and_the_time_past_the_wheels_end_is_not():
    span_ms = SETTINGS.wheel.span_ms()
    for due_ms in (0, NOW_MS - 1, NOW_MS + span_ms):
        wanted = MessageSpec(topic="orders")
        record = message_record(wanted, SETTINGS, due_ms=due_ms, now_ms=NOW_MS, unique="1")
        assert record.id.due_ms == due_ms
    width_ms = SETTINGS.wheel.width_ms(SETTINGS.wheel.levels - 1)
    assert refusal(due_ms=NOW_MS + span_ms + 2 * width_ms) == Reason.DELAY_TOO_LONG
    assert refusal(due_ms=2**70) == Reason.DELAY_TOO_LONG
    assert refusal(due_ms=-1) == Reason.BAD_DUE_TIME


@pytest.mark.parametrize("topic", ["", ".", "..", "a b", "ä", "x" * 250, "orders\n", 7, None])
def test_invalid_topic_is_refused(topic):
    assert refusal(topic=topic) == Reason.BAD_TOPIC


@pytest.mark.parametrize("topic", ["test.in", "test.wheel.0", "__consumer_offsets"])
def test_an_internal_topic_is_no_destination(topic):
    assert refusal(topic=topic) == Reason.INTERNAL_TOPIC


@pytest.mark.parametrize("unique", ["", "a b", "@1", "x" * 201, "ü", "1\n", 17])
def test_invalid_id_is_refused(unique):
    assert refusal(unique=unique) == Reason.BAD_ID


@pytest.mark.parametrize("partition", [-1, 1_000_000, True, 1.0, "1"])
def test_invalid_partition_is_refused(partition):
    assert refusal(partition=partition) == Reason.BAD_PARTITION


@pytest.mark.parametrize("payload", [{"a": 1}, 17, bytearray(b"x"), "\ud800"])
def test_only_bytes_and_text_are_payloads(payload):
    assert refusal(value=payload) == Reason.MALFORMED
    assert refusal(key=payload) == Reason.MALFORMED


@pytest.mark.parametrize(
    "headers",
    [
        {"due-topic": "bills"},
        [("due-at-ms", b"1")],
        {"due-in-ms": "1"},
        {"due-id": "x"},
        {"due-partition": "1"},
        {"a": 1},
        {1: "a"},
        {"a\0b": "c"},
        {"\ud800": "a"},
        {"a": "\ud800"},
        [("a",)],
        ["a"],
        17,
    ],
)
def test_invalid_headers_are_refused(headers):
    assert refusal(headers=headers) == Reason.BAD_HEADERS


def test_a_message_may_be_as_large_as_configured_and_no_larger():
    # 8 of the bytes are the header's frame.
    parts = {"key": "k" * 100, "headers": {"name": b"v" * 88}}
    wanted = MessageSpec(topic="orders", value="ü" * 900, **parts)
    message_record(wanted, SETTINGS, due_ms=NOW_MS, now_ms=NOW_MS, unique="1")
    assert refusal(value="ü" * 900 + "x", **parts) == Reason.TOO_LARGE


def test_headers_keep_their_order_and_their_duplicates():
    pairs = [("b", b"1"), ("a", b"2"), ("b", None), ("", b"")]
    assert encoded_headers(pairs) == pairs
    assert encoded_headers(iter(pairs)) == pairs
    assert encoded_headers(None) == []


def test_exactly_one_due_time_is_taken():
    at, in_ = datetime(2027, 1, 1, tzinfo=UTC), timedelta(seconds=1)
    for given_times, reason in (((None, None), "no-due-time"), ((at, in_), "two-due-times")):
        with pytest.raises(InvalidMessage) as refused:
            due(*given_times)
        assert refused.value.reason == reason


def test_in_counts_from_now_and_is_never_rounded_down():
    assert due(in_=timedelta(0)) == NOW_MS
    assert due(in_=timedelta(milliseconds=250)) == NOW_MS + 250
    assert due(in_=timedelta(microseconds=1)) == NOW_MS + 1


@given(st.datetimes(timezones=st.timezones()))
def test_at_is_the_instant_and_never_rounded_down(at):
    exact_us = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert due(at=at) == -(-exact_us // 1_000)


@pytest.mark.parametrize(
    ("at", "in_"),
    [
        (datetime(2027, 1, 1), None),  # noqa: DTZ001 (that is the point)
        (date(2027, 1, 1), None),
        (NOW_MS, None),
        ("2027-01-01T00:00:00Z", None),
        (None, timedelta(microseconds=-1)),
        (None, 5),
        (None, "5s"),
    ],
)
def test_naive_and_negative_times_and_numbers_are_refused(at, in_):
    with pytest.raises(InvalidMessage) as refused:
        due(at=at, in_=in_)
    assert refused.value.reason == Reason.BAD_DUE_TIME
