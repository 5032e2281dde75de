"""Retrying a consumer's work later, without holding up what comes behind it.

@retry_later(backoff=exponential("1s", max="1h"), attempts=8)
def handle(message): ...

A message whose handler raises is scheduled to its own topic once more, with its key, value and
headers. After the last attempt it is a dead letter of duetime: `duetime dead list`, `redrive`.
"""

import hashlib
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

from confluent_kafka import Message

from duetime.client import Producer
from duetime.clock import Clock, SystemClock, parse_duration
from duetime.config import Settings, load_settings
from duetime.copies import Copy, dead_letter, place
from duetime.errors import ClientFailed, InvalidMessage, KafkaError, RecordRefused
from duetime.message import (
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_TOPIC,
    UNIQUE_PATTERN,
    MessageId,
    headers_without,
)
from duetime.outgoing import OWN_HEADERS, Header, Outgoing, Wanted, scheduled
from duetime.stores.records import headers_of
from duetime.topics import TopicNames

log = logging.getLogger(__name__)

#: On a message that is tried again: how often it was, and when that failed first, epoch ms.
RETRIED = "due-retried"

#: Why a dead letter of a handler died.
HANDLER_FAILED = "handler-failed"

Handler = Callable[[Message], object]

#: How long to wait after so many failed attempts, in ms.
Backoff = Callable[[int], int]


def exponential(first: str, *, max: str = "1h") -> Backoff:  # noqa: A002 (the plainest word)
    """`first`, then twice as long each time, up to `max`: durations such as `1s` and `1h`."""
    first_ms, longest_ms = parse_duration(first), parse_duration(max)
    # 2 to the 64th ms is longer than any: no larger power need be made.
    return lambda attempts: min(first_ms << min(attempts - 1, 64), longest_ms)


def retry_later(
    *,
    backoff: Backoff,
    attempts: int,
    settings: Settings | None = None,
    clock: Clock | None = None,
) -> Callable[[Handler], Handler]:
    """Wrap a handler of confluent-kafka's messages, so that its exceptions are dealt with.

    What it returns is called with a message, and returns when that is done with: handled, or
    scheduled anew, or dead. Only then commit its offset: after a crash it is handled again, so it
    may be tried more often. Raises KafkaError where Kafka did not take it: do not commit then.

    Raises TypeError for a coroutine function: it has done nothing yet when it returns. What it
    returns raises it where the handler has returned something to be awaited, and for a message
    whose key or value was deserialised, which the handler does not get.
    """
    retries = Retries(settings or load_settings(), clock or SystemClock(), backoff, attempts)

    def decorate(handle: Handler) -> Handler:
        if inspect.iscoroutinefunction(handle):
            raise _not_plain(handle)

        @wraps(handle)
        def handled(message: Message) -> object:
            _check_raw(message)
            try:
                result = handle(message)
            except Exception as error:  # noqa: BLE001 (whatever the handler raises)
                retries.take(message, type(error).__name__)
                return None
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    # Else Python warns that nobody has awaited it.
                    result.close()
                raise _not_plain(handle)
            return result

        return handled

    return decorate


def _not_plain(handle: Handler) -> TypeError:
    return TypeError(
        f"{handle!r} is a coroutine function, or returns something to be awaited, and has done "
        "nothing yet when it returns: let a plain function run it, with asyncio.run"
    )


def _check_raw(message: Message) -> None:
    """Raises TypeError: the bytes that were sent cannot be had back from what was made of them."""
    for what, payload in (("key", message.key()), ("value", message.value())):
        if not isinstance(payload, bytes | None):
            raise TypeError(
                f"the {what} of a message is of type {type(payload).__name__}, and what fails is "
                "sent again as it came: take messages from a Consumer (no DeserializingConsumer), "
                "and let the handler deserialise them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a handler has failed for."""

    message: Message = field(repr=False)
    #: When, epoch ms.
    at_ms: int
    #: How often it has, this time included.
    attempts: int
    #: When it did for the first time, epoch ms.
    first_ms: int

    @property
    def place(self) -> str:
        """Where the record is."""
        return place(self.message)

    @property
    def unique(self) -> str:
        """The same each time that this record fails: after a crash, it may be handled again."""
        unique = f"retried:{self.place.replace('/', '.')}:{self.attempts}"
        is_short = re.match(UNIQUE_PATTERN, unique)
        return unique if is_short else hashlib.sha256(unique.encode()).hexdigest()

    def due_ms(self, backoff_ms: int) -> int:
        """When it is due again: the same, too, unless the record is older than half the back-off.

        From then on it is counted from now, so that no wait is shorter than that half.
        """
        _, sent_ms = self.message.timestamp()
        is_fresh = abs(self.at_ms - sent_ms) <= backoff_ms // 2
        return (sent_ms if is_fresh else self.at_ms) + backoff_ms


class Retries:
    """What becomes of messages whose handler failed."""

    def __init__(self, settings: Settings, clock: Clock, backoff: Backoff, attempts: int) -> None:
        self._settings = settings
        self._clock = clock
        self._backoff = backoff
        self._attempts = attempts
        self._producer: Producer | None = None

    def take(self, message: Message, what: str) -> None:
        """Schedule it anew, or make it a dead letter; returns when Kafka has it."""
        failure = _failure(message, self._clock.now_ms())
        identity = self._done_with(failure, what)
        log.warning("handler failed id=%s attempt=%d error=%s", identity, failure.attempts, what)

    def _done_with(self, failure: Failure, what: str) -> MessageId:
        if failure.attempts >= self._attempts:
            return self._bury(failure, what)
        try:
            return self._send(self._again(failure))
        except (InvalidMessage, RecordRefused) as error:
            # Whoever sent it did not come this way: it must not be handled for ever.
            return self._bury(failure, f"{what}, and it cannot be scheduled: {error.detail}")

    def _again(self, failure: Failure) -> Outgoing:
        message = failure.message
        wanted = Wanted(
            topic=message.topic() or "",
            value=message.value(),
            key=message.key(),
            headers=[*_own(message), (RETRIED, f"{failure.attempts}:{failure.first_ms}")],
        )
        return scheduled(
            wanted,
            self._settings,
            due_ms=failure.due_ms(self._backoff(failure.attempts)),
            now_ms=failure.at_ms,
            unique=failure.unique,
        )

    def _bury(self, failure: Failure, what: str) -> MessageId:
        """Make it a dead letter, with as much of it as Kafka takes."""
        message, detail = failure.message, f"its handler raised {what}"
        topic, words = TopicNames(self._settings).dead, _words(failure, detail)
        copy = dead_letter(topic, message, _own(message), words)
        while copy.less is not None:
            try:
                return self._send(_outgoing(failure, copy))
            except RecordRefused:
                copy = copy.less
        return self._send(_outgoing(failure, copy))

    def _send(self, record: Outgoing) -> MessageId:
        failures: list[KafkaError] = []

        def reported(error: KafkaError | None, _: str) -> None:
            if error:
                failures.append(error)

        producer = self._producer = self._producer or Producer(self._settings)
        try:
            producer.send(record, reported)
            producer.flush()
            if failures:
                raise failures[0]
        except ClientFailed:
            # It takes nothing any more: who comes next gets another one.
            self._producer = None
            raise
        return record.id


def _words(failure: Failure, detail: str) -> dict[str, object]:
    """What its dead letter says."""
    return {
        DUE_TOPIC: failure.message.topic(),
        DUE_AT_MS: failure.at_ms,
        DUE_ID: MessageId(due_ms=failure.at_ms, unique=failure.unique),
        DUE_ERROR: HANDLER_FAILED,
        DUE_ERROR_DETAIL: detail,
        DUE_ATTEMPTS: failure.attempts,
        DUE_FAILED_FIRST_MS: failure.first_ms,
        DUE_FAILED_LAST_MS: failure.at_ms,
    }


def _outgoing(failure: Failure, copy: Copy) -> Outgoing:
    return Outgoing(
        id=MessageId(due_ms=failure.at_ms, unique=failure.unique),
        topic=copy.topic,
        key=copy.key,
        value=copy.value,
        headers=tuple(copy.headers),
    )


def _own(message: Message) -> list[Header]:
    """The sender's headers: without those that duetime gave it on its way."""
    return headers_without(headers_of(message), (*OWN_HEADERS, RETRIED))


def _failure(message: Message, now_ms: int) -> Failure:
    """With how often it failed before, where something readable says so."""
    text = dict(headers_of(message)).get(RETRIED) or b""
    failed, _, first = text.partition(b":")
    is_told = failed.isdigit() and first.isdigit() and len(text) < 30
    return Failure(
        message=message,
        at_ms=now_ms,
        attempts=int(failed) + 1 if is_told else 1,
        first_ms=int(first) if is_told else now_ms,
    )


__all__ = ["Backoff", "exponential", "retry_later"]
