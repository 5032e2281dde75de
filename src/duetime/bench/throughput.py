"""Benchmarks of single Spark jobs in a session without a pipeline.

catchup  releases overdue messages, against a plain copy of the same records by Spark
intake   takes the JSON of the Airtel topic into the wheel, against a plain copy of the topic
bulk     schedules a DataFrame, against a plain write of it
wheel    moves one message that is due in years through every level, in simulated time

A copy and a run share one warm session, one after the other. The broker's timestamps say when the
last record was appended.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from duetime.bench.loadgen import LoadPlan, run_load
from duetime.bench.testbed import (
    Appends,
    Figures,
    create_destinations,
    destination,
    progress,
    rss_mb,
)
from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError
from duetime.core.settings import Settings
from duetime.core.timer_wheel import Slot, Wheel
from duetime.core.topics import DAY_MS, TopicNames
from duetime.dataframes import BULK_OPTIONS, schedule
from duetime.kafka.offsets import OffsetRange
from duetime.local.jars import pipeline_jars
from duetime.pipeline.intake.query import Intake
from duetime.pipeline.recovery.read_back import DeliveryLog
from duetime.pipeline.release.job import ReleaseJob
from duetime.pipeline.release.scheduler import ReleaseScheduler
from duetime.pipeline.store_queries import StoreWriter
from duetime.spark.columns import HEADERS_TYPE, simulated_clock
from duetime.spark.kafka_io import (
    read_ranges,
    read_stream,
    sink_options,
    start_real_time,
    write_batch,
)
from duetime.spark.session import jvm, spark_session
from duetime.stores import Store
from duetime.stores.factory import open_store
from duetime.stores.wheel_store import KafkaStore

#: How long one part of a benchmark may take on the slowest machine, in seconds.
TIMEOUT_S = 1_800.0

#: Partitions of the topics that are delivered and copied to.
PARTITIONS = 4

#: The most messages or rows in one round that warms the session up.
WARM_MESSAGES = 200_000

#: Rounds that warm the session up: Spark's pace doubles from the first release to the fourth.
CATCHUP_WARM_ROUNDS, INTAKE_WARM_ROUNDS = 4, 3

YEAR_MS = 365 * DAY_MS


def session(settings: Settings) -> SparkSession:
    """Start Spark with the pipeline's settings, and no query; it stops with its `with` block."""
    progress("starting Spark ...")
    return spark_session(settings, pipeline_jars())


def _ratio(messages: int, seconds: float, copy_seconds: float) -> Figures:
    per_s, copy_per_s = round(messages / seconds), round(messages / copy_seconds)
    ratio = round(per_s / copy_per_s, 3)
    return {"messages_per_s": per_s, "copy_messages_per_s": copy_per_s, "ratio": ratio}


def _copied(records: DataFrame, topic: str) -> DataFrame:
    return records.select(F.lit(topic).alias("topic"), "key", "value", "headers")


def _seconds_of(
    appends: Appends, messages: int, work: Callable[[], object], *, from_first: bool = False
) -> float:
    """Return the seconds from the start of the work, or its first append, to its last append.

    Raises KafkaError unless this many messages arrive.
    """
    work()
    if not appends.wait_for(messages, TIMEOUT_S):
        raise KafkaError("messages are missing: is the broker up, and does its disk have room?")
    return appends.seconds(from_first=from_first)


def catchup(settings: Settings, messages: int, value_bytes: int, runs: int) -> list[Figures]:
    """Copy and release overdue messages `runs` times, in a warm session.

    The load generator writes the messages where they wait, as intake would. When all are overdue,
    Spark copies them; then a release job starts and finds them. Each is measured from its start to
    its last append.
    """
    # All are on level 0, over a minute of slots.
    delay_ms = (20_000, 80_000)
    plan = LoadPlan(messages=messages, delay_ms=delay_ms, value_bytes=value_bytes, shape="pending")
    few = min(WARM_MESSAGES, messages)
    warm = replace(plan, messages=few, delay_ms=(5_000, 15_000), label="warm")
    with session(settings) as spark:
        for number in range(CATCHUP_WARM_ROUNDS):
            _catch_up(spark, settings, warm, f"warm-{number}")
        return [_catch_up(spark, settings, plan, f"run-{number}") for number in range(runs)]


def _catch_up(spark: SparkSession, settings: Settings, plan: LoadPlan, name: str) -> Figures:
    names, messages = [f"{name}-copied", f"{name}-released"], plan.messages
    copied, released = create_destinations(settings, names, partitions=PARTITIONS)
    plan = replace(plan, destinations=(released,))
    with (
        closing(open_store(settings) or KafkaStore(settings)) as store,
        closing(DeliveryLog(spark, settings)) as delivery_log,
    ):
        ranges = _fill_until_overdue(spark, settings, plan, store)
        progress("copying, then releasing ...")
        copy = _copied(read_ranges(spark, settings, ranges), copied)
        write = partial(write_batch, copy, settings, "bench")
        copy_s = _seconds_of(Appends(settings, [copied]), messages, write)
        job, clock = ReleaseJob(spark, settings, delivery_log), SystemClock()
        scheduler = ReleaseScheduler(settings=settings, store=store, job=job, clock=clock)

        def release() -> None:
            scheduler.release_overdue()
            scheduler.start()

        try:
            seconds = _seconds_of(Appends(settings, [released]), messages, release)
        finally:
            scheduler.stop()
    return _ratio(messages, seconds, copy_s)


def _fill_until_overdue(
    spark: SparkSession, settings: Settings, plan: LoadPlan, store: Store[Any]
) -> list[OffsetRange]:
    """Fill the store, and wait until all is overdue; return the same records in Kafka."""
    is_kafka = settings.store_kind == "kafka"
    inbox = Appends(settings, [] if is_kafka else [TopicNames(settings).store_inbox])
    sent = run_load(settings, plan)
    ranges = inbox.ranges()
    if not is_kafka:
        progress("saving ...")
        StoreWriter(spark, settings).save(read_ranges(spark, settings, ranges))
    time.sleep(max(0, (sent.last_due_ms + settings.wheel_tick_ms) / 1_000 - time.time()))
    if is_kafka:
        ranges = list(store.acquire_overdue(SystemClock().now_ms()))
        store.release(ranges)
    return ranges


def intake(settings: Settings, messages: int, value_bytes: int, runs: int) -> list[Figures]:
    """Copy the Airtel topic and take it in `runs` times, in a warm session.

    The messages are on the topic first. Both queries run in real-time mode as users run intake,
    and are measured from their first append to their last.
    """
    plan = LoadPlan(
        messages=messages,
        # Some twenty slots.
        delay_ms=(DAY_MS, 2 * DAY_MS),
        destinations=(destination(settings, "out"),),
        value_bytes=value_bytes,
        shape="airtel",
    )
    warm = replace(plan, messages=min(WARM_MESSAGES, messages))
    topics = create_destinations(settings, ["warm", "real"], partitions=PARTITIONS)
    warm_settings, real = (settings.model_copy(update={"airtel_topic": each}) for each in topics)
    with session(settings) as spark:
        run_load(warm_settings, warm)
        for number in range(INTAKE_WARM_ROUNDS):
            _take_in(spark, warm_settings, warm.messages, f"warm-{number}")
        run_load(real, plan)
        return [_take_in(spark, real, messages, f"run-{number}") for number in range(runs)]


def _take_in(spark: SparkSession, settings: Settings, messages: int, name: str) -> Figures:
    progress("copying, then taking in ...")
    copied = create_destinations(settings, [f"{name}-copied"], partitions=PARTITIONS)
    names = TopicNames(settings)
    copy = _copied(read_stream(spark, settings, [names.airtel]), copied[0])
    copy_s = _query_seconds(settings, copy, copied, messages)
    wheel = [names.wheel(level) for level in range(settings.wheel_levels)]
    rows = Intake(settings).rows(read_stream(spark, settings, names.plain_intake))
    return _ratio(messages, _query_seconds(settings, rows, wheel, messages), copy_s)


def _query_seconds(settings: Settings, rows: DataFrame, topics: list[str], messages: int) -> float:
    """Return the seconds of a real-time query from its first append to its last."""
    context, appends = rows.sparkSession.sparkContext, Appends(settings, topics)
    context.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory(prefix="duetime-bench-") as checkpoint:
        fresh = settings.model_copy(update={"checkpoint": checkpoint})
        query = start_real_time(rows, fresh, "bench", fresh.checkpoint_interval_seconds)
        try:
            return _seconds_of(appends, messages, lambda: None, from_first=True)
        finally:
            # Tasks that are stopped on purpose log a failure, also a while later.
            context.setLogLevel("OFF")
            query.stop()


def bulk(settings: Settings, rows: int, value_bytes: int) -> Figures:
    """Write this many rows plainly, and schedule them, in a warm session.

    Spark makes the rows, so that only their writing is measured. No row passes through this
    process: the result has its memory without the JVM. Raises KafkaError unless all rows arrive.
    """
    (copied,) = create_destinations(settings, ["copied"], partitions=PARTITIONS)
    options = sink_options(settings, "copy") | BULK_OPTIONS

    def write(frame: DataFrame) -> None:
        no_headers = F.array().cast(HEADERS_TYPE).alias("headers")
        records = _copied(frame.select("key", "value", no_headers), copied)
        records.write.format("kafka").options(**options).mode("append").save()

    def schedule_all(frame: DataFrame) -> None:
        schedule(frame, topic="bulk", at="at", settings=settings)

    with session(settings) as spark:
        warm = _bulk_rows(spark, min(WARM_MESSAGES, rows), value_bytes)
        write(warm)
        schedule_all(warm)
        frame, native = _bulk_rows(spark, rows, value_bytes), TopicNames(settings).native
        progress(f"writing {rows:,} rows plainly, then scheduling them ...")
        copy_s = _seconds_of(Appends(settings, [copied]), rows, partial(write, frame))
        mb_before = rss_mb(os.getpid())
        seconds = _seconds_of(Appends(settings, [native]), rows, partial(schedule_all, frame))
        mb_after = rss_mb(os.getpid())
    memory = {"python_mb_before": mb_before, "python_mb_after": mb_after}
    return {**_ratio(rows, seconds, copy_s), "seconds": round(seconds, 1), **memory}


def _bulk_rows(spark: SparkSession, count: int, value_bytes: int) -> DataFrame:
    # Due from tomorrow on, over a day.
    day_s = DAY_MS // 1_000
    due = F.current_timestamp() + F.make_dt_interval(secs=day_s + F.col("id") % day_s)
    value = F.rpad(F.col("id").cast("string"), value_bytes, "x")
    numbers = spark.range(0, count, 1, PARTITIONS)
    return numbers.select(due.alias("at"), F.lit("k").alias("key"), value.alias("value"))


#: How late the message of `wheel` may be in ms: its last release job may be the JVM's first. And
#: the number of due times whose way through the wheel is computed only.
MAX_LATE_MS, WALKS = 5_000, 10_000


def wheel(settings: Settings, years: float) -> Figures:
    """Move a message that is due in this many years through the wheel, in simulated time.

    Intake's columns route it, and at each level the release job empties its slot, with the clock of
    the columns set to when that slot is acquired. Other due times move in arithmetic alone. `hops`
    is the largest number of slots of one message.
    """
    topics = create_destinations(settings, ["arrived"])
    arrived = Appends(settings, topics)
    with session(settings) as spark:
        now_ms, span_ms = SystemClock().now_ms(), int(years * YEAR_MS)
        due_ms = now_ms + span_ms
        slots = walk(settings.wheel, due_ms, now_ms)
        one = LoadPlan(messages=1, due_ms=(due_ms, due_ms), destinations=tuple(topics))
        native = Appends(settings, [TopicNames(settings).native])
        run_load(settings, one)
        records = read_ranges(spark, settings, native.ranges())
        write_batch(Intake(settings).rows(records), settings, "bench")
        moved, ahead_ms = _move(spark, settings, slots)
    arrived_ms = [each.late_ms + ahead_ms for each in arrived.arrivals()]
    others = [
        walk(settings.wheel, now_ms + random.randrange(span_ms), now_ms)  # noqa: S311 (no secret)
        for _ in range(WALKS)
    ]
    hops = max(len(each) for each in [slots, *others])
    is_on_time = len(arrived_ms) == 1 and 0 <= arrived_ms[0] <= MAX_LATE_MS
    return {
        "hops": hops,
        "correct": moved and is_on_time and hops <= settings.wheel_levels,
        "late_ms": max(arrived_ms, default=None),
        "walkers": WALKS,
    }


def walk(shape: Wheel, due_ms: int, now_ms: int) -> list[Slot]:
    """Return the slots of a message from level to level, cascaded as early as possible."""
    slots = [shape.place(due_ms, now_ms)]
    while slots[-1].level:
        slots.append(shape.place(due_ms, shape.cascade_at_ms(slots[-1])))
    return slots


def _move(spark: SparkSession, settings: Settings, slots: list[Slot]) -> tuple[bool, int]:
    """Empty the slots in turn; return whether each had the message, and the last clock's lead."""
    moved, ahead_ms = True, 0
    with (
        closing(KafkaStore(settings)) as store,
        closing(DeliveryLog(spark, settings)) as delivery_log,
    ):
        for slot in slots:
            progress(f"level {slot.level}, slot {slot.number}")
            closes_ms = settings.wheel.release_at_ms(slot, settings.release_lead_ms)
            ahead_ms = closes_ms - SystemClock().now_ms()
            ranges = store.acquire(slot)
            moved = moved and sum(each.count for each in ranges) == 1
            with simulated_clock(jvm(spark)) as set_ahead:
                set_ahead(ahead_ms)
                ReleaseJob(spark, settings, delivery_log)(ranges)
            store.settle(ranges)
    return moved, ahead_ms
