"""`duetime bench delayed`: how punctual and in what order a delayed topic's records are read.

visible    a running pipeline makes the topic visible; stamped by the broker on append
consumer   `DelayedConsumer`, in this process; when `poll` returned the record
spark      the `delayed_kafka` source; when a batch of the query had its rows

Each way has a topic and a load of its own, one after the other. What the log got after the record's
own time (`appended_late`) is to be delivered at once, and cannot be in order.
"""

import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from pyspark.sql import DataFrame

from duetime.admin import create_topics
from duetime.bench.lateness import running_pipeline
from duetime.bench.load import LoadPlan, Sent, start_load
from duetime.bench.records import Shape
from duetime.bench.report import percentile
from duetime.bench.say import say
from duetime.bench.testbed import create_destinations
from duetime.bench.throughput import session
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.connection import librdkafka_properties, spark_properties
from duetime.delayed import DelayedConsumer
from duetime.delayed.log import LogReader, Place
from duetime.delayed.source import register
from duetime.message import DUE_AT_MS, DUE_ID
from duetime.stores.records import headers_of
from duetime.tables import DelayedTopic

#: Partitions of each topic.
PARTITIONS = 4

#: The figures that are counts of messages: added up over the ways.
COUNTS = ("sent", "delivered", "lost", "duplicated", "early", "out_of_order", "appended_late")

#: How long after the last message's time is still waited for it, in seconds.
PATIENCE_S = 30.0

#: How often is looked how much has come, and how large the index is, in seconds.
LOOK_S = 0.5

#: When the messages are due that go first, in ms: soon.
FIRST_MS = (50, 1_000)


class Way(StrEnum):
    """How the records are read."""

    VISIBLE = "visible"
    CONSUMER = "consumer"
    SPARK = "spark"


@dataclass(slots=True)
class Deliveries:
    """What has come, record by record. Used by one thread."""

    late_ms: "array[int]" = field(default_factory=lambda: array("q"))
    places: set[tuple[int, int]] = field(default_factory=set)
    out_of_order: int = 0
    appended_late: int = 0
    _last: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, place: tuple[int, int], due_ms: int, appended_ms: int, at_ms: int) -> None:
        """One more; its place, partition and offset, is that in the delayed topic."""
        partition, offset = place
        self.late_ms.append(at_ms - due_ms)
        self.places.add(place)
        if appended_ms > due_ms:
            self.appended_late += 1
            return
        last = self._last.get(partition, (0, 0))
        self.out_of_order += (due_ms, offset) < last
        self._last[partition] = max(last, (due_ms, offset))

    def figures(self, sent: int) -> dict[str, int | float | None]:
        """The result as it is shown."""
        late_ms = sorted(self.late_ms)
        return {
            "sent": sent,
            "delivered": len(self.places),
            "lost": max(sent - len(self.places), 0),
            "duplicated": len(late_ms) - len(self.places),
            "early": sum(1 for each in late_ms if each < 0),
            "out_of_order": self.out_of_order,
            "appended_late": self.appended_late,
            "p50_ms": percentile(late_ms, 50),
            "p99_ms": percentile(late_ms, 99),
            "p999_ms": percentile(late_ms, 99.9),
            "max_ms": late_ms[-1] if late_ms else None,
        }


@dataclass(slots=True)
class IndexSize:
    """How large a consumer's index was when it was largest. Looks now and then."""

    index_bytes: int = 0
    per_message: float | None = None
    _look_s: float = 0.0

    def look(self, consumer: DelayedConsumer) -> None:
        """Look at it, if it is time."""
        if time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + LOOK_S
        metrics = consumer.metrics()
        if metrics.index_bytes > self.index_bytes:
            self.index_bytes = metrics.index_bytes
            self.per_message = round(metrics.index_bytes / max(metrics.index_entries, 1), 2)


def delayed(
    settings: Settings, plan: LoadPlan, way: Way, warm_up_s: float
) -> dict[str, int | float | None]:
    """Send the plan to a delayed topic and read it in this way, after as much for so long."""
    run = {Way.VISIBLE: _visible, Way.CONSUMER: _consumer, Way.SPARK: _spark}[way]
    names = [f"{way}", f"{way}.delayed"]
    _, topic = create_destinations(settings, names, partitions=PARTITIONS)
    settings = settings.model_copy(
        update={
            "delayed_topics": {topic: DelayedTopic.model_validate({})},
            "intake_partitions": PARTITIONS,
        }
    )
    create_topics(settings)
    plan = replace(plan, destinations=(topic,), shape=Shape.DELAYED)
    messages = max(1, round(plan.rate * warm_up_s))
    return run(settings, plan, replace(plan, messages=messages, delay_ms=FIRST_MS, label="first"))


def _visible(settings: Settings, plan: LoadPlan, first: LoadPlan) -> dict[str, int | float | None]:
    (topic,) = plan.destinations
    visible = topic.removesuffix(".delayed")
    with LogReader(librdkafka_properties(settings)) as reader, running_pipeline(settings):
        places = reader.places(visible)

        def ends() -> list[int]:
            return [reader.bounds(place)[1] for place in places]

        _load(settings, first, lambda: sum(ends()))
        starts = ends()
        sent = _load(settings, plan, lambda: sum(ends()) - sum(starts))
        found = Deliveries()
        for place, start, end in zip(places, starts, ends(), strict=True):
            appended_ms = _appended_ms(reader, (topic, place[1]))
            for record in chain.from_iterable(reader.batches(place, start, end)):
                headers = dict(headers_of(record))
                offset = int((headers[DUE_ID] or b"").rpartition(b".")[2])
                due_ms, at_ms = int(headers[DUE_AT_MS] or b""), record.timestamp()[1]
                found.add((place[1], offset), due_ms, appended_ms[offset], at_ms)
    return found.figures(sent.sent)


def _appended_ms(reader: LogReader, place: Place) -> dict[int, int]:
    """When each record of a partition was appended, by offset."""
    records = chain.from_iterable(reader.batches(place, *reader.bounds(place)))
    return {record.offset() or 0: record.timestamp()[1] for record in records}


def _consumer(settings: Settings, plan: LoadPlan, first: LoadPlan) -> dict[str, int | float | None]:
    topics, counts = list(plan.destinations), [0]
    deliveries, size = [Deliveries()], IndexSize()
    done, clock = threading.Event(), SystemClock()
    group = {"group.id": f"{settings.namespace}.bench"}

    def read() -> None:
        with DelayedConsumer(librdkafka_properties(settings) | group) as consumer:
            consumer.subscribe(topics)
            while not done.is_set():
                message = consumer.poll(LOOK_S)
                if message is not None:
                    at_ms = clock.now_ms()
                    place = message.partition(), message.offset()
                    appended_ms = message.timestamp()[1]
                    deliveries[0].add(place, message.deliver_after_ms, appended_ms, at_ms)
                    counts[0] += 1
                size.look(consumer)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        _load(settings, first, lambda: counts[0])
        deliveries[0], counts[0] = Deliveries(), 0
        sent = _load(settings, plan, lambda: counts[0])
    finally:
        done.set()
        reading.join()
    return deliveries[0].figures(sent.sent) | {"index_bytes_per_message": size.per_message}


def _spark(settings: Settings, plan: LoadPlan, first: LoadPlan) -> dict[str, int | float | None]:
    deliveries, clock = [Deliveries()], SystemClock()

    def take(batch: DataFrame, _number: int) -> None:
        instants = ("unix_millis(deliver_after) due", "unix_millis(timestamp) appended")
        rows = batch.selectExpr("partition", "offset", *instants).collect()
        at_ms = clock.now_ms()
        for row in rows:
            deliveries[0].add((row.partition, row.offset), row.due, row.appended, at_ms)

    with session(settings) as spark:
        register(spark)
        options = spark_properties(settings) | {"subscribe": plan.destinations[0]}
        stream = spark.readStream.format("delayed_kafka").options(**options).load()
        query = stream.writeStream.foreachBatch(take).option(
            "checkpointLocation", f"{settings.checkpoint}/bench"
        )
        running = query.start()
        try:
            _load(settings, first, lambda: len(deliveries[0].late_ms))
            deliveries[0] = Deliveries()
            sent = _load(settings, plan, lambda: len(deliveries[0].late_ms))
        finally:
            running.stop()
    return deliveries[0].figures(sent.sent)


def _load(settings: Settings, plan: LoadPlan, came: Callable[[], int]) -> Sent:
    """Send the plan; returns when all of it came, or should have long ago."""
    say(f"sending {plan.messages:,} messages to {plan.destinations[0]} ...")
    with start_load(settings, plan) as load:
        sent = load.wait()
    until_s = sent.last_due_ms / 1_000 + PATIENCE_S
    while came() < sent.sent and time.time() < until_s:
        time.sleep(LOOK_S)
    # What comes twice comes soon.
    time.sleep(LOOK_S)
    return sent
