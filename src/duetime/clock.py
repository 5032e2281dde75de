"""Clocks, and the reading of times that people write.

Everything below the command line and the runner takes the time as an argument. An instant is a
whole number of milliseconds since the epoch (UTC); a text without a zone is not an instant and is
refused.
"""

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Protocol, Self

from duetime.errors import InvalidMessage, Reason

#: Units of a duration as people write it, in ms.
UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)

# More digits than any delay has, and fewer than Python refuses to read.
_PART = re.compile(r"(\d{1,99}(?:\.\d{1,99})?)\s*([a-z]+)", re.IGNORECASE)


class Clock(Protocol):
    """Something that knows the time."""

    def now_ms(self) -> int:
        """The present instant, in ms since the epoch."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now_ms(self) -> int:
        """The present instant, in ms since the epoch."""
        return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """How far another clock is ahead of this machine's, give or take `error_ms`."""

    ahead_ms: int
    error_ms: int

    @classmethod
    def seen(cls, *, sent_ms: int, stamped_ms: int, received_ms: int) -> Self:
        """What an answer tells that the other clock has stamped on its way."""
        # Clocks are read in whole ms, so there is one more that is not known.
        error_ms = (received_ms - sent_ms + 1) // 2 + 1
        return cls(ahead_ms=stamped_ms - (sent_ms + received_ms) // 2, error_ms=error_ms)


def parse_instant(text: str) -> int:
    """Read an ISO 8601 time with a zone, such as `2026-12-24T18:00:00+01:00`, as epoch ms.

    Raises InvalidMessage (bad-due-time) for anything else; a time without a zone is never guessed.
    """
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidMessage(
            Reason.BAD_DUE_TIME,
            f"{text!r} is no ISO 8601 time: write it as 2026-12-24T18:00:00+01:00",
        ) from None
    return instant_ms(instant)


def instant_ms(instant: datetime) -> int:
    """An aware datetime as epoch ms, rounded up so that nothing is early.

    Raises InvalidMessage (bad-due-time) for a naive datetime.
    """
    if instant.tzinfo is None:
        raise InvalidMessage(
            Reason.BAD_DUE_TIME,
            f"{instant.isoformat()} has no time zone: add one, such as +01:00 or Z",
        )
    since_epoch = instant - _EPOCH
    return duration_ms(since_epoch)


def duration_ms(duration: timedelta) -> int:
    """A timedelta as ms, rounded up so that nothing is early."""
    return -(-duration // _MS)


def parse_duration(text: str) -> int:
    """Read a duration such as `250ms`, `5s`, `1h30m` or `7d` as ms.

    Raises InvalidMessage (bad-due-time) for a negative one, an unknown unit or a bare number.
    """
    stripped = text.strip()
    if stripped.startswith("-"):
        raise InvalidMessage(Reason.BAD_DUE_TIME, f"{text!r} is negative: a delay is 0s or more")
    parts = _PART.findall(stripped)
    if not parts or _PART.sub("", stripped).strip():
        raise InvalidMessage(
            Reason.BAD_DUE_TIME,
            f"{text!r} is no duration: write a number and a unit, such as 5s or 1h30m",
        )
    return sum(_part_ms(amount, unit) for amount, unit in parts)


@lru_cache
def delay(text: str | None) -> timedelta | None:
    """A duration as people write it, as a timedelta. Raises InvalidMessage (bad-due-time)."""
    if text is None:
        return None
    try:
        return timedelta(milliseconds=parse_duration(text))
    except OverflowError:
        raise _beyond_calendar(text) from None


def instant(text: str | None) -> datetime | None:
    """An ISO 8601 time with a zone, as a datetime. Raises InvalidMessage (bad-due-time)."""
    if text is None:
        return None
    try:
        return _EPOCH + timedelta(milliseconds=parse_instant(text))
    except OverflowError:
        raise _beyond_calendar(text) from None


def _beyond_calendar(text: str) -> InvalidMessage:
    return InvalidMessage(
        Reason.BAD_DUE_TIME, f"{text!r} is outside the calendar: choose another time"
    )


def _part_ms(amount: str, unit: str) -> int:
    if unit not in UNITS_MS:
        raise InvalidMessage(
            Reason.BAD_DUE_TIME, f"{unit!r} is no unit of time: use one of {', '.join(UNITS_MS)}"
        )
    whole, _, fraction = amount.partition(".")
    scaled = int(whole + fraction) * UNITS_MS[unit]
    scale = int(10 ** len(fraction))
    return -(-scaled // scale)


def format_instant(epoch_ms: int) -> str:
    """Epoch ms as ISO 8601 in UTC with milliseconds, for people."""
    try:
        return f"{_second(epoch_ms // 1_000)}.{epoch_ms % 1_000:03d}Z"
    except (OverflowError, ValueError, OSError):
        return f"{epoch_ms} ms"


@lru_cache
def _second(epoch_s: int) -> str:
    """The whole second: those that are told together mostly share it."""
    # strftime takes five times as long.
    return datetime.fromtimestamp(epoch_s, tz=UTC).isoformat().removesuffix("+00:00")


def format_duration(duration: int) -> str:
    """A duration in ms in its two largest units, such as `1h 30m`, for people."""
    if duration < 1_000:
        return f"{duration}ms"
    words = []
    rest = duration
    for unit in ("w", "d", "h", "m", "s"):
        amount, rest = divmod(rest, UNITS_MS[unit])
        if amount:
            words.append(f"{amount}{unit}")
    return " ".join(words[:2])
