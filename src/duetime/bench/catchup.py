"""`duetime bench catchup`: how fast overdue messages are released, against a plain copy by Spark.

The load generator writes the messages straight into the slots of the wheel (or they are saved in
another store), in the shape that intake gives them, while no release runs. When all are overdue,
Spark copies them as they are, Kafka to Kafka, and then a release starts and finds them: the same
records, in the same warm session, one after the other, each from its start to the last append.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

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
from duetime.pipeline.saving import Saver
from duetime.pipeline.turn import Turn
from duetime.pipeline.written import Written
from duetime.stores import OffsetRange, Store
from duetime.stores.kafka import KafkaStore
from duetime.stores.offsets import Offsets
from duetime.stores.opening import open_store
from duetime.stores.places import Place
from duetime.topics import TopicNames

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
    with (
        closing(open_store(settings) or KafkaStore(settings)) as store,
        closing(Written(spark, settings)) as written,
    ):
        ranges = _filled(spark, settings, replace(plan, destinations=(topic,)), store)
        say("warming up ...")
        turn = Turn(spark, settings, written)
        claims = store.overdue(SystemClock().now_ms())
        for _ in range(WARM_ROUNDS):
            write_batch(plain(read_ranges(spark, settings, ranges), topic), settings, "bench")
            turn(claims)
        store.settle(claims)


def _run(spark: SparkSession, settings: Settings, plan: LoadPlan, name: str) -> Pace:
    copied, released = create_destinations(
        settings, [f"{name}-copied", f"{name}-released"], partitions=PARTITIONS
    )
    with closing(open_store(settings) or KafkaStore(settings)) as store:
        ranges = _filled(spark, settings, replace(plan, destinations=(released,)), store)
        say("copying, then releasing ...")
        records = plain(read_ranges(spark, settings, ranges), copied)
        copying = pace_from_start(
            Appends(settings, [copied]),
            plan.messages,
            lambda: write_batch(records, settings, "bench"),
        )
        return Pace(
            messages_per_s=_released(spark, settings, store, released, plan.messages),
            copy_messages_per_s=copying,
        )


def _filled(
    spark: SparkSession, settings: Settings, plan: LoadPlan, store: Store[Any]
) -> list[OffsetRange]:
    """Fill the store, and wait until all is overdue; returns the same records in Kafka."""
    if settings.store_kind == "kafka":
        _fill(settings, plan)
        ranges = list(store.overdue(SystemClock().now_ms()))
        store.give_up(ranges)
        return ranges
    before = _ends(settings)
    _fill(settings, plan, lambda: _save(spark, settings, before))
    return _since(settings, before)


def _fill(settings: Settings, plan: LoadPlan, then: Callable[[], None] = lambda: None) -> None:
    sent = fill(settings, plan)
    then()
    wait_until(sent.last_due_ms + settings.wheel_tick_ms, SystemClock().now_ms())


def _save(spark: SparkSession, settings: Settings, before: Mapping[Place, int]) -> None:
    say("saving ...")
    records = read_ranges(spark, settings, _since(settings, before))
    Saver(spark, settings).save(records)


def _since(settings: Settings, before: Mapping[Place, int]) -> list[OffsetRange]:
    return [OffsetRange(*place, before[place], end) for place, end in _ends(settings).items()]


def _ends(settings: Settings) -> dict[Place, int]:
    """Where the records end that are on their way to the store."""
    with closing(Offsets(settings, f"{settings.namespace}.bench")) as offsets:
        return offsets.ends(offsets.readable_places(TopicNames(settings).store))


def _released(
    spark: SparkSession, settings: Settings, store: Store[Any], topic: str, messages: int
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
