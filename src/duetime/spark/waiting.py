"""Everything that waits, as a DataFrame."""

from contextlib import closing
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from duetime.columns import HEADERS_TYPE, record_bytes, waiting_text
from duetime.config import Settings, load_settings
from duetime.message import (
    DUE_AT_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
    ID_PATTERN,
    STATE,
    WAITING_HEADERS,
)
from duetime.pipeline.claims import RECORD_TYPE, RowReader
from duetime.pipeline.kafka import read_ranges
from duetime.stores.reader import WheelReader
from duetime.topics import own_destinations

#: What is read of a record.
COLUMNS = ("key", "value", "headers", "topic", "partition", "offset")

#: Parts that another store than Kafka is read in, each by a task.
PARTS = 16

#: The columns of `pending`.
PENDING = (
    "id string, due timestamp, topic string, partition int, cluster string, key binary, "
    f"headers {HEADERS_TYPE}, size int, value binary"
)


def pending(spark: SparkSession, settings: Settings | None = None) -> DataFrame:
    """Everything that waits, as it is now: id, due, topic, key, headers, size, value.

    In the wheel, and in another store where there is one. Cancelled messages are left out, and of
    those with one id all but one. `size` is that of key, value and headers in bytes. A message that
    is tried again is due when its next try is. What is delivered before the DataFrame is read is
    missing in it, and so is what duetime sends to itself, as for the next run of a series.

    Raises KafkaError.
    """
    settings = settings or load_settings()
    with closing(WheelReader(settings)) as reader:
        ranges = reader.ranges()
    found = []
    if ranges:
        records = read_ranges(spark, settings, ranges, all_there=False)
        found.append(records.select(*COLUMNS))
    if settings.store_kind != "kafka":
        parts = spark.range(0, PARTS, 1, PARTS)
        everything = RowReader(settings, lambda rows, part: rows.everything(part, PARTS))
        found.append(parts.mapInArrow(everything, RECORD_TYPE).select(*COLUMNS))
    if not found:
        return spark.createDataFrame([], PENDING)
    waiting = reduce(DataFrame.unionAll, found).transform(waiting_messages)
    return waiting.where(~_is_own(settings))


def _is_own(settings: Settings) -> Column:
    cluster, topic = F.col("cluster"), F.col("topic")
    pairs = own_destinations(settings)
    each = (cluster.eqNullSafe(F.lit(name)) & (topic == own) for name, own in pairs)
    return reduce(Column.__or__, each)


def waiting_messages(records: DataFrame) -> DataFrame:
    """The messages among records of the wheel, each once. See `pending`."""
    return records.transform(_ours).transform(_without_duplicates_and_cancelled).select(*_shown())


def _ours(records: DataFrame) -> DataFrame:
    """What has the shape of a record that waits, with its `id` and when it is due in `due_ms`."""
    names = F.slice("headers", 1, len(WAITING_HEADERS))["key"]
    of_shape = names == F.array(*map(F.lit, WAITING_HEADERS))
    retry_ms = _of_state("retry").try_cast("bigint")
    due_ms = F.coalesce(retry_ms, _waiting(DUE_AT_MS).try_cast("bigint"))
    known = records.where(of_shape & _waiting(DUE_ID).rlike(ID_PATTERN))
    return known.select("*", _waiting(DUE_ID).alias("id"), due_ms.alias("due_ms"))


def _without_duplicates_and_cancelled(ours: DataFrame) -> DataFrame:
    """Of the records with one id a cancel, if there is one, and else the first; then no cancels."""
    # While a far slot is cascaded, a message is in two.
    arrival = F.col("topic").desc(), "partition", "offset"
    is_message = _waiting(DUE_TOPIC).isNotNull()
    same = W.partitionBy("id", "due_ms").orderBy(is_message, *arrival)
    first = ours.select("*", F.row_number().over(same).alias("nth")).where("nth = 1")
    return first.where(is_message)


def _shown() -> list[Column]:
    sent = F.slice("headers", len(WAITING_HEADERS) + 1, F.size("headers"))
    return [
        F.col("id"),
        F.timestamp_millis("due_ms").alias("due"),
        _waiting(DUE_TOPIC).alias("topic"),
        _waiting(DUE_PARTITION).try_cast("int").alias("partition"),
        F.nullif(_of_state("cluster"), F.lit("")).alias("cluster"),
        F.col("key"),
        sent.alias("headers"),
        record_bytes(F.col("key"), F.col("value"), sent).alias("size"),
        F.col("value"),
    ]


def _waiting(name: str) -> Column:
    return waiting_text(F.col("headers"), name)


def _of_state(name: str) -> Column:
    return F.split_part(_waiting(DUE_STATE), F.lit(":"), F.lit(STATE.index(name) + 1))
