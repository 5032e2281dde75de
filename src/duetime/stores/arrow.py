"""Between Spark's columns and the rows of a store. Runs in an executor's Python, in batches."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyarrow as pa

from duetime.stores.records import Header
from duetime.stores.rows import Record, Row, name_of, packed

#: What `rows_of` takes, besides headers.
VALUES = (
    "id",
    "due_ms",
    "is_cancel",
    "partition",
    "offset",
    "timestamp_ms",
    "key",
    "value",
)

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

#: The columns of a record read by Spark's Kafka source, as far as the pipeline uses them.
COLUMNS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
    ]
)


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of VALUES and headers."""
    columns = (batch.column(name).to_pylist() for name in VALUES)
    headers = headers_in(batch.column("headers"))
    for id_, due_ms, is_cancel, *place_and_payload, own in zip(*columns, headers, strict=True):
        row = packed(Record._make([*place_and_payload, own]))
        yield Row(name_of(id_, due_ms, is_cancel=is_cancel), id_, due_ms, row)


def batch_of(records: Sequence[Record], topic: str) -> pa.RecordBatch:
    """The records in COLUMNS, as read from `topic`."""
    headers = [header for record in records for header in record.headers]
    ends = [0]
    for record in records:
        ends.append(ends[-1] + len(record.headers))
    pairs = pa.StructArray.from_arrays(
        [
            pa.array([name for name, _ in headers], pa.string()),
            pa.array([value for _, value in headers], pa.binary()),
        ],
        names=["key", "value"],
    )
    columns = [
        pa.array([each.key for each in records], pa.binary()),
        pa.array([each.value for each in records], pa.binary()),
        pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pairs),
        pa.array([topic] * len(records), pa.string()),
        pa.array([each.partition for each in records], pa.int32()),
        pa.array([each.offset for each in records], pa.int64()),
        pa.array([each.timestamp_ms * 1_000 for each in records], COLUMNS.types[-1]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=COLUMNS)


def headers_in(column: pa.ListArray) -> Iterator[list[Header]]:
    """The headers of each record of a column."""
    # Flat, and cut by the offsets: taking the nested lists apart one by one costs twice as much.
    names, values = (column.values.field(each).to_pylist() for each in range(2))
    ends = column.offsets.to_pylist()
    pairs = list(zip(names, values, strict=True))
    for start, end in pairwise(ends):
        yield pairs[start:end]
