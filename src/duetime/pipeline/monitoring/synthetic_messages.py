"""Synthetic messages, sent the way every sender sends, to measure how punctual deliveries are.

They go from the native intake topic through the lanes or the store to an internal topic, where the
broker stamps them. On another cluster they arrive in the topic that `probe_topic` names.

The prober sends two a second, and the *warm-up* a stream of them. A JVM that has just started is a
hundred times slower than a warm one, and would release the first windows seconds late. So release
jobs are drilled until planning one is compiled code. Then the pipeline is ready only when messages
arrive on time.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from duetime.core import headers as H
from duetime.core.clock import Clock
from duetime.core.messages import MessageId
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange

log = logging.getLogger(__name__)

#: The partitions of the warm-up topic: where messages arrive, and what release drills read.
ARRIVALS, DRILLED = 0, 1

#: How long Kafka may take to return the end of the topic, in seconds.
END_TIMEOUT_S = 10.0

#: How long before it is due a message is sent, in ms: well within the lanes, or so far beyond them.
AHEAD_MS = 500

#: The share of the time for drilled jobs: after a few dozen, planning one takes a fifth.
DRILL_SHARE = 1 / 4

#: Jobs drilled at a time, as windows overlap too; and messages of each.
DRILL_THREADS, DRILL_MESSAGES = 2, 20

#: Messages a second of the stream, half of them through the lanes, half through the wheel.
RATE = 3_000

#: How often a part of the stream is sent, in seconds.
SEND_INTERVAL_S = 0.1

#: A second is punctual when 99 of 100 messages that were due in it are at most this late, in ms.
PUNCTUAL_MS = 50

#: The punctual seconds in a row that end the warm-up.
PUNCTUAL_S = 3

PAYLOAD = b"warm-up " * 16


class SyntheticMessages:
    """Sends synthetic messages to a cluster, and reads them where they arrive."""

    def __init__(
        self, settings: Settings, cluster: str | None = None, **properties: str | int
    ) -> None:
        """`properties` are librdkafka's, of the producer."""
        names = TopicNames(settings)
        self.topic = (cluster and settings.clusters[cluster].probe_topic) or names.warmup
        self._cluster, self._intake = cluster, names.native
        at = settings.at(cluster)
        group = {"group.id": f"{settings.namespace}.warmup", "enable.auto.commit": False}
        self._consumer_properties = librdkafka_properties(at) | group
        self.producer = Producer(librdkafka_properties(settings) | {"linger.ms": 5} | properties)

    def send(
        self,
        due_ms: int,
        value: bytes,
        *,
        key: str | None = None,
        unique: str | None = None,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
    ) -> None:
        """Schedule one message; `unique` is the unique part of its id. Does not wait.

        Raises KafkaException, and BufferError where the producer's queue is full.
        """
        headers: list[tuple[str, str | bytes | None]] = [
            (H.DUE_TOPIC, self.topic),
            (H.DUE_PARTITION, str(ARRIVALS)),
            (H.DUE_AT_MS, str(due_ms)),
        ]
        if unique:
            headers.append((H.DUE_ID, unique))
        if self._cluster:
            headers.append((H.DUE_CLUSTER, self._cluster))
        self.producer.produce(
            self._intake, value=value, key=key, headers=headers, on_delivery=on_delivery
        )
        self.producer.poll(0)

    def consumer(self) -> Consumer:
        """Return a consumer of what arrives from now on. Raises KafkaException."""
        consumer = Consumer(self._consumer_properties)
        arrivals = TopicPartition(self.topic, ARRIVALS)
        try:
            arrivals.offset = consumer.get_watermark_offsets(arrivals, timeout=END_TIMEOUT_S)[1]
        except KafkaException:
            consumer.close()
            raise
        consumer.assign([arrivals])
        return consumer


class WarmUp:
    """Warms one pipeline up, once."""

    def __init__(self, settings: Settings, clock: Clock, stopping: threading.Event) -> None:
        """It returns early once `stopping` is set."""
        self._settings, self._clock, self._stopping = settings, clock, stopping
        self._messages = SyntheticMessages(settings)
        self._started_s = time.monotonic()

    def drill(
        self,
        job: Callable[[Sequence[OffsetRange]], None],
        until: threading.Event | None = None,
    ) -> None:
        """Repeat the same small release job for a share of the time; with `until`, for all of it.

        Return early once `until` is set: this process is needed for something else.
        """
        ends = [self._stopping] if until is None else [self._stopping, until]
        ranges = [self._drilled_range()]
        until_s = self._deadline_s(DRILL_SHARE if until is None else 1)

        def repeat(_: int) -> int:
            jobs = 0
            while time.monotonic() < until_s and not any(each.is_set() for each in ends):
                job(ranges)
                jobs += 1
            return jobs

        with ThreadPoolExecutor(DRILL_THREADS) as pool:
            log.info("drilled release jobs=%d", sum(pool.map(repeat, range(DRILL_THREADS))))

    def until_punctual(self) -> None:
        """Send a steady stream until what arrives is punctual, or the time is over."""
        arrivals, until_s = Punctuality(self._clock.now_ms()), self._deadline_s(1)
        with closing(self._messages.consumer()) as consumer:
            while not self._stopping.wait(SEND_INTERVAL_S):
                self._send_part()
                for message in consumer.consume(RATE, timeout=0):
                    arrivals.count(message)
                if arrivals.is_reached(self._clock.now_ms()):
                    return
                if time.monotonic() > until_s:
                    log.warning(
                        "not punctual after the warm-up: the machine is busy, or Kafka slow"
                    )
                    return

    def _deadline_s(self, share: float) -> float:
        return self._started_s + share * self._settings.warm_up_seconds

    def _send_part(self) -> None:
        now_ms, count = self._clock.now_ms(), int(RATE * SEND_INTERVAL_S)
        for number in range(count):
            # In turn through a lane, and just beyond the lanes.
            least_ms = 0 if number % 2 else self._settings.short_delay_threshold_ms
            delay_ms = least_ms + AHEAD_MS + number * 1_000 // count
            self._messages.send(now_ms + delay_ms, PAYLOAD, key=str(number % 100))

    def _drilled_range(self) -> OffsetRange:
        """Write records as they wait in the wheel, due long ago, for the drilled jobs to read."""
        topic, offsets = self._messages.topic, list[int]()
        for number in range(DRILL_MESSAGES):
            identity = MessageId(due_ms=number, unique="warm-up")
            self._messages.producer.produce(
                topic,
                value=PAYLOAD,
                partition=DRILLED,
                headers=[
                    (H.DUE_TOPIC, topic),
                    (H.DUE_PARTITION, str(ARRIVALS)),
                    (H.DUE_STATE, None),
                    (H.DUE_AT_MS, str(identity.due_ms)),
                    (H.DUE_ID, str(identity)),
                ],
                on_delivery=lambda _, message: offsets.append(message.offset() or 0),
            )
        self._messages.producer.flush()
        return OffsetRange(topic, DRILLED, min(offsets), max(offsets) + 1)


class Punctuality:
    """The lateness of messages, by the second in which they were due."""

    def __init__(self, since_ms: int) -> None:
        self._since_ms = since_ms
        self._late_ms: dict[int, list[int]] = defaultdict(list)

    def count(self, message: Message) -> None:
        """Count an arrival, unless it is left from a warm-up that was interrupted."""
        due_ms = int(dict(message.headers() or ()).get(H.DUE_AT_MS) or 0)
        if not message.error() and due_ms >= self._since_ms:
            self._late_ms[due_ms // 1_000].append(message.timestamp()[1] - due_ms)

    def is_reached(self, now_ms: int) -> bool:
        """Return whether the last PUNCTUAL_S full seconds were punctual and had all messages."""
        last = now_ms // 1_000 - 1
        return all(self._is_punctual(last - ago) for ago in range(PUNCTUAL_S))

    def _is_punctual(self, second: int) -> bool:
        late_ms = sorted(self._late_ms.get(second, ()))
        # On a busy machine the stream may not keep its rate.
        return len(late_ms) > RATE // 2 and late_ms[len(late_ms) * 99 // 100] <= PUNCTUAL_MS
