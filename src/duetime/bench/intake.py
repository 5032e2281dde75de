"""`duetime bench intake`: how fast Airtel's JSON gets into the wheel, against a plain copy.

The messages are on the topic first. Then a real-time query that only copies the topic starts at
its beginning, and after it the intake query, in real-time mode as users run it: in one warm
session, each from its first append to its last, by the broker's stamps.
"""

import tempfile
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from duetime.bench.appends import Appends
from duetime.bench.load import LoadPlan
from duetime.bench.records import Shape
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations, destination
from duetime.bench.throughput import Pace, fill, plain, session, wait_for_all
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.pipeline.intake import intake
from duetime.pipeline.kafka import read_stream, start_real_time
from duetime.topics import TopicNames

#: When the messages are due, in ms after they are written: one to two days, some twenty slots.
DELAY_MS = (24 * 3_600_000, 48 * 3_600_000)

#: Partitions of the topic that is taken in, and of its copy: tasks that work on it at once.
PARTITIONS = 4

#: Messages that warm the session up, at most, and how often they are copied and taken in.
WARM_MESSAGES = 200_000
WARM_ROUNDS = 3


def run_intake(settings: Settings, messages: int, value_bytes: int, runs: int) -> list[Pace]:
    """Copy the topic and take it in, so many times, after a small run to get warm."""
    warming, real = (
        settings.model_copy(update={"airtel_topic": topic})
        for topic in create_destinations(settings, ["warm", "real"], partitions=PARTITIONS)
    )
    with session(settings) as spark:
        warm = min(WARM_MESSAGES, messages)
        _fill(warming, warm, value_bytes)
        for number in range(1, WARM_ROUNDS + 1):
            _run(spark, warming, warm, f"warm-{number}")
        _fill(real, messages, value_bytes)
        return [_run(spark, real, messages, f"run-{number}") for number in range(1, runs + 1)]


def _fill(settings: Settings, messages: int, value_bytes: int) -> None:
    plan = LoadPlan(
        messages=messages,
        rate=0,
        delay_ms=DELAY_MS,
        destinations=(destination(settings, "out"),),
        value_bytes=value_bytes,
        shape=Shape.AIRTEL,
    )
    fill(settings, plan)


def _run(spark: SparkSession, settings: Settings, messages: int, name: str) -> Pace:
    say("copying, then taking in ...")
    (copied,) = create_destinations(settings, [f"{name}-copied"], partitions=PARTITIONS)
    names = TopicNames(settings)
    copy = plain(read_stream(spark, settings, [names.airtel]), copied)
    wheel = [names.wheel(level) for level in range(settings.wheel_levels)]
    return Pace(
        copy_messages_per_s=_pace(settings, copy, [copied], messages),
        messages_per_s=_pace(settings, intake(spark, settings), wheel, messages),
    )


def _pace(settings: Settings, rows: DataFrame, topics: Sequence[str], messages: int) -> int:
    """Messages a second of a real-time query, without its start: from first append to last."""
    appends, began_ms = Appends(settings, topics), SystemClock().now_ms()
    appends.mark()
    with tempfile.TemporaryDirectory(prefix="duetime-bench-") as checkpoint:
        fresh = settings.model_copy(update={"checkpoint": checkpoint})
        context = rows.sparkSession.sparkContext
        context.setLogLevel("ERROR")
        query = start_real_time(rows, fresh, "bench")
        try:
            wait_for_all(appends, messages)
        finally:
            # Tasks that are stopped on purpose tell of it as of a failure, also a while later.
            context.setLogLevel("OFF")
            query.stop()
    return round(messages / appends.span(began_ms).seconds)
