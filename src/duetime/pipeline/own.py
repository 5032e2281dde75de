"""Messages of our own, sent as anybody sends them, to a topic of our own, to see how they fare.

On another cluster nothing is ours: the topic there is one that the configuration names.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.message import DUE_AT_MS, DUE_CLUSTER, DUE_ID, DUE_PARTITION, DUE_TOPIC, MessageId
from duetime.stores.records import headers_of
from duetime.topics import TopicNames

#: The partitions of the warm-up topic: where messages arrive, and what drilled turns read.
ARRIVALS, DRILLED = 0, 1

#: How long Kafka may take to say where the topic ends, in seconds.
TIMEOUT_S = 10.0

#: The ways that a probe may take.
LANES, STORE = PATHS = "lanes", "store"

#: How long before they are due, in ms: well within the lanes; and beyond the horizon by as much.
AHEAD_MS = 500

#: How long Kafka may take to acknowledge probes, in seconds.
ACKNOWLEDGE_S = 1.0

#: At most so many arrivals are taken at a time: others' are among them.
TAKEN = 1_000

#: What is told when Kafka has a message, or has it not.
Delivered = Callable[[KafkaError | None, Message], None]

#: The same of a probe, and its path first.
ProbeDelivered = Callable[[str, KafkaError | None, Message], None]


class OwnMessages:
    """Sends them, and reads them where they arrive."""

    def __init__(
        self, settings: Settings, *, cluster: str | None = None, topic: str | None = None
    ) -> None:
        names = TopicNames(settings)
        there = settings.at(cluster) if cluster else settings
        self.topic = topic or names.warmup
        self._cluster = cluster
        self._intake = names.native
        self._group = f"{settings.namespace}.warmup"
        self._properties = librdkafka_properties(there)
        self.producer = Producer(librdkafka_properties(settings) | {"linger.ms": 5})

    def send(
        self,
        due_ms: int,
        value: bytes,
        *,
        key: str | None = None,
        unique: str | None = None,
        on_delivery: Delivered | None = None,
    ) -> None:
        """Schedule one for then, under an id of its own if there is one."""
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
        """Reads what arrives from now on. Raises KafkaException."""
        group = {"group.id": self._group, "enable.auto.commit": False}
        consumer = Consumer(self._properties | group)
        arrivals = TopicPartition(self.topic, ARRIVALS)
        try:
            arrivals.offset = consumer.get_watermark_offsets(arrivals, timeout=TIMEOUT_S)[1]
        except KafkaException:
            consumer.close()
            raise
        consumer.assign([arrivals])
        return consumer


@dataclass(frozen=True, slots=True)
class Probe:
    """A message that is to be punctual."""

    #: LANES or STORE.
    path: str
    due_ms: int


class Probes:
    """At most two at a time, one through the lanes and one through the store: everybody's way."""

    def __init__(self, settings: Settings, name: str, cluster: str | None = None) -> None:
        topic = settings.clusters[cluster].probe_topic if cluster else None
        self._own = OwnMessages(settings, cluster=cluster, topic=topic)
        self._delay_ms = {LANES: AHEAD_MS, STORE: settings.horizon_ms + AHEAD_MS}
        #: Tells ours from those of others.
        self._mark = f"{name}-{uuid.uuid4().hex[:12]}."

    def send(
        self, now_ms: int, on_delivery: ProbeDelivered, paths: Sequence[str] = PATHS
    ) -> list[Probe]:
        """Send these, and wait a moment until Kafka has them.

        Raises KafkaException, BufferError.
        """
        # While Kafka takes none, none is sent: it would be late by its own fault.
        if self._own.producer.flush(0):
            return []
        probes = [Probe(path, now_ms + self._delay_ms[path]) for path in paths]
        for each in probes:
            self._own.send(
                each.due_ms,
                b"probe",
                unique=f"{self._mark}{each.path}",
                on_delivery=partial(on_delivery, each.path),
            )
        self._own.producer.flush(ACKNOWLEDGE_S)
        return probes

    def consumer(self) -> Consumer:
        """Reads what arrives from now on. Raises KafkaException."""
        return self._own.consumer()

    def arrived(self, consumer: Consumer, timeout_s: float) -> Iterator[tuple[Probe, int]]:
        """Which of ours have come, and how late, in ms. Raises KafkaException."""
        for record in consumer.consume(TAKEN, timeout=timeout_s):
            if error := record.error():
                # The topic is gone, say: whoever reads begins anew, or learns that it cannot.
                raise KafkaException(error)
            if probe := self._ours(record):
                yield probe, record.timestamp()[1] - probe.due_ms

    def _ours(self, record: Message) -> Probe | None:
        # On another cluster, others may write there whatever they like.
        name = (dict(headers_of(record)).get(DUE_ID) or b"").decode(errors="replace")
        _, is_ours, path = name.partition(f"-{self._mark}")
        return Probe(path, MessageId.parse(name).due_ms) if is_ours else None
