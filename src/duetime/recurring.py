"""The records that ask for a message which comes again, and about it: as `outgoing` for others."""

import re
from dataclasses import replace
from datetime import datetime, timedelta

from duetime.config import Settings
from duetime.errors import InvalidMessage, Reason
from duetime.message import DUE_AT_MS, DUE_EXPIRES_MS, DUE_OP, SERIES_PATTERN, MessageId
from duetime.outgoing import Outgoing, Wanted, due_time_ms, scheduled
from duetime.recurrence import Recurrence
from duetime.topics import TopicNames


def record_of(  # noqa: PLR0913 (as below)
    wanted: Wanted,
    recurrence: Recurrence | None,
    settings: Settings,
    *,
    at: datetime | None,
    in_: timedelta | None,
    now_ms: int,
    unique: str,
) -> Outgoing:
    """The record that schedules a message; with a recurrence, one that asks for its series.

    Raises InvalidMessage with the reason that it would be rejected for.
    """
    if recurrence is None:
        due_ms = due_time_ms(at, in_, now_ms)
        return scheduled(wanted, settings, due_ms=due_ms, now_ms=now_ms, unique=unique)
    start_ms = None if at is None and in_ is None else due_time_ms(at, in_, now_ms)
    return recurring(wanted, recurrence, settings, start_ms=start_ms, now_ms=now_ms, name=unique)


def recurring(  # noqa: PLR0913 (a series has as many parts)
    wanted: Wanted,
    recurrence: Recurrence,
    settings: Settings,
    *,
    start_ms: int | None,
    now_ms: int,
    name: str,
) -> Outgoing:
    """The record that asks for a message which comes again, from a start on, or from now.

    Raises InvalidMessage with the reason that it would be rejected for.
    """
    begin_ms = now_ms if start_ms is None else start_ms
    if (first_ms := recurrence.first(begin_ms)) is None:
        raise InvalidMessage(
            Reason.BAD_CRON, f"{recurrence.cron.expression!r} never comes before its end, or at all"
        )
    record = scheduled(wanted, settings, due_ms=begin_ms, now_ms=now_ms, unique=name)
    if not re.match(SERIES_PATTERN, name):
        raise InvalidMessage(
            Reason.BAD_ID, "the id of a series has at most 160 characters: it is part of others"
        )
    said = [(key, text.encode()) for key, text in recurrence.texts().items()]
    own = [each for each in record.headers if start_ms is not None or each[0] != DUE_AT_MS]
    if any(key == DUE_EXPIRES_MS for key, _ in own):
        raise InvalidMessage(Reason.BAD_EXPIRY, f"a series has no {DUE_EXPIRES_MS}: until ends it")
    first = MessageId(due_ms=first_ms, unique=name)
    return replace(record, id=first, headers=(*said, *own), series=name)


def asked_of_series(name: str, operation: str, settings: Settings) -> Outgoing:
    """The control record that asks something of the series with this name."""
    return Outgoing(
        id=MessageId(due_ms=0, unique=name),
        topic=TopicNames(settings).control,
        key=name.encode(),
        value=None,
        headers=((DUE_OP, operation.encode()),),
    )
