"""What could not be delivered and waits for another try, looked for by its id.

A retry waits under the id of its message, and at another time: that follows from the last failure
and the settings, which have to be those of the pipeline.
"""

from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import Message

from duetime.backoff import backoff_ms
from duetime.config import Settings
from duetime.message import DUE_STATE, WAITING_HEADERS, MessageId
from duetime.stores import OffsetRange
from duetime.stores.offsets import Offsets
from duetime.stores.records import Entry, RangeReader, headers_of, of_state
from duetime.tables import RetryPolicy
from duetime.topics import TopicNames

#: How far this machine's clock and the brokers' may differ, in ms.
MARGIN_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A message that could not be delivered."""

    topic: str
    #: How often it was tried.
    attempts: int
    #: When it is tried again, epoch ms; None where that was the last time.
    retry_ms: int | None


def last_failure(identity: MessageId, settings: Settings, now_ms: int) -> Failed | None:
    """The last time that this message failed, if it did and may wait for a retry.

    Reads what has failed since the message was due, of the longest time between two tries at most.
    Raises KafkaError.
    """
    earliest_ms = max(identity.due_ms, now_ms - settings.retry_backoff_max_ms) - MARGIN_MS
    place = TopicNames(settings).failed, 0
    with closing(Offsets(settings, f"{settings.namespace}.reader")) as offsets:
        start = offsets.first_since({place: earliest_ms})[place]
        end = offsets.ends([place])[place]
    if start is None:
        return None
    with RangeReader(settings) as reader:
        entries = list(reader.entries_of(identity, [OffsetRange(*place, start, end)]))
    return _failed(entries[-1], settings) if entries else None


def _failed(entry: Entry, settings: Settings) -> Failed:
    """As the pipeline judges it, in `failures`."""
    topic, attempts = entry.topic or "", _attempts(entry.record) + 1
    policy = settings.retry_topics.get(topic, RetryPolicy())
    first_ms = policy.backoff_ms or settings.retry_backoff_ms
    spread = f"{entry.id}:{attempts}"
    wait_ms = backoff_ms(attempts, first_ms, settings.retry_backoff_max_ms, spread)
    retry_ms = entry.record.timestamp()[1] + wait_ms
    is_over = attempts >= (policy.attempts or settings.retry_attempts) or (
        entry.expires_ms is not None and entry.expires_ms < retry_ms
    )
    return Failed(topic=topic, attempts=attempts, retry_ms=None if is_over else retry_ms)


def _attempts(record: Message) -> int:
    state = headers_of(record)[WAITING_HEADERS.index(DUE_STATE)][1]
    return int(of_state((state or b"").decode(), "attempts") or 0)
