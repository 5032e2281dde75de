"""Deduplicator: drops records whose message has moved on, so that each moves on once.

A message is in one place at a time: in an intake topic, a lane, a slot, the retry topic, or at its
destination. The step that takes it out of one place appends it to the next, and frees the first one
later. A crash between the two leaves a record whose message has moved on. Example, of a message m:

    second  step                                                          records of m
    0       intake reads m, due in 10 s, and appends it to slot 7         intake, slot 7
    9       the release job of slot 7 starts, and its claim notes that    intake, slot 7
    10      the job appends m to its destination                          intake, slot 7, orders
    10      crash: slot 7 is not settled, intake's batch not committed    intake, slot 7, orders
    20      the next leader acquires slot 7, which was started at 9: the job reads back orders
            since 9 (less CLOCKS_MS), finds m there, drops it, and settles the slot
    20      intake reads its batch again: it reads back slots, lanes and orders since 0, the oldest
            record of the batch (less CLOCKS_MS), finds m there, drops it, and commits

So a record is dropped if its id was appended further on since the record itself was. Ids are
deterministic: this needs no transactions, only a read of the records that were appended since the
oldest record in question. A message may come to a place twice (a retry waits in a slot again),
so "further on" is a number, `progress`, that grows with each step and each attempt.

Decisions are made on the driver; records and logs are read in executors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.pipeline.delivery.rows import parsed
from duetime.pipeline.recovery.read_back import PLACE, DeliveryLog, IdCache, hop_rank
from duetime.spark.catalyst import PlanCache

#: Records that agree in these columns are equally far, and in one partition.
SAME_LOG = ("progress", "topic", "partition")

#: Largest difference between the clocks of two machines, in ms: so much earlier is read back.
CLOCKS_MS = 5_000

#: Largest difference between a sender's timestamp and the brokers' clock, in ms.
SENDERS_CLOCK_MS = 600_000

#: Spark's number for a timestamp that the broker set.
LOG_APPEND_TIME = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRange:
    """The part of the logs that is read back for some records."""

    #: The earliest instant at which they may have been handled, epoch ms.
    since_ms: int
    #: Their destinations, by the name of the cluster; None is this one.
    destinations: Mapping[str | None, list[str]]


class Deduplicator:
    """Drops records whose message has moved on, according to a scan of the logs.

    Records may come in batches, oldest first. Each call scans the records that are new since the
    call before, and so a batch finds the messages that an earlier one wrote. All scans begin at the
    instant of the first.
    """

    def __init__(self, delivery_log: DeliveryLog) -> None:
        self._log = delivery_log
        self._internal, self._delivered, self._read = IdCache(), IdCache(), IdCache()
        self._cancels = IdCache()
        self._since_ms: int | None = None

    def drop_moved_on(self, records: DataFrame, scan_range: ScanRange) -> DataFrame:
        """Return the records of slots, lanes or the retry topic whose message is still there.

        They have the columns id and is_cancel, and keep their columns. Cancels are kept.
        """
        placed = records.select("*", hop_rank(self._log.settings).alias("progress"))
        return self._drop(placed, scan_range, _is_behind()).drop("progress")

    def drop_ingested(self, records: DataFrame, scan_range: ScanRange) -> DataFrame:
        """Return the records of intake topics whose message is nowhere else, and the cancels."""
        return self._drop(records, scan_range, F.lit(True))

    def new_records(self, topic: str, since_ms: int, earlier_ms: int = 0) -> DataFrame | None:
        """Return records of an intake or internal topic that are new since the last call, or None.

        In the columns of Spark's Kafka source, appended since the instant of the first call, or
        `earlier_ms` before it.
        """
        return self._log.new_records(topic, self._first(since_ms) - earlier_ms, self._read)

    def drop_cancelled(
        self, records: DataFrame, cancels: DataFrame | None, is_cancelled: Column
    ) -> DataFrame:
        """Drop the records that a cancel of this call or of an earlier one is for.

        `cancels` are the new ones, if there are any. `is_cancelled` compares the columns of a
        `record` with those of a `cancel`. A message that met its cancel is nowhere any more: read
        back alone, it would be delivered, although its cancel may be in a later batch.
        """
        if cancels is not None:
            self._cancels.add(cancels, records=1)
        if (found := self._cancels.ids) is None:
            return records
        return records.alias("record").join(found.alias("cancel"), is_cancelled, "left_anti")

    def _drop(self, records: DataFrame, scan_range: ScanRange, is_behind: Column) -> DataFrame:
        topics = sorted(set(scan_range.destinations.get(self._log.cluster, [])))
        since_ms = self._first(scan_range.since_ms)
        # The places that messages leave are scanned before those that they reach, and nothing is
        # freed meanwhile: no message slips through between the two.
        internal = self._log.internal(since_ms, self._internal)
        delivered = self._log.destinations(topics, since_ms, self._delivered)
        found = internal.unionAll(delivered) if internal and delivered else internal or delivered
        if found is None:
            return records
        same = (F.col("written.id") == F.col("record.id")) & ~F.col("record.is_cancel")
        moved_on = same & (F.col("written.is_delivered") | is_behind)
        return records.alias("record").join(found.alias("written"), moved_on, "left_anti")

    def _first(self, since_ms: int) -> int:
        if self._since_ms is None:
            self._since_ms = since_ms - CLOCKS_MS
        return self._since_ms


class BatchSequence:
    """Detects batches of a query that may have been started before."""

    def __init__(self) -> None:
        self._last: int | None = None

    def is_replay(self, number: int) -> bool:
        """Return whether the batch may have been started before. Call it once a batch, in order.

        That is the first batch after a start, and one that failed and is repeated.
        """
        is_replay, self._last = self._last in (None, number), number
        return is_replay


class ReplayedBatch(NamedTuple):
    """A batch whose records may have been handled before, in part or all."""

    deduplicator: Deduplicator
    scan_range: ScanRange


class ReplayDetector:
    """Detects batches of a query that have to be deduplicated.

    Those are batches that may have been started before, and, where the checkpoint is lost, all that
    was there when the query started: it reads that again, in other batches.
    """

    def __init__(self, delivery_log: DeliveryLog, started_ms: int) -> None:
        """`started_ms` is when the query started, epoch ms."""
        self._sequence = BatchSequence()
        self._until_ms = started_ms + CLOCKS_MS
        self._deduplicator: Deduplicator | None = Deduplicator(delivery_log)

    def check(
        self, number: int, scan_range_of: Callable[[], ScanRange | None]
    ) -> ReplayedBatch | None:
        """Return the batch if it has to be deduplicated. Call it once a batch, in order.

        `scan_range_of` returns the scan range of its records; that may take a job.
        """
        is_replay = self._sequence.is_replay(number)
        if self._deduplicator is None or (found := scan_range_of()) is None:
            return None
        if is_replay or found.since_ms < self._until_ms:
            return ReplayedBatch(self._deduplicator, found)
        # Of each partition that is behind, a batch has the next: none that follows is older.
        self._deduplicator = None
        return None


def scan_range(records: DataFrame, destination: Column, cluster: Column) -> ScanRange | None:
    """Return what to read back for these records of a Kafka source; None if there are none."""
    return _scan_range(_destinations(records, destination, cluster))


def scan_range_of_messages(records: DataFrame) -> ScanRange | None:
    """Return what to read back for `parsed` records."""
    return _scan_range(_destinations_of_messages(records))


def planned_scan_range(spark: SparkSession) -> Callable[[DataFrame], ScanRange | None]:
    """Return `scan_range_of_messages` for a query's batches of scheduled records, planned once."""
    plan = PlanCache(spark, lambda batch: _destinations_of_messages(parsed(batch).coalesce(1)))
    return lambda batch: _scan_range(plan(batch))


def _destinations_of_messages(records: DataFrame) -> DataFrame:
    destination = F.when(F.col("is_whole"), F.col("due_topic"))
    return _destinations(records, destination, F.col("cluster"))


def _destinations(records: DataFrame, destination: Column, cluster: Column) -> DataFrame:
    """Return `to`, `cluster` and `since_ms`, the instant of the earliest record."""
    at_ms = F.unix_millis("timestamp")
    stamped = F.col("timestampType") == LOG_APPEND_TIME
    earliest_ms = F.min(F.when(stamped, at_ms).otherwise(at_ms - SENDERS_CLOCK_MS))
    places = records.groupBy(destination.alias("to"), cluster.alias("cluster"))
    return places.agg(earliest_ms.alias("since_ms"))


def _scan_range(destinations: DataFrame) -> ScanRange | None:
    found = destinations.collect()
    if not found:
        return None
    named: dict[str | None, list[str]] = {}
    for row in found:
        if row.to is not None:
            named.setdefault(row.cluster, []).append(row.to)
    return ScanRange(since_ms=min(row.since_ms for row in found), destinations=named)


def _is_behind() -> Column:
    """True unless the record is the latest of its message: that is where the message is."""
    order = ("progress", *PLACE)
    written, record = (
        F.struct(*(f"{side}.{name}" for name in order)) for side in ("written", "record")
    )
    same = [F.col(f"written.{each}") == F.col(f"record.{each}") for each in SAME_LOG]
    # Within one partition the offset tells the order. Its timestamps may run backwards: a new
    # leader's clock is another one. They decide only between records that are in different
    # partitions and equally far.
    by_offset = F.col("written.offset") > F.col("record.offset")
    return F.when(reduce(and_, same), by_offset).otherwise(written > record)
