"""The query's second half: what is not acknowledged is fetched, and delivered again (`again`)."""

from collections import defaultdict
from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from duetime.config import Settings
from duetime.kmq.notes import Notes
from duetime.pipeline.again import PLACE, RECORD, Again
from duetime.pipeline.faults import Point, reach
from duetime.pipeline.fetch import fetch
from duetime.pipeline.kafka import write_batch
from duetime.pipeline.waking import Waking
from duetime.pipeline.written import Scope, Written
from duetime.stores.places import Place

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
        self._written, self._notes = written, Notes(settings)
        self._waking = waking
        waking.expect(self._notes.next_ms())
        self._again = Again(settings)
        self._last: int | None = None

    def __call__(self, batch: DataFrame, number: int) -> None:
        """Deliver again what came out, and write that it is done.

        After a crash between two lines the batch is repeated, with the same markers, memory and
        time: what it has sent it finds by its ids.
        """
        # Each look at the batch would follow the markers once more.
        rows = batch.collect()
        # The first batch may have been begun before a crash, and a batch that failed is repeated.
        is_again, self._last = self._last in (None, number), number
        if due := [row for row in rows if row.offset is not None]:
            # Spark would make as many tasks of it as there are threads, which wait for each other.
            asked = self._spark.createDataFrame(_table(due)).coalesce(1)
            records = self._again.judged(self._fetched(asked, due))
            left = self._without_sent(records, due) if is_again else records
            write_batch(self._again.delivered(left), self._settings, "redelivery")
            reach(Point.REDELIVERED)
            write_batch(self._again.ended(asked), self._settings, "redelivery")
        self._notes.note(rows)
        self._waking.expect(self._notes.next_ms())

    def _fetched(self, asked: DataFrame, due: Sequence[Row]) -> DataFrame:
        """What is asked for, with its record; with nulls where that is not there any more."""
        offsets: dict[Place, list[int]] = defaultdict(list)
        for row in due:
            offsets[row.topic, row.partition].append(row.offset)
        records = fetch(self._spark, self._settings, offsets).select(*PLACE, *RECORD)
        # What was only read over goes no further.
        wanted = records.join(F.broadcast(asked.select(*PLACE)), PLACE, "left_semi")
        return asked.join(wanted, PLACE, "left")

    def _without_sent(self, records: DataFrame, due: Sequence[Row]) -> DataFrame:
        """Without what was sent before a crash."""
        topics = {row.topic for row in due}
        dead = {self._settings.queues[topic].dead_topic(topic) for topic in topics}
        scope = Scope(
            since_ms=min(row.out_ms for row in due), destinations=sorted(topics | dead), abroad={}
        )
        return self._written.without_taken_in(records, scope)


def _table(due: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pydict({name: [row[name] for row in due] for name in ASKED.names}, ASKED)
