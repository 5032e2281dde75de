"""Schedules in any order of commands, outages and crashes, against what their users may rely on.

The reducer is real. A log of commands, the wheel and the topic of schedules are made up around it,
and a crash may come between any two steps of a batch.
"""

from dataclasses import replace

import pytest
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from duetime.core import headers as H
from duetime.core import schedules
from duetime.core.cron import LEAD_MS, Misfire
from duetime.core.schedules import (
    RUN,
    Schedule,
    ScheduleCommand,
    ScheduleEntry,
    ScheduleTable,
    apply_commands,
)

SECOND, MINUTE = 1_000, 60_000

#: When the world begins, epoch ms: a full hour.
BEGIN_MS = 1_800_000_000_000

NAMES = st.sampled_from(["first", "second"])

#: How long the world goes on without commands and faults, in minutes; all runs of it must come.
QUIET_MINUTES = 8

#: The steps of a batch before which the process may die: it writes the schedules that changed,
#: sends the first of the messages, the rest of them, and commits.
WRITES, SENDS, SENDS_MORE, COMMITS, SURVIVES = range(5)


class ScheduleStates(RuleBasedStateMachine):
    """A pipeline that dies again and again, and the log that it reads."""

    def __init__(self):
        super().__init__()
        self.now_ms = BEGIN_MS
        self.log, self.waiting, self.written = [], {}, {}
        #: Of the runs that were sent, by name and instant; and of all messages, by id.
        self.runs, self.ids = set(), set()
        self.start()
        self.committed, self.batch, self.is_replayed = 0, None, False

    def start(self):
        """A new process knows what was written, and reads back what may have been sent."""
        entries = {name: ScheduleEntry.decoded(text) for name, text in self.written.items()}
        self.table, self.read_back_until = ScheduleTable(entries), len(self.log)

    def append(self, operation, schedule, **more):
        self.log.append(
            ScheduleCommand(
                offset=len(self.log),
                at_ms=self.now_ms,
                operation=operation,
                schedule=schedule,
                **more,
            )
        )

    @rule(
        name=NAMES,
        cron=st.sampled_from(["* * * * *", "*/3 * * * *"]),
        misfire=st.sampled_from(Misfire),
        starts_in=st.sampled_from([0, 0, 5 * SECOND, 4 * MINUTE]),
        lasts=st.sampled_from([None, None, 9 * MINUTE]),
    )
    def define(self, name, cron, misfire, starts_in, lasts):
        until = None if lasts is None else str(self.now_ms + lasts)
        # The id under which it was taken in: unique in the log.
        since = f"{len(self.log)}-{name}"
        schedule = Schedule(
            name=name, since=since, topic="t", cron=cron, misfire=misfire, until=until
        )
        self.append(H.DEFINE, schedule, start_ms=self.now_ms + starts_in)

    @rule(name=NAMES, operation=st.sampled_from([H.PAUSE, H.RESUME, H.STOP]))
    def change(self, name, operation):
        self.append(operation, Schedule(name=name, since="", topic="", cron=""))

    @rule(pass_ms=st.sampled_from([SECOND, 9 * SECOND, 50 * SECOND, 3 * MINUTE, 20 * MINUTE]))
    def wait(self, pass_ms):
        """The wheel returns what is due then; after a longer time, as after an outage."""
        self.now_ms += pass_ms
        due = sorted((due_ms, since) for due_ms, since in self.waiting if due_ms <= self.now_ms)
        for each in due:
            schedule, from_ms = self.waiting.pop(each)
            self.append(H.NEXT, schedule, next_ms=from_ms)

    @precondition(lambda self: self.committed < len(self.log))
    @rule(records=st.integers(1, 6), dies=st.integers(WRITES, SURVIVES), sent=st.integers(0, 2))
    def process(self, records, dies, sent):
        # A batch that was begun is repeated as it was.
        self.batch = self.batch or slice(
            self.committed, min(self.committed + records, len(self.log))
        )
        batch = self.log[self.batch]
        actions, entries = apply_commands(self.table, batch)
        if dies > WRITES:
            for name, entry in entries.items():
                if entry is None:
                    self.written.pop(name, None)
                else:
                    self.written[name] = entry.encoded()
            self.table.note(entries)
        if dies > SENDS:
            self.send(actions[: sent if dies == SENDS_MORE else None])
        if dies == SURVIVES:
            self.committed, self.batch = self.batch.stop, None
        else:
            self.start()

    @rule(back=st.integers(1, 12))
    def lose_checkpoint(self, back):
        """The records that the topic still has are read once more, in other batches."""
        self.committed, self.batch, self.is_replayed = max(0, self.committed - back), None, True
        self.start()

    def send(self, actions):
        for each in actions:
            schedule = self.log[each.offset].schedule
            is_repeated = each.offset < self.read_back_until
            if each.kind == RUN:
                run = schedule.name, each.run_ms
                assert is_repeated or run not in self.runs, f"{run} is sent twice"
                self.runs.add(run)
            elif each.kind == H.NEXT:
                identity = each.due_ms, schedule.since
                if not (is_repeated and identity in self.ids):
                    self.waiting[identity] = schedule, each.run_ms
                self.ids.add(identity)

    def teardown(self):
        while self.committed < len(self.log):
            self.process(records=6, dies=SURVIVES, sent=0)
        quiet_ms = self.now_ms
        while self.now_ms < quiet_ms + QUIET_MINUTES * MINUTE:
            self.wait(5 * SECOND)
            while self.committed < len(self.log):
                self.process(records=6, dies=SURVIVES, sent=0)
        expected = self.runs_without_crashes()
        assert self.runs <= expected
        # Without a checkpoint, a run may be left out that a crash came upon.
        if not self.is_replayed:
            assert self.runs == expected
            for name in ("first", "second"):
                self.check_runs(name, quiet_ms)

    def runs_without_crashes(self):
        table, runs = ScheduleTable(), set()
        for command in self.log:
            actions, entries = apply_commands(table, [command])
            table.note(entries)
            runs |= {(command.schedule.name, each.run_ms) for each in actions if each.kind == RUN}
        return runs

    def check_runs(self, name, quiet_ms):
        """Compare the runs with the commands: those of the quiet time exactly, others by bounds."""
        commands = [each for each in self.log if each.schedule.name == name]
        sent = sorted(run_ms for each, run_ms in self.runs if each == name)
        spans, present, is_paused = [], None, False
        for each in commands:
            if each.operation == H.DEFINE:
                # A pause ends with its schedule; here the two may have been noticed in any order.
                if present and is_paused and present.schedule.until:
                    return
                present = each
                spans.append([each.start_ms, None])
            elif present and each.operation == H.STOP:
                present, spans[-1][1] = None, each.at_ms + LEAD_MS
                is_paused = False
            elif present and each.operation in (H.PAUSE, H.RESUME):
                is_paused = each.operation == H.PAUSE
        for run_ms in sent:
            assert any(
                start <= run_ms and (end is None or run_ms <= end) for start, end in spans
            ), f"{name} runs at {run_ms}, when none was defined"
        # Behind the first minute, since a new schedule leaves the next runs to the one before.
        first_ms, last_ms = quiet_ms + MINUTE, self.now_ms
        wanted = []
        if present and not is_paused:
            at_ms = max(first_ms, present.start_ms)
            recurrence = present.schedule.recurrence
            while (at_ms := recurrence.first(at_ms)) is not None and at_ms <= last_ms:
                wanted.append(at_ms)
                at_ms += 1
        assert [each for each in sent if first_ms <= each <= last_ms] == wanted


STEPS = hypothesis_settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_runs_of_schedules_come_once_and_as_commanded():
    run_state_machine_as_test(ScheduleStates, settings=STEPS)


def forget_what_was_before(table, name, _batch):
    entry = table.entries.get(name)
    return entry and entry.now


def free_at_once(_previous, _at_ms):
    return 0


def only_paused(_command, schedule):
    return schedule.is_paused


def any_definition(reducer, command, current):
    """Continue a schedule that was replaced, too."""
    return CONTINUE(reducer, replace(command, schedule=current), current)


CONTINUE = schedules.ScheduleReducer._continue


@pytest.mark.parametrize(
    ("of", "name", "mutant"),
    [
        (ScheduleTable, "before", forget_what_was_before),
        (schedules, "_free_from_ms", free_at_once),
        (schedules, "_is_left_out", only_paused),
        (schedules.ScheduleReducer, "_continue", any_definition),
    ],
)
def test_a_mutant_of_the_rules_is_caught(of, name, mutant, monkeypatch):
    monkeypatch.setattr(of, name, mutant)
    # The same examples each time, and none is made smaller.
    generated = hypothesis_settings(
        STEPS, max_examples=2_000, phases=[Phase.generate], derandomize=True, database=None
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ScheduleStates, settings=generated)
