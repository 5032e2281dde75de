"""Where messages wait. One contract for every store, and the words it is written in."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, Unpack

from duetime.message import LATEST_MS, MessageId
from duetime.stores.selection import Asked, Position
from duetime.wheel import Slot


class DueTimes(NamedTuple):
    """From the one instant up to, not including, the other, epoch ms."""

    from_ms: int
    to_ms: int


#: Of a claim that was not asked.
ANY_TIME = DueTimes(0, LATEST_MS + 1)


class Claim(Protocol):
    """Some of what waits, taken up by one planner, and by no other until it gives it up."""

    @property
    def count(self) -> int:
        """How many records it spans."""
        ...

    @property
    def begun_ms(self) -> int | None:
        """When it was first taken up, epoch ms, if that was before: some of it may have gone on."""
        ...

    @property
    def due(self) -> DueTimes:
        """When what it holds is due, if that was overdue: as far as the store knows it unread."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Records `start` up to, not including, `end` of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    #: When it was first taken up, epoch ms, if that was before: some of it may have gone on.
    begun_ms: int | None = None
    #: When these are due, of a claim of what is overdue; two ranges are the same without it.
    due: DueTimes = field(default=ANY_TIME, compare=False)

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


class Retry(NamedTuple):
    """What became of a message so far that could not be delivered, and is tried again."""

    #: When it is, epoch ms.
    at_ms: int
    #: How often it was tried.
    attempts: int
    #: When it failed for the first time, epoch ms.
    failed_ms: int


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
    #: None before its first attempt.
    retry: Retry | None = None

    @property
    def due_ms(self) -> int:
        """Until when it waits, epoch ms: what its id says, or its next attempt."""
        return self.retry.at_ms if self.retry else self.id.due_ms

    @property
    def position(self) -> Position:
        """Where it comes in a list."""
        return Position.of(str(self.id), self.due_ms)


ClaimT = TypeVar("ClaimT", bound=Claim)


class Store(Protocol[ClaimT]):
    """Where messages wait until they are due, as the one sees it who plans their turns.

    What comes in goes another way: to the wheel as a record of Kafka's sink, to a store of rows by
    `duetime.pipeline.saving`.
    """

    @property
    def levels(self) -> int:
        """How many levels of slots are taken up in time: level 0 is sent, others are routed on."""
        ...

    def due(self, slot: Slot) -> Sequence[ClaimT]:
        """Claim what waits in the slot now. What comes in later is overdue once its time passed."""
        ...

    def overdue(self, now_ms: int) -> Sequence[ClaimT]:
        """Claim what should have been taken up before now and was not, however old."""
        ...

    def begin(self, claims: Iterable[ClaimT], now_ms: int) -> None:
        """Note that these are taken up from now on, so that who claims them again knows."""
        ...

    def settle(self, claims: Iterable[ClaimT]) -> None:
        """Record that these are delivered or routed on, and free their storage. Safe to repeat."""
        ...

    def give_up(self, claims: Iterable[ClaimT]) -> None:
        """Drop the claims without settling: what they held is overdue again."""
        ...

    def find(self, id: MessageId, now_ms: int) -> Found | None:  # noqa: A002 (what all call it)
        """The message with this id, if it waits."""
        ...

    def pending(self, now_ms: int) -> Iterator[Pending]:
        """What waits, slot by slot, in order of time, without reading it."""
        ...

    def close(self) -> None:
        """Close the connection. What is claimed then is found by who comes next."""
        ...


class Search(Protocol):
    """A search for one id that can be repeated until what is expected is there."""

    def find(self, now_ms: int) -> Found | None:
        """Return what `Reader.find` returns, and read only what has come since the last time."""
        ...


class Reader(Protocol):
    """Looks at what waits, from any process: nothing is claimed and nothing is changed."""

    def find(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        now_ms: int,
        *,
        retry_ms: int | None = None,
    ) -> Found | None:
        """The message with this id, if it waits; `cancelled` if a cancel waits for it too.

        With `retry_ms`, if it is tried again then: it is found by that instant alone.
        """
        ...

    def search(
        self,
        id: MessageId,  # noqa: A002 (what all call it)
        *,
        retry_ms: int | None = None,
    ) -> Search:
        """Return a search for this id, for a caller that looks more than once."""
        ...

    def pending(self, now_ms: int) -> Sequence[Pending]:
        """How many records wait in each slot, in order of time, without reading them."""
        ...

    def messages(
        self, now_ms: int, *, limit: int | None = None, **asked: Unpack[Asked]
    ) -> Iterator[Found]:
        """The messages that wait, by their positions, without cancelled ones; each once.

        Those that are asked for, and at most `limit`.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...
