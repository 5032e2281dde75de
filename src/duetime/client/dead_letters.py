"""Dead letters, which are listed and redriven, and rejected records, which are listed.

A dead letter is redriven once: its message and a note of its offset are one transaction, and of
two that redrive at a time the first is fenced off. The notes are in the redrive log, with the
offset as key. The message goes to the intake topic for transactions, where an open transaction
delays no other sender.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

from confluent_kafka import Message

from duetime.core import headers as H
from duetime.core.clock import Clock
from duetime.core.errors import InvalidMessage, KafkaError, Reason, UnknownMessage
from duetime.core.messages import MessageId
from duetime.core.records import RESERVED_HEADERS, IntakeRecord, MessageSpec, message_record
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import OffsetRange, Offsets
from duetime.kafka.producer import transaction
from duetime.kafka.range_reader import RangeReader, headers_of

#: Maximum number and bytes of the letters in one transaction, which must be short.
BATCH_LETTERS = 500
BATCH_BYTES = 16 * 1024 * 1024

#: The headers that intake appends to a rejected record, in this order.
REJECTED_HEADERS = (H.DUE_ERROR, H.DUE_ERROR_DETAIL, H.DUE_ERROR_SOURCE)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that could not be delivered, and why. Instants are in epoch ms."""

    #: Its offset in the topic of dead letters, which identifies it.
    offset: int
    topic: str
    partition: int | None
    #: Name of the destination's cluster; None is the cluster of duetime.
    cluster: str | None
    due_ms: int
    id: str
    reason: str
    detail: str
    attempts: int
    #: When the first and the last attempt failed.
    first_ms: int
    last_ms: int
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    #: The sender's headers.
    headers: tuple[H.Header, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A record that intake has rejected, and why."""

    #: Its offset in the topic of rejected records, which identifies it.
    offset: int
    #: When it was rejected, epoch ms.
    at_ms: int
    reason: str
    detail: str
    #: Topic/partition/offset of the original record.
    source: str
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    #: The sender's headers.
    headers: tuple[H.Header, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Conditions on a dead letter; None is no condition."""

    topic: str | None = None
    reason: str | None = None
    #: Earliest instant of the last failure, epoch ms.
    since_ms: int | None = None
    offsets: frozenset[int] | None = None
    #: Returns whether the caller has access to a topic on a cluster; None is this cluster.
    allows: Callable[[str, str | None], bool] | None = None

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether the letter meets all conditions."""
        return (
            self.topic in (None, letter.topic)
            and self.reason in (None, letter.reason)
            and (self.since_ms is None or letter.last_ms >= self.since_ms)
            and (self.offsets is None or letter.offset in self.offsets)
            and (self.allows is None or self.allows(letter.topic, letter.cluster))
        )


class DeadLetters:
    """The dead letters of a cluster, or of a queue, that were not redriven.

    Every method raises KafkaError. The constructor raises ConfigError for an unknown queue.
    """

    def __init__(self, settings: Settings, queue: str | None = None) -> None:
        self._settings = settings
        self._names = TopicNames(settings)
        self._topic = settings.queue(queue).dead_topic(queue) if queue else self._names.dead_letter
        #: Prefix of an offset in the redrive log, which is one for all topics.
        self._prefix = f"{queue}." if queue else ""

    def latest(self, wanted: DeadLetterFilter, limit: int) -> list[DeadLetter]:
        """Return the last `limit` letters that match, the oldest first."""
        return list(deque(self.select(wanted), maxlen=limit))

    def select(self, wanted: DeadLetterFilter) -> Iterator[DeadLetter]:
        """Yield the letters that match: their payloads may not fit in memory together."""
        redriven = self._redriven_offsets()
        return (each for each in self._all_letters(wanted) if each.offset not in redriven)

    def count(self, wanted: DeadLetterFilter) -> int:
        """Return the number of letters that match."""
        return sum(1 for _ in self.select(wanted))

    def find(self, offset: int) -> DeadLetter:
        """Return the letter at this offset. Raises UnknownMessage."""
        for letter in self.select(DeadLetterFilter(offsets=frozenset((offset,)))):
            return letter
        raise unknown_dead_letter([offset])

    def missing(self, offsets: Iterable[int]) -> list[int]:
        """Return the offsets without a letter, or with one that was redriven."""
        asked = frozenset(offsets)
        return sorted(
            asked - {each.offset for each in self.select(DeadLetterFilter(offsets=asked))}
        )

    def redrive(self, wanted: DeadLetterFilter, clock: Clock) -> int:
        """Schedule the messages of the letters that match, due now; return their number.

        A letter that cannot be scheduled under the present settings is skipped, and logged.
        """
        redriven, letters = 0, self._all_letters(wanted)
        try:
            while batch := self._redrive_batch(letters, clock):
                redriven += batch
        except KafkaError as error:
            raise KafkaError(f"redriven {redriven:,}, then: {error.detail}") from error
        return redriven

    def _redrive_batch(self, letters: Iterator[DeadLetter], clock: Clock) -> int:
        # The transaction fences off another redrive. Its notes are read only then.
        with transaction(self._settings, "redrive") as send:
            redriven, count, size = self._redriven_offsets(), 0, 0
            records: list[IntakeRecord] = []
            for letter in letters:
                if letter.offset in redriven:
                    continue
                if pair := self._message_and_note(letter, clock.now_ms()):
                    records += pair
                    count, size = count + 1, size + len(letter.value or b"")
                if count >= BATCH_LETTERS or size >= BATCH_BYTES:
                    break
            send(records)
            return count

    def _message_and_note(self, letter: DeadLetter, now_ms: int) -> tuple[IntakeRecord, ...]:
        """Return the records that redrive the letter; none if it cannot be scheduled."""
        if letter.reason == Reason.RECORD_DELETED:
            log.warning("skipped dead letter offset=%d: its record is deleted", letter.offset)
            return ()
        spec = MessageSpec(
            topic=letter.topic,
            value=letter.value,
            key=letter.key,
            # Other envelopes pass on headers that a sender of this one may not give.
            headers=H.without(letter.headers, RESERVED_HEADERS),
            partition=letter.partition,
            cluster=letter.cluster,
        )
        key = f"{self._prefix}{letter.offset}"
        unique = f"redriven.{key}"
        try:
            message = message_record(
                spec, self._settings, due_ms=now_ms, now_ms=now_ms, unique=unique
            )
        except InvalidMessage as error:
            log.warning("skipped dead letter offset=%d: %s", letter.offset, error)
            return ()
        note = IntakeRecord(
            id=message.id, topic=self._names.redrive_log, key=key.encode(), value=None, headers=()
        )
        return replace(message, topic=self._names.transactional), note

    def _all_letters(self, wanted: DeadLetterFilter) -> Iterator[DeadLetter]:
        """Yield the letters that match, with those that were redriven."""
        for record in _records(self._settings, _all_of(self._settings, self._topic)):
            letter = _dead_letter(record)
            if letter and wanted.matches(letter):
                yield letter

    def _redriven_offsets(self) -> set[int]:
        prefix, notes = self._prefix.encode(), _all_of(self._settings, self._names.redrive_log)
        keys = (record.key() or b"" for record in _records(self._settings, notes))
        offsets = (key.removeprefix(prefix) for key in keys if key.startswith(prefix))
        return {int(offset) for offset in offsets if offset.isdigit()}


def unknown_dead_letter(offsets: Iterable[int]) -> UnknownMessage:
    """Return the error for offsets without a letter, or with one that was redriven."""
    return UnknownMessage(
        f"no dead letter at offset {', '.join(map(str, offsets))}, or it was redriven"
    )


def latest_rejected(settings: Settings, limit: int) -> Iterator[Rejected]:
    """Yield the last `limit` rejected records, the oldest first, and read no others.

    Their payloads may not fit in memory together. Raises KafkaError.
    """
    every = _all_of(settings, TopicNames(settings).rejected)
    return _rejected_records(settings, replace(every, start=max(every.start, every.end - limit)))


def find_rejected(settings: Settings, offset: int) -> Rejected:
    """Return the rejected record at this offset. Raises UnknownMessage, KafkaError."""
    every = _all_of(settings, TopicNames(settings).rejected)
    if every.start <= offset < every.end:
        one = replace(every, start=offset, end=offset + 1)
        for found in _rejected_records(settings, one):
            return found
    raise UnknownMessage(f"no rejected record at offset {offset}")


def _rejected_records(settings: Settings, wanted: OffsetRange) -> Iterator[Rejected]:
    for record in _records(settings, wanted):
        if (split := H.split(headers_of(record), REJECTED_HEADERS, errors="replace")) is not None:
            headers, words = split
            yield Rejected(
                offset=record.offset() or 0,
                at_ms=record.timestamp()[1],
                reason=words[H.DUE_ERROR],
                detail=words[H.DUE_ERROR_DETAIL],
                source=words[H.DUE_ERROR_SOURCE],
                key=record.key(),
                value=record.value(),
                headers=tuple(headers),
            )


def _all_of(settings: Settings, topic: str) -> OffsetRange:
    """Return the range of all records in a topic of one partition. Raises KafkaError."""
    place = topic, 0
    with closing(Offsets(settings)) as offsets:
        return OffsetRange(*place, offsets.starts([place])[place], offsets.ends([place])[place])


def _records(settings: Settings, wanted: OffsetRange) -> Iterator[Message]:
    if wanted.count:
        with RangeReader(settings) as reader:
            yield from reader.records([wanted])


def _dead_letter(record: Message) -> DeadLetter | None:
    """Parse a dead letter; None if the record is none of ours."""
    try:
        if (split := H.split(headers_of(record), H.DEAD_LETTER)) is None:
            return None
        headers, words = split
        return DeadLetter(
            offset=record.offset() or 0,
            topic=words[H.DUE_TOPIC],
            partition=int(words[H.DUE_PARTITION]) if words[H.DUE_PARTITION] else None,
            cluster=words[H.DUE_CLUSTER] or None,
            due_ms=int(words[H.DUE_AT_MS] or 0),
            id=str(MessageId.parse(words[H.DUE_ID])),
            reason=words[H.DUE_ERROR],
            detail=words[H.DUE_ERROR_DETAIL],
            attempts=int(words[H.DUE_ATTEMPTS] or 0),
            first_ms=int(words[H.DUE_FAILED_FIRST_MS] or 0),
            last_ms=int(words[H.DUE_FAILED_LAST_MS] or 0),
            key=record.key(),
            value=record.value(),
            headers=tuple(headers),
        )
    except ValueError:
        return None
