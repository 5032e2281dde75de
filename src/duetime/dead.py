"""Dead letters: what could not be delivered, looked at, and brought back.

A letter is brought back once: the message and a note that it was sent are one transaction, and of
two that redrive at once one fails. The notes are in a topic of their own, the offset as their key.
The message goes to the intake topic for transactions, where an open one delays nobody else.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from confluent_kafka import Message

from duetime.clock import Clock
from duetime.config import Settings
from duetime.errors import InvalidMessage, KafkaError, Reason, UnknownMessage
from duetime.message import (
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_CLUSTER,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_TOPIC,
    LAST_WORDS,
    MessageId,
    headers_without,
)
from duetime.outgoing import OWN_HEADERS, Outgoing, Wanted, scheduled
from duetime.stores.offsets import whole
from duetime.stores.records import Header, RangeReader, headers_of
from duetime.topics import TopicNames
from duetime.transaction import transaction

#: How many letters one transaction brings back, and of how many bytes: it may not last long.
AT_ONCE = 500
BYTES_AT_ONCE = 16 * 1024 * 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that could not be delivered, and why."""

    #: Its place in the topic of dead letters: what it is called by.
    number: int
    topic: str
    partition: int | None
    #: The cluster that it is for; None is this one.
    cluster: str | None
    due_ms: int
    #: The id under which it waited.
    id: str
    reason: str
    detail: str
    attempts: int
    #: When it failed first and last, epoch ms.
    first_ms: int
    last_ms: int
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    #: The sender's own.
    headers: tuple[Header, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which letters are meant; None is any."""

    topic: str | None = None
    reason: str | None = None
    #: Those that failed last at this instant or later, epoch ms.
    since_ms: int | None = None
    numbers: frozenset[int] | None = None
    #: Whether who asks may know of a topic on a cluster; None is this cluster.
    allows: Callable[[str, str | None], bool] | None = None

    def has(self, letter: DeadLetter) -> bool:
        """Whether this one is meant."""
        return (
            self.topic in (None, letter.topic)
            and self.reason in (None, letter.reason)
            and (self.since_ms is None or letter.last_ms >= self.since_ms)
            and (self.numbers is None or letter.number in self.numbers)
            and (self.allows is None or self.allows(letter.topic, letter.cluster))
        )


class DeadLetters:
    """The dead letters of a cluster, or of a queue, that were not brought back. Raises KafkaError.

    Raises ConfigError where there is no such queue.
    """

    def __init__(self, settings: Settings, queue: str | None = None) -> None:
        self._settings = settings
        self._names = TopicNames(settings)
        self._topic = settings.queue(queue).dead_topic(queue) if queue else self._names.dead
        #: What a letter's number is called by where those of all topics are.
        self._mark = f"{queue}." if queue else ""

    def latest(self, selection: Selection, limit: int) -> list[DeadLetter]:
        """The last ones to have died, of those that are meant, the oldest of them first."""
        return list(deque(self.chosen(selection), maxlen=limit))

    def chosen(self, selection: Selection) -> Iterator[DeadLetter]:
        """Those that are meant, one after the other: all payloads at once may be too much."""
        gone = self._redriven()
        return (letter for letter in self._ever(selection) if letter.number not in gone)

    def count(self, selection: Selection) -> int:
        """How many are meant."""
        return sum(1 for _ in self.chosen(selection))

    def find(self, number: int) -> DeadLetter:
        """The one with this number. Raises UnknownMessage."""
        for letter in self.chosen(Selection(numbers=frozenset((number,)))):
            return letter
        raise UnknownMessage(f"no dead letter has the number {number}, or it was brought back")

    def absent(self, numbers: Iterable[int]) -> list[int]:
        """Those of the numbers that no letter has, or one that was brought back."""
        asked = frozenset(numbers)
        return sorted(asked - {each.number for each in self.chosen(Selection(numbers=asked))})

    def redrive(self, selection: Selection, clock: Clock) -> int:
        """Send those that are meant once more, due now; returns how many.

        A letter that cannot be sent under the present settings is passed over, and logged.
        """
        sent, letters = 0, self._ever(selection)
        try:
            while again := self._brought_back(letters, clock):
                sent += again
        except KafkaError as error:
            raise KafkaError(f"brought back {sent:,}, then: {error.detail}") from error
        return sent

    def _brought_back(self, letters: Iterator[DeadLetter], clock: Clock) -> int:
        """Bring some of them back; returns how many."""
        # Whoever is at it at the same time is fenced off, and what it sent is noted, before the
        # first letter is read.
        with transaction(self._settings, "redrive") as send:
            gone, sent, size = self._redriven(), 0, 0
            records: list[Outgoing] = []
            for letter in letters:
                if letter.number not in gone and (again := self._again(letter, clock.now_ms())):
                    records += again
                    sent, size = sent + 1, size + len(letter.value or b"")
                if sent >= AT_ONCE or size >= BYTES_AT_ONCE:
                    break
            send(records)
            return sent

    def _again(self, letter: DeadLetter, now_ms: int) -> Sequence[Outgoing]:
        """The message anew, and the note; nothing of what cannot be sent."""
        if letter.reason == Reason.GONE:
            log.warning("not brought back number=%d: nothing is left of it", letter.number)
            return ()
        # What a sender may not give was passed on nevertheless, by other envelopes.
        headers = headers_without(letter.headers, OWN_HEADERS)
        wanted = Wanted(
            topic=letter.topic,
            value=letter.value,
            key=letter.key,
            headers=headers,
            partition=letter.partition,
            cluster=letter.cluster,
        )
        number = f"{self._mark}{letter.number}"
        unique = f"redriven.{number}"
        try:
            message = scheduled(wanted, self._settings, due_ms=now_ms, now_ms=now_ms, unique=unique)
        except InvalidMessage as error:
            log.warning("not brought back number=%d: %s", letter.number, error)
            return ()
        note = Outgoing(
            id=message.id,
            topic=self._names.redriven,
            key=number.encode(),
            value=None,
            headers=(),
        )
        return replace(message, topic=self._names.transactional), note

    def _ever(self, selection: Selection) -> Iterator[DeadLetter]:
        """Those that were brought back included."""
        for record in self._records(self._topic):
            letter = _letter(record)
            if letter and selection.has(letter):
                yield letter

    def _redriven(self) -> set[int]:
        mark = self._mark.encode()
        keys = (record.key() or b"" for record in self._records(self._names.redriven))
        numbers = (key.removeprefix(mark) for key in keys if key.startswith(mark))
        return {int(number) for number in numbers if number.isdigit()}

    def _records(self, topic: str) -> Iterator[Message]:
        everything = whole(self._settings, topic)
        with RangeReader(self._settings) as reader:
            yield from reader.records([everything])


def _letter(record: Message) -> DeadLetter | None:
    """None where the record is no dead letter of ours."""
    headers = headers_of(record)
    own, last = headers[: -len(LAST_WORDS)], headers[-len(LAST_WORDS) :]
    if tuple(name for name, _ in last) != LAST_WORDS:
        return None
    try:
        words = {name: (value or b"").decode() for name, value in last}
        return DeadLetter(
            number=record.offset() or 0,
            topic=words[DUE_TOPIC],
            partition=int(words[DUE_PARTITION]) if words[DUE_PARTITION] else None,
            cluster=words[DUE_CLUSTER] or None,
            due_ms=int(words[DUE_AT_MS] or 0),
            id=str(MessageId.parse(words[DUE_ID])),
            reason=words[DUE_ERROR],
            detail=words[DUE_ERROR_DETAIL],
            attempts=int(words[DUE_ATTEMPTS] or 0),
            first_ms=int(words[DUE_FAILED_FIRST_MS] or 0),
            last_ms=int(words[DUE_FAILED_LAST_MS] or 0),
            key=record.key(),
            value=record.value(),
            headers=tuple(own),
        )
    except ValueError:
        return None
