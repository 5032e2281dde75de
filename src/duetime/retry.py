"""Retrying a consumer's work later, without holding up what comes behind it.

@retry_later(backoff=exponential("1s", max="1h"), attempts=8)
def handle(message): ...

A message whose handler raises is scheduled to its own topic once more, with its key, value and
headers. After the last attempt it is a dead letter of duetime: `duetime dead list`, `redrive`.
"""

import logging
from collections.abc import Callable
from functools import wraps

from confluent_kafka import Message

from duetime.client import Producer
from duetime.clock import Clock, SystemClock, parse_duration
from duetime.config import Settings, load_settings
from duetime.errors import InvalidMessage, KafkaError, RecordRefused
from duetime.message import (
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_TOPIC,
    MessageId,
    last_words,
)
from duetime.outgoing import OWN_HEADERS, Header, Outgoing, Wanted, new_unique, scheduled
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


def exponential(first: str, *, max: str) -> Backoff:  # noqa: A002 (the plainest word)
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
    """
    retries = Retries(settings or load_settings(), clock or SystemClock(), backoff, attempts)

    def decorate(handle: Handler) -> Handler:
        @wraps(handle)
        def handled(message: Message) -> object:
            try:
                return handle(message)
            except Exception as error:  # noqa: BLE001 (whatever the handler raises)
                retries.take(message, type(error).__name__)
                return None

        return handled

    return decorate


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
        now_ms = self._clock.now_ms()
        failed, first_ms = _failed_before(message, now_ms)
        failed += 1
        try:
            if failed >= self._attempts:
                record = self._dead(message, now_ms, failed, first_ms, what)
            else:
                record = self._again(message, now_ms, failed, first_ms)
            self._send(record)
        except (InvalidMessage, RecordRefused) as error:
            # Whoever sent it did not come this way: it must not be handled for ever.
            why = f"{what}, and it cannot be scheduled: {error.detail}"
            record = self._dead(message, now_ms, failed, first_ms, why)
            self._send(record)
        log.warning("handler failed id=%s attempt=%d error=%s", record.id, failed, what)

    def _again(self, message: Message, now_ms: int, failed: int, first_ms: int) -> Outgoing:
        wanted = Wanted(
            topic=message.topic() or "",
            value=message.value(),
            key=message.key(),
            headers=[*_own(message), (RETRIED, f"{failed}:{first_ms}")],
        )
        due_ms = now_ms + self._backoff(failed)
        return scheduled(wanted, self._settings, due_ms=due_ms, now_ms=now_ms, unique=new_unique())

    def _dead(
        self, message: Message, now_ms: int, failed: int, first_ms: int, what: str
    ) -> Outgoing:
        identity = MessageId(due_ms=now_ms, unique=new_unique())
        words = {
            DUE_TOPIC: message.topic(),
            DUE_AT_MS: now_ms,
            DUE_ID: identity,
            DUE_ERROR: HANDLER_FAILED,
            DUE_ERROR_DETAIL: f"its handler raised {what}",
            DUE_ATTEMPTS: failed,
            DUE_FAILED_FIRST_MS: first_ms,
            DUE_FAILED_LAST_MS: now_ms,
        }
        return Outgoing(
            id=identity,
            topic=TopicNames(self._settings).dead,
            key=message.key(),
            value=message.value(),
            headers=(*_own(message), *last_words(words)),
        )

    def _send(self, record: Outgoing) -> None:
        failures: list[KafkaError] = []

        def reported(error: KafkaError | None, _: str) -> None:
            if error:
                failures.append(error)

        self._producer = self._producer or Producer(self._settings)
        self._producer.send(record, reported)
        self._producer.flush()
        if failures:
            raise failures[0]


def _own(message: Message) -> list[Header]:
    """The sender's headers: without those that duetime gave it on its way."""
    ours = (*OWN_HEADERS, RETRIED)
    return [(name, value) for name, value in headers_of(message) if name not in ours]


def _failed_before(message: Message, now_ms: int) -> tuple[int, int]:
    """How often it failed, and when first; (0, now) where nothing readable says so."""
    text = dict(headers_of(message)).get(RETRIED) or b""
    failed, _, first = text.partition(b":")
    if failed.isdigit() and first.isdigit() and len(text) < 30:
        return int(failed), int(first)
    return 0, now_ms


__all__ = ["Backoff", "exponential", "retry_later"]
