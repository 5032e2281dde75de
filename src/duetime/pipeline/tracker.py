"""The query's first half: queues' markers in, and out what is to be delivered again.

One group a partition of a queue, which remembers what is open there (`unacknowledged`). Its memory
is a state of Spark's, in RocksDB and in the checkpoint; and it is called when its next message is
overdue by the clock, also where no marker comes any more (`waking`).

Not a join of start with end markers up to a deadline: its time would be the markers' own, which
stands still on an idle topic, is another one in each partition after an outage, and takes a batch
more. And a start marker could not replace another.

Each batch reads all partitions up to their ends as of just before the batch's time: so an end
marker that was written before the deadline, and is there, is heeded before anything comes out,
also by a tracker that was down.
"""

from collections.abc import Iterator

import pandas as pd
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from duetime.columns import header_map, header_text
from duetime.config import Settings
from duetime.kmq.markers import END, GIVEN_BACK, LAST_OFFSET, START
from duetime.message import LATEST_MS
from duetime.pipeline.kafka import ALL, read_stream
from duetime.pipeline.unacknowledged import ENDED, Marker, Unacknowledged
from duetime.topics import TopicNames

#: What comes out: messages to be delivered again (`offset`, `out_ms`, `due_ms`, `why`), and of each
#: partition that was looked at, how many are open, since when, where their markers begin, and when
#: to look again.
FOUND = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "out_ms": "bigint",
    "due_ms": "bigint",
    "why": "string",
    "open": "bigint",
    "oldest_ms": "bigint",
    "position": "bigint",
    "next_ms": "bigint",
}

#: What is remembered of a partition: what is open, and up to where its markers were heeded.
REMEMBERED = "open binary, heeded bigint"

#: How many markers are made Python's own at a time.
AT_ONCE = 10_000

#: The lengths of a marker's key and of a start marker's value, in bytes.
KEY_BYTES, START_BYTES = 12, 9


def tracked(spark: SparkSession, settings: Settings) -> DataFrame:
    """FOUND, in batches without end. Runs in executors; the following in their Python."""
    records = read_stream(spark, settings, tracked_topics(settings), batch=ALL)
    markers = records.transform(_markers, settings)
    schema = ", ".join(f"{name} {kind}" for name, kind in FOUND.items())
    return markers.groupBy("topic", "partition").applyInPandasWithState(
        _follow, schema, REMEMBERED, "update", GroupStateTimeout.ProcessingTimeTimeout
    )


def tracked_topics(settings: Settings) -> list[str]:
    """Return the topics that the query reads."""
    markers = [own.markers_topic(name) for name, own in settings.queues.items()]
    # What wakes the query is no marker, and goes no further.
    return [*markers, TopicNames(settings).wake]


def _markers(records: DataFrame, settings: Settings) -> DataFrame:
    """The queue's topic, partition, and what a Marker has. What is no marker is left out.

    So are those of a queue that is not configured any more: a batch that was planned before has
    them, and named again it is read from its beginning.
    """
    key, value, queue = F.col("key"), F.col("value"), _queue(settings)
    partition, offset = _number(key, 1, 4).cast("int"), _number(key, 5, 8)
    is_start, is_end = _number(value, 1, 1) == START, _number(value, 1, 1) == END
    is_marker = (
        queue.isNotNull()
        & (F.octet_length(key) == KEY_BYTES)
        & offset.between(0, LAST_OFFSET)
        & (partition == F.col("partition"))
        & (is_end | (is_start & (F.octet_length(value) == START_BYTES)))
    )
    # Nobody waits for longer than an id can say, and nothing overflows.
    timeout_ms = F.least(F.greatest(_number(value, 2, 8), F.lit(0)), F.lit(LATEST_MS // 2))
    # Most have no headers at all.
    given_back = F.when(
        F.size("headers") > 0, header_text(header_map(F.col("headers")), GIVEN_BACK)
    )
    return records.where(is_marker).select(
        queue.alias("topic"),
        "partition",
        F.col("offset").alias("at"),
        F.unix_millis("timestamp").alias("appended_ms"),
        offset.alias("offset"),
        # Without nulls, which pandas would make fractions of.
        F.when(is_start, timeout_ms).otherwise(F.lit(ENDED)).alias("timeout_ms"),
        F.coalesce(given_back, F.lit("")).alias("given_back"),
    )


def _queue(settings: Settings) -> Column:
    """The queue whose marker this is."""
    topic = F.lit(None).cast("string")
    for name, own in settings.queues.items():
        topic = F.when(F.col("topic") == own.markers_topic(name), F.lit(name)).otherwise(topic)
    return topic


def _number(data: Column, start: int, length: int) -> Column:
    """Some bytes as a signed number, big-endian; null where there are none."""
    digits = F.nullif(F.hex(F.substring(data, start, length)), F.lit(""))
    return F.conv(digits, 16, -10).cast("bigint")


def _follow(
    key: tuple[str, int], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """Follow one partition for one batch. Runs in an executor's Python."""
    now_ms = state.getCurrentProcessingTimeMs()
    remembered, heeded = state.get if state.exists else (b"", 0)
    unacknowledged = Unacknowledged.decoded(remembered)
    found = []
    for marker in _in_order(frames):
        heeded = marker.at + 1
        if (due := unacknowledged.follow(marker)) is not None:
            found.append(due)
    found += unacknowledged.overdue(now_ms)
    position, oldest_ms, next_ms = heeded, None, None
    if unacknowledged:
        position, oldest_ms = unacknowledged.first_marker(), unacknowledged.oldest_ms()
        wait_ms = unacknowledged.wait_ms(now_ms)
        state.setTimeoutDuration(wait_ms)
        # Spark calls when the time is past.
        next_ms = now_ms + wait_ms + 1
    state.update((unacknowledged.encoded(), heeded))
    rows: list[tuple[object, ...]] = [(*key, *due, None, None, None, None) for due in found]
    known = len(unacknowledged), oldest_ms, position, next_ms
    rows.append((*key, None, None, None, None, *known))
    yield _frame(rows)


def _in_order(frames: Iterator[pd.DataFrame]) -> Iterator[Marker]:
    """The batch's markers as they stand in their partition: a shuffle keeps no order."""
    if several := list(frames):
        ordered = pd.concat(several).sort_values("at")
        # An hour's markers as Python's own numbers would take more memory than all else.
        for start in range(0, len(ordered), AT_ONCE):
            part = ordered.iloc[start : start + AT_ONCE]
            columns = (part[name].tolist() for name in Marker._fields)
            yield from map(Marker._make, zip(*columns, strict=True))


def _frame(rows: list[tuple[object, ...]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(FOUND), dtype=object)
