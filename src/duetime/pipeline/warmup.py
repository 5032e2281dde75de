"""Warming up: messages of our own, through every path, until they are punctual.

A JVM that has just started is a hundred times slower than a warm one: the first windows of real
messages would be seconds late. So turns are drilled until planning one is compiled code, and then
the pipeline says that it is ready only when messages of its own, sent to a topic of its own, arrive
on time.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from confluent_kafka import Consumer, Producer, TopicPartition

from duetime.clock import Clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.message import DUE_AT_MS, DUE_ID, DUE_PARTITION, DUE_TOPIC, MessageId
from duetime.stores import OffsetRange
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: How long turns are drilled, in seconds: a few dozen, after which planning one takes a fifth.
DRILL_S = 15.0

#: Messages of a drilled turn.
DRILL = 20

#: Messages a round, half of them through the lanes, half through the wheel. Ten thousand calls is
#: where the JVM compiles a method for good.
ROUND = 8_000

#: When a round counts as punctual: 99 of 100 messages at most this late, in ms.
PUNCTUAL_MS = 50

#: After so many rounds it is said to be ready anyway, with a warning.
ROUNDS = 10

#: How long a round's messages may take, in seconds.
PATIENCE_S = 60.0

#: How often is looked whether it is to stop, in seconds.
LOOK_S = 0.2

#: The partitions of the warm-up topic: where messages arrive, and what drilled turns read.
ARRIVALS, DRILLED = 0, 1


class WarmUp:
    """Warms one pipeline up, once."""

    def __init__(self, settings: Settings, clock: Clock, stopping: threading.Event) -> None:
        self._settings = settings
        self._topic = TopicNames(settings).warmup
        self._intake = TopicNames(settings).native
        self._clock = clock
        self._stopping = stopping
        self._producer = Producer(librdkafka_properties(settings) | {"linger.ms": 5})

    def drill(self, turn: Callable[[Sequence[OffsetRange]], None]) -> None:
        """Take the same small turn again and again, for DRILL_S or until it is to stop."""
        ranges = [self._drilled_range()]
        until_s = time.monotonic() + DRILL_S
        turns = 0
        while time.monotonic() < until_s and not self._stopping.is_set():
            turn(ranges)
            turns += 1
        log.info("warming up turns=%d", turns)

    def until_punctual(self) -> None:
        """Send rounds of messages until one is punctual, or it is to stop."""
        consumer = self._consumer()
        try:
            for number in range(1, ROUNDS + 1):
                p99_ms = self._round(consumer)
                log.info("warming up round=%d p99_ms=%s", number, p99_ms)
                if self._stopping.is_set() or (p99_ms is not None and p99_ms <= PUNCTUAL_MS):
                    return
            log.warning("not punctual after the warm-up: the machine is busy, or Kafka is slow")
        finally:
            consumer.close()

    def _round(self, consumer: Consumer) -> int | None:
        """The lateness in ms that 99 of 100 messages kept; None where some did not arrive."""
        now_ms = self._clock.now_ms()
        for number in range(ROUND):
            self._send(now_ms + _delay_ms(number, self._settings), number)
        self._producer.flush()
        late_ms = sorted(self._lateness(consumer, now_ms))
        return late_ms[ROUND * 99 // 100] if len(late_ms) == ROUND else None

    def _send(self, due_ms: int, number: int) -> None:
        self._producer.produce(
            self._intake,
            value=b"warm-up " * 16,
            key=str(number % 100),
            headers=[
                (DUE_TOPIC, self._topic),
                (DUE_PARTITION, str(ARRIVALS)),
                (DUE_AT_MS, str(due_ms)),
            ],
        )
        self._producer.poll(0)

    def _consumer(self) -> Consumer:
        properties = librdkafka_properties(self._settings)
        group = {"group.id": f"{self._settings.namespace}.warmup", "enable.auto.commit": False}
        consumer = Consumer(properties | group)
        arrivals = TopicPartition(self._topic, ARRIVALS)
        arrivals.offset = consumer.get_watermark_offsets(arrivals, timeout=10.0)[1]
        consumer.assign([arrivals])
        return consumer

    def _lateness(self, consumer: Consumer, since_ms: int) -> Iterator[int]:
        """Of this round's messages: what an interrupted warm-up left behind was due earlier."""
        got, until_s = 0, time.monotonic() + PATIENCE_S
        while got < ROUND and time.monotonic() < until_s and not self._stopping.is_set():
            for message in consumer.consume(min(1_000, ROUND - got), timeout=LOOK_S):
                due_ms = int(dict(message.headers() or ()).get(DUE_AT_MS) or 0)
                if not message.error() and due_ms >= since_ms:
                    got += 1
                    yield message.timestamp()[1] - due_ms

    def _drilled_range(self) -> OffsetRange:
        """Records as they wait in the wheel, due long ago, for turns to read."""
        offsets: list[int] = []
        for number in range(DRILL):
            identity = MessageId(due_ms=number, unique="warm-up")
            self._producer.produce(
                self._topic,
                value=b"warm-up " * 16,
                partition=DRILLED,
                headers=[
                    (DUE_TOPIC, self._topic),
                    (DUE_PARTITION, str(ARRIVALS)),
                    (DUE_AT_MS, str(identity.due_ms)),
                    (DUE_ID, str(identity)),
                ],
                on_delivery=lambda _, message: offsets.append(message.offset() or 0),
            )
        self._producer.flush()
        return OffsetRange(self._topic, DRILLED, min(offsets), max(offsets) + 1)


def _delay_ms(number: int, settings: Settings) -> int:
    # Spread over two seconds of the lanes, and over the first two windows beyond the horizon.
    share = number * 2_000 // ROUND
    return share + (500 if number % 2 else settings.horizon_ms + 500)
