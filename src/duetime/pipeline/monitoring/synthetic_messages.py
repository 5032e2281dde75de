"""Synthetic messages, sent the way every sender sends, to measure how punctual deliveries are.

They go from the native intake topic through the lanes or the store to an internal topic, where the
broker stamps them. On another cluster they arrive in the topic that `probe_topic` names.

The *prober* sends two a second as long as this process leads, so lateness is known also while no
sender is active.

The *warm-up* sends a stream of them. A JVM that has just started is a hundred times slower than a
warm one, and would release the first windows seconds late. So release jobs are drilled until
planning one is compiled code. Then the pipeline is ready only when messages arrive on time.
"""

import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from duetime.core.clock import Clock, Offset
from duetime.core.errors import error_text
from duetime.core.messages import (
    DUE_AT_MS,
    DUE_CLUSTER,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
    MessageId,
)
from duetime.core.metrics import CLOCK_OFFSET_SECONDS, LATENESS_SECONDS, PROBES
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange
from duetime.kafka.range_reader import headers_of

log = logging.getLogger(__name__)

#: The partitions of the warm-up topic: where messages arrive, and what release drills read.
ARRIVALS, DRILLED = 0, 1

#: How long Kafka may take to return the end of the topic, in seconds.
END_TIMEOUT_S = 10.0

#: The paths of probes: through the lanes, and through the store.
LANES, STORE = PATHS = "lanes", "store"

#: How long before it is due a message is sent, in ms: well within the lanes, or so far beyond them.
AHEAD_MS = 500

#: How long Kafka may take to acknowledge probes, in seconds.
ACKNOWLEDGE_TIMEOUT_S = 1.0

#: Records read at a time: on another cluster, foreign ones are among them.
BATCH_SIZE = 1_000

#: How often two probes are sent, in seconds.
PROBE_INTERVAL_S = 1.0

#: How long without an arrival, in seconds, until probes count as lost, or held up by an outage.
SILENCE_S = 60.0

#: How often they are sent from then on, or while they cannot be read, in seconds: enough to show
#: that none arrives. Each will arrive hours late, or be a dead letter where its topic is gone.
SILENT_INTERVAL_S = 60.0

#: How long `close` waits for Kafka, in seconds; for all clusters together.
CLOSE_TIMEOUT_S = 2.0

#: The largest error of a clock offset that is published, in ms: half a round trip.
MAX_OFFSET_ERROR_MS = 100


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

    def __init__(self, settings: Settings, cluster: str | None = None) -> None:
        names = TopicNames(settings)
        self.topic = (cluster and settings.clusters[cluster].probe_topic) or names.warmup
        self._cluster, self._intake = cluster, names.native
        at = settings.at(cluster)
        group = {"group.id": f"{settings.namespace}.warmup", "enable.auto.commit": False}
        self._consumer_properties = librdkafka_properties(at) | group
        self.producer = Producer(librdkafka_properties(settings) | {"linger.ms": 5})

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
            (DUE_TOPIC, self.topic),
            (DUE_PARTITION, str(ARRIVALS)),
            (DUE_AT_MS, str(due_ms)),
        ]
        if unique:
            headers.append((DUE_ID, unique))
        if self._cluster:
            headers.append((DUE_CLUSTER, self._cluster))
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


class ProberSet:
    """The probers of this cluster and of each other cluster with a `probe_topic`. Start it once."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        clusters = [name for name, each in settings.clusters.items() if each.probe_topic]
        self._probers = [Prober(settings, clock, each) for each in (None, *clusters)]

    def start(self) -> None:
        """Start all probers."""
        for each in self._probers:
            each.start()

    def close(self) -> None:
        """Stop all probers at once; probes under way are abandoned."""
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        for each in self._probers:
            each.stop()
        for each in self._probers:
            each.close(max(0.0, until_s - time.monotonic()))


class Prober:
    """Sends probes to one cluster and measures their lateness, in a thread. Start it once."""

    def __init__(self, settings: Settings, clock: Clock, cluster: str | None = None) -> None:
        self._clock, self._cluster = clock, cluster or ""
        self._messages = SyntheticMessages(settings, cluster)
        self._delay_ms = {LANES: AHEAD_MS, STORE: settings.short_delay_threshold_ms + AHEAD_MS}
        #: Begins the unique part of our ids.
        self._mark = f"probe-{uuid.uuid4().hex[:12]}."
        self._backoffs = {path: ProbeBackoff() for path in PATHS}
        self._consumer: Consumer | None = None
        #: Held while the clock offset is set, which must be 0 after `stop`.
        self._lock = threading.Lock()
        self._thread = PeriodicThread("probe", 0.0, self._probe)

    def start(self) -> None:
        """Start probing."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, and clear the clock offset, which only the leader measures."""
        self._thread.stopping.set()
        with self._lock:
            CLOCK_OFFSET_SECONDS.set(0)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        if self._thread.stop(timeout_s):
            self._close_consumer()

    def _probe(self) -> None:
        """Send the probes of one second, and measure what arrives in it."""
        until_s = time.monotonic() + PROBE_INTERVAL_S
        try:
            # Before the first probe is sent. Without it probes are sent, and missed.
            self._consumer = self._consumer or self._messages.consumer()
        except KafkaException as error:
            log.warning("probes cannot be read error=%s", error_text(error))
        try:
            self._send()
            self._observe(until_s)
        except (KafkaException, BufferError) as error:
            log.warning("probes failed error=%s", error_text(error))
            self._close_consumer()
        if self._thread.stopping.wait(max(0.0, until_s - time.monotonic())):
            self._close_consumer()

    def _close_consumer(self) -> None:
        if self._consumer:
            self._consumer.close()
        self._consumer = None

    def _send(self) -> None:
        """Send the probes that are due, and wait a moment for Kafka to acknowledge them.

        The acknowledgement shows how far the clocks are apart. Raises KafkaException, BufferError.
        """
        now_s, is_readable = time.monotonic(), self._consumer is not None
        backoffs = self._backoffs.items()
        paths = [path for path, each in backoffs if each.is_due(now_s, is_readable=is_readable)]
        # While Kafka takes none, none is sent: it would be late by the prober's fault.
        if self._messages.producer.flush(0):
            return
        now_ms = self._clock.now_ms()
        for path in paths:
            self._messages.send(
                now_ms + self._delay_ms[path],
                b"probe",
                unique=f"{self._mark}{path}",
                on_delivery=partial(self._acknowledged, now_ms, path),
            )
        self._messages.producer.flush(ACKNOWLEDGE_TIMEOUT_S)

    def _acknowledged(
        self, sent_ms: int, path: str, error: KafkaError | None, record: Message
    ) -> None:
        if error is not None:
            return
        PROBES.labels(self._cluster, path).inc()
        received_ms, stamped_ms = self._clock.now_ms(), record.timestamp()[1]
        offset = Offset.seen(sent_ms=sent_ms, stamped_ms=stamped_ms, received_ms=received_ms)
        with self._lock:
            if offset.error_ms <= MAX_OFFSET_ERROR_MS and not self._thread.stopping.is_set():
                CLOCK_OFFSET_SECONDS.set(offset.ahead_ms / 1_000)

    def _observe(self, until_s: float) -> None:
        """Measure what arrives until then. Raises KafkaException."""
        while self._consumer and not self._thread.stopping.is_set():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            for path, late_ms in self._arrivals(self._consumer, min(left_s, 0.1)):
                LATENESS_SECONDS.labels(self._cluster, path).observe(late_ms / 1_000)
                self._backoffs[path].reset(time.monotonic())

    def _arrivals(self, consumer: Consumer, timeout_s: float) -> Iterator[tuple[str, int]]:
        """Yield the path and the lateness, in ms, of our probes. Raises KafkaException."""
        for record in consumer.consume(BATCH_SIZE, timeout=timeout_s):
            if error := record.error():
                # The topic is gone, for instance: the consumer must be opened again.
                raise KafkaException(error)
            # On another cluster, others may write anything there.
            identity = (dict(headers_of(record)).get(DUE_ID) or b"").decode(errors="replace")
            _, is_ours, path = identity.partition(f"-{self._mark}")
            if is_ours:
                yield path, record.timestamp()[1] - MessageId.parse(identity).due_ms


class ProbeBackoff:
    """When the probes of one path are sent: each second, and seldom while none arrives."""

    def __init__(self) -> None:
        self._arrived_s = 0.0
        #: None before the first probe.
        self._sent_s: float | None = None

    def is_due(self, now_s: float, *, is_readable: bool) -> bool:
        """Return whether to send a probe now, by the monotonic clock; if so, note that."""
        if self._sent_s is None:
            # None can have arrived before.
            self._arrived_s = now_s
        else:
            is_silent = not is_readable or now_s - self._arrived_s >= SILENCE_S
            if is_silent and now_s - self._sent_s < SILENT_INTERVAL_S:
                return False
        self._sent_s = now_s
        return True

    def reset(self, now_s: float) -> None:
        """Note that a probe arrived."""
        self._arrived_s = now_s


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
        consumer = self._messages.consumer()
        arrivals, until_s = Punctuality(self._clock.now_ms()), self._deadline_s(1)
        try:
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
        finally:
            consumer.close()

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
                    (DUE_TOPIC, topic),
                    (DUE_PARTITION, str(ARRIVALS)),
                    (DUE_STATE, None),
                    (DUE_AT_MS, str(identity.due_ms)),
                    (DUE_ID, str(identity)),
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
        due_ms = int(dict(message.headers() or ()).get(DUE_AT_MS) or 0)
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
