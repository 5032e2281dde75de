"""Messages of our own, sent as anybody sends them, to a topic of our own, to see how they fare."""

from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.message import DUE_AT_MS, DUE_ID, DUE_PARTITION, DUE_TOPIC
from duetime.topics import TopicNames

#: The partitions of the warm-up topic: where messages arrive, and what drilled turns read.
ARRIVALS, DRILLED = 0, 1

#: How long Kafka may take to say where the topic ends, in seconds.
TIMEOUT_S = 10.0

#: What is told when Kafka has a message, or has it not.
Delivered = Callable[[KafkaError | None, Message], None]


class OwnMessages:
    """Sends them, and reads them where they arrive."""

    def __init__(self, settings: Settings) -> None:
        names = TopicNames(settings)
        self.topic = names.warmup
        self._intake = names.native
        self._group = f"{settings.namespace}.warmup"
        self._properties = librdkafka_properties(settings)
        self.producer = Producer(self._properties | {"linger.ms": 5})

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
