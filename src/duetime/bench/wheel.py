"""`duetime bench wheel`: a message due in years walks every level, in simulated time.

One message goes the real way: intake's columns route it, and at each level the turn that a release
would take empties its slot, with the clock of the columns moved to when that slot is taken up.
Thousands of other due times walk in arithmetic alone.
"""

import random
from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import Producer
from pyspark.sql import SparkSession

from duetime.bench.reader import read_arrivals
from duetime.bench.records import Shape, maker
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.bench.throughput import session
from duetime.clock import SystemClock
from duetime.columns import simulated_clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.pipeline.intake import Intake
from duetime.pipeline.jvm import jvm
from duetime.pipeline.kafka import read_ranges, write_batch
from duetime.pipeline.turn import Turn
from duetime.pipeline.written import Written
from duetime.stores import OffsetRange
from duetime.stores.kafka import KafkaStore
from duetime.stores.offsets import Offsets
from duetime.topics import TopicNames
from duetime.wheel import Slot, Wheel

#: How late the message may be that really walks, in ms: its last turn may be the JVM's first.
MOST_LATE_MS = 5_000

#: Due times that walk in arithmetic.
WALKERS = 10_000

YEAR_MS = 365 * 24 * 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How a message came through the wheel."""

    #: The slots it was in, one after the other.
    slots: list[Slot]
    #: Simulated arrival minus due.
    late_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """The message that went the real way, and what all others did in arithmetic."""

    hops: int
    correct: bool
    late_ms: int
    walkers: int


def wheel(settings: Settings, years: float) -> Walks:
    """Let a message that is due in so many years walk; hops are slots that it was written to."""
    now_ms = SystemClock().now_ms()
    due_ms = now_ms + int(years * YEAR_MS)
    expected = walk(settings.wheel, due_ms, now_ms)
    with session(settings) as spark:
        real = _really(spark, settings, due_ms)
    others = [
        walk(settings.wheel, now_ms + random.randrange(int(years * YEAR_MS)), now_ms)  # noqa: S311
        for _ in range(WALKERS)
    ]
    most = max(len(slots) for slots in [real.slots, *others])
    return Walks(
        hops=most,
        correct=real.slots == expected
        and 0 <= real.late_ms <= MOST_LATE_MS
        and most <= settings.wheel_levels,
        late_ms=real.late_ms,
        walkers=WALKERS,
    )


def walk(shape: Wheel, due_ms: int, now_ms: int) -> list[Slot]:
    """The slots of a message from level to level, each cascaded as early as it ever is.

    Raises AssertionError where a slot does not cover the due time, or the next one is no nearer.
    """
    slots = [shape.place(due_ms, now_ms)]
    while slots[-1].level:
        slots.append(shape.place(due_ms, shape.cascade_at_ms(slots[-1])))
        if slots[-1].level >= slots[-2].level:
            raise AssertionError(f"{due_ms} went from {slots[-2]} to {slots[-1]}")
    for slot in slots:
        if not shape.start_ms(slot) <= due_ms < shape.end_ms(slot):
            raise AssertionError(f"{due_ms} is not in {slot}")
    return slots


def _really(spark: SparkSession, settings: Settings, due_ms: int) -> Walk:
    """The walk of one message through Kafka and Spark."""
    (topic,) = create_destinations(settings, ["arrived"])
    _take_in(spark, settings, topic, due_ms)
    slots, ahead_ms = [], 0
    with closing(KafkaStore(settings)) as store, closing(Written(spark, settings)) as written:
        while slot := _waiting_in(settings, store, ahead_ms):
            say(f"level {slot.level}, slot {slot.number}")
            slots.append(slot)
            ahead_ms = settings.wheel.closes_at_ms(slot, settings.lead_ms) - SystemClock().now_ms()
            ranges = store.due(slot)
            with simulated_clock(jvm(spark)) as set_ahead:
                set_ahead(ahead_ms)
                Turn(spark, settings, written)(ranges)
            store.settle(ranges)
    (late_ms,) = read_arrivals(settings, [topic]).late_ms
    return Walk(slots=slots, late_ms=late_ms + ahead_ms)


def _take_in(spark: SparkSession, settings: Settings, topic: str, due_ms: int) -> None:
    """Route one message as the intake query does."""
    producer = Producer(librdkafka_properties(settings))
    make = maker(Shape.NATIVE, settings, [topic], "walker", value_bytes=200)
    intake, value, key, headers, _ = make(0, due_ms, 0)
    producer.produce(intake, value, key, partition=0, headers=headers)
    producer.flush()
    records = read_ranges(spark, settings, [OffsetRange(intake, 0, 0, 1)])
    write_batch(Intake(settings).rows(records), settings, "bench")


def _waiting_in(settings: Settings, store: KafkaStore, ahead_ms: int) -> Slot | None:
    """The slot that holds the message; None when it has left the wheel."""
    offsets = Offsets(settings, TopicNames(settings).release_group)
    try:
        ends, settled = offsets.ends(store.places()), offsets.committed(store.places())
    finally:
        offsets.close()
    now_ms = SystemClock().now_ms() + ahead_ms
    for (topic, partition), end in ends.items():
        if end > settled.get((topic, partition), 0):
            level = int(topic.rpartition(".")[2])
            return settings.wheel.slot_filling(level, partition, now_ms, settings.lead_ms)
    return None
