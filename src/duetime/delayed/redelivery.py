"""Retries of one consumer group: a record of the same partition, or a dead letter.

A retry carries the header `deliver-retry` (attempts, first failure, first offset) and the name of
the group that it is for; other groups skip it.
"""

from collections import deque
from datetime import timedelta
from functools import cached_property, partial
from typing import NamedTuple, Self

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import Message

from duetime.core import headers as H
from duetime.core.errors import KafkaError, Reason
from duetime.core.messages import MessageId
from duetime.delayed.options import ConsumerOptions
from duetime.delayed.segments import is_number
from duetime.kafka.producer import TOO_LARGE, CopyProducer, OutboundRecord, dead_letter
from duetime.kafka.range_reader import headers_of

#: The headers that make a record a retry.
RETRY_HEADERS = (H.DELIVER_AFTER_MS, H.DELIVER_GROUP, H.DELIVER_RETRY)

#: How long a retry may take to arrive, in seconds.
TIMEOUT_S = 30.0

#: Errors that do not change with another attempt to send.
PERMANENT = (*TOO_LARGE, BrokerError.INVALID_RECORD, BrokerError.TOPIC_AUTHORIZATION_FAILED)


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
