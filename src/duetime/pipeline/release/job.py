"""Release job: one Spark job that empties some claims, of whatever store and level.

    acquire -> drop duplicates -> drop cancelled -> in due order -> send -> settle

`scheduler` acquires before and settles after; the steps between are here. A message that is due
soon is sent at its time, and one that is due later is routed to a nearer slot. So the release of a
second, the cascade of a far slot and an overdue release are the same job over other offsets. A
record that its slot should not have (the ring came round, clocks moved) is routed again, never
dropped.

A job has a task for each shard of its slots, which reads all of the shard's partitions. That makes
duplicates, cancels and order a matter of sorting rows: no shuffle, which would cost more than
everything else. The tasks have one plan: a plan each took all of a core for windows of four shards
(2,000/s: median lateness 12.8 s, with one plan 6 ms).
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from queue import PriorityQueue
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from duetime.core.errors import OutcomeKnown, error_text
from duetime.core.messages import LATEST_MS
from duetime.core.metrics import CANCELLED
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import OffsetRange
from duetime.pipeline.delivery.delivery_errors import topic_metadata
from duetime.pipeline.delivery.isolation import FailedDestinations
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import SinkColumns, choose, message_columns, parsed
from duetime.pipeline.recovery.deduplicator import Deduplicator, ScanRange
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.catalyst import Observed, PlanCache, as_single_read
from duetime.spark.columns import HEADERS_TYPE, now_ms, slept_until
from duetime.spark.executors import END_S, is_executor_ended
from duetime.spark.kafka_io import DELIVERY_TIMEOUT_S, client_id, read_ranges, write_batch
from duetime.spark.secrets import TaskSettings
from duetime.stores import Claim
from duetime.stores.factory import open_row_store

if TYPE_CHECKING:
    import pyarrow as pa

    from duetime.stores.row_store import Record, RowStore

log = logging.getLogger(__name__)

#: The order of arrival: at the intake, and of records taken in within one ms, in the slot.
ARRIVAL = ("taken_ms", "offset")

#: Names of the jobs' producers. A sink waits until its producer holds no record, of any sink: so
#: each job has a producer for itself while it runs.
PRODUCERS = [f"release-{number}" for number in range(48)]

#: Time limit for the producer of a failed job to empty its buffer, in seconds.
QUIET_TIMEOUT_S = 3.0


class ReleaseJob:
    """Sends or routes on the records of some claims. Thread-safe.

    The columns are built once, before the first job needs them. The plan of a first run, which has
    nothing to read back, is kept by type of claim: there is a job every second, and planning is
    most of its cost.
    """

    def __init__(
        self,
        spark: SparkSession,
        settings: Settings,
        delivery_log: DeliveryLog,
        isolation: FailedDestinations | None = None,
    ) -> None:
        """`isolation` receives the error of a failed job; None where nothing is sent."""
        self._spark, self._settings = spark, settings
        self._delivery_log, self._isolation = delivery_log, isolation
        self._router = Router(settings)
        self._metadata, self._passes = _pace(settings)
        self._error, self._row = _route(self._router)
        # The lowest number first, so that few producers are ever opened.
        self._producers: PriorityQueue[tuple[int, str]] = PriorityQueue()
        for each in enumerate(PRODUCERS):
            self._producers.put(each)
        # By the node that reads. A wheel may have to be emptied next to another store.
        self._plans = defaultdict[tuple[type[Claim], bool], PlanCache](
            lambda: PlanCache(spark, self.rows)
        )

    def __call__(self, claims: Sequence[Claim]) -> None:
        """Empty the claims of one store; return when every record is acknowledged.

        Safe to repeat with claims that carry the instant of their first start: messages written
        since are read back and left out. Raises OutcomeKnown if the failed job's producer is empty,
        so that it may be repeated at once.
        """
        with self._producer() as producer:
            started = [each.started_ms for each in claims if each.started_ms is not None]
            if started:
                # The first run counts the cancelled messages, or no run does. All shards are one
                # task, and read back once.
                records = read_claims(self._spark, self._settings, claims)
                write_batch(self.rows(records, min(started)), self._settings, producer)
                return
            planned = self._planned(claims)
            write_batch(planned.rows, self._settings, producer)
            count_cancelled(planned)

    def route_cancels(self, claims: Sequence[Claim]) -> None:
        """Route on the cancels of the claims that are due later, and leave a copy in the claims.

        Safe to repeat: of several cancels with one id, a job takes one.
        """
        records = read_claims(self._spark, self._settings, claims)
        cancels = parsed(records).where("is_cancel").select(*records.columns)
        with self._producer() as producer:
            write_batch(self.rows(cancels), self._settings, producer)

    def rows(self, records: DataFrame, started_ms: int | None = None) -> DataFrame:
        """Return rows for the Kafka sink: messages to route on, then messages to send, as due.

        With `started_ms`, when an earlier run of these records began, messages that it wrote are
        left out.
        """
        messages = parsed(records)
        if started_ms is not None:
            here = messages.where("is_whole and due_topic is not null and cluster is null")
            topics = [row.due_topic for row in here.select("due_topic").distinct().collect()]
            scan_range = ScanRange(since_ms=started_ms, destinations={None: topics})
            messages = Deduplicator(self._delivery_log).drop_moved_on(messages, scan_range)
        # Decided when a record is read: by its turn in the sorted task it would be due soon.
        is_later = F.col("due_ms") - now_ms() > self._settings.short_delay_threshold_ms
        return (
            messages.select("*", is_later.alias("later"))
            .coalesce(1)
            .transform(drop_duplicates_and_cancelled)
            .transform(in_due_order)
            .select("*", *self._metadata)
            .where(self._passes)
            .select("*", self._error)
            .transform(self._router.rows, self._row)
        )

    def _planned(self, claims: Sequence[Claim]) -> Observed:
        shards = self._shards(claims)
        is_one_read = len(shards) in {1, len(claims)}
        if is_one_read:
            records = read_claims(self._spark, self._settings, claims)
        else:
            parts = [read_claims(self._spark, self._settings, each).coalesce(1) for each in shards]
            records = as_single_read(self._spark, reduce(DataFrame.union, parts))
        plans = self._plans[type(claims[0]), is_one_read]
        return plans.observed(records, is_one_task=len(shards) == 1)

    def _shards(self, claims: Sequence[Claim]) -> list[Sequence[Claim]]:
        """Return the claims of each task: those of one shard.

        Records of one id are in one shard of a slot. On another level they may be in another.
        """
        ranges = [each for each in claims if isinstance(each, OffsetRange)]
        if len({each.topic for each in ranges}) != 1:
            return [claims]
        shards = defaultdict[int, list[Claim]](list)
        for each in ranges:
            shards[self._settings.wheel.shard_of(each.partition)].append(each)
        return list(shards.values())

    @contextmanager
    def _producer(self) -> Iterator[str]:
        """Give the name of a producer that no other job uses meanwhile.

        Raises OutcomeKnown once the producer of a failed job holds no record. Only before the job
        is as old as the delivery timeout: until then it cannot have given up a record unanswered.
        """
        number, name = self._producers.get()
        client, started_s = client_id(self._settings, name), time.monotonic()
        try:
            yield name
        except Exception as error:
            if is_ended := is_executor_ended(error):
                time.sleep(END_S)
            if self._isolation and (is_ended or self._isolation.blame(error, client)):
                left_s = started_s + DELIVERY_TIMEOUT_S - time.monotonic()
                if self._isolation.await_quiet(client, min(QUIET_TIMEOUT_S, left_s)):
                    raise OutcomeKnown(error_text(error)) from error
            raise
        finally:
            self._producers.put((number, name))


def drop_duplicates_and_cancelled(messages: DataFrame) -> DataFrame:
    """Keep one record of each id: a cancel if there is one, else the first that arrived.

    So a cancelled message is dropped here, and its cancel when its time has come. Adds the columns
    nth and cancels_only, and observes how many are cancelled.
    """
    # All records with one id are in one task. By (due, id) and not id alone, because Spark sorts a
    # number by radix and a text by comparing.
    same = W.partitionBy("due_ms", "id").orderBy(F.col("is_cancel").desc(), *ARRIVAL)
    whole = same.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    cancels_only = F.last("is_cancel").over(whole).alias("cancels_only")
    nth = F.row_number().over(same).alias("nth")
    first = messages.select("*", nth, cancels_only).where("nth = 1")
    cancelled = F.count_if(F.col("is_cancel") & ~F.col("cancels_only"))
    return first.observe("release", cancelled.alias("cancelled"))


def in_due_order(messages: DataFrame) -> DataFrame:
    """Sort within the task: messages to route on first, each part by due time and arrival.

    Routing on must not wait for messages that are sent at their time. Spark sorts one number by
    radix.
    """
    due = F.when(F.col("later"), F.col("due_ms")).otherwise(F.col("due_ms") + LATEST_MS)
    return messages.sortWithinPartitions(due, *ARRIVAL)


def _pace(settings: Settings) -> tuple[tuple[Column, Column], Column]:
    """Return `now` and the destination's metadata, and a filter that passes rows when due.

    It drops a cancel when its time has come. Runs in an executor, after the sort: the task sleeps
    from row to row.
    """
    sent_to = F.when(~F.col("later"), F.col("due_topic"))
    metadata = topic_metadata(settings, sent_to, F.col("cluster")).alias("metadata")
    due = slept_until(F.col("due_ms"), F.col("now"))
    passes = F.when(F.col("later"), True).when(F.col("is_cancel"), False).otherwise(due)
    return (now_ms().alias("now"), metadata), passes


def _route(router: Router) -> tuple[Column, SinkColumns]:
    """Return `error`, why a message cannot be sent, and its row: to its slot or destination."""
    is_later, message = F.col("later"), message_columns()
    error = router.delivery_error(message, F.col("metadata"), now_ms())
    row = choose(
        (~F.col("is_whole"), router.foreign()),
        (is_later, router.store(message, F.col("now"))),
        otherwise=router.due_now(message, F.col("metadata"), F.col("error")),
    )
    error = F.when(F.col("is_whole") & ~is_later, error).alias("error")
    return error, SinkColumns.of(row)


def count_cancelled(planned: Observed) -> None:
    """Add the cancelled messages of a finished job to the metric. Raises nothing."""
    try:
        CANCELLED.inc(planned.count())
    except Exception as error:  # noqa: BLE001 (whatever it was, the messages are sent)
        log.warning("could not count cancelled messages error=%s", error_text(error))


#: The columns that `RowReader` returns, for Spark.
RECORD_TYPE = (
    f"key binary, value binary, headers {HEADERS_TYPE}, topic string, partition int, "
    "offset bigint, timestamp timestamp"
)


def read_claims(spark: SparkSession, settings: Settings, claims: Sequence[Claim]) -> DataFrame:
    """Return the records of claims of one store, in the columns of Spark's Kafka source."""
    ranges = [each for each in claims if isinstance(each, OffsetRange)]
    if ranges:
        return read_ranges(spark, settings, ranges)
    # One task, because a job is one.
    one = spark.range(0, 1, 1, 1)
    reader = RowReader(
        TaskSettings.of(settings), lambda rows, _: chain.from_iterable(map(rows.records, claims))
    )
    return one.mapInArrow(reader, RECORD_TYPE)


@dataclass(frozen=True)
class RowReader:
    """Reads a store of rows in an executor, in Python, some records at a time."""

    settings: TaskSettings
    #: Returns the records for each number of the input.
    read: "Callable[[RowStore, int], Iterable[Sequence[Record]]]"

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Yield the records (RECORD_TYPE) for a column of numbers."""
        # Only stores other than Kafka need what this imports.
        from duetime.stores.row_store import arrow_batch  # noqa: PLC0415

        settings = self.settings.read()
        rows, topic = open_row_store(settings), TopicNames(settings).store_inbox
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for records in self.read(rows, number):
                    yield arrow_batch(records, topic)
