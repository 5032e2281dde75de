"""`spark.readStream.format("delayed_kafka")`: delayed topics as a streaming source of Spark.

register(spark)
orders = spark.readStream.format("delayed_kafka").option("subscribe", "orders.delayed").load()

A process beside the driver reads the logs once and plans: an offset of the source is a position in
each partition, and a batch is what lies between two. Executors read the records of a batch, and
give them in the order of (deliverAfter, offset) within each partition.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from duetime.delayed.options import PREFIX
from duetime.delayed.partition import Position
from duetime.delayed.planning import Planner, Positions, Stretch
from duetime.delayed.rows import SCHEMA, rows
from duetime.errors import ConfigError

#: What the name of a property of librdkafka has in front.
KAFKA = "kafka."

#: Options, and the properties that they are.
OPTIONS = {
    "startingoffsets": "auto.offset.reset",
    "group": "group.id",
    "indexlocation": f"{PREFIX}index.location",
    "keptbytes": f"{PREFIX}kept.bytes",
}

#: The two that are no properties.
SUBSCRIBE, MOST = "subscribe", "maxrecordspertrigger"

#: Retries are for the group that asked for them: a query is of none, unless it says so.
NO_GROUP = "delayed_kafka"

#: A batch of so many records is not worth more than one task: another process, which may have to
#: start and has kept nothing, takes longer than this one with all of it.
SMALL = 50_000

#: The driver plans, and keeps no records.
NOTHING = {f"{PREFIX}kept.bytes": 1}

#: An offset of the source as Spark keeps and shows it: offset, cursor, and how many records were
#: removed before they were delivered, by `topic/partition`.
Offset = dict[str, dict[str, Any]]


def register(spark: SparkSession) -> None:
    """Make the format known to this session."""
    spark.dataSource.register(DelayedKafka)


class DelayedKafka(DataSource):
    """The format. Its options: see docs/delayed-topics.md."""

    @classmethod
    def name(cls) -> str:
        """What it is called."""
        return "delayed_kafka"

    def schema(self) -> str:
        """The columns of its rows."""
        return SCHEMA

    def streamReader(self, schema: StructType) -> "DelayedReader":  # noqa: ARG002, N802 (Spark's)
        """What reads for one query."""
        return DelayedReader(dict(self.options))


class Task(InputPartition):
    """What one task of an executor reads."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        super().__init__(stretches)
        self.stretches = stretches


class DelayedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Everything but `read` runs in one process; the methods are called as Spark calls them."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._properties = properties(options)
        self._topics = [each.strip() for each in options.get(SUBSCRIBE, "").split(",")]
        if not all(self._topics):
            raise ConfigError("option subscribe is missing: name the delayed topics")
        self._most = int(options.get(MOST, 0))
        self._planner: Planner | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 (Spark's name)
        """Where a query without a checkpoint begins."""
        return _told(self._plan().first())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 (Spark's name)
        """Where the next batch ends."""
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return _told(self._plan().latest(_heard(start), most))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 (Spark's name)
        """`maxRecordsPerTrigger`, or everything that is due."""
        return ReadMaxRows(self._most) if self._most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 (Spark's name)
        """What is due by now is all that there will be."""
        self._plan().end_here()

    def partitions(self, start: Offset, end: Offset) -> Sequence[Task]:
        """A task for each partition that has something between the two, or one for all of it.

        A small batch is read by one process, which has read and kept what is next to it before.
        """
        stretches = self._plan().between(_heard(start), _heard(end))
        if sum(each.entries.size for each in stretches) <= SMALL:
            return [Task(stretches)] if stretches else []
        return [Task([each]) for each in stretches]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task. Runs in an executor."""
        if not isinstance(partition, Task):
            raise TypeError(f"no task of this source: {partition!r}")
        return rows(self._properties, partition.stretches)

    def commit(self, end: Offset) -> None:
        """What is before is done with."""
        self._plan().committed(_heard(end))

    def stop(self) -> None:
        """Close the connections."""
        if self._planner:
            self._planner.close()

    def _plan(self) -> Planner:
        # Not in the constructor: a reader is also made for executors, and those plan nothing.
        if self._planner is None:
            self._planner = Planner(self._properties | NOTHING, self._topics)
        return self._planner


def properties(options: Mapping[str, str]) -> dict[str, Any]:
    """The options as properties of a delayed consumer. Raises ConfigError, naming the option."""
    found: dict[str, Any] = {"group.id": NO_GROUP}
    for name, value in options.items():
        if name.startswith(KAFKA):
            found[name.removeprefix(KAFKA)] = value
        elif name in OPTIONS:
            found[OPTIONS[name]] = value
        elif name not in (SUBSCRIBE, MOST):
            raise ConfigError(f"option {name} is unknown to delayed_kafka: see its documentation")
    return found


def _told(positions: Positions) -> Offset:
    return {
        f"{topic}/{partition}": {
            "offset": at.offset,
            "metadata": str(at.cursor),
            "removed": int(at.note or 0),
        }
        for (topic, partition), at in positions.items()
    }


def _heard(offset: Offset) -> dict[tuple[str, int], Position]:
    heard = {}
    for name, told in offset.items():
        topic, _, partition = name.rpartition("/")
        position = Position.committed(told["offset"], told["metadata"])
        heard[topic, int(partition)] = replace(position, note=str(told.get("removed", 0)))
    return heard
