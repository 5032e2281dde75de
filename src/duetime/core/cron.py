"""Recurrence of a schedule: cron's five fields in a time zone. The time is an argument.

Days and hours are those of the zone's clocks, as in Debian's cron. Where the clocks are set
forward, a run at a fixed time in the missing hour comes at its end, once. Where they are set back,
it comes once, at the first time it is that late; an hourly run, or one every few minutes, comes
through both hours. Evaluated by cronsim, which may leave out a run of chosen hours and a `*` where
clocks are set back by half an hour.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from duetime.core import headers as H
from duetime.core.clock import instant_ms
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import LATEST_MS

#: Cron's aliases.
ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

#: How long a zone's rules are cached, in seconds: an update of the time zone database takes effect
#: without a restart.
ZONE_CACHE_S = 3_600.0

#: A run that is later than this is missed, in ms.
GRACE_MS = 60_000

#: How long before its time a run is sent, in ms: too early for the lanes, so that it waits in its
#: window and is punctual.
LEAD_MS = 10_000

#: The most runs that are made up for at a time.
MAX_RUNS = 1_000


class Misfire(StrEnum):
    """The policy for runs that could not be sent in time, because no pipeline ran."""

    SKIP = "skip"
    #: One run for all that are due by then: the latest.
    ONCE = "once"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression and a zone. Raises InvalidMessage (bad-cron, bad-zone)."""

    expression: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        _check_lengths({H.DUE_CRON: self.expression, H.DUE_ZONE: self.zone})
        fields = _fields(self.expression)
        if len(fields.split()) != 5:
            raise _bad_cron(self.expression)
        now = datetime.now(tz=_zone(self.zone))
        try:
            CronSim(fields, now)
        except (CronSimError, ValueError) as error:
            if _is_readable(fields, now):
                raise InvalidMessage(
                    Reason.BAD_CRON,
                    f"{self.expression!r} never comes: no month that it names has such a day",
                ) from None
            raise _bad_cron(self.expression) from error

    def after(self, instant_ms: int) -> int | None:
        """Return the first run later than an instant, both in epoch ms; None without one."""
        try:
            found = CronSim(_fields(self.expression), self._at(instant_ms))
            # Of an hour that comes twice, the first is meant; and one run may stand for several.
            return next(run_ms for run_ms in map(_epoch_ms, found) if run_ms > instant_ms)
        except (StopIteration, OverflowError, ValueError):
            return None

    def latest(self, instant_ms: int) -> int | None:
        """Return the last run that is not later than an instant, both in epoch ms."""
        try:
            begin = self._at(instant_ms) + timedelta(seconds=1)
            found = CronSim(_fields(self.expression), begin, reverse=True)
            run_ms = next(run_ms for run_ms in map(_epoch_ms, found) if run_ms <= instant_ms)
        except (StopIteration, OverflowError, ValueError):
            return None
        # In reverse, cronsim leaves out a run that was moved out of a missing hour.
        while (later_ms := self.after(run_ms)) is not None and later_ms <= instant_ms:
            run_ms = later_ms
        return run_ms

    def _at(self, instant_ms: int) -> datetime:
        return datetime.fromtimestamp(instant_ms // 1_000, tz=_zone(self.zone))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs to send now, and the next one (None without one); epoch ms."""

    due_ms: list[int]
    next_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """When a schedule's runs are due."""

    cron: Cron
    #: No run is later than this, epoch ms.
    until_ms: int = LATEST_MS
    misfire: Misfire = Misfire.ONCE

    @classmethod
    def of(
        cls,
        cron: str,
        *,
        zone: str | None = None,
        until: datetime | None = None,
        misfire: str | None = None,
    ) -> "Recurrence":
        """Create a recurrence from texts; UTC and `once` by default.

        Raises InvalidMessage (bad-cron, bad-zone, bad-due-time for an end without a zone).
        """
        texts = {H.DUE_CRON: cron, H.DUE_ZONE: zone, H.DUE_MISFIRE: misfire}
        end = {} if until is None else {H.DUE_UNTIL: str(instant_ms(until))}
        return cls.parse(texts | end)

    @classmethod
    def parse(cls, texts: Mapping[str, str | None]) -> "Recurrence":
        """Parse the headers RECURRENCE, by name. Raises InvalidMessage (bad-cron, bad-zone)."""
        _check_lengths(texts)
        cron = Cron(texts.get(H.DUE_CRON) or "", texts.get(H.DUE_ZONE) or "UTC")
        until, misfire = texts.get(H.DUE_UNTIL), texts.get(H.DUE_MISFIRE) or Misfire.ONCE
        if until is not None and not (until.isascii() and until.isdigit() and len(until) <= 18):
            raise InvalidMessage(
                Reason.BAD_CRON, f"{H.DUE_UNTIL} is no whole number: write it in epoch ms"
            )
        if misfire not in tuple(Misfire):
            raise InvalidMessage(
                Reason.BAD_CRON, f"{H.DUE_MISFIRE} is {misfire!r}: write skip, once or all"
            )
        until_ms = LATEST_MS if until is None else min(int(until), LATEST_MS)
        return cls(cron=cron, until_ms=until_ms, misfire=Misfire(misfire))

    def texts(self) -> dict[str, str]:
        """Return the headers that `parse` reads."""
        until = {} if self.until_ms == LATEST_MS else {H.DUE_UNTIL: str(self.until_ms)}
        cron = {H.DUE_CRON: self.cron.expression, H.DUE_ZONE: self.cron.zone}
        return cron | {H.DUE_MISFIRE: self.misfire} | until

    def first(self, from_ms: int) -> int | None:
        """Return the first run at an instant or later, epoch ms; None without one."""
        return self._in_time(self.cron.after(from_ms - 1))

    def runs(self, next_ms: int, now_ms: int, limit: int = MAX_RUNS) -> Runs:
        """Return the runs to send by now, from the next run on, at most `limit`.

        The misfire policy decides about those that were missed.
        """
        run_ms: int | None = next_ms
        if next_ms < now_ms - GRACE_MS:
            run_ms = self._after_missed(next_ms, now_ms)
        due_ms = list[int]()
        while run_ms is not None and run_ms <= now_ms + LEAD_MS and len(due_ms) < limit:
            due_ms.append(run_ms)
            run_ms = self._in_time(self.cron.after(run_ms))
        return Runs(due_ms, run_ms)

    def _after_missed(self, next_ms: int, now_ms: int) -> int | None:
        if self.misfire is Misfire.ALL:
            return next_ms
        if self.misfire is Misfire.SKIP:
            return self.first(now_ms - GRACE_MS)
        latest_ms = self.cron.latest(min(now_ms, self.until_ms))
        return next_ms if latest_ms is None else max(next_ms, latest_ms)

    def _in_time(self, run_ms: int | None) -> int | None:
        return run_ms if run_ms is not None and run_ms <= self.until_ms else None


def _check_lengths(texts: Mapping[str, str | None]) -> None:
    # Longer ones would be stored, and shown, at that length.
    for name in H.RECURRENCE:
        if len(texts.get(name) or "") > H.MAX_RECURRENCE_CHARACTERS:
            raise InvalidMessage(
                Reason.BAD_CRON,
                f"{name} is too long: write {H.MAX_RECURRENCE_CHARACTERS} characters at most",
            )


def _fields(expression: str) -> str:
    return ALIASES.get(expression.strip().lower(), expression)


def _is_readable(fields: str, now: datetime) -> bool:
    """Return whether each field is valid, although they never apply together."""
    minute, hour, day, month, weekday = fields.split()
    try:
        CronSim(f"{minute} {hour} {day} * {weekday}", now)
        CronSim(f"* * * {month} *", now)
    except (CronSimError, ValueError):
        return False
    return True


def _bad_cron(expression: str) -> InvalidMessage:
    return InvalidMessage(
        Reason.BAD_CRON,
        f"{expression!r} is no cron expression: use five fields (minute, hour, day of the month, "
        f"month, day of the week), or {', '.join(ALIASES)}",
    )


def _zone(name: str) -> ZoneInfo:
    return _zone_read(name, int(time.monotonic() // ZONE_CACHE_S))


@lru_cache(maxsize=1_000)
def _zone_read(name: str, _period: int) -> ZoneInfo:
    try:
        return ZoneInfo.no_cache(name)
    except (KeyError, ValueError, OSError):
        raise InvalidMessage(
            Reason.BAD_ZONE, f"{name!r} is no time zone: use a name of IANA's, as Europe/Berlin"
        ) from None


def _epoch_ms(run: datetime) -> int:
    return int(run.astimezone(UTC).timestamp()) * 1_000
