"""The common part of the stores of rows, Redis and Aerospike: records, readers, batches, leases.

A record on its way to the store lies in `duetime.store-inbox`. Its origin there tells a repeated
save from another record with the same id. A packed record is its origin, then key, value, and each
header's name and value as MessagePack, which every language reads:

    4 bytes partition | 8 bytes offset | 8 bytes timestamp, epoch ms | [key, value, name, value ...]

Records are converted between Spark's columns and rows in Arrow batches, in executors.
"""

import logging
import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgpack
import pyarrow as pa

from duetime.core import headers as H
from duetime.core.errors import StoreError
from duetime.core.messages import LATEST_MS, MessageId, PendingMessage, SortKey
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.timer_wheel import Slot, Wheel
from duetime.kafka.range_reader import address
from duetime.stores import MessageFilter, PendingSlot, Reader, Search, Store, merged

log = logging.getLogger(__name__)

#: partition, offset, timestamp.
ORIGIN = struct.Struct(">iqq")

#: The first character of a cancel's name: it is kept together with its message.
CANCEL_MARK = "!"

#: The bytes of records that one request should read; the first and the largest batch of a listing.
READ_BYTES, FIRST_BATCH, MAX_BATCH = 4 * 1024 * 1024, 10, 500

#: The length of a lease, in ms: as long as a leader may send without confirming that it leads, so
#: that the next leader finds what was left.
LEASE_MS = 5_000

#: How many ticks before now are counted one by one. Everything older is one slot.
OVERDUE_TICKS = 64

_Name = TypeVar("_Name")
_Claim = TypeVar("_Claim")


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


class RowStore(Protocol):
    """Saves and reads rows, mostly in an executor. Each method raises StoreError."""

    def begin_term(self) -> int:
        """Begin a new writer's term and return it. Earlier writers can save nothing from now on."""

    def save(self, rows: Iterable[Row], term: int) -> None:
        """Save rows that are not there yet. Idempotent.

        Raises StoreError if a later term has begun.
        """

    def records(self, claim: Any) -> Iterator[list[Record]]:  # noqa: ANN401 (the store's own type)
        """Yield the records of a claim in due order, in batches."""

    def all_records(self, part: int, parts: int) -> Iterator[list[Record]]:
        """Yield one of `parts` parts of all records, claimed or not, in batches, unordered.

        A record that is claimed meanwhile may come twice.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A store of rows: what its package opens. The package has it as `BACKEND`."""

    store: Callable[[Settings], Store[Any]]
    reader: Callable[[Settings], Reader]
    rows: Callable[[Settings], RowStore]
    #: Returns a sentence that describes the server. Raises StoreError, ConfigError.
    check: Callable[[Settings], str]


class KeyedReader(Reader):
    """The part of a `Reader` that is the same for every store of rows."""

    def search(self, message_id: MessageId, *, retry_ms: int | None = None) -> Search:
        """Return a search whose every call is one or two requests: the store has a key per id."""
        return lambda _: self.lookup(message_id, retry_ms)

    def matching(self, message_filter: MessageFilter, now_ms: int) -> Iterator[PendingMessage]:  # noqa: ARG002 (as in `Reader`)
        """See `Reader.matching`."""
        for each in merged(self.streams(message_filter)):
            if message_filter.matches_topic(each.topic):
                yield each

    def close(self) -> None:
        """Do nothing: the connections are shared by the whole process."""

    @abstractmethod
    def lookup(self, message_id: MessageId, retry_ms: int | None) -> PendingMessage | None:
        """Return the message with this id, or its retry at `retry_ms`."""

    @abstractmethod
    def streams(self, message_filter: MessageFilter) -> Sequence[Iterator[PendingMessage]]:
        """Return streams of the messages in the filter's time range, each in order."""


def empty_slots(wheel: Wheel, oldest_ms: int, now_ms: int) -> list[PendingSlot]:
    """Return the slots into which the wheel would cut time at `now_ms`, to count messages in.

    They reach from the oldest message to `LATEST_MS`. Overdue time comes first: the tick of the
    oldest message, one slot for most of what follows, then the last OVERDUE_TICKS ticks.
    """
    number, tick_ms = wheel.number(0, now_ms), wheel.tick_ms
    first_ms, now_tick_ms = wheel.number(0, oldest_ms) * tick_ms, number * tick_ms
    edges = {each * tick_ms for each in range(number - OVERDUE_TICKS, number)}
    edges |= {first_ms, first_ms + tick_ms}
    starts = [(each, 0) for each in sorted(edges) if first_ms <= each < now_tick_ms]
    start_ms = now_tick_ms
    for level in range(wheel.levels):
        level_end_ms = (wheel.number(level, start_ms) + wheel.slots) * wheel.width_ms(level)
        while start_ms < level_end_ms:
            starts.append((start_ms, level))
            start_ms = (wheel.number(level, start_ms) + 1) * wheel.width_ms(level)
    ends = [*(start for start, _ in starts[1:]), LATEST_MS + 1]
    return [
        PendingSlot(
            slot=Slot(level, wheel.number(level, start_ms)),
            start_ms=start_ms,
            end_ms=end_ms,
            count=0,
        )
        for (start_ms, level), end_ms in zip(starts, ends, strict=True)
    ]


def counted_slots(slots: Sequence[PendingSlot], counts: Sequence[int]) -> list[PendingSlot]:
    """Return the slots that have messages, with their counts."""
    counted = zip(slots, counts, strict=True)
    return [replace(slot, count=count) for slot, count in counted if count]


def batches(rows: Iterable[Row], max_rows: int, max_bytes: int) -> Iterator[list[Row]]:
    """Cut rows into batches of limited number and size. A single larger row is a batch."""
    batch, size = list[Row](), 0
    for row in rows:
        if batch and (len(batch) == max_rows or size + len(row.packed) > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += len(row.packed)
    if batch:
        yield batch


def read_messages(
    names: Sequence[str], read: Callable[[Sequence[str]], Sequence[PendingMessage]]
) -> Iterator[PendingMessage]:
    """Yield the messages with these names. The larger they are, the fewer a request reads."""
    start, size = 0, FIRST_BATCH
    while batch := names[start : start + size]:
        found = read(batch)
        yield from found
        start += len(batch)
        size = next_batch_size(len(batch), sum(len(each.value or b"") for each in found), MAX_BATCH)


def next_batch_size(count: int, size_bytes: int, max_batch: int) -> int:
    """Return how many records to read next, after `count` of together `size_bytes`."""
    return min(max(READ_BYTES // (size_bytes // count + 1), 1), max_batch)


class LeaseKeeper(Generic[_Name, _Claim]):
    """The claims that one scheduler holds, by name. A thread extends their leases. Thread-safe."""

    def __init__(self, extend: Callable[[dict[_Name, _Claim]], object]) -> None:
        """Call `extend`, which may raise StoreError, five times within a lease."""
        self._extend = extend
        self._claims: dict[_Name, _Claim] = {}
        #: Reentrant. Held by callers during which no claim may be added or removed.
        self.lock = threading.RLock()
        self._thread = PeriodicThread("leases", LEASE_MS / 5_000, self._extend_held)
        self._thread.start()

    def held(self) -> dict[_Name, _Claim]:
        """Return the claims that are held."""
        with self.lock:
            return dict(self._claims)

    def add(self, claims: Mapping[_Name, _Claim]) -> None:
        """Hold these claims."""
        with self.lock:
            self._claims |= claims

    def remove(self, names: Iterable[_Name]) -> None:
        """Extend these no longer."""
        with self.lock:
            for name in names:
                self._claims.pop(name, None)

    def close(self) -> None:
        """Stop extending. Other schedulers acquire the claims when their leases end."""
        self._thread.stop()

    def _extend_held(self) -> None:
        claims = self.held()
        try:
            if claims:
                self._extend(claims)
        except StoreError as error:
            log.warning("leases not extended claims=%d error=%s", len(claims), error)
