"""Schedules: list and find them, pause, resume and stop them with a confirmed answer.

A compacted topic holds the table of schedules by name. A change is sent as a command, and is
confirmed when the pipeline has written it to that topic.
"""

import re
from contextlib import ExitStack, closing
from typing import Self

from duetime.client.producer import Producer
from duetime.core import headers as H
from duetime.core.errors import InvalidMessage, KafkaError, Reason, UnknownMessage
from duetime.core.messages import SCHEDULE_PATTERN
from duetime.core.records import schedule_command_record
from duetime.core.schedules import Schedule, ScheduleEntry, ScheduleTable
from duetime.core.settings import Settings, load_settings
from duetime.core.threads import wait_until
from duetime.core.topics import TopicNames
from duetime.kafka.offsets import OffsetRange, Offsets
from duetime.kafka.range_reader import RangeReader

#: Time for a pipeline to apply a command, in seconds.
CONFIRM_TIMEOUT_S = 15.0

#: Time until a schedule that was sent just now is in the table, in seconds.
ARRIVAL_TIMEOUT_S = 5.0

#: Interval between two reads of the table, in seconds.
POLL_INTERVAL_S = 0.2


def list_schedules(settings: Settings | None = None) -> list[Schedule]:
    """Return all schedules, by name. Raises KafkaError."""
    return read_schedule_table(settings or load_settings()).all()


def find_schedule(
    name: str, settings: Settings | None = None, *, timeout_s: float = 0.0
) -> Schedule:
    """Return the schedule with this name.

    Waits up to `timeout_s` seconds for one that was sent a moment ago: ARRIVAL_TIMEOUT_S is enough.
    Raises UnknownMessage, KafkaError, and InvalidMessage (bad-id).
    """
    with ScheduleTableReader(settings or load_settings()) as reader:
        return _find(reader, name, timeout_s)


def pause_schedule(name: str, settings: Settings | None = None) -> Schedule:
    """Skip runs until the schedule is resumed; return it as it is then. Safe to repeat.

    A run that is due in less than 10 s is still delivered. Raises UnknownMessage, InvalidMessage
    (bad-id), and KafkaError if no pipeline confirms it within CONFIRM_TIMEOUT_S.
    """
    return _change(name, H.PAUSE, settings or load_settings())


def resume_schedule(name: str, settings: Settings | None = None) -> Schedule:
    """Continue a paused schedule; return it as it is then. Safe to repeat.

    A run that is due in less than 10 s is already skipped. Raises as `pause_schedule` does.
    """
    return _change(name, H.RESUME, settings or load_settings())


def stop_schedule(name: str, settings: Settings | None = None) -> None:
    """End a schedule for good.

    A run that is due in less than 10 s is still delivered. Raises as `pause_schedule` does.
    """
    _change(name, H.STOP, settings or load_settings())


class ScheduleTableReader:
    """Reads the table of schedules repeatedly. Holds connections: close it."""

    def __init__(self, settings: Settings) -> None:
        self._partition = TopicNames(settings).schedules, 0
        self._open = ExitStack()
        self._offsets = self._open.enter_context(closing(Offsets(settings)))
        self._reader = self._open.enter_context(RangeReader(settings))
        self._table, self._next_offset = ScheduleTable(), 0

    def now(self) -> ScheduleTable:
        """Read what is new, and return the table as it is now. Raises KafkaError."""
        end = self._offsets.ends([self._partition])[self._partition]
        for record in self._reader.records([OffsetRange(*self._partition, self._next_offset, end)]):
            name, value = (record.key() or b"").decode(), record.value()
            self._table.note({name: None if value is None else ScheduleEntry.decoded(value)})
        self._next_offset = end
        return self._table

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def read_schedule_table(settings: Settings) -> ScheduleTable:
    """Return the table of schedules as it is now. Raises KafkaError."""
    with ScheduleTableReader(settings) as reader:
        return reader.now()


def unknown_schedule(name: str) -> UnknownMessage:
    """Return the error for a name without a schedule, or with one that is not the caller's."""
    return UnknownMessage(f"no schedule is called {name}, or it is over, or it was stopped")


def _find(reader: ScheduleTableReader, name: str, timeout_s: float) -> Schedule:
    if not re.match(SCHEDULE_PATTERN, name):
        raise InvalidMessage(Reason.BAD_ID, f"{name!r} is no name of a schedule: it is its due-id")
    schedule = wait_until(lambda: reader.now().find(name), timeout_s, POLL_INTERVAL_S)
    if schedule is None:
        raise unknown_schedule(name)
    return schedule


def _change(name: str, operation: str, settings: Settings) -> Schedule:
    """Send the command, and wait until the table shows its effect."""
    with ScheduleTableReader(settings) as reader:
        schedule = _find(reader, name, ARRIVAL_TIMEOUT_S)
        with Producer(settings) as producer:
            producer.send(schedule_command_record(name, operation, settings))

        def is_applied() -> bool:
            nonlocal schedule
            found = reader.now().find(name)
            if found is None:
                return operation == H.STOP
            schedule = found
            return operation != H.STOP and found.is_paused == (operation == H.PAUSE)

        if wait_until(is_applied, CONFIRM_TIMEOUT_S, POLL_INTERVAL_S):
            return schedule
    raise KafkaError(
        f"the request to {operation} schedule {name} was sent, but no pipeline confirmed it within "
        f"{CONFIRM_TIMEOUT_S:.0f} s: check that one runs with duetime status"
    )
