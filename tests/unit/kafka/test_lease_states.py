"""The lease of three members, whose steps come in many orders: one holds it at a time.

The rules of `Leadership` are real. Each member goes through the steps of the election in their
order; it may stand still before each of them, also between the decision to fence and the fence, and
between the start of a heartbeat and its record. Each has a clock of its own. The election's rest
after a fence by another is left out, which makes takeovers more frequent.

Late and partial reads are in `tests/simulation/test_leadership.py`.
"""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from duetime.kafka.leadership import HEARTBEAT_S, IS_WARM, Heartbeat, Leadership

TAKEOVER_S = 1.5

#: After the last fault, one leads within this time, in seconds.
PATIENCE_S = 15.0

ALL = frozenset(range(3))
MEMBERS = st.sampled_from(sorted(ALL))


@dataclass
class Member:
    """A process: what it has read, its fence, and the heartbeat that it is just writing."""

    name: str
    clock_s: float
    is_warm: bool
    view: Leadership = None
    position: int = 0
    number: int = 0
    #: The next of its steps.
    step: int = 0
    #: The epoch of its fence, and its first heartbeat after that.
    epoch: int | None = None
    fenced_at: int = 0
    is_fencing: bool = False
    is_leading: bool = False
    #: When its write began, by its clock, and the heartbeat; None once that is committed.
    writing: tuple[float, Heartbeat] | None = None
    #: Until when it sends, by its clock.
    until_s: float = 0.0


class LeaseStates(RuleBasedStateMachine):
    """Three members, their log, and the epoch of the leaders' transactional id."""

    def __init__(self):
        super().__init__()
        self.now_s, self.log, self.epoch = 1_000.0, [], 0
        self.members, self.is_broken = [], False

    @initialize(warm=st.lists(st.booleans(), min_size=3, max_size=3))
    def start(self, warm):
        for number, (name, is_warm) in enumerate(zip("abc", warm, strict=True)):
            member = Member(name, number * 7_777.0, is_warm)
            self.members.append(member)
            self.join(member)
        self.go_on(ALL, 150)

    def now(self, member):
        return self.now_s + member.clock_s

    def join(self, member):
        member.view = Leadership(member.name, TAKEOVER_S, self.now(member))
        member.position = 0
        if not self.log:
            member.view.note_empty_log(self.now(member))

    def heartbeat(self, member, lease_s):
        member.number += 1
        told = Heartbeat(
            member=member.name,
            name=member.name,
            number=member.number,
            lease_ms=None if lease_s is None else int(lease_s * 1_000),
            status={IS_WARM: member.is_warm},
        )
        return Heartbeat.decode(told.encode())

    def step_down(self, member):
        member.epoch, member.is_fencing, member.is_leading = None, False, False
        member.writing, member.until_s = None, 0.0

    def read(self, member):
        for each in self.log[member.position :]:
            member.position += 1
            member.view.hear(each, self.now(member))
        if member.epoch is not None and member.view.has_other_leader(member.fenced_at):
            self.step_down(member)

    def write_as_standby(self, member):
        if not member.is_leading:
            self.log.append(self.heartbeat(member, None))

    def decide(self, member):
        member.is_fencing = member.epoch is None and member.view.may_fence(self.now(member))

    def fence(self, member):
        if member.is_fencing:
            self.epoch += 1
            member.is_fencing, member.epoch = False, self.epoch
            member.fenced_at = member.number + 1
            self.write_as_standby(member)

    def begin(self, member):
        now_s = self.now(member)
        if member.epoch is None:
            return
        if member.is_leading or member.view.may_lead(member.fenced_at, now_s):
            member.is_leading = True
            member.writing = now_s, self.heartbeat(member, member.view.lease_s(now_s))

    def append(self, member):
        """Write the record: others see it before it is committed, and also if it never is."""
        if member.writing:
            self.log.append(member.writing[1])

    def commit(self, member):
        if not member.writing:
            return
        if member.epoch != self.epoch:
            self.step_down(member)
            return
        (begun_s, told), member.writing = member.writing, None
        member.until_s = begun_s + told.lease_ms / 1_000

    STEPS = (read, write_as_standby, decide, fence, begin, append, commit)

    def is_about_to(self, member, step):
        """Return whether its next step is this one, and changes something."""
        if self.STEPS[member.step].__name__ != step:
            return False
        if step == "fence":
            return member.is_fencing
        if step == "begin":
            view, now_s = member.view, self.now(member)
            return member.epoch is not None and view.may_lead(member.fenced_at, now_s)
        return bool(member.writing)

    def go_on(self, numbers, steps, until=None):
        """Run the next steps of these members.

        `until` ends them early: a member, and a step that it is about to take.
        """
        for _ in range(steps):
            self.now_s += HEARTBEAT_S / len(self.STEPS)
            for number in sorted(numbers):
                member = self.members[number]
                if until and number == until[0] and self.is_about_to(member, until[1]):
                    return
                self.STEPS[member.step](self, member)
                member.step = (member.step + 1) % len(self.STEPS)
                self.one_holds_the_lease_at_a_time()

    @rule(paused=st.sets(MEMBERS), steps=st.sampled_from([1, 3, 40, 150]))
    def some_stand_still(self, paused, steps):
        self.go_on(ALL - paused, steps)

    @rule(
        pair=st.permutations(sorted(ALL)),
        step=st.sampled_from(["fence", "begin", "append", "commit"]),
        steps=st.sampled_from([1, 3, 7, 14, 150]),
    )
    def two_stand_still_in_turns(self, pair, step, steps):
        """The second stops just before a step that the pause of the first made it take."""
        first, second, _ = pair
        self.go_on(ALL - {first}, 200, until=(second, step))
        self.go_on(ALL - {second}, steps)
        self.go_on(ALL - {first}, 40)

    @rule(number=MEMBERS)
    def give_the_lead_back(self, number):
        member = self.members[number]
        if member.is_leading and not member.writing:
            member.until_s = 0.0
            self.log.append(self.heartbeat(member, 0))
            self.step_down(member)

    @rule(number=MEMBERS)
    def start_again(self, number):
        """Kill one, which sends nothing any more: the new process is another member."""
        member = self.members[number]
        self.step_down(member)
        member.name += "'"
        self.join(member)

    @invariant()
    def one_holds_the_lease_at_a_time(self):
        held = [each.name for each in self.members if self.now(each) < each.until_s]
        self.is_broken = len(held) > 1
        assert not self.is_broken, f"two hold the lease: {held}"

    def teardown(self):
        """Without faults, one leads soon."""
        if self.members and not self.is_broken:
            self.go_on(ALL, int(PATIENCE_S / HEARTBEAT_S) * len(self.STEPS))
            assert any(self.now(each) < each.until_s for each in self.members)


def run(**options):
    steps = {"max_examples": 150, "stateful_step_count": 10, "deadline": None}
    run_state_machine_as_test(LeaseStates, settings=hypothesis_settings(**steps, **options))


def test_one_holds_the_lease_at_a_time_and_one_leads_after_the_faults():
    run()


def leads_before_the_lease_has_ended(self, fenced_at, _now_s):
    return self.has_read(fenced_at)


def leads_before_it_has_read_up_to_its_fence(self, _fenced_at, now_s):
    return now_s >= self._leases_end_s


@pytest.mark.parametrize(
    "mutant", [leads_before_the_lease_has_ended, leads_before_it_has_read_up_to_its_fence]
)
def test_a_member_that_leads_too_soon_is_caught(mutant):
    fixed = {"derandomize": True, "database": None}
    first_only = {"phases": [Phase.generate], "report_multiple_bugs": False}
    caught = pytest.raises(AssertionError, match="two hold the lease")
    with patch.object(Leadership, "may_lead", mutant), caught:
        run(**fixed, **first_only)
