"""The load generator: a process of its own, which shares no Python with what is measured.

with start_load(settings, plan) as load:
    sent = load()

shape    records                                        used by
native   for duetime.in, with due-* headers             most benchmarks
airtel   for the Airtel topic, JSON objects             intake
pending  for the store's topics, as intake writes them  catchup, flood, lookup, pending
delayed  for a delayed topic, with deliver-after-ms     delayed
queue    for a queue, whose value begins with a number  queue
"""

import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from typing import Any, Literal, NamedTuple, Self, TypeVar

from confluent_kafka import KafkaException, Producer

from duetime.bench.testbed import progress
from duetime.core import headers as H
from duetime.core.clock import SystemClock, parse_duration
from duetime.core.errors import DuetimeError, InvalidMessage, KafkaError, Reason, error_text
from duetime.core.records import ANY_PARTITION
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties

ResultT = TypeVar("ResultT")

#: The contract that records follow: see above.
Shape = Literal["native", "airtel", "pending", "delayed", "queue"]

#: Number of distinct keys, and of the partitions of a queue, which get its messages in turn.
KEYS, QUEUE_PARTITIONS = 1_000, 8

#: Interval in seconds at which records are sent: small bursts disturb the pipeline less than large
#: ones, and more wake-ups would cost more CPU. And the records in a burst if no rate is set.
BURST_INTERVAL_S, BURST = 0.005, 500

#: How long the broker may take to acknowledge the last records, in seconds.
FLUSH_S = 60.0

#: A generator that sends fewer messages a second hangs.
MIN_RATE = 100.0

PRODUCER: dict[str, str | int | float | bool] = {
    "acks": "all",
    "linger.ms": 5,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 128 * 1024,
    # A callback for every message would cost more than sending it.
    "delivery.report.only.error": True,
}

#: Headers as confluent-kafka's types have them.
Headers = list[tuple[str, str | bytes | None]]

#: Topic, value, key, headers and partition.
Record = tuple[str, bytes, bytes | None, Headers, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The messages that the load generator sends."""

    messages: int
    #: Messages a second; 0 is as fast as possible.
    rate: float = 0
    #: Each message is due this long after it is sent, in ms: uniform between the two.
    delay_ms: tuple[int, int] = (0, 0)
    #: In place of `delay_ms`: each message is due uniformly between these instants, epoch ms.
    due_ms: tuple[int, int] | None = None
    #: The topics that the messages are for, in turn.
    destinations: tuple[str, ...] = ()
    value_bytes: int = 200
    shape: Shape = "native"
    #: The destinations' cluster, by its name in the settings; None is the one of duetime itself.
    cluster: str | None = None
    #: Prefix of the message ids: it must differ between runs into the same destinations.
    label: str = "bench"

    @classmethod
    def steady(cls, rate: float, seconds: float, **others: Any) -> Self:  # noqa: ANN401 (any field)
        """A load of `rate` messages a second for `seconds` seconds: one message at least."""
        return cls(messages=max(1, round(rate * seconds)), rate=rate, **others)

    @property
    def limit_s(self) -> float:
        """The longest time that sending may take, in seconds."""
        return self.messages / min(self.rate or MIN_RATE, MIN_RATE) + 2 * FLUSH_S


class Sent(NamedTuple):
    """A plan that was sent."""

    #: The latest due time, epoch ms.
    last_due_ms: int
    #: Messages a second until the last acknowledgement, the cores that the generator kept busy, and
    #: the longest that it fell behind its rate, in ms.
    figures: dict[str, float]


def parse_range(text: str) -> tuple[int, int]:
    """Read `5s..30s`, or one duration, as minimum and maximum in ms. Raises InvalidMessage."""
    shortest, _, longest = text.partition("..")
    min_ms, max_ms = parse_duration(shortest), parse_duration(longest or shortest)
    if min_ms > max_ms:
        detail = f"{text!r} goes backwards: write the shorter duration first"
        raise InvalidMessage(Reason.BAD_DUE_TIME, detail)
    return min_ms, max_ms


def run_load(settings: Settings, plan: LoadPlan) -> Sent:
    """Send the plan, and wait until all is acknowledged. Raises KafkaError unless it is."""
    progress(f"sending {plan.messages:,} messages ...")
    with start_load(settings, plan) as load:
        return load()


def start_load(settings: Settings, plan: LoadPlan) -> AbstractContextManager[Callable[[], Sent]]:
    """Start to send the plan; the generator ends with the block, if not before."""
    return child_process(plan.limit_s, send, settings, plan)


@contextmanager
def child_process(
    timeout_s: float, run: Callable[..., ResultT], *arguments: object
) -> Iterator[Callable[[], ResultT]]:
    """Run the function in a fresh process, which ends with the block; yield what waits for it.

    Waiting raises KafkaError if the function fails, or exceeds the time since then.
    """
    # Messages are freed by reference counting: there are no cycles to look for.
    with multiprocessing.get_context("spawn").Pool(1, gc.disable) as pool:
        running: AsyncResult[ResultT] = pool.apply_async(_run_guarded, (run, *arguments))

        def result() -> ResultT:
            try:
                return running.get(timeout_s)
            except multiprocessing.TimeoutError as error:
                what = f"{run.__name__} did not end within {timeout_s:.0f} s"
                raise KafkaError(f"{what}: is the broker up?") from error

        yield result


def _run_guarded(run: Callable[..., ResultT], *arguments: object) -> ResultT:
    try:
        return run(*arguments)
    except (DuetimeError, KafkaException) as error:
        # Not every error can be sent to another process.
        raise KafkaError(
            f"{run.__name__} failed ({error_text(error)}): is the broker up?"
        ) from None


def send(settings: Settings, plan: LoadPlan) -> Sent:
    """Send the plan from this process. Raises KafkaError unless all is acknowledged."""
    failures: list[object] = []
    producer = Producer(
        librdkafka_properties(settings)
        | PRODUCER
        | {"on_delivery": lambda error, _message: failures.append(error)}
    )
    # Connect first: the connection must not count in the rate.
    producer.list_topics(timeout=FLUSH_S)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    last_due_ms, behind_ms = _send_all(producer, settings, plan)
    if unsent := producer.flush(FLUSH_S) + len(failures):
        raise KafkaError(f"{unsent} messages were not acknowledged: is the broker's disk full?")
    taken_s = time.monotonic() - started_s
    cores = (time.process_time() - started_cpu_s) / taken_s
    figures = {"rate_reached": round(plan.messages / taken_s, 1), "load_cores": round(cores, 3)}
    return Sent(last_due_ms, figures | {"load_behind_ms": behind_ms})


def _send_all(producer: Producer, settings: Settings, plan: LoadPlan) -> tuple[int, int]:
    """Return the latest due time, and the longest that the rate was missed by, in ms."""
    make, clock, last_due_ms, max_behind_ms = maker(settings, plan), SystemClock(), 0, 0
    min_ms, max_ms = plan.due_ms or plan.delay_ms
    for numbers, behind_ms in bursts(plan.messages, plan.rate):
        now_ms, max_behind_ms = clock.now_ms(), max(max_behind_ms, behind_ms)
        from_ms = min_ms if plan.due_ms else now_ms + min_ms
        for number in numbers:
            due_ms = from_ms + int(random.random() * (max_ms - min_ms + 1))  # noqa: S311 (no secret)
            last_due_ms = max(last_due_ms, due_ms)
            _produce(producer, make(number, due_ms, now_ms))
        producer.poll(0)
    return last_due_ms, max_behind_ms


def bursts(messages: int, rate: float) -> Iterator[tuple[range, int]]:
    """Yield the numbers to send now, and how late the first of them is, in ms."""
    sent, started_s = 0, time.monotonic()
    while sent < messages:
        since_s = time.monotonic() - started_s
        until = min(messages, int(since_s * rate) + 1 if rate else sent + BURST)
        if until > sent:
            yield range(sent, until), int((since_s - sent / rate) * 1_000) if rate else 0
            sent = until
        if rate:
            time.sleep(BURST_INTERVAL_S)


def _produce(producer: Producer, record: Record) -> None:
    topic, value, key, headers, partition = record
    while True:
        try:
            producer.produce(topic, value, key, partition, headers=headers)
        except BufferError:
            producer.poll(0.1)
        else:
            return


def maker(settings: Settings, plan: LoadPlan) -> Callable[[int, int, int], Record]:
    """Return a function that makes a record from its number, its due time and now, epoch ms.

    The ids are `<label>-<number>`.
    """
    names, wheel, value = TopicNames(settings), settings.wheel, os.urandom(plan.value_bytes)
    native, inbox, airtel = names.native, names.store_inbox, names.airtel
    levels = [names.wheel(level) for level in range(wheel.levels)]
    cluster: Headers = [(H.DUE_CLUSTER, plan.cluster.encode())] if plan.cluster else []
    head = f'{{"event":"reminder","customer":"{plan.label}","attempt":1,"text":"'
    json_value = head + "x" * (plan.value_bytes - len(head) - 2) + '"}'

    def make(number: int, due_ms: int, now_ms: int) -> Record:
        destination = plan.destinations[number % len(plan.destinations)]
        key, due, unique = b"%d" % (number % KEYS), b"%d" % due_ms, f"{plan.label}-{number}"
        if plan.shape == "airtel":
            text = (
                f'{{"topic":"{destination}","key":"{number % KEYS}",'
                f'"value":{json_value},"postTime":{due_ms}}}'
            )
            return airtel, text.encode(), key, [], ANY_PARTITION
        if plan.shape == "queue":
            text = str(number).ljust(plan.value_bytes)
            return destination, text.encode(), None, [], number % QUEUE_PARTITIONS
        to: Headers = [(H.DUE_TOPIC, destination.encode())]
        if plan.shape == "native":
            headers = [*to, (H.DUE_AT_MS, due), (H.DUE_ID, unique.encode()), *cluster]
            return native, value, key, headers, ANY_PARTITION
        identity = f"{due_ms:012x}-{unique}".encode()
        if plan.shape == "delayed":
            headers = [(H.DELIVER_AFTER_MS, due), (H.DELIVER_ID, identity)]
            return destination, value, key, headers, ANY_PARTITION
        state: Headers = [(H.DUE_PARTITION, None), (H.DUE_STATE, b"%d" % now_ms)]
        headers = [*to, *state, (H.DUE_AT_MS, due), (H.DUE_ID, identity)]
        if settings.store_kind != "kafka":
            return inbox, value, key, headers, ANY_PARTITION
        slot = wheel.place(due_ms, now_ms)
        return levels[slot.level], value, key, headers, wheel.partition(slot, identity.decode())

    return make
