"""What a claim holds, as records: whatever the store, in the columns of a Kafka record."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession

from duetime.columns import HEADERS_TYPE
from duetime.config import Settings
from duetime.pipeline.kafka import read_ranges
from duetime.stores import Claim, OffsetRange
from duetime.stores.opening import open_rows
from duetime.topics import TopicNames

if TYPE_CHECKING:
    import pyarrow as pa

    from duetime.stores.rows import Record, Rows

#: What `RowReader` gives, for Spark.
RECORD_TYPE = (
    f"key binary, value binary, headers {HEADERS_TYPE}, topic string, partition int, "
    "offset bigint, timestamp timestamp"
)


def read_claims(spark: SparkSession, settings: Settings, claims: Sequence[Claim]) -> DataFrame:
    """The records of these claims, which are all of one store. Read in executors."""
    ranges = [each for each in claims if isinstance(each, OffsetRange)]
    if ranges:
        return read_ranges(spark, settings, ranges)
    # One task, because a turn is one.
    one = spark.range(0, 1, 1, 1)
    reader = RowReader(settings, lambda rows, _: chain.from_iterable(map(rows.records, claims)))
    return one.mapInArrow(reader, RECORD_TYPE)


@dataclass(frozen=True)
class RowReader:
    """Reads a store of rows in an executor, in Python, some records at a time."""

    settings: Settings
    #: What is read for each number that it is given.
    read: "Callable[[Rows, int], Iterable[Sequence[Record]]]"

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """The records, for a column of numbers."""
        # Only who has another store than Kafka needs what this imports.
        from duetime.stores.arrow import batch_of  # noqa: PLC0415

        rows, topic = open_rows(self.settings), TopicNames(self.settings).store
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for records in self.read(rows, number):
                    yield batch_of(records, topic)
