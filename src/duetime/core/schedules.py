"""The state machine of schedules: commands in log order lead to runs. Pure; no clock is read.

Commands, and the schedules themselves before each run, are records of one partition. Times are the
records' timestamps, so that a batch that is processed again leads to the same.

A schedule's record returns LEAD_MS before each run, sends the run, and waits for the next one. It
carries the instant after its last run, and the next run is computed when it returns, by the rules
that its time zone has then. It returns at least each WAKE_MS, so that changed rules are seen before
the run.

A schedule that is defined under the name of another one replaces it: its runs are those later than
LEAD_MS after that, and what the other one missed is dropped. A pause outlives the replacement,
because it is the operator's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from duetime.core import headers as H
from duetime.core.cron import LEAD_MS, MAX_RUNS, Recurrence
from duetime.core.errors import InvalidMessage, Reason
from duetime.core.messages import LATEST_MS

#: The kinds of outcomes, besides NEXT.
RUN, REFUSED = "run", "refused"

#: The most runs of a batch, about: each is a row that the driver makes.
BATCH_RUNS = 100_000

#: The wait until a schedule whose zone is unknown on this machine is evaluated again, in ms.
REEVALUATION_MS = 60_000

#: The longest time between two evaluations of a schedule, in ms.
WAKE_MS = 30 * 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule, without its message's key, value and headers."""

    name: str
    #: The id under which it was defined.
    since: str
    topic: str
    cron: str
    zone: str | None = None
    #: Epoch ms, as the sender wrote it.
    until: str | None = None
    misfire: str | None = None
    partition: str | None = None
    cluster: str | None = None
    is_paused: bool = False
    #: When it was resumed, epoch ms, and the offset of that command: earlier records lead to no
    #: run, also where they are processed again and the pause is not.
    resumed_ms: int = 0
    resumed_at: int = 0
    #: No run is earlier than this, epoch ms; 0 in records of early versions.
    start_ms: int = 0
    #: When it was stopped, or had its last run, epoch ms; None while it goes on.
    ended_ms: int | None = None

    @property
    def recurrence(self) -> Recurrence:
        """When its runs are due. Raises InvalidMessage (bad-cron, bad-zone)."""
        texts = (self.cron, self.zone, self.until, self.misfire)
        return Recurrence.parse(dict(zip(H.RECURRENCE, texts, strict=True)))

    @property
    def until_ms(self) -> int | None:
        """No run is later than this, epoch ms; None without an end."""
        until_ms = int(self.until) if self.until else LATEST_MS
        return until_ms if until_ms < LATEST_MS else None

    def next_ms(self, now_ms: int) -> int | None:
        """Return the next run that is not sent yet, epoch ms.

        None if it is paused, or has no more runs, or its zone is unknown on this machine.
        """
        if self.is_paused:
            return None
        try:
            return self.recurrence.first(max(now_ms + LEAD_MS + 1, self.start_ms))
        except InvalidMessage:
            return None


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """An entry of the schedules topic: the schedule now, and before the batch that changed it."""

    now: Schedule | None
    before: Schedule | None = None
    #: The first offset of that batch: processing it again begins with `before`.
    batch: int = -1

    def encoded(self) -> bytes:
        """Encode it as JSON."""
        return _ENTRY.dump_json(self)

    @staticmethod
    def decoded(text: bytes) -> "ScheduleEntry":
        """Decode JSON; fields of other versions are ignored."""
        return _ENTRY.validate_json(text)

    def is_over(self, at_ms: int) -> bool:
        """Return whether it can be deleted: its last run was due, so a new one cannot repeat it."""
        ended_ms = self.now.ended_ms if self.now else 0
        return ended_ms is not None and ended_ms + LEAD_MS < at_ms


_ENTRY = TypeAdapter(ScheduleEntry)


@dataclass(slots=True)
class ScheduleTable:
    """All entries by name, as of the last processed batch."""

    entries: dict[str, ScheduleEntry] = field(default_factory=dict)

    def all(self) -> list[Schedule]:
        """Return the schedules that go on, by name."""
        return [each for name in sorted(self.entries) if (each := self.find(name))]

    def find(self, name: str) -> Schedule | None:
        """Return the schedule with this name; None without one, or if it was stopped or is over."""
        entry = self.entries.get(name)
        return entry.now if entry and entry.now and entry.now.ended_ms is None else None

    def note(self, entries: Mapping[str, ScheduleEntry | None]) -> None:
        """Apply changes that are written to the topic; None deletes an entry."""
        for name, entry in entries.items():
            if entry:
                self.entries[name] = entry
            else:
                self.entries.pop(name, None)

    def before(self, name: str, batch: int) -> Schedule | None:
        """Return the schedule before the batch with this first offset, which may be a repeat."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        return entry.before if entry.batch == batch else entry.now


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCommand:
    """A record of the topic of schedule commands, without its message."""

    offset: int
    #: Its timestamp, epoch ms.
    at_ms: int
    #: DEFINE, NEXT, or one of SCHEDULE_OPERATIONS; None in a foreign record.
    operation: str | None
    #: With DEFINE and NEXT the schedule; otherwise only its name counts.
    schedule: Schedule
    #: With DEFINE, its start, epoch ms.
    start_ms: int = 0
    #: With NEXT, the instant from which the next run is computed, epoch ms.
    next_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduleAction:
    """The effect of a command: a run, the schedule's next evaluation, or a refusal."""

    offset: int
    #: RUN, NEXT or REFUSED.
    kind: str
    #: The run, epoch ms; with NEXT the instant from which the next run is computed; else 0.
    run_ms: int = 0
    #: When it is due, epoch ms: a schedule returns before its run.
    due_ms: int = 0
    #: Why it is refused, or why it is only evaluated again.
    reason: str = ""
    detail: str = ""


def apply_commands(
    table: ScheduleTable, batch: Iterable[ScheduleCommand]
) -> tuple[list[ScheduleAction], dict[str, ScheduleEntry | None]]:
    """Process a batch; return the outcomes in order, and the changed entries.

    An entry that is over becomes None in a later batch. The table is unchanged: `note` the entries.
    """
    commands = sorted(batch, key=lambda each: each.offset)
    if not commands:
        return [], {}
    first = commands[0].offset
    reducer = ScheduleReducer(max_runs=max(1, min(MAX_RUNS, BATCH_RUNS // len(commands))))
    before, now = dict[str, Schedule | None](), dict[str, Schedule | None]()
    for command in commands:
        name = command.schedule.name
        if name not in before:
            before[name] = now[name] = table.before(name, first)
        now[name] = reducer.apply(command, now[name])
    changed = {name for name, schedule in now.items() if schedule != before[name]}
    entries = {name: ScheduleEntry(now[name], before[name], first) for name in changed}
    latest_ms = max(each.at_ms for each in commands)
    over = {name for name, entry in table.entries.items() if entry.is_over(latest_ms)}
    return reducer.outcomes, dict.fromkeys(over - now.keys()) | entries


@dataclass(slots=True)
class ScheduleReducer:
    """Applies the commands of a batch; each may send `max_runs` runs."""

    max_runs: int
    outcomes: list[ScheduleAction] = field(default_factory=list)

    def apply(self, command: ScheduleCommand, current: Schedule | None) -> Schedule | None:
        """Return the schedule after this command, and add what follows from it to the outcomes."""
        if command.operation == H.DEFINE:
            return self._define(command, current)
        if command.operation not in (H.NEXT, *H.SCHEDULE_OPERATIONS):
            detail = "not a record of a schedule (unexpected headers)"
            return self._refuse(command, current, Reason.MALFORMED, detail)
        if current is None or current.ended_ms is not None:
            return current
        if command.operation == H.NEXT:
            return self._continue(command, current)
        changes: dict[str, Any] = {}
        if command.operation == H.STOP:
            changes = {"ended_ms": command.at_ms}
        elif command.operation == H.PAUSE:
            changes = {"is_paused": True}
        elif current.is_paused:
            resumed = {"resumed_ms": command.at_ms, "resumed_at": command.offset}
            changes = {"is_paused": False, **resumed}
        return replace(current, **changes)

    def _define(self, command: ScheduleCommand, current: Schedule | None) -> Schedule | None:
        start_ms = max(command.start_ms, _free_from_ms(current, command.at_ms))
        new = replace(command.schedule, start_ms=start_ms)
        if current and current.ended_ms is None:
            new = replace(
                new,
                is_paused=current.is_paused,
                resumed_ms=current.resumed_ms,
                resumed_at=current.resumed_at,
            )
        try:
            first_ms = new.recurrence.first(start_ms)
        except InvalidMessage as error:
            return self._refuse(command, current, error.reason, error.detail)
        if first_ms is None:
            detail = f"{new.cron!r} never comes before its end, or at all: nothing is to be sent"
            return self._refuse(command, current, Reason.BAD_CRON, detail)
        return self._send(command, new, start_ms)

    def _continue(self, command: ScheduleCommand, current: Schedule) -> Schedule:
        # One that was replaced ends here, and what it missed is dropped.
        if not command.next_ms or command.schedule.since != current.since:
            return current
        try:
            return self._send(command, current, command.next_ms)
        except InvalidMessage as error:
            # This machine's time zones differ from those of the machine where it was defined.
            again = (command.next_ms, command.at_ms + REEVALUATION_MS, error.reason, error.detail)
            self.outcomes.append(ScheduleAction(command.offset, H.NEXT, *again))
        return current

    def _send(self, command: ScheduleCommand, schedule: Schedule, from_ms: int) -> Schedule:
        """Send the runs from an instant on that are due, and return the schedule after that."""
        recurrence, offset, at_ms = schedule.recurrence, command.offset, command.at_ms
        ended = replace(schedule, ended_ms=at_ms)
        if (next_ms := recurrence.first(from_ms)) is None:
            return ended
        runs = recurrence.runs(next_ms, at_ms, self.max_runs)
        if not _is_left_out(command, schedule):
            self.outcomes += [ScheduleAction(offset, RUN, run_ms, run_ms) for run_ms in runs.due_ms]
        if runs.next_ms is None:
            return ended
        if runs.due_ms:
            from_ms = runs.due_ms[-1] + 1
        due_ms = min(max(0, runs.next_ms - LEAD_MS), at_ms + WAKE_MS)
        self.outcomes.append(ScheduleAction(offset, H.NEXT, from_ms, due_ms))
        return schedule

    def _refuse(
        self, command: ScheduleCommand, current: Schedule | None, reason: str, detail: str
    ) -> Schedule | None:
        self.outcomes.append(ScheduleAction(command.offset, REFUSED, reason=reason, detail=detail))
        return current


def _is_left_out(command: ScheduleCommand, schedule: Schedule) -> bool:
    # Not by offsets alone, because a topic that is created again begins at 0; and not by times
    # alone, because two brokers' clocks differ.
    was_paused = command.at_ms <= schedule.resumed_ms and command.offset < schedule.resumed_at
    return schedule.is_paused or was_paused


def _free_from_ms(previous: Schedule | None, at_ms: int) -> int:
    """Return the instant from which no run of this name is under way, epoch ms."""
    if previous is None:
        return 0
    last_ms = at_ms if previous.ended_ms is None else previous.ended_ms
    return last_ms + LEAD_MS + 1 if at_ms <= last_ms + LEAD_MS else 0
