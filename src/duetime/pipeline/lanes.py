"""The lanes query: a record waits its lane's time, then is looked at again.

First in is first out, so nothing is sorted and nothing is held in memory. What a crash leaves
uncommitted is finished by `recover`.
"""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.columns import lane_wait_ms, now_ms, slept
from duetime.config import Settings
from duetime.errors import Reason
from duetime.pipeline.kafka import read_stream
from duetime.pipeline.routing import Routes
from duetime.pipeline.rows import choose, waiting_record
from duetime.topics import TopicNames


def lanes(spark: SparkSession, settings: Settings) -> DataFrame:
    """Rows for the Kafka sink, from all lanes. Runs in executors, without end."""
    return looked_at_again(waited(lane_records(spark, settings), settings), settings)


def lane_records(spark: SparkSession, settings: Settings, *, batch: int | None = None) -> DataFrame:
    """All lanes as an endless read."""
    return read_stream(spark, settings, [TopicNames(settings).lanes], batch=batch)


def waited(records: DataFrame, settings: Settings) -> DataFrame:
    """Holds each record until its lane's wait is over, or it is due.

    What remains then and is shorter than any lane is waited for as well.
    """
    ladder, message = settings.ladder, waiting_record()
    wait, step = lane_wait_ms(ladder, F.col("partition")), ladder.step_ms(0)
    over = F.unix_millis("timestamp") + wait
    until = F.when(message.due_ms < over + step, message.due_ms).otherwise(over)
    # No longer than ever: if the clock was set back, those behind do not wait for that.
    pause = F.least(until - now_ms(), wait + step)
    timed = records.select("*", F.coalesce(pause, F.lit(0)).alias("pause"))
    return timed.filter(slept(F.col("pause")))


def looked_at_again(records: DataFrame, settings: Settings) -> DataFrame:
    """Rows for the sink: to the destination where it is due, else down another lane."""
    message, routes, now = waiting_record(), Routes(settings), F.col("after")
    unreadable = ~message.is_whole | message.is_cancel
    foreign = F.lit("no record of a lane: who wrote it?")
    to = choose(
        (unreadable, routes.rejected(F.lit(str(Reason.UNREADABLE)), foreign)),
        (message.due_ms <= now, routes.sent(message)),
        otherwise=routes.lane(message, now),
    )
    why = F.when(~unreadable & (message.due_ms <= now), routes.obstacle(message, now))
    known = routes.known(F.when(~unreadable, message.topic), message.cluster)
    return routes.rows(records.select("*", now_ms().alias("after"), known), why, to)
