"""Retries of a consumer's work, without holding up the messages behind it.

```
@retry_later(max_attempts=8, min_backoff="1s", max_backoff="1h")
def handle(message): ...
```
A message whose handler raises is scheduled to its topic again, with its key, value and headers.
After the last attempt it becomes a dead letter of duetime: see `duetime dead-letters`.
"""

import hashlib
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Self

from confluent_kafka import Message

from duetime.client.producer import Producer
from duetime.core import headers as H
from duetime.core.clock import Clock, SystemClock, parse_duration
from duetime.core.errors import ClientFailed, InvalidMessage, KafkaError, RecordRefused
from duetime.core.messages import UNIQUE_PATTERN, MessageId
from duetime.core.records import RESERVED_HEADERS, IntakeRecord, MessageSpec, message_record
from duetime.core.settings import Settings, load_settings
from duetime.core.topics import TopicNames
from duetime.kafka.producer import dead_letter, place
from duetime.kafka.range_reader import headers_of

log = logging.getLogger(__name__)

#: Header of a retried message: number of failed attempts, and when the first one failed, epoch ms.
RETRIED = "due-retried"

#: `due-error` of a dead letter whose handler raised.
HANDLER_FAILED = "handler-failed"

Handler = Callable[[Message], object]

#: Maps the number of failed attempts to the delay of the next one, in ms.
Backoff = Callable[[int], int]


def exponential(first: str, *, max: str = "1h") -> Backoff:  # noqa: A002 (the plainest word)
    """Return a back-off of `first`, doubled with each attempt up to `max`; such as `1s`, `1h`."""
    first_ms, max_ms = parse_duration(first), parse_duration(max)
    # 2**64 ms is longer than any duration: no larger power is needed.
    return lambda attempts: min(first_ms << min(attempts - 1, 64), max_ms)


def retry_later(  # noqa: PLR0913 (an option each)
    *,
    max_attempts: int,
    min_backoff: str = "1s",
    max_backoff: str = "1h",
    backoff: Backoff | None = None,
    settings: Settings | None = None,
    clock: Clock | None = None,
) -> Callable[[Handler], Handler]:
    """Wrap a handler of confluent-kafka's messages, so that a message that fails is retried.

    The message gets at most `max_attempts` attempts, the first one included. The delay of a retry
    begins with `min_backoff` and doubles with each attempt, up to `max_backoff`: durations such as
    `1s` and `1h`. In place of these, `backoff` maps the number of failed attempts to ms.

    The wrapped handler returns when the message is handled, scheduled again, or a dead letter.
    Commit its offset only then: after a crash it is handled again, so there may be more attempts.
    It raises KafkaError if Kafka did not take the retry (do not commit), and TypeError for a
    message whose key or value is deserialised, and for a handler that is a coroutine function.
    """
    backoff = backoff or exponential(min_backoff, max=max_backoff)
    retries = Retries(settings or load_settings(), clock or SystemClock(), backoff, max_attempts)

    def decorate(handle: Handler) -> Handler:
        if inspect.iscoroutinefunction(handle):
            raise _awaitable_error(handle)

        @wraps(handle)
        def handle_or_retry(message: Message) -> object:
            _check_raw(message)
            try:
                result = handle(message)
            except Exception as error:  # noqa: BLE001 (whatever the handler raises)
                retries.handle_failure(message, type(error).__name__)
                return None
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    # Otherwise Python warns that it was never awaited.
                    result.close()
                raise _awaitable_error(handle)
            return result

        return handle_or_retry

    return decorate


class Retries:
    """Decides and sends what becomes of a message whose handler has failed."""

    def __init__(
        self, settings: Settings, clock: Clock, backoff: Backoff, max_attempts: int
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._backoff = backoff
        self._max_attempts = max_attempts
        self._producer: Producer | None = None

    def handle_failure(self, message: Message, error: str) -> None:
        """Retry the message, or make it a dead letter; return when Kafka has it."""
        failure = HandlerFailure.of(message, self._clock.now_ms())
        if failure.attempts >= self._max_attempts:
            self._send_dead_letter(failure, error)
            return
        due_ms = failure.due_ms(self._backoff(failure.attempts))
        try:
            identity = self._send(self._retry_record(failure, due_ms))
        except (InvalidMessage, RecordRefused) as refused:
            # Its sender did not use duetime, and duetime cannot carry it: do not handle it forever.
            detail = f", and it cannot be scheduled: {refused.detail}"
            self._send_dead_letter(failure, error, detail)
            return
        log.warning(
            "scheduled retry id=%s attempt=%d delay_ms=%d error=%s",
            *(identity, failure.attempts, due_ms - failure.at_ms, error),
        )

    def _retry_record(self, failure: "HandlerFailure", due_ms: int) -> IntakeRecord:
        message, retried = failure.message, f"{failure.attempts}:{failure.first_ms}"
        spec = MessageSpec(
            topic=message.topic() or "",
            value=message.value(),
            key=message.key(),
            headers=[*_sender_headers(message), (RETRIED, retried)],
        )
        return message_record(
            spec, self._settings, due_ms=due_ms, now_ms=failure.at_ms, unique=failure.unique
        )

    def _send_dead_letter(self, failure: "HandlerFailure", error: str, detail: str = "") -> None:
        """Write a dead letter with as much of the message as Kafka takes."""
        message = failure.message
        identity = MessageId(due_ms=failure.at_ms, unique=failure.unique)
        words = {
            H.DUE_TOPIC: message.topic(),
            H.DUE_AT_MS: failure.at_ms,
            H.DUE_ID: identity,
            H.DUE_ERROR: HANDLER_FAILED,
            H.DUE_ERROR_DETAIL: f"its handler raised {error}{detail}",
            H.DUE_ATTEMPTS: failure.attempts,
            H.DUE_FAILED_FIRST_MS: failure.first_ms,
            H.DUE_FAILED_LAST_MS: failure.at_ms,
        }
        topic = TopicNames(self._settings).dead_letter
        copy = dead_letter(topic, message, _sender_headers(message), words)
        while True:
            try:
                self._send(
                    IntakeRecord(
                        id=identity,
                        topic=copy.topic,
                        key=copy.key,
                        value=copy.value,
                        headers=tuple(copy.headers),
                    )
                )
            except RecordRefused:
                if copy.less is None:
                    raise
                copy = copy.less
            else:
                break
        log.warning(
            "wrote dead letter id=%s attempts=%d error=%s", identity, failure.attempts, error
        )

    def _send(self, record: IntakeRecord) -> MessageId:
        errors: list[KafkaError] = []
        producer = self._producer = self._producer or Producer(self._settings)
        try:
            producer.send(record, lambda error, _: errors.extend([error] if error else []))
            producer.flush()
            if errors:
                raise errors[0]
        except ClientFailed:
            # It sends nothing from now on: the next failure gets another one.
            self._producer = None
            raise
        return record.id


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailure:
    """One failed attempt to handle a message."""

    message: Message = field(repr=False)
    #: Epoch ms.
    at_ms: int
    #: Number of failed attempts, this one included.
    attempts: int
    #: When the first one failed, epoch ms.
    first_ms: int

    @classmethod
    def of(cls, message: Message, now_ms: int) -> Self:
        """Read the earlier failures from the header, if it is one of ours."""
        text = dict(headers_of(message)).get(RETRIED) or b""
        attempts, _, first = text.partition(b":")
        is_ours = attempts.isdigit() and first.isdigit() and len(text) < 30
        return cls(
            message=message,
            at_ms=now_ms,
            attempts=int(attempts) + 1 if is_ours else 1,
            first_ms=int(first) if is_ours else now_ms,
        )

    @property
    def unique(self) -> str:
        """Idempotency key of the retry: a record that is handled again after a crash repeats it."""
        unique = f"retried:{place(self.message).replace('/', '.')}:{self.attempts}"
        if re.match(UNIQUE_PATTERN, unique):
            return unique
        return hashlib.sha256(unique.encode()).hexdigest()

    def due_ms(self, backoff_ms: int) -> int:
        """Return when the retry is due: counted from the record's timestamp, to be repeatable.

        If that differs from now by more than half of the back-off, it is counted from now, so that
        no delay is shorter than that half.
        """
        _, sent_ms = self.message.timestamp()
        is_fresh = abs(self.at_ms - sent_ms) <= backoff_ms // 2
        return (sent_ms if is_fresh else self.at_ms) + backoff_ms


def _awaitable_error(handle: Handler) -> TypeError:
    return TypeError(
        f"{handle!r} is a coroutine function, or returns something to be awaited, and has done "
        "nothing when it returns: let a plain function run it, with asyncio.run"
    )


def _check_raw(message: Message) -> None:
    """Raise TypeError if the bytes of the message are lost, as it is sent again as it came."""
    for part, payload in (("key", message.key()), ("value", message.value())):
        if not isinstance(payload, bytes | None):
            raise TypeError(
                f"the {part} of a message is of type {type(payload).__name__}, and a retry sends "
                "the bytes that came: take messages from a Consumer (not a DeserializingConsumer), "
                "and let the handler deserialise them"
            )


def _sender_headers(message: Message) -> list[H.Header]:
    return H.without(headers_of(message), (*RESERVED_HEADERS, RETRIED))
