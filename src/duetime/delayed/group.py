"""A consumer group of a delayed topic: its properties, its retries and dead letters.

Properties are librdkafka's, and those that begin with `delayed.`. A retry is a record of the same
partition. It carries the header `deliver-retry` (attempts, first failure, first offset) and the
name of the group that it is for; other groups skip it.
"""

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property, partial
from typing import Annotated, Any, Literal, NamedTuple, Self

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import Message
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from duetime.core import headers as H
from duetime.core.clock import doubled_ms, duration_ms
from duetime.core.errors import ConfigError, KafkaError, Reason, validation_words
from duetime.core.messages import MessageId
from duetime.core.setting_types import Count
from duetime.delayed.index import SegmentLimits
from duetime.delayed.segments import is_number
from duetime.kafka.producer import TOO_LARGE, CopyProducer, OutboundRecord, dead_letter
from duetime.kafka.range_reader import headers_of

PREFIX = "delayed."

#: Prefixes of the properties that a consumer and a producer have in common.
SHARED = ("bootstrap.", "metadata.broker.", "security.", "sasl.", "ssl.", "client.", "log", "debug")

#: Properties that librdkafka must not see, because they are about the cursor and not an offset.
OURS = ("enable.auto.commit", "auto.commit.interval.ms", "auto.offset.reset")

#: librdkafka's names for one of the two values of auto.offset.reset.
EARLIEST = ("earliest", "smallest", "beginning")

#: Also of a path.
Text = Annotated[str, BeforeValidator(str)]

#: The headers that make a record a retry.
RETRY_HEADERS = (H.DELIVER_AFTER_MS, H.DELIVER_GROUP, H.DELIVER_RETRY)

#: How long a retry may take to arrive, in seconds.
TIMEOUT_S = 30.0

#: Errors that do not change with another attempt to send.
PERMANENT = (*TOO_LARGE, BrokerError.INVALID_RECORD, BrokerError.TOPIC_AUTHORIZATION_FAILED)


class ConsumerOptions(BaseModel):
    """The properties of a consumer, parsed: those with the prefix are named by their fields."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=lambda field: PREFIX + field.replace("_", "."),
    )

    #: For each client of the consumer.
    librdkafka: dict[str, Any] = Field(alias="librdkafka", repr=False)
    group: str = Field(alias="group.id", min_length=1)
    auto_commit: bool = Field(True, alias="enable.auto.commit")
    auto_commit_ms: int = Field(5_000, alias="auto.commit.interval.ms")
    auto_offset_reset: Literal["earliest", "latest", "smallest", "beginning", "largest", "end"] = (
        Field("earliest", alias="auto.offset.reset")
    )
    #: Attempts of the group at a record in all, and the waits between them.
    attempts: Count = 5
    backoff_ms: Count = 1_000
    backoff_max_ms: Count = 60_000
    dead_letter_topic: Text = "duetime.dead-letter"
    segment_records: Count = SegmentLimits().records
    segment_ms: Count = SegmentLimits().age_ms
    #: Directory or URL of the index files; None is no files: each start reads the log again.
    index_location: Text | None = None
    #: Memory for pending records, in bytes.
    kept_bytes: Count = 128 * 1024 * 1024
    #: A record with a longer delay is due at once; None is no limit.
    delivery_max_ms: Count | None = None

    @classmethod
    def of(cls, properties: Mapping[str, Any]) -> Self:
        """Parse the properties. Raises ConfigError, which names the property."""
        parsed: dict[str, Any] = {"librdkafka": {}}
        for name, value in properties.items():
            if not name.startswith(PREFIX) and name not in OURS:
                parsed["librdkafka"][name] = value
            if name in (*OURS, "group.id") or (name.startswith(PREFIX) and value not in (None, "")):
                parsed[name] = value
        try:
            return cls.model_validate(parsed)
        except ValidationError as error:
            (first, *_) = error.errors()
            raise ConfigError(
                f"property {first['loc'][0]} of a delayed consumer: {validation_words(first)}"
            ) from None

    @property
    def from_beginning(self) -> bool:
        """True if a group without a commit begins at the first record, not behind the last."""
        return self.auto_offset_reset in EARLIEST

    @property
    def limits(self) -> SegmentLimits:
        """When a segment of the index is closed."""
        return SegmentLimits(records=self.segment_records, age_ms=self.segment_ms)

    def shared(self) -> dict[str, Any]:
        """Return the properties that a producer for the same cluster needs."""
        return {name: value for name, value in self.librdkafka.items() if name.startswith(SHARED)}

    def retry_wait_ms(self, attempts: int, retry_in: timedelta | None) -> int:
        """Return the wait after this many attempts: `retry_in`, or a backoff that doubles."""
        if retry_in is not None:
            return max(0, duration_ms(retry_in))
        return doubled_ms(attempts, self.backoff_ms, self.backoff_max_ms)


class DeliveryAttempts(NamedTuple):
    """The attempts before this one, as the header of a retry has them."""

    attempts: int = 0
    #: When the first one failed, epoch ms, and the offset of its record.
    first_failed_ms: int | None = None
    first_offset: int | None = None

    @classmethod
    def of(cls, record: Message) -> Self:
        """Read them from the headers; a malformed header counts as none."""
        parts = (dict(headers_of(record)).get(H.DELIVER_RETRY) or b"").split(b":")
        is_valid = len(parts) == 3 and all(map(is_number, parts))
        return cls(*map(int, parts)) if is_valid else cls()

    def after_failure(self, record: Message, now_ms: int) -> "DeliveryAttempts":
        """Return the attempts once this one has failed, too."""
        if self.first_failed_ms is None:
            return DeliveryAttempts(self.attempts + 1, now_ms, record.offset() or 0)
        return self._replace(attempts=self.attempts + 1)

    def __str__(self) -> str:
        return ":".join(map(str, self))


class FailedSend(NamedTuple):
    """A record that has not arrived, and what the next flush sends."""

    error: str
    copy: OutboundRecord
    #: The dead letter to send if the topic refuses the copy.
    instead: OutboundRecord | None


class RetryProducer:
    """The producer of a consumer's retries, opened with the first one. Thread-safe."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._options = options
        self._failed = deque[FailedSend]()

    @cached_property
    def _producer(self) -> CopyProducer:
        return CopyProducer(self._options.shared())

    def retry(self, record: Message, retry_in: timedelta | None, now_ms: int) -> None:
        """Send a retry of the record, or its dead letter after the last attempt."""
        options = self._options
        made = DeliveryAttempts.of(record).after_failure(record, now_ms)
        dead = self._dead_letter(record, made, now_ms)
        if made.attempts >= options.attempts:
            self._send(dead)
            return
        at_ms = now_ms + options.retry_wait_ms(made.attempts, retry_in)
        copy = OutboundRecord(
            topic=record.topic() or "",
            partition=record.partition() or 0,
            key=record.key(),
            value=record.value(),
            headers=[
                *H.without(headers_of(record), RETRY_HEADERS),
                *H.from_texts(
                    {
                        H.DELIVER_AFTER_MS: at_ms,
                        H.DELIVER_GROUP: options.group,
                        H.DELIVER_RETRY: made,
                    }
                ),
            ],
        )
        self._send(copy, dead)

    def flush(self) -> None:
        """Wait until everything has arrived, after another attempt for what has failed.

        Raises KafkaError if something has not arrived by then.
        """
        if "_producer" not in vars(self):
            return
        for _ in range(len(self._failed)):
            # Sent before it is removed: an interrupt in between repeats it.
            self._send(self._failed[0].copy, self._failed[0].instead)
            self._failed.popleft()
        left = self._producer.flush(TIMEOUT_S)
        if left or self._failed:
            error = self._failed[0].error if self._failed else "no answer"
            raise KafkaError(
                f"{left + len(self._failed)} retries could not be sent ({error}): nothing is "
                "committed"
            )

    def _send(self, copy: OutboundRecord, instead: OutboundRecord | None = None) -> None:
        self._producer.send(copy, partial(self._handle, copy, instead))
        self._producer.serve()

    def _handle(
        self, copy: OutboundRecord, instead: OutboundRecord | None, error: BrokerError
    ) -> None:
        if instead is not None and error.code() in PERMANENT:
            copy, instead = instead, None
        self._failed.append(FailedSend(error.str(), copy, instead))

    def _dead_letter(self, record: Message, made: DeliveryAttempts, now_ms: int) -> OutboundRecord:
        """Return a dead letter that `duetime dead-letters` can read."""
        due_ms = made.first_failed_ms or now_ms
        place = f"@{record.topic()}.{record.partition()}.{made.first_offset}"
        detail = f"group {self._options.group} gave it up after {made.attempts} attempts"
        fields = {
            H.DUE_TOPIC: record.topic(),
            H.DUE_PARTITION: record.partition(),
            H.DUE_AT_MS: due_ms,
            H.DUE_ID: MessageId(due_ms=due_ms, unique=place),
            H.DUE_ERROR: Reason.RETRIES_EXHAUSTED,
            H.DUE_ERROR_DETAIL: detail,
            H.DUE_ATTEMPTS: made.attempts,
            H.DUE_FAILED_FIRST_MS: due_ms,
            H.DUE_FAILED_LAST_MS: now_ms,
        }
        # Address headers of an earlier delivery would be taken for those of the next one.
        headers = H.without(headers_of(record), (*RETRY_HEADERS, *H.ADDRESS))
        return dead_letter(self._options.dead_letter_topic, record, headers, fields)
