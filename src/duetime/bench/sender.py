"""The load generator's own process: `python -m duetime.bench.sender`.

Reads `{"settings": {...}, "plan": {...}}` from stdin, sends, and writes what it sent as JSON.
"""

import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from confluent_kafka import KafkaException, Producer

from duetime.bench.load import LoadPlan, Sent
from duetime.bench.records import Record, maker, to_cluster
from duetime.clock import SystemClock
from duetime.config import Settings
from duetime.connection import librdkafka_properties

#: How often it wakes to send what is due to be sent, in seconds: small bursts disturb the pipeline
#: less than large ones, and more wake-ups would cost more CPU.
TICK_S = 0.005

#: Messages between two looks at the clock, where no rate is set.
BURST = 500

#: How long the last messages may take to be acknowledged, in seconds.
FLUSH_S = 60.0

PRODUCER: dict[str, str | int | float | bool] = {
    "acks": "all",
    "linger.ms": 5,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 128 * 1024,
    # A callback for every message would cost more than sending it.
    "delivery.report.only.error": True,
}


def send(settings: Settings, plan: LoadPlan) -> Sent:
    """Send it all from this process, and wait until all is acknowledged."""
    failures: list[object] = []
    producer = Producer(
        librdkafka_properties(settings)
        | PRODUCER
        | {"on_delivery": lambda error, _message: failures.append(error)}
    )
    # Connect first: that is no part of the rate.
    producer.list_topics(timeout=FLUSH_S)
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    last_due_ms, behind_ms = _send_all(producer, settings, plan)
    unsent = producer.flush(FLUSH_S) + len(failures)
    taken_s = time.monotonic() - begun_s
    return Sent(
        sent=plan.messages - unsent,
        failed=unsent,
        rate_reached=round(plan.messages / taken_s, 1),
        last_due_ms=last_due_ms,
        cores=round((time.process_time() - begun_cpu_s) / taken_s, 3),
        behind_ms=behind_ms,
    )


def _send_all(producer: Producer, settings: Settings, plan: LoadPlan) -> tuple[int, int]:
    """The latest due time, and the longest that was fallen behind, in ms."""
    make = maker(plan.shape, settings, plan.destinations, plan.label, plan.value_bytes)
    if plan.cluster:
        make = to_cluster(make, plan.cluster)
    clock, (least_ms, most_ms) = SystemClock(), plan.due_ms or plan.delay_ms
    spread_ms = most_ms - least_ms + 1
    last_due_ms, most_behind_ms = 0, 0
    for numbers, behind_ms in bursts(plan.messages, plan.rate):
        now_ms, most_behind_ms = clock.now_ms(), max(most_behind_ms, behind_ms)
        from_ms = least_ms if plan.due_ms else now_ms + least_ms
        for number in numbers:
            due_ms = from_ms + int(random.random() * spread_ms)  # noqa: S311 (no secret)
            last_due_ms = max(last_due_ms, due_ms)
            _produce(producer, make(number, due_ms, now_ms))
        producer.poll(0)
    return last_due_ms, most_behind_ms


def bursts(messages: int, rate: float) -> Iterator[tuple[range, int]]:
    """The numbers to send now, again and again, and how late the first of them is, in ms."""
    sent, begun_s = 0, time.monotonic()
    while sent < messages:
        since_s = time.monotonic() - begun_s
        until = min(messages, int(since_s * rate) + 1 if rate else sent + BURST)
        if until > sent:
            yield range(sent, until), int((since_s - sent / rate) * 1_000) if rate else 0
            sent = until
        if rate:
            time.sleep(TICK_S)


def _produce(producer: Producer, record: Record) -> None:
    topic, value, key, headers, partition = record
    while True:
        try:
            producer.produce(topic, value, key, partition, headers=headers)
        except BufferError:
            producer.poll(0.1)
        else:
            return


def main() -> None:
    """Read what to send, send it, say what was sent."""
    asked = json.load(sys.stdin)
    # Messages are freed by counting references; there are no cycles to look for.
    gc.disable()
    try:
        sent = send(Settings(**asked["settings"]), LoadPlan(**asked["plan"]))
    except KafkaException as error:
        sys.exit(f"load generator: {error}")
    sys.stdout.write(json.dumps(asdict(sent)) + "\n")


if __name__ == "__main__":
    main()
