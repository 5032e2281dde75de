"""Packed records, and their conversion from and to Arrow batches."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.core import headers as H
from duetime.core.messages import MessageId
from duetime.stores.row_store import (
    FIRST_BATCH,
    HEADERS,
    KAFKA_COLUMNS,
    READ_BYTES,
    ROW_COLUMNS,
    Record,
    Row,
    arrow_batch,
    batches,
    missing_record,
    pack,
    read_messages,
    record_name,
    rows_from_batch,
    unpack,
    with_cancel,
)

DUE_MS = 1_800_000_000_000
ID = str(MessageId(due_ms=DUE_MS, unique="order-17"))

nullable_bytes = st.none() | st.binary(max_size=40)
records = st.builds(
    Record,
    st.integers(-1, 2**31 - 1),
    st.integers(-1, 2**63 - 1),
    st.integers(0, 2**48),
    nullable_bytes,
    nullable_bytes,
    st.lists(st.tuples(st.text(max_size=10), nullable_bytes), max_size=8),
)


def test_large_messages_are_read_in_small_batches():
    asked = []

    def find(size_bytes):
        def found(names):
            asked.append(len(names))
            return [SimpleNamespace(name=each, value=bytes(size_bytes)) for each in names]

        return found

    names = [str(each) for each in range(100)]
    assert [each.name for each in read_messages(names, find(10))] == names
    assert asked == [FIRST_BATCH, 100 - FIRST_BATCH]
    asked.clear()
    assert [each.name for each in read_messages(names, find(READ_BYTES // 3))] == names
    assert max(asked[1:]) <= 3


@given(records)
def test_a_packed_record_round_trips(record):
    assert unpack(pack(record)) == record


def handed_over(given_records):
    """Return the batch that Spark passes to Python."""
    columns = {
        "id": pa.array([ID] * len(given_records)),
        "due_ms": pa.array([DUE_MS] * len(given_records), pa.int64()),
        "is_cancel": pa.array([False] * len(given_records)),
        "key": pa.array([each.key for each in given_records], pa.binary()),
        "value": pa.array([each.value for each in given_records], pa.binary()),
    }
    for name in ("partition", "offset", "timestamp_ms"):
        columns[name] = pa.array([getattr(each, name) for each in given_records], pa.int64())
    nested = [[{"key": n, "value": v} for n, v in each.headers] for each in given_records]
    columns["headers"] = pa.array(nested, HEADERS)
    return pa.RecordBatch.from_pydict({name: columns[name] for name in (*ROW_COLUMNS, "headers")})


@given(st.lists(records, min_size=1, max_size=6), st.integers(0, 3))
def test_rows_are_made_of_a_batch_or_a_slice_of_it(given_records, skipped):
    rows = list(rows_from_batch(handed_over(given_records).slice(skipped)))
    assert [unpack(row.packed) for row in rows] == given_records[skipped:]
    assert {(row.name, row.id, row.due_ms) for row in rows} <= {(ID, ID, DUE_MS)}


@given(
    st.lists(st.builds(Record._replace, records, timestamp_ms=st.integers(0, 2**44)), max_size=6)
)
def test_a_batch_is_made_of_records(given_records):
    batch = arrow_batch(given_records, "duetime.store-inbox")
    assert batch.schema == KAFKA_COLUMNS
    rows = batch.to_pylist()
    assert [(row["key"], row["value"]) for row in rows] == [
        (each.key, each.value) for each in given_records
    ]
    assert [[(one["key"], one["value"]) for one in row["headers"]] for row in rows] == [
        each.headers for each in given_records
    ]
    assert [(row["partition"], row["offset"]) for row in rows] == [
        (each.partition, each.offset) for each in given_records
    ]
    stamped = [int(row["timestamp"].timestamp() * 1_000 + 0.5) for row in rows]
    assert stamped == [each.timestamp_ms for each in given_records]


def test_message_cancel_and_retry_have_distinct_names():
    names = [
        record_name(ID, DUE_MS, is_cancel=False),
        record_name(ID, DUE_MS, is_cancel=True),
        record_name(ID, DUE_MS + 1, is_cancel=False),
        record_name(ID, DUE_MS + 1, is_cancel=True),
    ]
    assert names == [ID, f"!{ID}", f"{ID}/{DUE_MS + 1}", f"!{ID}/{DUE_MS + 1}"]


@pytest.mark.parametrize("topic", [b"orders", None])
def test_only_a_record_with_a_topic_is_a_message(topic):
    values = (topic, b"3", b"1:9", b"%d" % DUE_MS, ID.encode())
    headers = [*zip(H.SCHEDULED, values, strict=True), ("a", b"\xff")]
    found = Record(0, 0, 0, b"k", b"v", headers).to_message(cancelled=True)
    if topic is None:
        assert found is None
    else:
        assert (str(found.id), found.topic, found.partition) == (ID, "orders", 3)
        assert (found.expires_ms, found.headers, found.cancelled) == (9, [("a", b"\xff")], True)


def test_a_missing_record_is_not_a_message():
    assert missing_record(ID).to_message() is None


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 8), st.integers(1, 100))
@settings(max_examples=200)
def test_batches_are_limited_in_number_and_size(sizes, most, most_bytes):
    rows = [Row(str(number), ID, DUE_MS, bytes(size)) for number, size in enumerate(sizes)]
    groups = list(batches(rows, most, most_bytes))
    assert [row for group in groups for row in group] == rows
    for group in groups:
        assert 1 <= len(group) <= most
        assert len(group) == 1 or sum(len(row.packed) for row in group) <= most_bytes


def test_the_names_of_message_and_cancel_follow_from_either():
    cancel = record_name(ID, DUE_MS, is_cancel=True)
    assert with_cancel(ID) == with_cancel(cancel) == (ID, cancel)
