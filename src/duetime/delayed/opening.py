"""Opening a partition where its group was: what a consumer and a Spark source begin with."""

from dataclasses import dataclass, field

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from duetime.delayed.cursor import Cursor
from duetime.delayed.files import SegmentFiles
from duetime.delayed.log import LogReader
from duetime.delayed.options import ConsumerOptions
from duetime.delayed.partition import DelayedPartition, Position
from duetime.delayed.payloads import Payloads, Room
from duetime.errors import KafkaError
from duetime.stores.logs import describe_topic_ids

#: How long the broker may take to answer, in seconds.
TIMEOUT_S = 20.0


@dataclass(slots=True)
class Opening:
    """Opens partitions; they share its room and its reader of the log."""

    options: ConsumerOptions
    room: Room = field(init=False)
    reader: LogReader = field(init=False)
    _topic_ids: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.room = Room(self.options.kept_bytes)
        self.reader = LogReader(self.options.librdkafka)

    def open(self, committed: TopicPartition, now_ms: int) -> DelayedPartition:
        """The partition, read up to its present end. Raises KafkaError."""
        opened = DelayedPartition(
            place=(committed.topic, committed.partition),
            reader=self.reader,
            payloads=Payloads(self.room),
            group=self.options.policy.group,
            longest_ms=self.options.longest_ms,
            files=self._files(committed),
            limits=self.options.limits,
        )
        opened.open(self.position(committed), now_ms)
        return opened

    def close(self) -> None:
        """Close the connection."""
        self.reader.close()

    def position(self, committed: TopicPartition) -> Position:
        """Where to begin: what is committed, or what `auto.offset.reset` says of nothing."""
        if committed.error is not None:
            raise KafkaError(f"what is committed is not known: {committed.error.str()}")
        if committed.offset >= 0:
            return Position.committed(committed.offset, committed.metadata or "")
        first, end = self.reader.bounds((committed.topic, committed.partition))
        start = first if self.options.from_beginning else end
        return Position(start, Cursor.start(start))

    def _files(self, of: TopicPartition) -> SegmentFiles | None:
        location = self.options.index_location
        if location is None:
            return None
        return SegmentFiles(
            location=location,
            group=self.options.policy.group,
            topic=of.topic,
            topic_id=self._topic_id(of.topic),
            partition=of.partition,
        )

    def _topic_id(self, topic: str) -> str:
        if topic not in self._topic_ids:
            admin = AdminClient(self.options.shared())
            try:
                self._topic_ids |= describe_topic_ids(admin, [topic], TIMEOUT_S)
            except KafkaException as error:
                raise KafkaError(
                    f"topic {topic} cannot be described ({error.args[0].str()})"
                ) from error
        return self._topic_ids[topic]
