"""Warming up: messages of our own, through every path, until they are punctual.

A JVM that has just started is a hundred times slower than a warm one: the first windows of real
messages would be seconds late. So the pipeline says that it is ready only when its own messages,
sent to a topic of its own, arrive on time.
"""

import logging
from collections.abc import Iterator

from confluent_kafka import Consumer, Producer, TopicPartition

from duetime.clock import Clock
from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.message import DUE_AT_MS, DUE_TOPIC
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: Messages a round, half of them through the lanes, half through the wheel. Ten thousand calls is
#: where the JVM compiles a method for good.
ROUND = 8_000

#: When a round counts as punctual: 99 of 100 messages at most this late, in ms.
PUNCTUAL_MS = 60

#: After so many rounds it is said to be ready anyway, with a warning.
ROUNDS = 12

#: How long a round's messages may take, in seconds.
PATIENCE_S = 60.0


def warm_up(settings: Settings, clock: Clock) -> None:
    """Send rounds of messages until one is punctual."""
    names = TopicNames(settings)
    properties = librdkafka_properties(settings)
    producer = Producer(properties | {"linger.ms": 5})
    consumer = Consumer(
        properties | {"group.id": f"{settings.namespace}.warmup", "enable.auto.commit": False}
    )
    end = consumer.get_watermark_offsets(TopicPartition(names.warmup, 0), timeout=10.0)[1]
    consumer.assign([TopicPartition(names.warmup, 0, end)])
    try:
        for number in range(1, ROUNDS + 1):
            _send_round(producer, names, settings, clock.now_ms())
            late_ms = sorted(_lateness(consumer, ROUND))
            p99_ms = late_ms[len(late_ms) * 99 // 100] if late_ms else None
            log.info("warming up round=%d p99_ms=%s", number, p99_ms)
            if len(late_ms) == ROUND and p99_ms is not None and p99_ms <= PUNCTUAL_MS:
                return
        log.warning("not punctual after the warm-up: the machine is busy, or Kafka is slow")
    finally:
        consumer.close()


def _send_round(producer: Producer, names: TopicNames, settings: Settings, now_ms: int) -> None:
    for each in range(ROUND):
        due_ms = now_ms + _delay_ms(each, settings)
        producer.produce(
            names.native,
            value=b"warm-up " * 16,
            key=str(each % 100).encode(),
            headers=[(DUE_TOPIC, names.warmup.encode()), (DUE_AT_MS, str(due_ms).encode())],
        )
        if each % 100 == 0:
            producer.poll(0)
    producer.flush()


def _delay_ms(number: int, settings: Settings) -> int:
    # Spread over two seconds of the lanes, and over the first two windows beyond the horizon.
    share = number * 2_000 // ROUND
    return share + (500 if number % 2 else settings.horizon_ms + 500)


def _lateness(consumer: Consumer, expected: int) -> Iterator[int]:
    got = 0
    while got < expected:
        messages = consumer.consume(min(1_000, expected - got), timeout=PATIENCE_S)
        if not messages:
            return
        for message in messages:
            if not message.error():
                got += 1
                due_ms = dict(message.headers() or ())[DUE_AT_MS]
                yield message.timestamp()[1] - int(due_ms or 0)
