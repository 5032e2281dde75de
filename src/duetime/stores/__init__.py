"""Where messages wait. One contract for every store, and the words it is written in."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from duetime.message import MessageId
from duetime.wheel import Slot


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Records `start` up to, not including, `end` of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    #: When it was first taken up, epoch ms, if that was before: some of it may have gone on.
    begun_ms: int | None = None

    @property
    def count(self) -> int:
        """How many offsets it spans."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """How many records wait in one slot; a cancel and what it cancels count until its time."""

    slot: Slot
    start_ms: int
    end_ms: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A message that waits, as `find` and `messages` give it."""

    id: MessageId
    topic: str
    partition: int | None
    #: The cluster that it is for; None is this one.
    cluster: str | None
    #: After this instant it is not delivered any more, epoch ms; None is never.
    expires_ms: int | None
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: Sequence[tuple[str, bytes | None]] = field(repr=False)
    cancelled: bool


class Store(Protocol):
    """Where messages wait until they are due.

    One process plans turns (`due`, `overdue`, `settle`); any process may look (`find`, `pending`).
    """

    def due(self, slot: Slot) -> Sequence[OffsetRange]:
        """Claim what waits in the slot now. What comes in later is overdue once its time passed."""
        ...

    def overdue(self, now_ms: int) -> Sequence[OffsetRange]:
        """Claim what should have been taken up before now and was not, however old."""
        ...

    def begin(self, ranges: Iterable[OffsetRange], now_ms: int) -> None:
        """Note that these are taken up from now on, so that who claims them again knows."""
        ...

    def settle(self, ranges: Iterable[OffsetRange]) -> None:
        """Record that these are delivered or routed on, and free their storage. Safe to repeat."""
        ...

    def give_up(self, ranges: Iterable[OffsetRange]) -> None:
        """Drop the claim without settling: what it held is overdue again."""
        ...

    def find(self, id: MessageId, now_ms: int) -> Found | None:  # noqa: A002 (what all call it)
        """The message with this id, if it waits."""
        ...

    def pending(self, now_ms: int) -> Iterator[Pending]:
        """What waits, slot by slot, in order of time; from offsets alone."""
        ...
