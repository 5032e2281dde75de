"""Stores: where scheduled messages wait until they are due. This module is the contract.

A `Store` is the release scheduler's view: it acquires claims on messages and settles them. A
`Reader` is everybody else's view: it finds, counts and lists messages and changes nothing. Every
store lists messages by due time, then by name. Arrival order would not be stable: a message arrives
again in each slot of the wheel on its way, and a page that starts after another must skip none.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from duetime.core.messages import LATEST_MS, MessageId, PendingMessage, SortKey
from duetime.core.timer_wheel import Slot
from duetime.kafka.offsets import DueTimes


class Claim(Protocol):
    """Messages that one scheduler has acquired. No other gets them before they are released."""

    @property
    def count(self) -> int:
        """The number of records."""

    @property
    def started_ms(self) -> int | None:
        """When the claim was first started (epoch ms), or None.

        If set, part of it may already have been delivered.
        """

    @property
    def due(self) -> DueTimes:
        """When the messages of an overdue claim are due, as far as known without reading them."""


ClaimT = TypeVar("ClaimT", bound=Claim)


class Store(Protocol[ClaimT]):
    """The messages that wait, as the release scheduler of the leader sees them.

    A claim goes through `acquire` or `acquire_overdue`, `mark_started`, and then `settle` or
    `release`. Every method is thread-safe. Each raises StoreError, or KafkaError for the wheel,
    where the server does not answer.

    Messages are saved elsewhere: the wheel is written by a Kafka sink, a store of rows by
    `duetime.pipeline.store_queries`.
    """

    @property
    def levels(self) -> int:
        """The number of levels whose slots are acquired in time.

        Level 0 is delivered, higher levels are cascaded.
        """

    def acquire(self, slot: Slot) -> Sequence[ClaimT]:
        """Claim the unclaimed messages of `slot`. Called when the slot closes.

        Not idempotent: a second call returns only messages that arrived in between. A message that
        arrives later still is returned by `acquire_overdue`.
        """

    def acquire_overdue(self, now_ms: int) -> Sequence[ClaimT]:
        """Claim all unclaimed messages that should have been acquired before `now_ms`.

        Called by the overdue scan. Includes what a crashed leader had claimed. Not idempotent.
        """

    def mark_started(self, claims: Iterable[ClaimT], now_ms: int) -> None:
        """Record that delivery of `claims` starts now. Called before the first send.

        Idempotent: the first instant is kept, and the next claim of the same messages has it as
        `started_ms`. Raises StoreError, or KafkaError for the wheel, if another scheduler may have
        acquired the messages by now: the caller must not send them.
        """

    def settle(self, claims: Iterable[ClaimT]) -> None:
        """Remove `claims`, which are delivered or cascaded, and free their storage.

        Called after the last acknowledgement. Idempotent. What a crash leaves of a claim is
        acquired again, with `started_ms`.
        """

    def release(self, claims: Iterable[ClaimT]) -> None:
        """Give `claims` back unsettled: the next overdue scan acquires their messages.

        Called when a release job fails. Idempotent.
        """

    def close(self) -> None:
        """Close the connections. Open claims are left to the next leader's overdue scan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSlot:
    """The number of records that wait in one slot.

    A cancel, and the message it cancels, count until they are due.
    """

    slot: Slot
    start_ms: int
    end_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFilter:
    """Selects messages behind a sort key that are due before `to_ms`."""

    after: SortKey
    to_ms: int
    topic: str | None = None
    allows: Callable[[str], bool] | None = None

    @property
    def from_ms(self) -> int:
        """The earliest due time of a match, epoch ms."""
        return self.after.due_ms

    def matches(self, topic: str | None, sort_key: SortKey) -> bool:
        """Return whether a record matches. A cancel, which has no topic, matches any topic."""
        return (
            (topic is None or self.matches_topic(topic))
            and self.after < sort_key
            and sort_key.due_ms < self.to_ms
        )

    def matches_topic(self, topic: str) -> bool:
        """Return whether messages for this destination match."""
        return (self.allows is None or self.allows(topic)) and self.topic in {None, topic}


#: A search for one id, to be repeated until the expected message is there. Takes the time now, in
#: epoch ms; returns what `Reader.find` returns. Reads only what arrived since the last call.
Search = Callable[[int], PendingMessage | None]


class Reader(ABC):
    """The messages that wait, for any process. Claims nothing and changes nothing. Thread-safe.

    Each method raises StoreError, or KafkaError for the wheel, where the server does not answer.
    """

    def find(
        self, message_id: MessageId, now_ms: int, *, retry_ms: int | None = None
    ) -> PendingMessage | None:
        """Return the message with this id, or None if it does not wait.

        `cancelled` is set if a cancel waits for it. A message that waits for a retry is found only
        with `retry_ms`, the instant of that retry.
        """
        return self.search(message_id, retry_ms=retry_ms)(now_ms)

    def messages(  # noqa: PLR0913 (a condition each)
        self,
        now_ms: int,
        *,
        topic: str | None = None,
        allows: Callable[[str], bool] | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
        after: SortKey | None = None,
        limit: int | None = None,
    ) -> Iterator[PendingMessage]:
        """Yield the messages for `topic` that are due from `from_ms` to `to_ms`, at most `limit`.

        They are ordered by sort key, and begin `after` that of the previous page's last message.
        `to_ms` is exclusive, epoch ms. `allows` returns whether a destination is visible to the
        caller. It is called for every record read, and may raise. Cancelled messages are left out.
        Of several with one id, the first is listed.
        """
        first = SortKey(from_ms or 0, "")
        message_filter = MessageFilter(
            after=max(first, after or first),
            to_ms=LATEST_MS + 1 if to_ms is None else to_ms,
            topic=topic,
            allows=allows,
        )
        return islice(self.matching(message_filter, now_ms), limit)

    @abstractmethod
    def search(self, message_id: MessageId, *, retry_ms: int | None = None) -> Search:
        """Return a search for this id, for a caller that polls."""

    @abstractmethod
    def pending(self, now_ms: int) -> Sequence[PendingSlot]:
        """Count the records of each slot, in order of time, without reading them."""

    @abstractmethod
    def matching(self, message_filter: MessageFilter, now_ms: int) -> Iterator[PendingMessage]:
        """Yield the messages that match, in order; see `messages`."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


def merged(streams: Iterable[Iterator[PendingMessage]]) -> Iterator[PendingMessage]:
    """Merge streams of messages that are ordered by sort key; each key once."""
    last: SortKey | None = None
    for each in heapq.merge(*streams, key=lambda found: found.sort_key):
        if each.sort_key != last:
            last = each.sort_key
            yield each


def overlapping(
    slots: Iterable[PendingSlot], from_ms: int | None, to_ms: int | None
) -> list[PendingSlot]:
    """Return the non-empty slots that overlap a time range, those at its ends as a whole."""
    return [
        slot
        for slot in slots
        if slot.count
        and (from_ms is None or slot.end_ms > from_ms)
        and (to_ms is None or slot.start_ms < to_ms)
    ]
