"""The queries of a store other than Kafka: one writes to it, and one takes its expirations.

    sender -> intake -> [store writer] -> message cache       the message, which never expires
                                       -> message id          its id, which expires when it is due
    Aerospike's connector -> expiry topic -> [expirations: a release job] -> destination

The writer is a micro-batch query over `duetime.store-inbox`, to which intake, retries and release
jobs route messages that are due later. So intake stays a real-time query whose rows never leave the
JVM, a store that is down holds up this query only, and messages that cannot be written wait in
Kafka.

Executors write the rows by pipelined scripts, each row once: a batch that is repeated changes
nothing. But messages that it wrote before a crash may have been delivered since, and be gone from
the store. So a repeated batch leaves out those that went on or were cancelled, and the store itself
refuses a writer that was paused once another one has begun.

Expirations are a micro-batch query over the topic of Aerospike's connector. An expiration names a
message, and the message that is found under that name is released. So one that is repeated, or
whose message is gone, changes nothing, and one that is early waits in its release job until the
message is due. The cached message is removed when the send is acknowledged. The overdue scan finds
messages without an expiration.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.core.clock import Clock
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline.delivery.rows import parsed
from duetime.pipeline.recovery.deduplicator import (
    ReplayDetector,
    ReplayedBatch,
    scan_range_of_messages,
)
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.spark.catalyst import PlanCache
from duetime.spark.columns import HEADERS_TYPE
from duetime.spark.kafka_io import BatchHandler
from duetime.spark.secrets import TaskSettings
from duetime.stores.factory import open_row_store

if TYPE_CHECKING:
    import pyarrow as pa

    from duetime.stores.aerospike import AerospikeStore

#: How often a batch starts: messages have a second from intake to the planning of their window, and
#: each batch costs some 100 ms of a core, however small it is.
SAVING_INTERVAL = "500 milliseconds"

#: How long written messages stay in the topic, in ms: intake finds there which ones it took in.
SAVED_KEPT_MS = 3_600_000

#: How often a batch of expirations starts.
NOTICES_INTERVAL = "100 milliseconds"


def store_handler(
    spark: SparkSession, settings: Settings, delivery_log: DeliveryLog, started_ms: int
) -> BatchHandler:
    """Return the handler of the query's batches. It runs on the driver; its rows in executors.

    `started_ms` is when the query began, epoch ms.
    """
    writer, detector = StoreWriter(spark, settings), ReplayDetector(delivery_log, started_ms)

    def without_handled(known: DataFrame, replay: ReplayedBatch) -> DataFrame:
        left = replay.deduplicator.drop_moved_on(known, replay.scan_range)
        same = F.col("record.id") == F.col("cancel.id")
        # The message of a retry that was cancelled may have gone on at another time.
        at_its_time = F.col("record.due_ms") == F.col("cancel.due_ms")
        is_cancelled = same & at_its_time & ~F.col("record.is_cancel")
        return replay.deduplicator.drop_cancelled(left, _cancels(replay, settings), is_cancelled)

    def handle(batch: DataFrame, number: int) -> None:
        if replay := detector.check(number, lambda: scan_range_of_messages(parsed(batch))):
            writer.save(batch, lambda known: without_handled(known, replay))
        else:
            writer.save(batch)

    return handle


def _cancels(replay: ReplayedBatch, settings: Settings) -> DataFrame | None:
    """Return the new cancels since the first record of the batch: `id` and `due_ms`."""
    topic, since_ms = TopicNames(settings).store_inbox, replay.scan_range.since_ms
    sent = replay.deduplicator.new_records(topic, since_ms)
    return sent and parsed(sent).where("is_cancel").select("id", "due_ms")


class StoreWriter:
    """Writes from now on; earlier writers are refused, wherever they were paused.

    The columns are built once, and planned once.
    """

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self._columns = _columns()
        self._writer = RowWriter(TaskSettings.of(settings), open_row_store(settings).begin_term())
        self._plan = PlanCache(spark, self._rows)
        # A partition has a few hundred records of a batch: less work than to start a task.
        self._tasks = spark.sparkContext.defaultParallelism

    def save(
        self, records: DataFrame, deduplicate: Callable[[DataFrame], DataFrame] | None = None
    ) -> None:
        """Write records of the topic to the store. Safe to repeat while they are pending.

        `deduplicate` drops some of the records, which are `parsed` then.
        """
        rows = self._rows(records, deduplicate) if deduplicate else self._plan(records)
        # This format runs the job without a result.
        rows.write.format("noop").mode("append").save()

    def _rows(
        self,
        records: DataFrame,
        deduplicate: Callable[[DataFrame], DataFrame] = lambda known: known,
    ) -> DataFrame:
        saved = deduplicate(parsed(records)).coalesce(self._tasks).select(*self._columns)
        return saved.mapInArrow(self._writer, "nothing int")


def _columns() -> list[Column]:
    return [
        *map(F.col, ("id", "due_ms", "is_cancel", "partition", "offset")),
        F.unix_millis("timestamp").alias("timestamp_ms"),
        F.col("key"),
        F.col("value"),
        F.coalesce("headers", F.array().cast(HEADERS_TYPE)).alias("headers"),
    ]


@dataclass(frozen=True)
class RowWriter:
    """Writes rows in an executor, in Python, a batch of Arrow at a time."""

    settings: TaskSettings
    term: int

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Write all batches, and yield none."""
        # Imports what only users of another store than Kafka have installed.
        from duetime.stores.row_store import rows_from_batch  # noqa: PLC0415

        rows = open_row_store(self.settings.read())
        for batch in batches:
            rows.save(rows_from_batch(batch), self.term)
        yield from ()


@dataclass(frozen=True, slots=True)
class Expiration:
    """The removal of an id: its name, or where the connector sends none, its digest."""

    name: str | None
    digest: bytes | None


def expiration_handler(
    settings: Settings, store: "AerospikeStore", release: Callable[[Any], None], clock: Clock
) -> BatchHandler:
    """Return the handler of the query's batches, which runs on the driver.

    Safe to repeat: a delivered message is gone. Messages due later than the short delay threshold
    are left to the overdue scan, which goes by due times.
    """

    def handle(batch: DataFrame, _number: int) -> None:
        rows = batch.select("key", "value").collect()
        expired = expirations((row.key, row.value) for row in rows)
        names = [each.name for each in expired if each.name is not None]
        digests = [each.digest for each in expired if each.name is None and each.digest is not None]
        until_ms = clock.now_ms() + settings.short_delay_threshold_ms
        if claims := store.acquire_expired(names, digests, until_ms):
            release(claims)

    return handle


def expirations(records: Iterable[tuple[bytes | None, bytes | None]]) -> list[Expiration]:
    """Return the expirations among records of the connector, without repeats."""
    found = (parse_expiration(key, value) for key, value in records)
    return list(dict.fromkeys(each for each in found if each))


def parse_expiration(key: bytes | None, value: bytes | None) -> Expiration | None:
    """Parse the connector's flat JSON; return None where it does not report a removal."""
    try:
        metadata = json.loads(value or b"null")["metadata"]
        if metadata["msg"] != "delete":
            return None
        name = metadata.get("userKey") or json.loads(key or b"{}").get("userKey")
        digest = metadata.get("digest")
        return Expiration(
            name=name if isinstance(name, str) else None,
            digest=base64.b64decode(digest, validate=True) if digest else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
