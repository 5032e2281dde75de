"""Retries of one reader's group: when a record is to come again, and what dies.

Decides only; nothing here sends.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from confluent_kafka import Message

from duetime.backoff import doubled_ms
from duetime.clock import duration_ms
from duetime.errors import Reason
from duetime.message import (
    ADDRESS,
    DELIVER_AFTER_MS,
    DELIVER_GROUP,
    DELIVER_RETRY,
    DUE_AT_MS,
    DUE_ATTEMPTS,
    DUE_ERROR,
    DUE_ERROR_DETAIL,
    DUE_FAILED_FIRST_MS,
    DUE_FAILED_LAST_MS,
    DUE_ID,
    DUE_PARTITION,
    DUE_TOPIC,
    MessageId,
    headers_without,
)
from duetime.outgoing import Header
from duetime.stores.records import headers_of

#: The headers that a retry has of its own.
OWN = (DELIVER_AFTER_MS, DELIVER_GROUP, DELIVER_RETRY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How often a group tries a record, and how long it waits in between."""

    group: str
    #: Tries in all, the first one included.
    attempts: int = 5
    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000

    def wait_ms(self, attempts: int, retry_in: timedelta | None) -> int:
        """How long the wait after so many tries is: what was asked for, or the back-off."""
        if retry_in is not None:
            return max(0, duration_ms(retry_in))
        return doubled_ms(attempts, self.backoff_ms, self.backoff_max_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a record says about the tries before."""

    attempts: int = 0
    first_failed_ms: int | None = None
    #: The offset of the record that was put off first.
    first_offset: int | None = None

    @classmethod
    def of(cls, record: Message) -> Self:
        """Read it from the headers; what is not ours says nothing."""
        text = dict(headers_of(record)).get(DELIVER_RETRY) or b""
        parts = text.split(b":")
        if len(parts) != 3 or not all(part.isdigit() and len(part) < 19 for part in parts):
            return cls()
        attempts, failed_ms, offset = map(int, parts)
        return cls(attempts=attempts, first_failed_ms=failed_ms, first_offset=offset)

    def again(self, record: Message, now_ms: int) -> "Tried":
        """Once it has failed once more."""
        first = self.first_failed_ms, self.first_offset
        return Tried(
            attempts=self.attempts + 1,
            first_failed_ms=now_ms if first[0] is None else first[0],
            first_offset=(record.offset() or 0) if first[1] is None else first[1],
        )

    def __str__(self) -> str:
        return f"{self.attempts}:{self.first_failed_ms}:{self.first_offset}"


def retry_headers(record: Message, tried: Tried, policy: Policy, at_ms: int) -> list[Header]:
    """The headers of the record that comes again."""
    return [
        *headers_without(headers_of(record), OWN),
        (DELIVER_AFTER_MS, str(at_ms).encode()),
        (DELIVER_GROUP, policy.group.encode()),
        (DELIVER_RETRY, str(tried).encode()),
    ]


def dead_words(record: Message, tried: Tried, policy: Policy, now_ms: int) -> dict[str, object]:
    """What its dead letter says, as `duetime dead` reads it."""
    due_ms = tried.first_failed_ms or now_ms
    place = f"@{record.topic()}.{record.partition()}.{tried.first_offset}"
    return {
        DUE_TOPIC: record.topic(),
        DUE_PARTITION: record.partition(),
        DUE_AT_MS: due_ms,
        DUE_ID: MessageId(due_ms=due_ms, unique=place),
        DUE_ERROR: Reason.RETRIES_OVER,
        DUE_ERROR_DETAIL: f"group {policy.group} has put it off {tried.attempts} times",
        DUE_ATTEMPTS: tried.attempts,
        DUE_FAILED_FIRST_MS: due_ms,
        DUE_FAILED_LAST_MS: now_ms,
    }


def senders(record: Message) -> list[Header]:
    """The sender's headers: those of an earlier delivery would be taken for the next one's."""
    return headers_without(headers_of(record), (*OWN, *ADDRESS))
