"""`duetime bench catchup`: how fast overdue messages are released, against a plain copy by Spark.

The load generator writes the messages straight into the slots of the wheel, in the shape that
intake gives them, while no release runs. When all are overdue, Spark copies them as they are, Kafka
to Kafka, and then a release starts and finds them: the same records, in the same warm session, one
after the other, each from its start to the last append.
"""

from contextlib import closing
from dataclasses import replace

from pyspark.sql import SparkSession

from duetime.bench.appends import Appends
from duetime.bench.load import LoadPlan
from duetime.bench.records import Shape
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.bench.throughput import Pace, fill, pace_from_start, plain, session, wait_until
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.pipeline.kafka import read_ranges, write_batch
from duetime.pipeline.release import Release
from duetime.pipeline.turn import Turn
from duetime.pipeline.written import Written
from duetime.stores.kafka import KafkaStore

#: Partitions of the topics that are delivered and copied to.
PARTITIONS = 4

#: When the messages are due, in ms after they are written: all on level 0, over a minute of slots.
DELAY_MS = (20_000, 80_000)

#: The same for the messages that warm the session up, how many those are at most, and how often
#: they are copied and released: Spark's pace doubles from the first time to the fourth.
WARM_DELAY_MS = (5_000, 15_000)
WARM_MESSAGES = 200_000
WARM_ROUNDS = 4


def catchup(settings: Settings, messages: int, value_bytes: int, runs: int) -> list[Pace]:
    """Copy and release overdue messages, so many times, after smaller rounds to get warm."""
    warm = _plan(min(WARM_MESSAGES, messages), WARM_DELAY_MS, value_bytes)
    real = _plan(messages, DELAY_MS, value_bytes)
    with session(settings) as spark:
        _warm_up(spark, settings, warm)
        return [_run(spark, settings, real, f"run-{number}") for number in range(1, runs + 1)]


def _plan(messages: int, delay_ms: tuple[int, int], value_bytes: int) -> LoadPlan:
    return LoadPlan(
        messages=messages,
        rate=0,
        delay_ms=delay_ms,
        destinations=(),
        value_bytes=value_bytes,
        shape=Shape.WAITING,
    )


def _warm_up(spark: SparkSession, settings: Settings, plan: LoadPlan) -> None:
    (topic,) = create_destinations(settings, ["warm"], partitions=PARTITIONS)
    sent = fill(settings, replace(plan, destinations=(topic,)))
    wait_until(sent.last_due_ms + settings.wheel_tick_ms, SystemClock().now_ms())
    say("warming up ...")
    with closing(KafkaStore(settings)) as store, closing(Written(spark, settings)) as written:
        turn = Turn(spark, settings, written)
        ranges = store.overdue(SystemClock().now_ms())
        for _ in range(WARM_ROUNDS):
            write_batch(plain(read_ranges(spark, settings, ranges), topic), settings, "bench")
            turn(ranges)
        store.settle(ranges)


def _run(spark: SparkSession, settings: Settings, plan: LoadPlan, name: str) -> Pace:
    copied, released = create_destinations(
        settings, [f"{name}-copied", f"{name}-released"], partitions=PARTITIONS
    )
    sent = fill(settings, replace(plan, destinations=(released,)))
    wait_until(sent.last_due_ms + settings.wheel_tick_ms, SystemClock().now_ms())
    say("copying, then releasing ...")
    store = KafkaStore(settings)
    try:
        copying = pace_from_start(
            Appends(settings, [copied]), sent.sent, lambda: _copy(spark, settings, store, copied)
        )
        return Pace(
            messages_per_s=_released(spark, settings, store, released, sent.sent),
            copy_messages_per_s=copying,
        )
    finally:
        store.close()


def _copy(spark: SparkSession, settings: Settings, store: KafkaStore, topic: str) -> None:
    ranges = store.overdue(SystemClock().now_ms())
    store.give_up(ranges)
    write_batch(plain(read_ranges(spark, settings, ranges), topic), settings, "bench")


def _released(
    spark: SparkSession, settings: Settings, store: KafkaStore, topic: str, messages: int
) -> int:
    """Messages a second, from the start of a release to the last append."""
    with closing(Written(spark, settings)) as written:
        turn = Turn(spark, settings, written)
        release = Release(settings=settings, store=store, turn=turn, clock=SystemClock())

        def begin() -> None:
            release.rescue_once()
            release.start()

        try:
            return pace_from_start(Appends(settings, [topic]), messages, begin)
        finally:
            release.stop()
