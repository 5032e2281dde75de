"""What was begun and is not done: the markers of one partition, followed one by one.

    marker        what is open after it
    start         its message, until the marker's time + its time-out; a later one replaces it
    given back    its message no more: it comes out at once, to be delivered again
    end           its message no more
    (time goes)   what is past its deadline no more: it comes out, to be delivered again

Nothing here knows Kafka or Spark, and nothing reads a clock.
"""

from array import array
from collections.abc import Iterator
from typing import NamedTuple, Self

from duetime.errors import DuetimeError

#: How long after its deadline a message is delivered again, in ms: an end marker that was written
#: in time may be on its way, and offsets are looked up a moment before the time is.
GRACE_MS = 250

#: Why a message comes out if nobody gave it back.
TIMED_OUT = "timed-out"

#: The time-out of an end marker.
ENDED = -1

#: Signed 64-bit numbers, as `array` calls them.
INT64 = "q"

#: Of what is remembered, which begins with it as a negative number. Offsets, with which it began
#: before there were versions, are not negative.
VERSION = 1


class Marker(NamedTuple):
    """A marker as it stands in its partition."""

    #: Its own offset.
    at: int
    appended_ms: int
    #: Of the message that it speaks of.
    offset: int
    #: ENDED of an end marker.
    timeout_ms: int
    #: Why the message was given back; empty if it was not.
    given_back: str = ""


class Begun(NamedTuple):
    """A message that somebody works on."""

    offset: int
    #: Where its last start marker is.
    at: int
    since_ms: int
    deadline_ms: int


class Due(NamedTuple):
    """A message that is to be delivered again."""

    offset: int
    #: Since when it may have come out.
    out_ms: int
    #: When to deliver it, before any back-off.
    due_ms: int
    why: str


class Unacknowledged:
    """The messages of one partition that are open, by their offsets."""

    def __init__(self, begun: dict[int, Begun] | None = None) -> None:
        self._begun = begun or {}

    def follow(self, marker: Marker) -> Due | None:
        """Heed one more marker; returns the message if that gave it back."""
        was_open = self._begun.pop(marker.offset, None)
        if marker.timeout_ms == ENDED:
            return None
        until_ms = marker.appended_ms + marker.timeout_ms
        if marker.given_back:
            # One that is not open was delivered again meanwhile.
            due = Due(marker.offset, marker.appended_ms, until_ms, marker.given_back)
            return due if was_open else None
        self._begun[marker.offset] = Begun(marker.offset, marker.at, marker.appended_ms, until_ms)
        return None

    def overdue(self, now_ms: int) -> Iterator[Due]:
        """Take out what is past its deadline."""
        late_ms = now_ms - GRACE_MS
        for each in [one for one in self._begun.values() if one.deadline_ms <= late_ms]:
            del self._begun[each.offset]
            yield Due(each.offset, each.deadline_ms, each.deadline_ms, TIMED_OUT)

    def __len__(self) -> int:
        return len(self._begun)

    def wait_ms(self, now_ms: int) -> int:
        """How long until something is overdue, if nobody says anything. Not of nothing."""
        deadline_ms = min(each.deadline_ms for each in self._begun.values())
        return max(1, deadline_ms + GRACE_MS - now_ms)

    def first_marker(self) -> int:
        """Where the first start marker is that still counts. Not of nothing."""
        return min(each.at for each in self._begun.values())

    def oldest_ms(self) -> int:
        """Since when the one is open that is so for longest. Not of nothing."""
        return min(each.since_ms for each in self._begun.values())

    def encoded(self) -> bytes:
        """As it is remembered from batch to batch."""
        numbers = (each for one in self._begun.values() for each in one)
        return array(INT64, [-VERSION, *numbers]).tobytes()

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        """What `encoded` gave. Raises DuetimeError where another release gave it."""
        numbers = array(INT64)
        numbers.frombytes(data)
        if numbers and numbers[0] < 0 and (version := -numbers.pop(0)) != VERSION:
            raise DuetimeError(
                f"the tracker of queues was saved by another release (version {version}; this one "
                f"knows {VERSION}): run that release, or remove `redelivery` from the checkpoint"
            )
        width = len(Begun._fields)
        each = (Begun(*numbers[at : at + width]) for at in range(0, len(numbers), width))
        return cls({one.offset: one for one in each})
