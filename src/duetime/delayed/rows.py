"""The records of a batch as rows of Spark's source. Runs in executors, in processes of Python.

A process is used again for the next batch, and most records of it were next to some of this one: so
each process reads a log once, like a consumer, and keeps what is due later as far as there is room.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from duetime.delayed.entries import NONE
from duetime.delayed.log import LogReader, Place, entries
from duetime.delayed.options import ConsumerOptions
from duetime.delayed.payloads import Payloads, Room
from duetime.delayed.planning import Stretch
from duetime.stores.records import headers_of

log = logging.getLogger(__name__)

#: The columns of the rows: Spark's own Kafka columns, and when each was to be delivered.
SCHEMA = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "timestampType int, headers array<struct<key:string,value:binary>>, deliver_after timestamp"
)

INSTANT = pa.timestamp("us", tz="UTC")
COLUMNS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", INSTANT),
        ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("deliver_after", INSTANT),
    ]
)

#: Rows that are handed to Spark at a time.
AT_ONCE = 2_000

#: librdkafka counts its types of timestamp from 1, and Spark from 0.
TYPE_BASE = 1


@dataclass(slots=True)
class Kept:
    """What one process keeps of one cluster."""

    options: ConsumerOptions
    reader: LogReader = field(init=False)
    _room: Room = field(init=False)
    _payloads: dict[Place, Payloads] = field(default_factory=dict, init=False)
    #: Where the logs were read to.
    _ends: dict[Place, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.reader = LogReader(self.options.librdkafka)
        self._room = Room(self.options.kept_bytes)

    def records(self, stretch: Stretch) -> list[Message | None]:
        """Those of the stretch, in its order; None of what retention has removed."""
        return self._of(stretch.place).take(
            stretch.entries, NONE, lambda start, end: self.reader.batches(stretch.place, start, end)
        )

    def read_on(self, stretches: Sequence[Stretch]) -> None:
        """Read the logs on to the last records that are wanted; what is due later is kept."""
        wanted = {each.place: each for each in stretches}
        missing = {place: self._missing(each) for place, each in wanted.items()}
        for place, records in self.reader.all_batches(missing):
            self._keep(wanted[place], records)
        self._ends |= {place: max(stretch) for place, stretch in missing.items()}

    def _missing(self, stretch: Stretch) -> tuple[int, int]:
        start = max(stretch.first, self._ends.get(stretch.place, 0))
        return start, int(stretch.entries["offset"].max()) + 1

    def _keep(self, stretch: Stretch, records: Sequence[Message]) -> None:
        found = entries(records, self.options.policy.group)
        now = np.isin(found["offset"], stretch.entries["offset"])
        self._of(stretch.place).keep(found[now | ~stretch.after.delivered(found)], records)

    def _of(self, place: Place) -> Payloads:
        return self._payloads.setdefault(place, Payloads(self._room))


#: By the properties: one query may read one cluster, and another query another.
_KEPT: dict[str, Kept] = {}


def rows(properties: Mapping[str, Any], stretches: Sequence[Stretch]) -> Iterator[pa.RecordBatch]:
    """The rows of each stretch, in its order."""
    known = repr(sorted(properties.items()))
    if known not in _KEPT:
        _KEPT[known] = Kept(ConsumerOptions.of(properties))
    _KEPT[known].read_on(stretches)
    for each in stretches:
        yield from _rows(each, _KEPT[known].records(each))


def _rows(stretch: Stretch, found: Sequence[Message | None]) -> Iterator[pa.RecordBatch]:
    times = stretch.entries["deliver_after_ms"].tolist()
    there = [(record, at) for record, at in zip(found, times, strict=True) if record is not None]
    if len(there) < len(found):
        log.warning("retention has removed records=%d", len(found) - len(there))
    for begin in range(0, len(there), AT_ONCE):
        yield _batch(there[begin : begin + AT_ONCE])


def _batch(records: Sequence[tuple[Message, int]]) -> pa.RecordBatch:
    columns = zip(*(_row(record, at_ms) for record, at_ms in records), strict=True)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, COLUMNS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=COLUMNS)


def _row(record: Message, deliver_after_ms: int) -> tuple[Any, ...]:
    kind, timestamp_ms = record.timestamp()
    return (
        record.key(),
        record.value(),
        record.topic(),
        record.partition(),
        record.offset(),
        timestamp_ms * 1_000,
        kind - TYPE_BASE,
        [{"key": name, "value": value} for name, value in headers_of(record)] or None,
        deliver_after_ms * 1_000 or None,
    )
