"""Benchmarks of duetime's clients: of delayed topics, of queues, and of the HTTP API.

delayed  lateness and order of a delayed topic's records: in the visible topic, by the broker's
         timestamps; when `DelayedConsumer.poll` returns; when a batch of the Spark source has them
queue    the pace of a queue's worker, and how soon it gets back what it drops
api      single messages and batches; clients, server and Kafka share the machine
"""

import http.client
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Message
from pyspark.sql import DataFrame

from duetime.bench.chaos import duetime_process
from duetime.bench.delivery import GRACE_S, running_pipeline
from duetime.bench.loadgen import (
    QUEUE_PARTITIONS,
    LoadPlan,
    child_process,
    parse_range,
    run_load,
    start_load,
)
from duetime.bench.testbed import (
    COUNTS,
    POLL_INTERVAL_S,
    Appends,
    Arrival,
    Figures,
    create_destinations,
    destination,
    percentiles,
    progress,
    report,
)
from duetime.bench.throughput import PARTITIONS, session
from duetime.core import headers as H
from duetime.core.clock import SystemClock, parse_duration
from duetime.core.errors import KafkaError
from duetime.core.setting_types import DelayedTopic, QueueSettings
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread, wait_until
from duetime.delayed import DelayedConsumer
from duetime.delayed.spark_source import register
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties, spark_properties
from duetime.kafka.consumer_group import leave
from duetime.kafka.range_reader import headers_of
from duetime.local.process import HOST, free_port
from duetime.queue import Queue
from duetime.queue.message import REDELIVERY_COUNT, MarkerKey, decoded_count, decoded_timeout


def delayed(  # noqa: PLR0913 (the options of a command)
    settings: Settings,
    *,
    rate: float,
    seconds: float,
    delay: str,
    way: str,
    warm_up: float,
    value_bytes: int,
) -> Figures:
    """Read a steady load in this way, or in each if it is `all`, after `warm_up` seconds of it."""
    ways = {"visible": _visible, "consumer": _consumer, "spark": _spark}
    found = {}
    for name in ways if way == "all" else [way]:
        names = [name, f"{name}.delayed"]
        _, topic = create_destinations(settings, names, partitions=PARTITIONS)
        topics = {topic: DelayedTopic.model_validate({})}
        update = {"delayed_topics": topics, "intake_partitions": PARTITIONS}
        create_topics(own := settings.model_copy(update=update))
        load = {"destinations": (topic,), "value_bytes": value_bytes, "shape": "delayed"}
        plan = LoadPlan.steady(rate, seconds, delay_ms=parse_range(delay), **load)
        warm = LoadPlan.steady(rate, warm_up, delay_ms=(50, 1_000), label="first", **load)
        found[name] = ways[name](own, plan, warm)
    counts = (*COUNTS, "out_of_order", "appended_late")
    return {name: sum(each[name] for each in found.values()) for name in counts} | found


def in_order(reads: Sequence[Arrival], sent: int) -> Figures:
    """Return the result, given the records in the order of reading, and the number sent.

    A record that the log got after its own time is due at once, and cannot be in order.
    """
    on_time = [each for each in reads if each.appended_ms <= each.due_ms]
    last, out_of_order = defaultdict[int, tuple[int, int]](lambda: (0, 0)), 0
    for each in on_time:
        partition, offset = each.id
        out_of_order += (each.due_ms, offset) < last[partition]
        last[partition] = max(last[partition], (each.due_ms, offset))
    order = {"out_of_order": out_of_order, "appended_late": len(reads) - len(on_time)}
    return report(reads, sent) | order


def _visible(settings: Settings, plan: LoadPlan, warm: LoadPlan) -> Figures:
    topic = plan.destinations[0].removesuffix(".delayed")
    sent, reads = Appends(settings, plan.destinations), list[Arrival]()
    with running_pipeline(settings):
        _load(settings, warm, Appends(settings, [topic]).count)
        visible = Appends(settings, [topic])
        _load(settings, plan, visible.count)
    appended_ms = {(one.partition(), one.offset()): one.timestamp()[1] for one in sent.records()}
    for record in visible.records():
        read = Arrival.of(record, record.timestamp()[1])
        place = record.partition(), int(read.id.rpartition(b".")[2])
        reads.append(read._replace(id=place, appended_ms=appended_ms[place]))
    return in_order(reads, plan.messages)


def _consumer(settings: Settings, plan: LoadPlan, warm: LoadPlan) -> Figures:
    reads, clock, index = list[Arrival](), SystemClock(), (0, 0)
    group = {"group.id": f"{settings.namespace}.bench"}
    consumer = DelayedConsumer(librdkafka_properties(settings) | group)
    consumer.subscribe(list(plan.destinations))

    def read() -> None:
        nonlocal index
        until_s = time.monotonic() + POLL_INTERVAL_S
        while (left_s := until_s - time.monotonic()) > 0:
            if (each := consumer.poll(left_s)) is not None:
                due_ms, place = each.deliver_after_ms, (each.partition(), each.offset())
                late_ms = clock.now_ms() - due_ms
                reads.append(Arrival(due_ms, late_ms, place, each.timestamp()[1]))
        metrics = consumer.metrics()
        index = max(index, (metrics.index_bytes, metrics.index_entries))

    with closing(consumer), PeriodicThread("delayed consumer", 0, read):
        figures = _load_both(settings, plan, warm, reads)
    per_message = round(index[0] / max(index[1], 1), 2) if index[0] else None
    return figures | {"index_bytes_per_message": per_message}


def _spark(settings: Settings, plan: LoadPlan, warm: LoadPlan) -> Figures:
    reads, clock = list[Arrival](), SystemClock()
    instants = ("unix_millis(deliver_after) due", "unix_millis(timestamp) appended")

    def take(batch: DataFrame, _number: int) -> None:
        rows = batch.selectExpr("partition", "offset", *instants).collect()
        now_ms = clock.now_ms()
        for *place, due_ms, appended_ms in rows:
            reads.append(Arrival(due_ms, now_ms - due_ms, tuple(place), appended_ms))

    with session(settings) as spark:
        register(spark)
        options = spark_properties(settings) | {"subscribe": plan.destinations[0]}
        stream = spark.readStream.format("delayed_kafka").options(**options).load()
        writer = stream.writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", f"{settings.checkpoint}/bench").start()
        try:
            return _load_both(settings, plan, warm, reads)
        finally:
            query.stop()


def _load_both(settings: Settings, plan: LoadPlan, warm: LoadPlan, reads: list[Arrival]) -> Figures:
    """Send both plans; return the figures of the second."""
    for each in (warm, plan):
        reads.clear()
        _load(settings, each, lambda: len(reads))
    return in_order([*reads], plan.messages)


def _load(settings: Settings, plan: LoadPlan, arrived: Callable[[], int]) -> None:
    """Send the plan, and wait until all has arrived or is overdue."""
    sent = run_load(settings, plan)
    timeout_s = sent.last_due_ms / 1_000 + GRACE_S - time.time()
    wait_until(lambda: arrived() >= plan.messages, timeout_s, POLL_INTERVAL_S)
    # A duplicate arrives soon.
    time.sleep(POLL_INTERVAL_S)


#: Messages read at a time. And how long messages come and are dropped before anything is measured,
#: in seconds: the tracker's first batches take seconds each.
BATCH, QUEUE_WARM_UP_S = 1_000, 30

#: How long after its timeout a message counts as lost, and how long the plain consumer waits for
#: messages that exist, in seconds.
LOST_S, RAW_TIMEOUT_S = 60.0, 30.0


class Task(NamedTuple):
    """The messages of one queue, and what its worker does with them."""

    load: LoadPlan
    #: The worker drops every message with a multiple of this number; 0 is none.
    drop_every: int
    timeout_ms: int

    @property
    def idle_s(self) -> float:
        """The worker ends after this long without a new acknowledgement, in seconds."""
        return self.timeout_ms / 1_000 + LOST_S

    @property
    def limit_s(self) -> float:
        """The time limit of the worker, in seconds: it ends by itself long before."""
        return self.load.limit_s + 5 * self.idle_s

    def of(self, queue: str, **changed: Any) -> "Task":  # noqa: ANN401 (fields of the load)
        """Return the same task on another queue, with another load."""
        return self._replace(load=replace(self.load, destinations=(queue,), **changed))


def queue(  # noqa: PLR0913 (the options of a command)
    settings: Settings,
    *,
    messages: int,
    drop: float,
    timeout: str,
    rate: float,
    value_bytes: int,
    runs: int,
) -> list[Figures]:
    """Work on two queues `runs` times, through one warm pipeline.

    On the first, all messages exist when the worker starts, and none is dropped: its pace is
    compared with that of a plain consumer. On the second, messages arrive at a steady rate, and
    some are dropped at their first delivery. The topics are read after the run.
    """
    load = LoadPlan(messages=messages, rate=rate, value_bytes=value_bytes, shape="queue")
    task = Task(load, round(1 / drop) if drop else 0, parse_duration(timeout))
    warm, *queues = [destination(settings, f"queue-{number}") for number in range(2 * runs + 1)]
    shared = QueueSettings(partitions=QUEUE_PARTITIONS, redeliveries=100)
    settings = settings.model_copy(update={"queues": dict.fromkeys([warm, *queues], shared)})
    create_topics(settings)
    with running_pipeline(settings):
        progress(f"warming up for {QUEUE_WARM_UP_S} s ...")
        _work_while_filling(settings, task.of(warm, messages=max(1, int(rate * QUEUE_WARM_UP_S))))
        return [_run_queues(settings, task, *queues[at : at + 2]) for at in range(0, 2 * runs, 2)]


def _run_queues(settings: Settings, task: Task, pace_queue: str, drop_queue: str) -> Figures:
    delivered = Appends(settings, [pace_queue, drop_queue])
    markers = Appends(settings, [settings.queue(drop_queue).markers_topic(drop_queue)])
    existing, messages = task.of(pace_queue, rate=0)._replace(drop_every=0), task.load.messages
    run_load(settings, existing.load)
    with child_process(existing.limit_s, read_raw, settings, existing.load) as reading:
        raw_per_s = reading()
    with child_process(existing.limit_s, work, settings, existing) as working:
        per_s, acknowledged = working()
    acknowledged += _work_while_filling(settings, task.of(drop_queue))
    progress("reading redeliveries ...")
    records = delivered.records()
    redelivered = [each for each in records if REDELIVERY_COUNT in dict(headers_of(each))]
    late_ms = _late_ms((each for each in redelivered if each.topic() == drop_queue), markers)
    wrong = [each for each in redelivered if is_wrong(each, pace_queue, task.drop_every)]
    return {
        "messages": messages,
        "messages_per_s": per_s,
        "raw_messages_per_s": raw_per_s,
        "ratio": round(per_s / raw_per_s, 3),
        "lost": 2 * messages - acknowledged,
        "redelivered": len(redelivered),
        "wrongly_redelivered": len(wrong),
        **percentiles(late_ms, ("p50", "p99"), "redelivery_lateness_"),
    }


def _work_while_filling(settings: Settings, task: Task) -> int:
    """Return the number of messages acknowledged."""
    worker = child_process(task.limit_s, work, settings, task)
    with start_load(settings, task.load) as load, worker as working:
        load()
        return working()[1]


def _late_ms(redelivered: Iterable[Message], markers: Appends) -> Iterator[int]:
    """Yield how long after the deadline of its last start marker each message came."""
    deadlines_ms = {}
    for marker in markers.records():
        key, timeout_ms = MarkerKey.decoded(marker.key()), decoded_timeout(marker.value())
        if key is not None and timeout_ms is not None:
            deadlines_ms[key] = marker.timestamp()[1] + timeout_ms
    for record in redelivered:
        # Its id ends in the place of the delivery before this one.
        *_, partition, offset = (dict(headers_of(record))[H.DUE_ID] or b"").decode().split(".")
        yield record.timestamp()[1] - deadlines_ms[MarkerKey(int(partition), int(offset))]


def is_wrong(record: Message, pace_queue: str, drop_every: int) -> bool:
    """True if a redelivered message was acknowledged before: only first deliveries are dropped."""
    number = int(record.value() or b"")
    is_first = decoded_count(dict(headers_of(record))[REDELIVERY_COUNT]) == 1
    was_dropped = record.topic() != pace_queue and is_dropped(number, drop_every)
    return not (was_dropped and is_first)


def is_dropped(number: int, drop_every: int) -> bool:
    """True if the worker drops the first delivery of this message."""
    return drop_every > 0 and number % drop_every == 0


def work(settings: Settings, task: Task) -> tuple[int, int]:
    """Return the first deliveries a second, and the number of messages acknowledged.

    Works until each is acknowledged, or none is for `task.idle_s` seconds.
    """
    deliveries, acknowledged, before = list[tuple[float, int]](), set[int](), -1
    (topic,), timeout = task.load.destinations, timedelta(milliseconds=task.timeout_ms)

    def close_if_idle() -> None:
        nonlocal before
        if len(acknowledged) == before:
            jobs.close()
        before = len(acknowledged)

    with (
        Queue(topic, group="workers", settings=settings, timeout=timeout, prefetch=BATCH) as jobs,
        PeriodicThread("idle check", task.idle_s, close_if_idle),
    ):
        for message in jobs:
            if message.attempt == 1:
                deliveries.append((time.monotonic(), 1))
            number = int(message.value or b"")
            if message.attempt > 1 or not is_dropped(number, task.drop_every):
                message.ack()
                acknowledged.add(number)
            if len(acknowledged) == task.load.messages:
                break
    return pace(deliveries), len(acknowledged)


def read_raw(settings: Settings, load: LoadPlan) -> int:
    """Return the messages a second of a consumer that writes no markers and commits rarely."""
    group = {"group.id": "raw", "auto.offset.reset": "earliest"}
    consumer, batches = Consumer(librdkafka_properties(settings) | group), list[tuple[float, int]]()
    consumer.subscribe(list(load.destinations))
    left = load.messages
    while left > 0 and (found := consumer.consume(BATCH, RAW_TIMEOUT_S)):
        count = sum(not each.error() for each in found)
        left -= count
        batches.append((time.monotonic(), count))
    leave(consumer)
    return pace(batches)


def pace(arrivals: Sequence[tuple[float, int]]) -> int:
    """Return the messages a second from the first arrival to the last, as instants and counts."""
    if not arrivals:
        return 0
    seconds = arrivals[-1][0] - arrivals[0][0]
    return round(sum(together for _, together in arrivals) / max(seconds, 0.001))


#: Concurrent requests: with half as many the server waits for Kafka's acknowledgements. And the
#: messages in a batch.
CONNECTIONS, API_BATCH = 32, 100

#: How long the server may take to start, and how long each kind is sent before anything is
#: measured, in seconds: Kafka's JVM is slow at first.
START_S, API_WARM_UP_S = 30.0, 3.0


def api(settings: Settings, seconds: float, value_bytes: int, runs: int) -> list[Figures]:
    """Load a fresh server `runs` times."""
    return [_run_api(settings, seconds, value_bytes) for _ in range(runs)]


def _run_api(settings: Settings, seconds: float, value_bytes: int) -> Figures:
    """Send single messages, then batches, then single messages at half the rate of the first."""
    message = {"topic": "bench", "key": "k", "value": "x" * value_bytes, "in": "1d"}
    single, batch = json.dumps(message).encode(), json.dumps([message] * API_BATCH).encode()
    with TemporaryDirectory(prefix="duetime-api-") as directory:
        port, spool = free_port(), Path(directory) / "spool.db"
        served = settings.model_copy(update={"api_port": port, "api_spool": spool})
        with duetime_process(served, "api") as process:
            wait_until(lambda: _answers(port) or process.poll() is not None, START_S, 0.05)
            if not _answers(port):
                raise KafkaError("duetime api did not start: see its log above")
            for body in (single, batch):
                http_load(port, body, API_WARM_UP_S)
            progress(f"{CONNECTIONS} connections send single messages")
            single_us, failed_single = http_load(port, single, seconds)
            progress(f"they send batches of {API_BATCH}")
            batch_us, failed_batch = http_load(port, batch, seconds)
            rate = len(single_us) / seconds
            progress(f"they send {rate / 2:.0f} single messages a second")
            paced_us, failed_paced = http_load(port, single, seconds, rate / 2)
    return {
        "single_per_s": round(rate),
        "batch_messages_per_s": round(len(batch_us) * API_BATCH / seconds),
        **percentiles((each / 1_000 for each in paced_us), ("p50", "p99")),
        "failed": failed_single + failed_batch + failed_paced,
    }


def _answers(port: int) -> bool:
    with closing(http.client.HTTPConnection(HOST, port)) as connection, suppress(OSError):
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.HTTPStatus.OK
    return False


def http_load(
    port: int, body: bytes, seconds: float, rate: float | None = None
) -> tuple[list[int], int]:
    """Send as many requests as possible, or at a rate; a late one counts from when it was due.

    Return the duration of each request that was answered with 201, in microseconds, and the number
    of those with another answer: not counted in the pace, because a refusal takes no time.
    """
    start_s, numbers, took_us = time.monotonic(), count(), list[int]()

    def send(_connection: int) -> int:
        connection, failed = http.client.HTTPConnection(HOST, port), 0
        while True:
            sent_s = start_s + next(numbers) / rate if rate else time.monotonic()
            if sent_s >= start_s + seconds:
                connection.close()
                return failed
            time.sleep(max(0.0, sent_s - time.monotonic()))
            connection.request("POST", "/v1/messages", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            if response.status == http.HTTPStatus.CREATED:
                took_us.append(int((time.monotonic() - sent_s) * 1_000_000))
            else:
                failed += 1

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return took_us, sum(pool.map(send, range(CONNECTIONS)))
