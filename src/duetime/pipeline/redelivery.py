"""The redelivery query: queue messages that were not acknowledged in time are sent again.

The first half is the tracker, which returns the messages. Here they are fetched by partition and
offset, by executors, in few reads of ranges, and judged.

A redelivery is an ordinary message: due now, or after the queue's back-off through a lane or the
wheel. It goes to the partition it came from, with its key, value and headers and an increased
count. After the last one, the message goes to the queue's dead letters.

Its id is made of its partition, offset and time, so a batch that is repeated finds what it has
written.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError, Reason
from duetime.core.messages import LATEST_MS
from duetime.core.setting_types import QueueSettings
from duetime.core.settings import Settings
from duetime.kafka.offsets import OffsetRange, Offsets, Partition, runs
from duetime.pipeline import REDELIVERY
from duetime.pipeline.delivery.delivery_errors import topic_metadata
from duetime.pipeline.delivery.router import Router
from duetime.pipeline.delivery.rows import (
    FailureColumns,
    MessageColumns,
    SinkColumns,
    SinkRow,
    choose,
    dead_letter_headers,
    pending_headers,
)
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.recovery.deduplicator import BatchSequence, Deduplicator, ScanRange
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.tracker import FOUND, TIMED_OUT, WakeUpTimer
from duetime.queue.message import (
    INT_BYTES,
    LAST_OFFSET,
    REDELIVERY_COUNT,
    GivenBack,
    MarkerKey,
    MarkerProducer,
)
from duetime.queue.stats import TrackerOffsets
from duetime.spark.catalyst import PlanCache, as_single_read
from duetime.spark.columns import HEADERS_TYPE, backoff_ms, message_id, now_ms, state_text
from duetime.spark.kafka_io import RECORD as KAFKA_RECORD
from duetime.spark.kafka_io import read_ranges, write_batch

log = logging.getLogger(__name__)

#: The columns that identify a record, and those that are fetched.
PLACE = ["topic", "partition", "offset"]
RECORD = ["key", "value", "headers", "timestamp"]

#: The Arrow types of Spark's.
ARROW_TYPES = {"string": pa.string(), "int": pa.int32(), "bigint": pa.int64()}

#: The returned messages as the driver hands them back to Spark: as Arrow, which needs no job.
RETURNED = pa.schema(
    [(name, ARROW_TYPES[FOUND[name]]) for name in (*PLACE, "returned_ms", "due_ms", "cause")]
)

#: Smaller gaps between wanted records are read over, in records: another read costs as much.
GAP = 5_000

#: The limit of reads of one partition: beyond it, wider gaps are read over.
MAX_READS = 16

#: Headers that a redelivery sets: those of an earlier one are removed.
REPLACED_HEADERS = (H.DUE_AT_MS, H.DUE_ID, REDELIVERY_COUNT)

DETAILS = {
    Reason.TIMED_OUT: "no delivery was acknowledged within the visibility timeout",
    Reason.NACKED: "each delivery failed or timed out",
    Reason.RECORD_DELETED: "its record was removed from the queue before it could be delivered "
    "again",
}

#: A count below this is one byte, as kmq writes it.
ONE_BYTE = 2**7


class Redelivery:
    """Handles the batches of the tracker. Runs on the driver; its rows in executors."""

    def __init__(
        self, spark: SparkSession, settings: Settings, delivery_log: DeliveryLog, timer: WakeUpTimer
    ) -> None:
        """Raises KafkaError."""
        self._spark, self._settings = spark, settings
        self._clock = SystemClock()
        self._delivery_log, self._tracker = delivery_log, TrackerOffsets(settings)
        self._offsets = Offsets(settings)
        self._timer = timer
        timer.schedule(self._tracker.next_ms())
        self._columns = RedeliveryColumns(settings)
        #: By whether all messages are delivered at once.
        self._plans = {
            at_once: PlanCache(spark, partial(self._rows, at_once=at_once))
            for at_once in (False, True)
        }
        self._producers: dict[str, MarkerProducer] = {}
        self._batches = BatchSequence()
        #: Queues that are not configured, and were logged.
        self._unknown: set[str] = set()

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Deliver the returned messages, then write their end markers, then commit the state.

        After a crash between two lines the batch is repeated, with the same markers, state and
        time: what it has sent is found by its ids.
        """
        # Evaluated once: each evaluation would apply the markers again.
        rows = self._of_configured_queues(batch.collect())
        is_replay = self._batches.is_replay(number)
        if returned := [row for row in rows if row.offset is not None]:
            # One task: Spark would make several, which wait for each other.
            table = pa.Table.from_pylist([row.asDict() for row in returned], RETURNED)
            wanted = self._spark.createDataFrame(table).coalesce(1)
            records = as_single_read(self._spark, self._fetched(wanted, returned))
            at_once = self._are_due(returned)
            if is_replay:
                sent = self._rows(records, partial(self._without_sent, returned), at_once=at_once)
            else:
                sent = self._plans[at_once](records)
            write_batch(sent, self._settings, REDELIVERY)
            reach(Point.REDELIVERED)
            self._write_end_markers(returned)
        self._tracker.note(rows)
        self._timer.schedule(self._tracker.next_ms())

    def _of_configured_queues(self, rows: Sequence[Row]) -> list[Row]:
        """Drop rows of other queues, and of offsets that no record can have.

        The state may have both: queues that were removed from the settings since, and markers that
        an earlier release accepted.
        """
        queues = self._settings.queues
        unknown = {row.topic for row in rows if row.topic} - queues.keys()
        for queue in sorted(unknown - self._unknown):
            log.warning(
                "open messages are left out, their queue is not configured: to have them delivered "
                "again, put it back into queues topic=%s",
                queue,
            )
        self._unknown |= unknown
        return [
            row
            for row in rows
            if row.topic in queues and (row.offset is None or 0 <= row.offset <= LAST_OFFSET)
        ]

    def _are_due(self, returned: Sequence[Row]) -> bool:
        """Return whether all are delivered now, without a back-off."""
        now_ms = self._clock.now_ms()
        backs_off = any(self._settings.queues[row.topic].backoff_ms for row in returned)
        return not backs_off and all(row.due_ms <= now_ms for row in returned)

    def _fetched(self, wanted: DataFrame, returned: Sequence[Row]) -> DataFrame:
        """Add its record to each message; nulls where the record is deleted."""
        offsets: dict[Partition, list[int]] = defaultdict(list)
        for row in returned:
            offsets[row.topic, row.partition].append(row.offset)
        existing = before_end(self._offsets, offsets)
        records = fetch(self._spark, self._settings, existing).select(*PLACE, *RECORD)
        # Records that were only read over go no further.
        places = F.broadcast(wanted.select(*PLACE))
        return wanted.join(records.join(places, PLACE, "left_semi"), PLACE, "left")

    def _rows(
        self,
        records: DataFrame,
        deduplicate: Callable[[DataFrame], DataFrame] = lambda judged: judged,
        *,
        at_once: bool,
    ) -> DataFrame:
        judged = self._columns.judged(records).transform(deduplicate)
        return self._columns.delivered(judged, at_once=at_once)

    def _without_sent(self, returned: Sequence[Row], records: DataFrame) -> DataFrame:
        """Drop what was sent before a crash."""
        topics = {row.topic for row in returned}
        dead = {self._settings.queues[topic].dead_topic(topic) for topic in topics}
        since_ms = min(row.returned_ms for row in returned)
        scope = ScanRange(since_ms=since_ms, destinations={None: sorted(topics | dead)})
        return Deduplicator(self._delivery_log).drop_ingested(records, scope)

    def _write_end_markers(self, returned: Sequence[Row]) -> None:
        """Write end markers, as kmq's tracker does; from the driver: they are small.

        Raises KafkaError.
        """
        keys: dict[str, list[MarkerKey]] = defaultdict(list)
        for row in returned:
            keys[row.topic].append(MarkerKey(row.partition, row.offset))
        for queue, ended in keys.items():
            if queue not in self._producers:
                topic = self._settings.queues[queue].markers_topic(queue)
                self._producers[queue] = MarkerProducer(self._settings, topic)
            self._producers[queue].end_all(ended)


def before_end(
    offsets: Offsets, wanted: Mapping[Partition, Iterable[int]]
) -> dict[Partition, list[int]]:
    """Return the offsets that may have a record, by existing partitions.

    For others Spark waits minutes, and fails. Raises KafkaError where a topic is missing, too: it
    may be created again, and its messages are not gone until it is removed from the settings.
    """
    places: list[Partition] = []
    for topic in sorted({topic for topic, _ in wanted}):
        if not (found := offsets.readable_partitions(topic)):
            raise KafkaError(
                f"topic {topic} is missing, and has open messages: create it, or take it out of "
                "queues"
            )
        places += [place for place in found if place in wanted]
    ends = offsets.ends(places)
    return {place: [each for each in wanted[place] if each < ends[place]] for place in places}


def fetch(
    spark: SparkSession, settings: Settings, wanted: Mapping[Partition, Iterable[int]]
) -> DataFrame:
    """Return the existing records at these offsets, and others near them."""
    found = [
        read_ranges(spark, settings, ranges, fail_on_missing=False) for ranges in reads(wanted)
    ]
    return reduce(DataFrame.unionAll, found or [spark.createDataFrame([], KAFKA_RECORD)])


def reads(wanted: Mapping[Partition, Iterable[int]]) -> list[list[OffsetRange]]:
    """Return ranges with these offsets, grouped in reads of at most one range a partition."""
    by_place = [
        [OffsetRange(*place, start, end) for start, end in _runs(sorted(offsets))]
        for place, offsets in wanted.items()
    ]
    count = max(map(len, by_place), default=0)
    return [[ranges[nth] for ranges in by_place if nth < len(ranges)] for nth in range(count)]


def _runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    gaps = sorted(after - each for each, after in pairwise(ordered))
    widest = max(GAP, gaps[-MAX_READS] if len(gaps) >= MAX_READS else 0)
    return [(first, last + 1) for first, last in runs(ordered, widest)]


class RedeliveryColumns:
    """The two steps of a redelivery. Build it once: making its many columns takes a second."""

    def __init__(self, settings: Settings) -> None:
        self._routes = Router(settings)
        self._judged = _judged(settings)
        due_ms = F.col("asked_ms") + F.when(F.col("is_backed_off"), _wait_ms(settings)).otherwise(0)
        self._due_ms = F.least(due_ms, F.lit(LATEST_MS)).alias("due_ms")
        unique = F.concat(F.lit("@queue:"), F.concat_ws(".", *PLACE))
        self._id = message_id(F.col("due_ms"), unique).alias("id")
        message, now, metadata = _message(), F.col("now"), F.col("metadata")
        is_sent = ~F.col("is_dead") & (F.col("due_ms") <= now)
        sent_to = F.when(is_sent, message.topic)
        self._metadata = topic_metadata(settings, sent_to, message.cluster).alias("metadata")
        error = self._routes.delivery_error(message, metadata, now)
        self._error = F.when(is_sent, error).alias("error")
        dead = F.col("is_dead"), _dead_letter(message, settings)
        due_now = self._routes.due_now(message, metadata, F.col("error"))
        row = self._routes.route(message, now, rejected=dead, due_now=due_now)
        self._row = SinkColumns.of(row)
        self._row_at_once = SinkColumns.of(choose(dead, otherwise=due_now))

    def judged(self, records: DataFrame) -> DataFrame:
        """Add `count` (of redeliveries), `is_dead`, `reason`; `due_ms`, `id` of the next one."""
        timed = records.select(*self._judged).select("*", self._due_ms)
        return timed.select("*", self._id, F.lit(False).alias("is_cancel"))

    def delivered(self, judged: DataFrame, *, at_once: bool) -> DataFrame:
        """Return rows for the sink: to the queue now or later, or to its dead letters.

        `at_once` asserts that no row is delivered later: planning it takes a quarter less.
        """
        known = judged.select("*", now_ms().alias("now")).select("*", self._metadata)
        checked = known.select("*", self._error)
        return self._routes.rows(checked, self._row_at_once if at_once else self._row)


def _judged(settings: Settings) -> list[Column]:
    """Return the columns of a judged record, without the time of its redelivery."""
    cause, is_gone = F.col("cause"), F.col("timestamp").isNull()
    is_counted = cause != str(GivenBack.UNSEEN)
    count = _count(F.col("headers"))
    max_redeliveries = _by_queue(settings, lambda _, queue: queue.redeliveries)
    is_exhausted = is_counted & (count >= max_redeliveries)
    reason = (
        F.when(is_gone, str(Reason.RECORD_DELETED))
        .when(cause == TIMED_OUT, str(Reason.TIMED_OUT))
        .otherwise(str(Reason.NACKED))
    )
    return [
        *map(F.col, (*PLACE, *RECORD, "returned_ms")),
        (count + is_counted.cast("int")).alias("count"),
        (is_gone | is_exhausted).alias("is_dead"),
        reason.alias("reason"),
        # A worker that asks for a time gets it, without a back-off.
        F.col("due_ms").alias("asked_ms"),
        (~is_exhausted & cause.isin(TIMED_OUT, str(GivenBack.FAILED))).alias("is_backed_off"),
    ]


def _wait_ms(settings: Settings) -> Column:
    """Return the exponential back-off, half of which is spread by partition and offset."""
    first_ms = _by_queue(settings, lambda _, queue: queue.backoff_ms)
    max_ms = _by_queue(settings, lambda _, queue: queue.backoff_max_ms)
    return backoff_ms(F.col("count"), first_ms, max_ms, spread=[F.col(name) for name in PLACE])


def _by_queue(settings: Settings, chosen: Callable[[str, QueueSettings], str | int]) -> Column:
    """Return a setting of the row's queue."""
    found = F.lit(None)
    for name, queue in settings.queues.items():
        found = F.when(F.col("topic") == name, F.lit(chosen(name, queue))).otherwise(found)
    return found


def _message() -> MessageColumns:
    """Return the redelivery as a scheduled message."""
    message = MessageColumns(
        topic=F.col("topic"),
        partition=F.col("partition").cast("string"),
        cluster=F.lit(None).cast("string"),
        due_ms=F.col("due_ms"),
        taken_ms=F.col("returned_ms"),
        expires_ms=F.lit(None).cast("bigint"),
        id=F.col("id"),
        key=F.col("key"),
        value=F.col("value"),
        headers=F.concat(_sender_headers(), F.array(_count_header())),
    )
    return pending_headers(message, state_text(taken=message.taken_ms))


def _dead_letter(message: MessageColumns, settings: Settings) -> SinkRow:
    """Return the message with the headers of a dead letter on top."""
    detail = F.lit("")
    for reason, text in DETAILS.items():
        detail = F.when(F.col("reason") == str(reason), text).otherwise(detail)
    failure = FailureColumns(
        reason=F.col("reason"),
        detail=detail,
        # Equal to the count: the first delivery was no redelivery, and the next one does not come.
        attempts=F.col("count"),
        first_ms=F.col("returned_ms"),
        last_ms=F.col("returned_ms"),
    )
    headers = F.concat(_sender_headers(), dead_letter_headers(message, F.col("due_ms"), failure))
    topic = _by_queue(settings, lambda name, queue: queue.dead_topic(name))
    return SinkRow(topic, None, F.col("key"), F.col("value"), headers)


def _sender_headers() -> Column:
    headers = F.coalesce("headers", F.array().cast(HEADERS_TYPE))
    return F.filter(headers, lambda each: ~each["key"].isin(*REPLACED_HEADERS))


def _count(headers: Column) -> Column:
    """Return how often a record was delivered again: `queue.message.decoded_count` in Spark."""
    first = F.array_position(headers["key"], REDELIVERY_COUNT).cast("int") - 1
    value = F.get(headers["value"], first)
    number = F.conv(F.hex(F.substring(value, 1, INT_BYTES)), 16, 10).cast("bigint")
    length = F.octet_length(value)
    # As a signed number, what is not below the limit is negative, and so counts as 0.
    limit = F.when(length == 1, ONE_BYTE).when(length >= INT_BYTES, F.lit(2**31))
    return F.when(number < limit, number).otherwise(F.lit(0)).cast("bigint")


def _count_header() -> Column:
    """Return the header with the count in big-endian: `queue.message.decoded_count`."""
    count = F.col("count")
    digits = F.when(count < ONE_BYTE, 2).otherwise(2 * INT_BYTES)
    value = F.unhex(F.lpad(F.hex(count), digits, F.lit("0")))
    return F.struct(F.lit(REDELIVERY_COUNT).alias("key"), value.alias("value"))
