"""Records as stores of rows keep them, and as Spark hands them over."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.message import WAITING_HEADERS, MessageId
from duetime.stores.arrow import COLUMNS, HEADERS, VALUES, batch_of, rows_of
from duetime.stores.rows import (
    FIND_BYTES,
    FIND_FIRST,
    Record,
    Row,
    found_in_parts,
    lost,
    name_of,
    packed,
    portions,
    unpacked,
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


def test_large_messages_are_looked_at_a_few_at_a_time():
    asked = []

    def find(size_bytes):
        def found(names):
            asked.append(len(names))
            return [SimpleNamespace(name=each, value=bytes(size_bytes)) for each in names]

        return found

    names = [str(each) for each in range(100)]
    assert [each.name for each in found_in_parts(names, find(10))] == names
    assert asked == [FIND_FIRST, 100 - FIND_FIRST]
    asked.clear()
    assert [each.name for each in found_in_parts(names, find(FIND_BYTES // 3))] == names
    assert max(asked[1:]) <= 3


@given(records)
def test_a_record_is_the_same_when_it_is_unpacked(record):
    assert unpacked(packed(record)) == record


def handed_over(given_records):
    """As Spark hands records to Python."""
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
    return pa.RecordBatch.from_pydict({name: columns[name] for name in (*VALUES, "headers")})


@given(st.lists(records, min_size=1, max_size=6), st.integers(0, 3))
def test_rows_are_made_of_columns_whole_or_a_part_of_them(given_records, skipped):
    rows = list(rows_of(handed_over(given_records).slice(skipped)))
    assert [unpacked(row.packed) for row in rows] == given_records[skipped:]
    assert {(row.name, row.id, row.due_ms) for row in rows} <= {(ID, ID, DUE_MS)}


@given(
    st.lists(st.builds(Record._replace, records, timestamp_ms=st.integers(0, 2**44)), max_size=6)
)
def test_columns_are_made_of_records(given_records):
    batch = batch_of(given_records, "duetime.store")
    assert batch.schema == COLUMNS
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


def test_a_message_its_cancel_and_its_retries_have_names_of_their_own():
    names = [
        name_of(ID, DUE_MS, is_cancel=False),
        name_of(ID, DUE_MS, is_cancel=True),
        name_of(ID, DUE_MS + 1, is_cancel=False),
        name_of(ID, DUE_MS + 1, is_cancel=True),
    ]
    assert names == [ID, f"!{ID}", f"{ID}/{DUE_MS + 1}", f"!{ID}/{DUE_MS + 1}"]


@pytest.mark.parametrize("topic", [b"orders", None])
def test_a_message_is_found_with_its_own_headers_and_a_cancel_is_no_message(topic):
    values = (topic, b"3", b"1:9", b"%d" % DUE_MS, ID.encode())
    headers = [*zip(WAITING_HEADERS, values, strict=True), ("a", b"\xff")]
    found = Record(0, 0, 0, b"k", b"v", headers).found(cancelled=True)
    if topic is None:
        assert found is None
    else:
        assert (str(found.id), found.topic, found.partition) == (ID, "orders", 3)
        assert (found.expires_ms, found.headers, found.cancelled) == (9, [("a", b"\xff")], True)


def test_what_was_removed_is_no_message_of_ours():
    assert lost(ID).found() is None


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 8), st.integers(1, 100))
@settings(max_examples=200)
def test_rows_are_cut_into_portions_by_number_and_size_and_stay_in_order(sizes, most, most_bytes):
    rows = [Row(str(number), ID, DUE_MS, bytes(size)) for number, size in enumerate(sizes)]
    groups = list(portions(rows, most, most_bytes))
    assert [row for group in groups for row in group] == rows
    for group in groups:
        assert 1 <= len(group) <= most
        assert len(group) == 1 or sum(len(row.packed) for row in group) <= most_bytes


def test_a_message_and_its_cancel_are_named_by_either():
    cancel = name_of(ID, DUE_MS, is_cancel=True)
    assert with_cancel(ID) == with_cancel(cancel) == (ID, cancel)
