"""The query's second half: what is not acknowledged is fetched, and delivered again (`again`)."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.kmq.markers import LAST_OFFSET, MarkerKey
from duetime.kmq.marking import Marking
from duetime.kmq.notes import Notes
from duetime.pipeline.again import PLACE, RECORD, Again
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.fetch import before_end, fetch
from duetime.pipeline.kafka import write_batch
from duetime.pipeline.planned import PlannedOnce, one_read
from duetime.pipeline.waking import Waking
from duetime.pipeline.written import Batches, Scope, Written
from duetime.stores.offsets import Offsets
from duetime.stores.places import Place

log = logging.getLogger(__name__)

#: What came out, as the driver gives it back to Spark: without a job, as Arrow.
ASKED = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("out_ms", pa.int64()),
        ("due_ms", pa.int64()),
        ("why", pa.string()),
    ]
)


class Redelivery:
    """What to do with each batch of the tracker. Runs on the driver; its rows in executors."""

    def __init__(
        self, spark: SparkSession, settings: Settings, written: Written, waking: Waking
    ) -> None:
        """Raises KafkaError."""
        self._spark, self._settings = spark, settings
        self._clock = SystemClock()
        self._written, self._notes = written, Notes(settings)
        self._offsets = Offsets(settings, f"{settings.namespace}.reader")
        self._waking = waking
        waking.expect(self._notes.next_ms())
        self._again = Again(settings)
        # By whether all goes at once.
        self._planned = {
            at_once: PlannedOnce(spark, partial(self._sent, at_once=at_once))
            for at_once in (False, True)
        }
        self._markings: dict[str, Marking] = {}
        self._batches = Batches()
        #: Queues that are not configured, and were told of.
        self._told: set[str] = set()

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Deliver again what came out, and write that it is done.

        After a crash between two lines the batch is repeated, with the same markers, memory and
        time: what it has sent it finds by its ids.
        """
        # Each look at the batch would follow the markers once more.
        rows = self._deliverable(batch.collect())
        is_again = self._batches.is_again(number)
        if due := [row for row in rows if row.offset is not None]:
            # Spark would make several tasks of it, which wait for each other.
            asked = self._spark.createDataFrame(_table(due)).coalesce(1)
            records = one_read(self._spark, self._fetched(asked, due))
            at_once = self._is_due(due)
            if is_again:
                sent = self._sent(
                    records, at_once=at_once, sieve=lambda judged: self._without_sent(judged, due)
                )
            else:
                sent = self._planned[at_once](records)
            write_batch(sent, self._settings, "redelivery")
            reach(Point.REDELIVERED)
            self._end(due)
        self._notes.note(rows)
        self._waking.expect(self._notes.next_ms())

    def _deliverable(self, rows: Sequence[Row]) -> list[Row]:
        """Those of configured queues, and of offsets that a record can have.

        What is remembered may have others: of a queue that was taken out since, and of a marker
        that would not be taken for one any more.
        """
        queues = self._settings.queues
        for queue in sorted({row.topic for row in rows if row.topic} - queues.keys() - self._told):
            log.warning(
                "open messages are left out, their queue is not configured: to have them delivered "
                "again, put it back into queues topic=%s",
                queue,
            )
            self._told.add(queue)
        return [
            row
            for row in rows
            if row.topic in queues and (row.offset is None or 0 <= row.offset <= LAST_OFFSET)
        ]

    def _sent(
        self,
        records: DataFrame,
        *,
        at_once: bool,
        sieve: Callable[[DataFrame], DataFrame] = lambda judged: judged,
    ) -> DataFrame:
        """Rows for the sink, of what a sieve lets through."""
        return self._again.delivered(sieve(self._again.judged(records)), at_once=at_once)

    def _is_due(self, due: Sequence[Row]) -> bool:
        """Whether all of it is delivered now, without a back-off."""
        now_ms = self._clock.now_ms()
        backs_off = any(self._settings.queues[row.topic].backoff_ms for row in due)
        return not backs_off and all(row.due_ms <= now_ms for row in due)

    def _end(self, due: Sequence[Row]) -> None:
        """Write end markers of what is delivered again, as kmq's tracker does. Raises KafkaError.

        From here, without a job: they are few bytes each.
        """
        keys: dict[str, list[MarkerKey]] = defaultdict(list)
        for row in due:
            keys[row.topic].append(MarkerKey(row.partition, row.offset))
        for queue, ended in keys.items():
            self._marking(queue).end_all(ended)

    def _marking(self, queue: str) -> Marking:
        if queue not in self._markings:
            topic = self._settings.queues[queue].markers_topic(queue)
            self._markings[queue] = Marking(self._settings, topic)
        return self._markings[queue]

    def _fetched(self, asked: DataFrame, due: Sequence[Row]) -> DataFrame:
        """What is asked for, with its record; with nulls where that is not there any more."""
        offsets: dict[Place, list[int]] = defaultdict(list)
        for row in due:
            offsets[row.topic, row.partition].append(row.offset)
        there = before_end(self._offsets, offsets)
        records = fetch(self._spark, self._settings, there).select(*PLACE, *RECORD)
        # What was only read over goes no further.
        wanted = records.join(F.broadcast(asked.select(*PLACE)), PLACE, "left_semi")
        return asked.join(wanted, PLACE, "left")

    def _without_sent(self, records: DataFrame, due: Sequence[Row]) -> DataFrame:
        """Without what was sent before a crash."""
        topics = {row.topic for row in due}
        dead = {self._settings.queues[topic].dead_topic(topic) for topic in topics}
        since_ms = min(row.out_ms for row in due)
        scope = Scope(since_ms=since_ms, destinations={None: sorted(topics | dead)})
        return self._written.without_taken_in(records, scope)


def _table(due: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pydict({name: [row[name] for row in due] for name in ASKED.names}, ASKED)
