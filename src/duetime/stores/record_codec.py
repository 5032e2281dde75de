"""Records in a store of rows: packed, under a name that makes repeated saves harmless.

A record on its way to the store lies in `duetime.store-inbox`. Its origin there tells a repeated
save from another record with the same id. A packed record is its origin, then key, value, and each
header's name and value as MessagePack, which every language reads:

    4 bytes partition | 8 bytes offset | 8 bytes timestamp, epoch ms | [key, value, name, value ...]

The second half converts between Spark's columns and rows, in Arrow batches. It runs in executors.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgpack
import pyarrow as pa

from duetime.core import headers as H
from duetime.core.messages import MessageId, PendingMessage, SortKey
from duetime.kafka.range_reader import address

#: partition, offset, timestamp.
ORIGIN = struct.Struct(">iqq")

#: The first character of a cancel's name: it is kept together with its message.
CANCEL_MARK = "!"


class Row(NamedTuple):
    """A record as it is saved."""

    #: Unique in the store.
    name: str
    #: Shared by a message, its cancel and its retries, so that they are kept together.
    id: str
    due_ms: int
    packed: bytes


class Record(NamedTuple):
    """An unpacked record."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[H.Header]

    def to_message(self, *, cancelled: bool = False) -> PendingMessage | None:
        """Return the scheduled message; None for a cancel or a foreign record."""
        about = address(self.headers)
        if about is None or about.topic is None:
            return None
        return about.pending_message(self.key, self.value, self.headers, cancelled=cancelled)


def pack(record: Record) -> bytes:
    """Return the record as bytes."""
    flat = [each for header in record.headers for each in header]
    body: bytes = msgpack.packb([record.key, record.value, *flat])
    return ORIGIN.pack(record.partition, record.offset, record.timestamp_ms) + body


def unpack(data: bytes) -> Record:
    """Return the record that was packed."""
    key, value, *flat = msgpack.unpackb(memoryview(data)[ORIGIN.size :])
    return Record._make([*ORIGIN.unpack_from(data), key, value, headers_from(flat)])


def headers_from(flat: Sequence[str | bytes | None]) -> list[H.Header]:
    """Return headers from a flat sequence of names and values."""
    return list(zip(flat[::2], flat[1::2], strict=True))  # type: ignore[arg-type]


def missing_record(name: str) -> Record:
    """Return a record in place of one whose payload was removed: the release job rejects it."""
    return Record(-1, -1, 0, name.encode(), None, [])


def record_name(message_id: str, due_ms: int, *, is_cancel: bool) -> str:
    """Return the name of a message due at `due_ms`, or of its cancel."""
    name = SortKey.of(message_id, due_ms).name
    return CANCEL_MARK + name if is_cancel else name


def with_cancel(name: str) -> tuple[str, str]:
    """Return the names of a message and its cancel, given either."""
    message = name.removeprefix(CANCEL_MARK)
    return message, CANCEL_MARK + message


def record_names(message_id: MessageId, retry_ms: int | None) -> tuple[str, str]:
    """Return the names of a message and its cancel, or of its retry at `retry_ms`."""
    due_ms = message_id.due_ms if retry_ms is None else retry_ms
    return with_cancel(record_name(str(message_id), due_ms, is_cancel=False))


#: The columns that `rows_from_batch` takes, besides headers.
ROW_COLUMNS = ("id", "due_ms", "is_cancel", "partition", "offset", "timestamp_ms", "key", "value")

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

#: The columns of Spark's Kafka source, as far as the pipeline uses them.
KAFKA_COLUMNS = pa.schema(
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


def rows_from_batch(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield the rows of a batch with ROW_COLUMNS and headers."""
    columns = (batch.column(name).to_pylist() for name in ROW_COLUMNS)
    headers = header_lists(batch.column("headers"))
    for id_, due_ms, is_cancel, *record, pairs in zip(*columns, headers, strict=True):
        packed = pack(Record._make([*record, pairs]))
        yield Row(record_name(id_, due_ms, is_cancel=is_cancel), id_, due_ms, packed)


def arrow_batch(records: Sequence[Record], topic: str) -> pa.RecordBatch:
    """Return the records in KAFKA_COLUMNS, as if read from `topic`."""
    headers = [header for record in records for header in record.headers]
    ends = list(accumulate((len(record.headers) for record in records), initial=0))
    names, values = [name for name, _ in headers], [value for _, value in headers]
    pairs = pa.StructArray.from_arrays(
        [pa.array(names, pa.string()), pa.array(values, pa.binary())], names=["key", "value"]
    )
    columns = [
        pa.array([each.key for each in records], pa.binary()),
        pa.array([each.value for each in records], pa.binary()),
        pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pairs),
        pa.array([topic] * len(records), pa.string()),
        pa.array([each.partition for each in records], pa.int32()),
        pa.array([each.offset for each in records], pa.int64()),
        pa.array([each.timestamp_ms * 1_000 for each in records], KAFKA_COLUMNS.types[-1]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=KAFKA_COLUMNS)


def header_lists(column: pa.ListArray) -> Iterator[list[H.Header]]:
    """Yield the headers of each record of a column."""
    # Flattened, and cut at the offsets: converting each nested list costs twice as much.
    names, values = (column.values.field(each).to_pylist() for each in range(2))
    pairs = list(zip(names, values, strict=True))
    for start, end in pairwise(column.offsets.to_pylist()):
        yield pairs[start:end]
