"""Which of the messages that wait are asked for, and the order in which every store lists them.

By due time, and by name where that is the same: not by arrival, because a message arrives anew in
each slot of the wheel on its way, and a page that begins behind another must pass over none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self, TypedDict, Unpack

from duetime.errors import InvalidMessage, Reason
from duetime.message import LATEST_MS, MessageId

#: Between an id and the instant of a retry: the message itself may not be settled yet.
RETRY_MARK = "/"

#: More than an instant has.
MOST_DIGITS = 20


class Position(NamedTuple):
    """Where a message comes among those that wait."""

    due_ms: int
    #: Its id; of a retry, which is due at another time than that says, with its instant.
    name: str

    @classmethod
    def of(cls, id: str, due_ms: int) -> Self:  # noqa: A002 (what all call it)
        """Of the message with this id that is due then."""
        is_first = id[:12] == f"{due_ms:012x}"
        return cls(due_ms, id if is_first else f"{id}{RETRY_MARK}{due_ms}")

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a position's name. Raises InvalidMessage (bad-id, bad-due-time)."""
        first, is_retry, retry_ms = name.partition(RETRY_MARK)
        identity = MessageId.parse(first)
        if not is_retry:
            return cls(identity.due_ms, first)
        # Python reads no number of thousands of digits.
        is_number = retry_ms.isascii() and retry_ms.isdecimal() and len(retry_ms) < MOST_DIGITS
        if not is_number or int(retry_ms) > LATEST_MS:
            raise InvalidMessage(Reason.BAD_DUE_TIME, f"{name!r} has no instant behind its /")
        return cls.of(first, int(retry_ms))


class Asked(TypedDict, total=False):
    """What may be asked for; what is left out, or None, leaves nothing out."""

    #: Those for this destination.
    topic: str | None
    #: Those whose destination it allows. It is asked about all that is read, and may raise.
    allows: Callable[[str], bool]
    #: Those that are due then or later.
    from_ms: int | None
    #: Those that are due before then.
    to_ms: int | None
    #: Those that come behind this one.
    after: Position | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which messages are asked for: those `behind` a position, due before `to_ms`."""

    behind: Position
    to_ms: int
    topic: str | None = None
    allows: Callable[[str], bool] | None = None

    @classmethod
    def of(cls, **asked: Unpack[Asked]) -> Self:
        """What is asked for, with bounds in place of what is left open."""
        first, to_ms = Position(asked.get("from_ms") or 0, ""), asked.get("to_ms")
        return cls(
            behind=max(first, asked.get("after") or first),
            to_ms=LATEST_MS + 1 if to_ms is None else to_ms,
            topic=asked.get("topic"),
            allows=asked.get("allows"),
        )

    @property
    def from_ms(self) -> int:
        """The earliest instant at which one of them is due."""
        return self.behind.due_ms

    def takes(self, topic: str | None, position: Position) -> bool:
        """Whether the message is one of them. A cancel, which names no topic, counts too."""
        is_meant = topic is None or self.is_for(topic)
        return is_meant and self.behind < position and position.due_ms < self.to_ms

    def is_for(self, topic: str) -> bool:
        """Whether messages for this destination are asked for."""
        return (self.allows is None or self.allows(topic)) and self.topic in {None, topic}
