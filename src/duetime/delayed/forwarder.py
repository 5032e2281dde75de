"""Visible topics: a record of `orders.delayed` is forwarded to `orders` when it is due.

The copy has the same partition, key, value and headers, in the order of (deliverAfter, offset): one
reader per topic takes due records from the index and gives them to one producer, which keeps the
order. Lanes and windows are not used, because they are many tasks that are late independently: of
40,000 messages due at 2,000/s they had 1,200 out of order, by up to 92 ms.

Each record is forwarded once: with its position, the reader commits the end of the destination, and
after a restart it reads back what was appended since then and skips those records. Transactions are
not needed, and plain consumers see each record once.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Self

from confluent_kafka import KafkaError as BrokerError
from confluent_kafka import Message, TopicPartition

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError, LeaderPaused, Reason, error_text
from duetime.core.messages import LATEST_MS, MessageId
from duetime.core.settings import Settings
from duetime.core.threads import PeriodicThread
from duetime.core.topics import TopicNames, visible_topics
from duetime.delayed.consumer import DelayedConsumer, DelayedMessage
from duetime.delayed.segments import delay_ms, deliver_after_ms, is_number
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.leadership import check_lease
from duetime.kafka.offsets import Partition
from duetime.kafka.producer import (
    TOO_LARGE,
    CopyProducer,
    OutboundRecord,
    dead_letter,
    error_only,
    place,
)
from duetime.kafka.range_reader import LogReader, headers_of

log = logging.getLogger(__name__)

#: How long the producer tries to deliver a record, in ms: less than a change of leaders takes.
DELIVERY_TIMEOUT_MS = 5_000

#: Delay before a failed forwarder starts again, in seconds: what the producer has may still arrive.
RESTART_DELAY_S = DELIVERY_TIMEOUT_MS / 1_000 + 1.0

#: After a pause of this long, in seconds, another process may lead: the lease is checked again
#: before anything is sent.
PAUSE_S = 4.0

#: Interval in seconds at which the lease is checked while it is not held.
LEASE_INTERVAL_S = 0.1

#: Interval in seconds at which the position is committed: records in flight must arrive first,
#: which delays due ones by some ms; and what was sent since is read back after a restart.
COMMIT_INTERVAL_S = 5.0

#: How long one wait for records is, in seconds, and how many are taken at a time.
WAIT_S = 0.2
BATCH = 500

#: How long a flush may take, in seconds: longer than the delivery timeout.
FLUSH_S = 30.0

#: Errors that another attempt does not change, and their reasons: the record is retried later, as
#: all failed deliveries are.
PERMANENT = {
    BrokerError.UNKNOWN_TOPIC_OR_PART: Reason.UNKNOWN_TOPIC,
    BrokerError._UNKNOWN_TOPIC: Reason.UNKNOWN_TOPIC,  # noqa: SLF001 (their public names)
    BrokerError._UNKNOWN_PARTITION: Reason.NO_SUCH_PARTITION,  # noqa: SLF001
    BrokerError.TOPIC_AUTHORIZATION_FAILED: Reason.NOT_AUTHORISED,
    **dict.fromkeys(TOO_LARGE, Reason.TOO_LARGE_FOR_TOPIC),
    BrokerError.INVALID_RECORD: Reason.REFUSED_BY_BROKER,
    # Another record of its request was refused: it is written by its retry.
    BrokerError._INVALID_DIFFERENT_RECORD: Reason.REFUSED_BY_BROKER,  # noqa: SLF001
    BrokerError.INVALID_TIMESTAMP: Reason.REFUSED_BY_BROKER,
    BrokerError.POLICY_VIOLATION: Reason.REFUSED_BY_BROKER,
}


class DelayedForwarder:
    """Forwards the due records of one delayed topic in a thread, from `start` until `close`."""

    def __init__(self, settings: Settings, topic: str, holds_lease: Callable[[], bool]) -> None:
        """`holds_lease` returns whether this process holds the leader's lease now."""
        self._settings = settings
        self._topic = topic
        self._holds_lease = holds_lease
        #: When no other process was known to lead, by the monotonic clock.
        self._checked_s = 0.0
        self._thread = PeriodicThread(f"visible {topic}", LEASE_INTERVAL_S, self._forward_as_leader)
        self._closing = self._thread.stopping

    def start(self) -> None:
        """Start where the last forwarder ended."""
        self._thread.start()

    def close(self) -> None:
        """Wait until the records in flight have arrived, and stop. Safe to repeat."""
        self._thread.stop()

    def _forward_as_leader(self) -> None:
        """Forward while this process leads; after an error, wait before the next step."""
        if not self._holds_lease():
            # Joining the group now would take the partitions from the leader.
            return
        try:
            self._forward()
        except Exception as error:  # noqa: BLE001 (after any error it starts again)
            log.warning(
                "forwarding failed, starting again topic=%s error=%s",
                self._topic,
                error_text(error),
            )
            self._closing.wait(RESTART_DELAY_S)

    def _forward(self) -> None:
        """Forward until something fails: the next run reads back what has arrived."""
        properties = librdkafka_properties(self._settings) | {
            "group.id": TopicNames(self._settings).visible_group(self._topic),
            # A static member: a new leader replaces the last one at once.
            "group.instance.id": "leader",
            "enable.auto.commit": False,
            "delayed.delivery.max.ms": self._settings.delayed_topics[self._topic].max_ms,
        }
        with (
            ForwardingProducer(self._settings, self._topic, self._holds_lease) as producer,
            # Closed first: its last commit needs the producer.
            DelayedConsumer(properties) as consumer,
        ):

            def begin(_: DelayedConsumer, partitions: list[TopicPartition]) -> None:
                producer.begin(consumer, partitions)
                # It has committed, so that the partitions are ours, however long that took.
                self._checked_s = time.monotonic()

            consumer.subscribe(
                [self._topic],
                on_assign=begin,
                on_revoke=lambda _, __: producer.hand_over(consumer),
                on_lost=lambda _, __: producer.abandon(),
            )
            try:
                self._forward_due(producer, consumer)
            except Exception as error:
                # Records that were taken and not sent are behind the consumer's position.
                producer.fail(error_text(error))
                if isinstance(error, LeaderPaused):
                    # Before the consumer leaves its group, which takes a while.
                    producer.abandon()
                raise

    def _forward_due(self, producer: "ForwardingProducer", consumer: DelayedConsumer) -> None:
        self._checked_s = committed_s = time.monotonic()
        while not self._closing.is_set():
            messages = consumer.consume(BATCH, WAIT_S)
            self._check_lease()
            for message in messages:
                self._check_lease()
                producer.forward(message)
            producer.check()
            if self._checked_s - committed_s >= COMMIT_INTERVAL_S:
                committed_s = self._checked_s
                producer.commit(consumer)

    def _check_lease(self) -> None:
        """Raise LeaderPaused if another process may lead: the last step before each record."""
        check_lease(self._holds_lease)
        now_s = time.monotonic()
        if now_s - self._checked_s > PAUSE_S:
            raise LeaderPaused("paused for so long that another process may lead")
        self._checked_s = now_s


class ForwardingProducer:
    """Sends due records, and skips those that were sent before. Used by one thread."""

    def __init__(self, settings: Settings, topic: str, holds_lease: Callable[[], bool]) -> None:
        self._copies, self._holds_lease = ForwardedCopies(settings, topic), holds_lease
        self._source, self._destination = topic, visible_topics(settings)[topic]
        properties = librdkafka_properties(settings)
        self._reader = LogReader(properties)
        self._clock = SystemClock()
        self._producer = CopyProducer(
            properties
            | {
                "linger.ms": 0,
                "delivery.timeout.ms": DELIVERY_TIMEOUT_MS,
                "topic.metadata.propagation.max.ms": 1_000,
            }
        )
        #: The offset from which each partition of the destination is to be read back: its end, once
        #: the records found there have been passed.
        self._ends: dict[int, int] = {}
        #: The records found there, by their offsets in the delayed topic, and when the last of them
        #: is due, epoch ms.
        self._found: dict[int, set[int]] = {}
        self._found_until_ms: dict[int, int] = {}
        self._error: str | None = None

    def begin(self, consumer: DelayedConsumer, partitions: Sequence[TopicPartition]) -> None:
        """Read back what was sent after the last commit. Raises KafkaError."""
        # The commit below is of all partitions.
        self._flush()
        notes = consumer.notes()
        for each in partitions:
            target = self._destination, each.partition
            # Nothing is read back from a partition that does not exist.
            end = self._reader.bounds(target)[1] if self._reader.exists(target) else 0
            start = notes.get((each.topic, each.partition), "")
            # A destination that was recreated is shorter than it was.
            begin = min(int(start), end) if start.isdecimal() else end
            sent = self._sent_since(target, begin, end)
            self._found[each.partition] = set(sent)
            # Compared in place of our clock: that of the last leader may be ahead.
            self._found_until_ms[each.partition] = max(sent.values(), default=0)
            self._ends[each.partition] = begin
        # The offset to read back from must be known before the first record is sent.
        consumer.commit(asynchronous=False, notes=self._notes())

    def forward(self, message: DelayedMessage) -> None:
        """Send the record to its destination, or its rejection; do not wait for it."""
        found = self._found.get(message.partition(), set())
        if (message.deliver_after_ms or 0) > self._found_until_ms.get(message.partition(), 0):
            # Everything sent before is due before, and has been passed.
            found.clear()
        if message.offset() in found:
            found.remove(message.offset())
        elif (rejection := self._copies.rejection(message)) is not None:
            self._producer.send(rejection, self._fail)
        else:
            delivery = self._copies.delivery(message)
            self._producer.send(
                delivery, partial(self._retry, message), partial(self._note_arrival, message)
            )

    def check(self) -> None:
        """Raise KafkaError if it is unknown whether some record has arrived."""
        self._producer.serve()
        if self._error:
            raise KafkaError(f"a record may not have arrived ({self._error}): it is read back")

    def commit(self, consumer: DelayedConsumer, *, wait: bool = False) -> None:
        """Commit once everything has arrived, and `wait` for the answer. Raises KafkaError."""
        self._flush()
        consumer.commit(asynchronous=not wait, notes=self._notes())

    def fail(self, error: str) -> None:
        """Commit nothing more: some of what was taken may not be sent."""
        self._error = self._error or error

    def hand_over(self, consumer: DelayedConsumer) -> None:
        """Commit for the next member, unless something failed: it reads back what is unknown."""
        if not self._error:
            self.commit(consumer, wait=True)

    def abandon(self) -> None:
        """Drop what is not sent: another member has the partitions."""
        self._producer.purge()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close(FLUSH_S)
        self._reader.close()

    def _flush(self) -> None:
        """Wait until all records have arrived. Raises KafkaError, LeaderPaused."""
        until_s = time.monotonic() + FLUSH_S
        while (left := self._producer.flush(LEASE_INTERVAL_S)) and time.monotonic() < until_s:
            # What is not sent is dropped then, and not sent after the next leader has sent it.
            check_lease(self._holds_lease)
        self.check()
        if left:
            raise KafkaError(f"{left} records have not arrived in time: they are read back")

    def _notes(self) -> dict[Partition, str]:
        return {(self._source, partition): str(end) for partition, end in self._ends.items()}

    def _sent_since(self, partition: Partition, start: int, end: int) -> dict[int, int]:
        """Return the due times of the records in this range, by their offsets in the source."""
        source = re.escape(self._source)
        ours = re.compile(rf"([0-9a-f]{{12}})-@{source}\.{partition[1]}\.([0-9]{{1,18}})")
        records = chain.from_iterable(self._reader.batches(partition, start, end))
        names = (dict(headers_of(record)).get(H.DUE_ID) or b"" for record in records)
        found = (ours.fullmatch(name.decode(errors="replace")) for name in names)
        return {int(each[2]): int(each[1], 16) for each in found if each}

    def _note_arrival(self, message: DelayedMessage, sent: Message) -> None:
        # Until the records found have been passed, they must be found again.
        if not self._found.get(message.partition()):
            end = self._ends.get(message.partition(), 0)
            self._ends[message.partition()] = max(end, (sent.offset() or 0) + 1)

    def _retry(self, message: DelayedMessage, error: BrokerError) -> None:
        if (reason := PERMANENT.get(error.code())) is None:
            self._fail(error)
        else:
            now_ms = self._clock.now_ms()
            retry = self._copies.retry(message, reason, error.str(), now_ms)
            self._producer.replace(retry, self._fail)

    def _fail(self, error: BrokerError) -> None:
        self._error = error.str()


class ForwardedCopies:
    """Builds the records to send for those of one delayed topic. Sends nothing."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self._names = TopicNames(settings)
        self._max_delay_ms = settings.delayed_topics[topic].max_ms
        self._source, self._destination = topic, visible_topics(settings)[topic]

    def delivery(self, message: DelayedMessage) -> OutboundRecord:
        """Return the record for the visible topic."""
        record = message.due.record
        return OutboundRecord(
            topic=self._destination,
            partition=message.partition(),
            key=record.key(),
            value=record.value(),
            headers=[
                *H.from_texts({H.DUE_AT_MS: _due_ms(message), H.DUE_ID: self._id(message)}),
                *_senders_headers(record),
            ],
        )

    def rejection(self, message: DelayedMessage) -> OutboundRecord | None:
        """Return a record for the rejected ones if the due time is invalid or too far away."""
        record = message.due.record
        headers, time_ms = headers_of(record), deliver_after_ms(record, None)
        text = dict(headers).get(H.DELIVER_AFTER_MS)
        if text is not None and not is_number(text):
            reason = Reason.BAD_DUE_TIME
            detail = "deliver-after-ms is no whole number of milliseconds"
        elif time_ms is not None and delay_ms(record, time_ms) > self._max_delay_ms:
            reason, detail = Reason.BEYOND_LIMIT, f"its delay exceeds {self._max_delay_ms} ms"
        else:
            return None
        error = H.from_texts(
            {H.DUE_ERROR: reason, H.DUE_ERROR_DETAIL: detail, H.DUE_ERROR_SOURCE: place(record)}
        )
        return OutboundRecord(
            topic=self._names.rejected,
            key=record.key(),
            value=record.value(),
            headers=[*headers, *error],
            less=error_only(self._names.rejected, headers, error),
        )

    def retry(
        self, message: DelayedMessage, reason: Reason, error: str, now_ms: int
    ) -> OutboundRecord:
        """Return a record for the retry topic; its dead letter is sent if it is too large."""
        record, headers = message.due.record, _senders_headers(message.due.record)
        address = {
            H.DUE_TOPIC: self._destination,
            H.DUE_PARTITION: message.partition(),
            H.DUE_STATE: record.timestamp()[1],
            H.DUE_AT_MS: _due_ms(message),
            H.DUE_ID: self._id(message),
        }
        detail = f"the visible topic refused it: {error}"
        failure = {H.DUE_ERROR: reason, H.DUE_ERROR_DETAIL: detail}
        attempts = {H.DUE_ATTEMPTS: 1, H.DUE_FAILED_FIRST_MS: now_ms, H.DUE_FAILED_LAST_MS: now_ms}
        fields: dict[str, object] = {**address, **failure, **attempts}
        return OutboundRecord(
            topic=self._names.retry,
            key=record.key(),
            value=record.value(),
            headers=[
                *H.from_texts({name: fields[name] for name in H.SCHEDULED}),
                *headers,
                *H.from_texts(failure),
            ],
            less=dead_letter(self._names.dead_letter, record, headers, fields),
        )

    def _id(self, message: DelayedMessage) -> MessageId:
        unique = f"@{self._source}.{message.partition()}.{message.offset()}"
        return MessageId(due_ms=_due_ms(message), unique=unique)


def _senders_headers(record: Message) -> list[H.Header]:
    """Address headers of an earlier delivery would be taken for those of this one."""
    return H.without(headers_of(record), H.ADDRESS)


def _due_ms(message: DelayedMessage) -> int:
    """A record that is to be delivered at once is due when it was appended."""
    due_ms = message.deliver_after_ms or message.timestamp()[1]
    # A sender may set any timestamp.
    return min(max(due_ms, 0), LATEST_MS)
