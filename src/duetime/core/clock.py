"""Clocks, and the parsing and formatting of instants and durations.

Only the command line and the service read a clock; everything below them takes the time as an
argument. An instant is a whole number of milliseconds since the epoch (UTC). A text without a time
zone is not an instant, and is refused. Rounding is upwards, so that nothing is early.
"""

import re
import time
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Protocol, Self

from duetime.core.errors import InvalidMessage, Reason

#: Units of a duration, in ms.
UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

#: The exponent at which exponential backoff stops to grow.
MAX_DOUBLINGS = 30

#: The number of steps into which the jitter of a backoff is divided.
PARTS = 1_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)

# More digits than any delay has, and fewer than Python refuses to read.
_PART = re.compile(r"(\d{1,99}(?:\.\d{1,99})?)\s*([a-z]+)", re.IGNORECASE)


class Clock(Protocol):
    """A source of the current time."""

    def now_ms(self) -> int:
        """Return the current instant, in ms since the epoch."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now_ms(self) -> int:
        """Return the current instant, in ms since the epoch."""
        return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """The lead of another clock over this machine's, with an error of at most `error_ms`."""

    ahead_ms: int
    error_ms: int

    @classmethod
    def seen(cls, *, sent_ms: int, stamped_ms: int, received_ms: int) -> Self:
        """Estimate the offset from a round trip whose answer the other clock has stamped."""
        # Clocks are read in whole ms, which adds one more of uncertainty.
        error_ms = (received_ms - sent_ms + 1) // 2 + 1
        return cls(ahead_ms=stamped_ms - (sent_ms + received_ms) // 2, error_ms=error_ms)


def parse_instant(text: str) -> int:
    """Parse an ISO 8601 time with a zone, such as `2026-12-24T18:00:00+01:00`, into epoch ms.

    Raises InvalidMessage (bad-due-time) for any other text; a missing zone is never guessed.
    """
    try:
        parsed = datetime.fromisoformat(text.strip())
    except ValueError:
        detail = f"{text!r} is no ISO 8601 time: write it as 2026-12-24T18:00:00+01:00"
        raise _invalid(detail) from None
    return instant_ms(parsed)


def instant(text: str | None) -> datetime | None:
    """Parse an ISO 8601 time with a zone into a datetime. Raises InvalidMessage (bad-due-time)."""
    if text is None:
        return None
    try:
        return datetime_of(parse_instant(text))
    except OverflowError:
        raise _outside_calendar(text) from None


def instant_ms(instant: datetime) -> int:
    """Return an aware datetime as epoch ms. Raises InvalidMessage (bad-due-time) if naive."""
    if instant.tzinfo is None:
        raise _invalid(f"{instant.isoformat()} has no time zone: add one, such as +01:00 or Z")
    return duration_ms(instant - _EPOCH)


def datetime_of(epoch_ms: int) -> datetime:
    """Return epoch ms as a datetime in UTC. Raises OverflowError outside the calendar."""
    return _EPOCH + timedelta(milliseconds=epoch_ms)


def duration_ms(duration: timedelta) -> int:
    """Return a timedelta as ms."""
    return -(-duration // _MS)


def parse_duration(text: str) -> int:
    """Parse a duration such as `250ms`, `5s`, `1h30m` or `7d` into ms.

    Raises InvalidMessage (bad-due-time) for a negative one, an unknown unit or a bare number.
    """
    stripped = text.strip()
    if stripped.startswith("-"):
        raise _invalid(f"{text!r} is negative: a delay is 0s or more")
    parts = _PART.findall(stripped)
    if not parts or _PART.sub("", stripped).strip():
        raise _invalid(f"{text!r} is no duration: write a number and a unit, such as 5s or 1h30m")
    return sum(_part_ms(amount, unit) for amount, unit in parts)


@lru_cache
def delay(text: str | None) -> timedelta | None:
    """Parse a duration into a timedelta. Raises InvalidMessage (bad-due-time)."""
    if text is None:
        return None
    try:
        return timedelta(milliseconds=parse_duration(text))
    except OverflowError:
        raise _outside_calendar(text) from None


def _part_ms(amount: str, unit: str) -> int:
    if unit not in UNITS_MS:
        raise _invalid(f"{unit!r} is no unit of time: use one of {', '.join(UNITS_MS)}")
    whole, _, fraction = amount.partition(".")
    return -(-int(whole + fraction) * UNITS_MS[unit] // int(10 ** len(fraction)))


def _outside_calendar(text: str) -> InvalidMessage:
    return _invalid(f"{text!r} is outside the calendar: choose another time")


def _invalid(detail: str) -> InvalidMessage:
    return InvalidMessage(Reason.BAD_DUE_TIME, detail)


def format_instant(epoch_ms: int) -> str:
    """Format epoch ms as ISO 8601 in UTC with milliseconds."""
    try:
        return f"{_second(epoch_ms // 1_000)}.{epoch_ms % 1_000:03d}Z"
    except (OverflowError, ValueError, OSError):
        return f"{epoch_ms} ms"


@lru_cache
def _second(epoch_s: int) -> str:
    """Cached, because instants that are formatted together mostly share their second."""
    # strftime takes five times as long.
    return datetime.fromtimestamp(epoch_s, tz=UTC).isoformat().removesuffix("+00:00")


def format_duration(duration: int) -> str:
    """Format a duration in ms in its two largest units, such as `1h 30m`."""
    if duration < 1_000:
        return f"{duration}ms"
    words = []
    rest = duration
    for unit in ("w", "d", "h", "m", "s"):
        amount, rest = divmod(rest, UNITS_MS[unit])
        if amount:
            words.append(f"{amount}{unit}")
    return " ".join(words[:2])


def doubled_ms(attempts: int, first_ms: int, max_ms: int) -> int:
    """Return the wait after `attempts` attempts, in ms: doubled each time, at most `max_ms`."""
    return int(min(first_ms * 2 ** min(attempts - 1, MAX_DOUBLINGS), max_ms))


def backoff_ms(attempts: int, first_ms: int, max_ms: int, spread: str) -> int:
    """Return `doubled_ms` with jitter, in ms: 50 to 100 % of it, by a hash of `spread`.

    `duetime.spark.columns.backoff_ms` is the same for Spark.
    """
    share = 0.5 + zlib.crc32(spread.encode()) % PARTS / (2 * PARTS)
    return int(doubled_ms(attempts, first_ms, max_ms) * share)
