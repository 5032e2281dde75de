"""What becomes of a record of a visible topic that is due: the copies that are sent.

Decides only; nothing here sends.
"""

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import Message

from duetime.config import Settings
from duetime.copies import TOO_LARGE, Copy, dead_letter, place, place_only
from duetime.delayed.log import DIGITS, delay_ms, deliver_after_ms
from duetime.delayed.message import DelayedMessage
from duetime.errors import Reason
from duetime.message import (
    ADDRESS,
    DELIVER_AFTER_MS,
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_ERROR_SOURCE,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_STATE,
    DUE_TOPIC,
    LATEST_MS,
    WAITING_HEADERS,
    MessageId,
    headers_without,
)
from duetime.outgoing import Header
from duetime.stores.records import headers_of
from duetime.topics import TopicNames, visible

#: Why Kafka does not take a record, and never will as things are: it takes the way of all failures.
FINAL = {
    BrokerError.UNKNOWN_TOPIC_OR_PART: Reason.UNKNOWN_TOPIC,
    BrokerError._UNKNOWN_TOPIC: Reason.UNKNOWN_TOPIC,  # noqa: SLF001 (their public names)
    BrokerError._UNKNOWN_PARTITION: Reason.NO_SUCH_PARTITION,  # noqa: SLF001
    BrokerError.TOPIC_AUTHORIZATION_FAILED: Reason.NOT_AUTHORISED,
    **dict.fromkeys(TOO_LARGE, Reason.TOO_LARGE_FOR_TOPIC),
    BrokerError.INVALID_RECORD: Reason.NO_KEY,
}


class Outcomes:
    """Of the records of one delayed topic."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self._names = TopicNames(settings)
        self._longest_ms = settings.delayed_topics[topic].max_ms
        self._from, self._to = topic, visible(settings)[topic]

    def of(self, message: DelayedMessage) -> tuple[Copy, bool]:
        """What is sent, and whether that is its delivery."""
        record = message.due.record
        if refusal := self._refusal(record):
            return self._rejected(record, refusal), False
        return self._delivered(message), True

    def undelivered(self, message: DelayedMessage, why: Reason, error: str, now_ms: int) -> Copy:
        """To be tried again; or dead at once, where all of it is too large for that."""
        record = message.due.record
        detail = f"the visible topic does not take it: {error}"
        waiting = {
            DUE_TOPIC: self._to.encode(),
            DUE_PARTITION: str(message.partition()).encode(),
            DUE_STATE: str(record.timestamp()[1]).encode(),
            DUE_AT_MS: _due(message),
            DUE_ID: str(self._id(message)).encode(),
        }
        headers = [*((name, waiting[name]) for name in WAITING_HEADERS), *_passed_on(record)]
        said = [(DUE_ERROR, str(why).encode()), (DUE_ERROR_DETAIL, detail.encode())]
        return Copy(
            topic=self._names.failed,
            key=record.key(),
            value=record.value(),
            headers=[*headers, *said],
            less=self._dead(message, why, detail, now_ms),
        )

    def _delivered(self, message: DelayedMessage) -> Copy:
        record = message.due.record
        own = [(DUE_AT_MS, _due(message)), (DUE_ID, str(self._id(message)).encode())]
        return Copy(
            topic=self._to,
            partition=message.partition(),
            key=record.key(),
            value=record.value(),
            headers=[*own, *_passed_on(record)],
        )

    def _rejected(self, record: Message, refusal: tuple[Reason, str]) -> Copy:
        own, topic = headers_of(record), self._names.rejected
        reason, detail = refusal
        said = [
            (DUE_ERROR, str(reason).encode()),
            (DUE_ERROR_DETAIL, detail.encode()),
            (DUE_ERROR_SOURCE, place(record).encode()),
        ]
        return Copy(
            topic=topic,
            key=record.key(),
            value=record.value(),
            headers=[*own, *said],
            less=place_only(topic, own, said),
        )

    def _dead(self, message: DelayedMessage, why: Reason, detail: str, now_ms: int) -> Copy:
        record = message.due.record
        words = {
            DUE_TOPIC: self._to,
            DUE_PARTITION: message.partition(),
            DUE_AT_MS: _due(message).decode(),
            DUE_ID: self._id(message),
            DUE_ERROR: why,
            DUE_ERROR_DETAIL: detail,
            DUE_ATTEMPTS: 1,
            DUE_FAILED_FIRST_MS: now_ms,
            DUE_FAILED_LAST_MS: now_ms,
        }
        return dead_letter(self._names.dead, record, _passed_on(record), words)

    def _refusal(self, record: Message) -> tuple[Reason, str] | None:
        text = dict(headers_of(record)).get(DELIVER_AFTER_MS)
        time_ms = deliver_after_ms(record, None)
        if text is not None and not (text.isdigit() and len(text) <= DIGITS):
            return Reason.BAD_DUE_TIME, "deliver-after-ms is no whole number of milliseconds"
        if time_ms is not None and delay_ms(record, time_ms) > self._longest_ms:
            return Reason.BEYOND_LIMIT, f"it waits for longer than {self._longest_ms} ms"
        return None

    def _id(self, message: DelayedMessage) -> MessageId:
        unique = f"@{self._from}.{message.partition()}.{message.offset()}"
        return MessageId(due_ms=int(_due(message)), unique=unique)


def _passed_on(record: Message) -> list[Header]:
    """The sender's headers: what it has of an earlier delivery would be taken for ours."""
    return headers_without(headers_of(record), ADDRESS)


def _due(message: DelayedMessage) -> bytes:
    """When it was due: what is to be delivered at once is due when it was appended."""
    due_ms = message.deliver_after_ms or message.timestamp()[1]
    # A sender may set any timestamp.
    return str(min(max(due_ms, 0), LATEST_MS)).encode()
