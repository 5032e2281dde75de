"""The saving query: what waits in another store than Kafka is brought there.

A micro-batch query over `duetime.store`, to which intake, failures and turns route what is due
later. So intake stays a real-time query whose rows never leave the JVM, a store that is away holds
up nothing but this query, and what cannot be saved yet is safe in Kafka.

Rows are saved in executors, by pipelined scripts, each once: a batch that is repeated changes
nothing. But what it saved before a crash may have been delivered meanwhile, and be gone from the
store: so a repeated batch leaves out what has gone on, or was cancelled, and a writer that was
paused is refused by the store itself once another has begun.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import HEADERS_TYPE
from duetime.config import Settings
from duetime.pipeline.kafka import read_stream
from duetime.pipeline.planned import PlannedOnce
from duetime.pipeline.seen import Seen
from duetime.pipeline.turn import readable
from duetime.pipeline.written import Repeat, Repeats, Written, scope_of_waiting
from duetime.stores.opening import open_rows
from duetime.topics import TopicNames

if TYPE_CHECKING:
    import pyarrow as pa

#: What the query, and the directory of its offsets, are called.
SAVING = "saving"

#: How often a batch is begun: messages have a second from intake to the planning of their window,
#: and each batch costs some 100 ms of a core, however little is in it.
EVERY = "500 milliseconds"

#: How long what was saved stays in its topic, in ms: intake finds there what it has taken in.
SAVED_KEPT_MS = 3_600_000


def saving(
    spark: SparkSession, settings: Settings, written: Written, begun_ms: int
) -> Callable[[DataFrame, int], None]:
    """What to do with each batch of the query. Runs on the driver; its rows in executors.

    `begun_ms` is when the query began, epoch ms.
    """
    saver, repeats = Saver(spark, settings), Repeats(written, begun_ms)
    cancels = Seen()

    def without_gone(known: DataFrame, repeat: Repeat) -> DataFrame:
        left = repeat.sieve.without(known, repeat.scope)
        if new := _cancels(repeat, settings):
            cancels.add(new, records=1)
        # A message that met its cancel is nowhere any more: it would be delivered, if its cancel is
        # in a later batch.
        return _without(left, cancels.ids) if cancels.ids else left

    def handle(batch: DataFrame, number: int) -> None:
        if repeat := repeats.of(number, lambda: scope_of_waiting(batch)):
            saver.save_of(batch, lambda known: without_gone(known, repeat))
        else:
            saver.save(batch)

    return handle


def _cancels(repeat: Repeat, settings: Settings) -> DataFrame | None:
    """Those that came since the first record of the batch, and are new: `id` and `due_ms`."""
    sent = repeat.sieve.taken_in(TopicNames(settings).store, repeat.scope.since_ms)
    return sent and sent.select(*readable()).where("is_cancel").select("id", "due_ms")


def _without(records: DataFrame, cancels: DataFrame) -> DataFrame:
    """Without the messages that these cancel; with the records that do."""
    same = F.col("record.id") == F.col("cancel.id")
    # Of a retry that was cancelled, the message may have gone on another time.
    at_its_time = F.col("record.due_ms") == F.col("cancel.due_ms")
    cancelled = same & at_its_time & ~F.col("record.is_cancel")
    return records.alias("record").join(cancels.alias("cancel"), cancelled, "left_anti")


def on_their_way(spark: SparkSession, settings: Settings) -> DataFrame:
    """What is to be saved, as an endless read."""
    topic, batch = TopicNames(settings).store, settings.batch_records
    return read_stream(spark, settings, [topic], batch=batch)


class Saver:
    """Saves from now on; those from before save no more, wherever they were paused.

    The columns are built once, and planned once.
    """

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._readable, self._columns = readable(), _columns()
        self._writer = RowWriter(settings, open_rows(settings).begin_term())
        self._all = PlannedOnce(spark, self._rows)
        # Of one partition a batch has a few hundred records: less work than to begin a task.
        self._tasks = spark.sparkContext.defaultParallelism

    def save(self, records: DataFrame) -> None:
        """Save what waits in `duetime.store`, read as it is. Safe to repeat while it waits."""
        _run(self._all(records))

    def save_of(self, records: DataFrame, sieve: Callable[[DataFrame], DataFrame]) -> None:
        """The same of what a sieve lets through; it is given them made readable."""
        _run(self._rows(records, sieve))

    def _rows(
        self, records: DataFrame, sieve: Callable[[DataFrame], DataFrame] = lambda known: known
    ) -> DataFrame:
        known = records.select("*", *self._readable)
        saved = sieve(known).coalesce(self._tasks).select(*self._columns)
        return saved.mapInArrow(self._writer, "nothing int")


def _run(rows: DataFrame) -> None:
    # A way to run it that asks for no result.
    rows.write.format("noop").mode("append").save()


def _columns() -> list[Column]:
    return [
        F.col("id"),
        F.col("due_ms"),
        F.col("is_cancel"),
        F.col("partition"),
        F.col("offset"),
        F.unix_millis("timestamp").alias("timestamp_ms"),
        F.col("key"),
        F.col("value"),
        F.coalesce("headers", F.array().cast(HEADERS_TYPE)).alias("headers"),
    ]


@dataclass(frozen=True)
class RowWriter:
    """Saves rows in an executor, in Python, a batch of Arrow at a time."""

    settings: Settings
    term: int

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Save them; gives nothing back."""
        # Only who has another store than Kafka needs what this imports.
        from duetime.stores.arrow import rows_of  # noqa: PLC0415

        rows = open_rows(self.settings)
        for batch in batches:
            rows.save(rows_of(batch), self.term)
        yield from ()
