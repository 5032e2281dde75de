"""Redelivery: the second half of the query. Messages that the tracker returned are sent again.

Single records are fetched by partition and offset, by executors, in few reads of ranges.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import pairwise

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.kafka.offsets import OffsetRange, Offsets, Partition, runs
from duetime.pipeline import REDELIVERY
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.recovery.deduplicator import BatchSequence, Deduplicator, ScanRange
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.redelivery.columns import PLACE, RECORD, RedeliveryColumns
from duetime.pipeline.redelivery.tracker import FOUND, WakeUpTimer
from duetime.queue.markers import LAST_OFFSET, MarkerKey, MarkerProducer
from duetime.queue.stats import TrackerOffsets
from duetime.spark.catalyst import PlanCache, as_single_read
from duetime.spark.kafka_io import RECORD as KAFKA_RECORD
from duetime.spark.kafka_io import read_ranges, write_batch

log = logging.getLogger(__name__)

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
