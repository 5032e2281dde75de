"""`duetime bench bulk`: how fast `duetime.spark.schedule` is, against a plain write to Kafka.

Spark makes the rows itself, so that nothing but their writing is measured. No row passes through
this process: how much memory it takes, without its JVM, is part of the result.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.bench.appends import Appends
from duetime.bench.memory import rss_mb
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.bench.throughput import Pace, plain, session
from duetime.config import Settings
from duetime.errors import KafkaError
from duetime.pipeline.kafka import sink_options
from duetime.spark import schedule
from duetime.spark.bulk import MANY
from duetime.topics import TopicNames

#: Tasks that write at once, and partitions of what they write to.
PARTITIONS = 4

#: Rows that warm the session up, at most.
WARM_ROWS = 200_000

#: When the rows are due: from tomorrow on, over a day, as seconds from now.
FIRST_S, OVER_S = 86_400, 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """What it took to schedule a DataFrame."""

    pace: Pace
    seconds: float
    #: Memory of this process in RAM, without its JVM.
    python_mb_before: int
    python_mb_after: int

    def figures(self) -> dict[str, int | float]:
        """The result as it is shown."""
        return {
            **self.pace.figures(),
            "seconds": self.seconds,
            "python_mb_before": self.python_mb_before,
            "python_mb_after": self.python_mb_after,
        }


def bulk(settings: Settings, rows: int, value_bytes: int) -> Scheduled:
    """Write so many rows plainly, and schedule them, after fewer to get warm.

    Raises KafkaError where not all of them arrived.
    """
    (copied,) = create_destinations(settings, ["copied"], partitions=PARTITIONS)
    native = TopicNames(settings).native
    with session(settings) as spark:
        warm = _rows(spark, min(WARM_ROWS, rows), value_bytes)
        _write(warm, copied, settings)
        schedule(warm, topic="bulk", at="at", settings=settings)
        wanted = _rows(spark, rows, value_bytes)
        say(f"writing {rows:,} rows plainly, then scheduling them ...")
        plain_s = _timed(settings, copied, rows, lambda: _write(wanted, copied, settings))
        before_mb = rss_mb(os.getpid())
        seconds = _timed(
            settings,
            native,
            rows,
            lambda: schedule(wanted, topic="bulk", at="at", settings=settings),
        )
        after_mb = rss_mb(os.getpid())
    return Scheduled(
        pace=Pace(messages_per_s=round(rows / seconds), copy_messages_per_s=round(rows / plain_s)),
        seconds=round(seconds, 1),
        python_mb_before=before_mb,
        python_mb_after=after_mb,
    )


def _rows(spark: SparkSession, count: int, value_bytes: int) -> DataFrame:
    due = F.current_timestamp() + F.make_dt_interval(secs=FIRST_S + F.col("id") % OVER_S)
    value = F.rpad(F.col("id").cast("string"), value_bytes, "x")
    numbers = spark.range(0, count, 1, PARTITIONS)
    return numbers.select(due.alias("at"), F.lit("k").alias("key"), value.alias("value"))


def _write(rows: DataFrame, topic: str, settings: Settings) -> None:
    none = F.array().cast("array<struct<key:string,value:binary>>").alias("headers")
    options = sink_options(settings, "copy") | MANY
    records = plain(rows.select("key", "value", none), topic)
    records.write.format("kafka").options(**options).mode("append").save()


def _timed(settings: Settings, topic: str, rows: int, write: Callable[[], object]) -> float:
    """How long it takes to write all rows to the topic, in seconds."""
    appends = Appends(settings, [topic])
    appends.mark()
    began_s = time.monotonic()
    write()
    taken_s = time.monotonic() - began_s
    if (arrived := appends.count()) != rows:
        raise KafkaError(f"{arrived:,} of {rows:,} rows arrived in {topic}: is its disk full?")
    return taken_s
