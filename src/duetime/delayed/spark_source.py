"""`spark.readStream.format("delayed_kafka")`: delayed topics as a streaming source of Spark.

register(spark)
orders = spark.readStream.format("delayed_kafka").option("subscribe", "orders.delayed").load()

A Python process of the driver reads the logs once and plans: an offset of the source is a position
in each partition, and a batch is what is due between two of them. Executors read the records of a
batch, and return them in the order of (deliverAfter, offset) within each partition.

Spark reuses an executor's Python process for the next batch, most records of which are next to
some of this one. Each process therefore reads a log once, as a consumer does, and caches what is
due later as far as there is room.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Message
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from duetime.core.errors import ConfigError
from duetime.delayed.batch_planner import BatchPlanner, EntryRange, Positions
from duetime.delayed.group import PREFIX, ConsumerOptions
from duetime.delayed.partition import CacheBudget, CommittedPosition, RecordCache
from duetime.delayed.segments import NONE, record_entries
from duetime.kafka.offsets import Partition
from duetime.kafka.range_reader import LogReader, headers_of

log = logging.getLogger(__name__)

#: Prefix of librdkafka's properties among the options.
KAFKA = "kafka."

#: The consumer's properties by the names of options.
OPTIONS = {
    "startingoffsets": "auto.offset.reset",
    "group": "group.id",
    "indexlocation": f"{PREFIX}index.location",
    "keptbytes": f"{PREFIX}kept.bytes",
}

#: The two options that are no properties.
SUBSCRIBE, MAX_RECORDS = "subscribe", "maxrecordspertrigger"

#: The group of a query that names none: it gets no group's retries.
NO_GROUP = "delayed_kafka"

#: A batch of up to this many records is one task: another process, which may have to start and has
#: nothing cached, takes longer than this one with all of it.
MAX_SINGLE_TASK = 50_000

#: The driver plans, and caches no records.
NO_CACHE = {f"{PREFIX}kept.bytes": 1}

#: The most rows of one Arrow batch.
BATCH_ROWS = 2_000

#: librdkafka numbers its types of timestamp from 1, and Spark from 0.
TYPE_BASE = 1

#: The columns of the rows: those of Spark's Kafka source, and when each record was due.
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

#: An offset of the source as Spark stores and shows it: offset, cursor, and the number of records
#: removed before they were delivered, by `topic/partition`.
Offset = dict[str, dict[str, Any]]


def register(spark: SparkSession) -> None:
    """Register the format with this session."""
    spark.dataSource.register(DelayedKafka)


class DelayedKafka(DataSource):
    """The format. Its options: see docs/delayed-topics.md."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "delayed_kafka"

    def schema(self) -> str:
        """Return the columns of the rows."""
        return SCHEMA

    def streamReader(self, schema: StructType) -> "DelayedReader":  # noqa: ARG002, N802 (Spark's)
        """Return the reader of one query."""
        return DelayedReader(dict(self.options))


class RangesTask(InputPartition):
    """The ranges that one task of an executor reads."""

    def __init__(self, ranges: Sequence[EntryRange]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class DelayedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one query. All methods but `read` run in one process of the driver."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._properties = properties(options)
        self._topics = [each.strip() for each in options.get(SUBSCRIBE, "").split(",")]
        if not all(self._topics):
            raise ConfigError("option subscribe is missing: name the delayed topics")
        self._max_records = int(options.get(MAX_RECORDS, 0))
        self._planner: BatchPlanner | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        """Return where a query without a checkpoint begins."""
        return _to_offset(self._plan().first())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        """Return where the next batch ends."""
        max_records = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return _to_offset(self._plan().latest(_to_positions(start), max_records))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """Return `maxRecordsPerTrigger`, or everything that is due."""
        return ReadMaxRows(self._max_records) if self._max_records else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """End the query with what is due now."""
        self._plan().end_here()

    def partitions(self, start: Offset, end: Offset) -> Sequence[RangesTask]:
        """Return a task for each partition with due records, or a single one for a small batch.

        One process reads all small batches, and has cached the records next to the last one.
        """
        ranges = self._plan().between(_to_positions(start), _to_positions(end))
        if sum(each.entries.size for each in ranges) <= MAX_SINGLE_TASK:
            return [RangesTask(ranges)] if ranges else []
        return [RangesTask([each]) for each in ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a task. Runs in an executor."""
        if not isinstance(partition, RangesTask):
            raise TypeError(f"not a task of this source: {partition!r}")
        return _executor_cache(tuple(sorted(self._properties.items()))).rows(partition.ranges)

    def commit(self, end: Offset) -> None:
        """Free what is before the offset."""
        self._plan().committed(_to_positions(end))

    def stop(self) -> None:
        """Close the connections."""
        if self._planner:
            self._planner.close()

    def _plan(self) -> BatchPlanner:
        # Not in the constructor: a reader is also made for executors, which plan nothing.
        if self._planner is None:
            self._planner = BatchPlanner(self._properties | NO_CACHE, self._topics)
        return self._planner


def properties(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the properties of a delayed consumer. Raises ConfigError, which names the option."""
    found: dict[str, Any] = {"group.id": NO_GROUP}
    for name, value in options.items():
        if name.startswith(KAFKA):
            found[name.removeprefix(KAFKA)] = value
        elif name in OPTIONS:
            found[OPTIONS[name]] = value
        elif name not in (SUBSCRIBE, MAX_RECORDS):
            raise ConfigError(f"option {name} is unknown to delayed_kafka: see its documentation")
    return found


def _to_offset(positions: Positions) -> Offset:
    return {
        f"{topic}/{partition}": {
            "offset": at.offset,
            "metadata": str(at.cursor),
            "removed": int(at.note or 0),
        }
        for (topic, partition), at in positions.items()
    }


def _to_positions(offset: Offset) -> Positions:
    positions = {}
    for name, value in offset.items():
        topic, _, partition = name.rpartition("/")
        position = CommittedPosition.parse(value["offset"], value["metadata"])
        positions[topic, int(partition)] = replace(position, note=str(value.get("removed", 0)))
    return positions


class ExecutorCache:
    """The cached records of one cluster, and the reader of its logs, in an executor's process."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._group = options.group
        self._reader = LogReader(options.librdkafka)
        budget = CacheBudget(options.kept_bytes)
        self._caches = defaultdict[Partition, RecordCache](lambda: RecordCache(budget))
        #: The ends up to which the logs were read.
        self._ends: dict[Partition, int] = {}

    def rows(self, ranges: Sequence[EntryRange]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of each range, in its order."""
        self._read_logs({each.place: each for each in ranges})
        for each in ranges:
            read = partial(self._reader.batches, each.place)
            records = self._caches[each.place].take(each.entries, NONE, read)
            found = zip(records, each.entries["deliver_after_ms"].tolist(), strict=True)
            there = [_row(record, due_ms) for record, due_ms in found if record is not None]
            if removed := each.entries.size - len(there):
                log.warning("retention removed records before they were due records=%d", removed)
            for start in range(0, len(there), BATCH_ROWS):
                yield pa.RecordBatch.from_pylist(there[start : start + BATCH_ROWS], COLUMNS)

    def _read_logs(self, wanted: Mapping[Partition, EntryRange]) -> None:
        """Read the logs on to the last records of the ranges; cache what is due later, too."""
        missing = {
            place: (
                max(each.first, self._ends.get(place, 0)),
                int(each.entries["offset"].max()) + 1,
            )
            for place, each in wanted.items()
        }
        for place, records in self._reader.all_batches(missing):
            found = record_entries(records, self._group)
            is_now = np.isin(found["offset"], wanted[place].entries["offset"])
            is_later = ~wanted[place].after.delivered(found)
            self._caches[place].add(found[is_now | is_later], records)
        self._ends |= {place: max(bounds) for place, bounds in missing.items()}


@cache
def _executor_cache(properties: tuple[tuple[str, Any], ...]) -> ExecutorCache:
    """Return the cache for these properties: two queries may read two clusters."""
    return ExecutorCache(ConsumerOptions.of(dict(properties)))


def _row(record: Message, deliver_after_ms: int) -> dict[str, Any]:
    kind, timestamp_ms = record.timestamp()
    headers = [{"key": name, "value": value} for name, value in headers_of(record)]
    return {
        "key": record.key(),
        "value": record.value(),
        "topic": record.topic(),
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp": timestamp_ms * 1_000,
        "timestampType": kind - TYPE_BASE,
        "headers": headers or None,
        "deliver_after": deliver_after_ms * 1_000 or None,
    }
