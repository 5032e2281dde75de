"""Leadership under pauses, cuts and slow brokers: one holds a lease at a time, and soon one does.

The real election runs on a simulated log and clock. A mutant of each rule must be caught.
"""

import pytest
from tests.simulation.heartbeats import Brokers, Leads, patch_election
from tests.simulation.world import Process, World

from duetime.core.clock import SystemClock
from duetime.core.settings import Settings
from duetime.kafka.leadership import HEARTBEAT_S, IS_WARM, LONE_LEASE_S, Leadership
from duetime.pipeline.leadership.election import Election

SECONDS, MEMBERS, SEEDS = 40.0, 3, 60

TAKEOVER_S = 1.5

#: Faults end here: by the end of the world, one leads.
FAULTS_END_S = 20.0


class Member(Election):
    """An election whose leases are noted."""

    def prepare(self, world, leases, name):
        self.world, self.leases = world, leases
        self._member = self._name = name
        self.status = lambda: {IS_WARM: True}
        return self

    def _lease_until(self, instant_s):
        super()._lease_until(instant_s)
        self.leases.append((self.world.now_s, self._until_s, self))

    __hash__ = object.__hash__


def pause_now_and_then(world):
    """A process may stand still between any two steps."""

    def disturb(process, _):
        if world.now_s < FAULTS_END_S and world.random.random() < 0.001:
            bounds_s = world.random.choice(((1.0, 2.0), (0.1, 8.0)))
            world.pause(process, world.random.uniform(*bounds_s))

    return disturb


def cut_now_and_then(world, brokers, members):
    world.disturb = pause_now_and_then(world)
    while True:
        world.between(1.0, 6.0)
        if world.now_s > FAULTS_END_S:
            return
        names = [each._name for each in members]
        hit = world.random.choice([[each] for each in names] + [names])
        both = [brokers.cut, brokers.coordinator_cut]
        kinds = world.random.choice((both, both, [brokers.coordinator_cut]))
        until_s = world.now_s + world.random.uniform(0.2, 6.0)
        for each in hit:
            for what in kinds:
                what[each] = min(until_s, FAULTS_END_S)


def simulate(seed, monkeypatch, faults=cut_now_and_then):
    """Run one world; return what each call has set the leases to, and the members."""
    world, leases, members = World(seed), [], []
    brokers = Brokers(world)
    brokers.has_faults = lambda: faults is cut_now_and_then and world.now_s < FAULTS_END_S
    patch_election(monkeypatch, world, brokers)
    settings = Settings(takeover_seconds=TAKEOVER_S)
    for name in map(str, range(MEMBERS)):
        member = Member(settings, SystemClock()).prepare(world, leases, name)
        members.append(member)
        world.start(member.start, Process(name))
    world.start(lambda: faults(world, brokers, members))
    world.run(SECONDS)
    return leases, members


def held(leases):
    """Return when each lease was held: (from, to, member); a later grant replaces one."""
    spans, last = [], {}
    for at_s, until_s, member in leases:
        if member in last:
            begun_s, end_s = last[member]
            spans.append((begun_s, min(end_s, at_s), member))
        last[member] = (at_s, until_s)
    spans += [(begun_s, end_s, member) for member, (begun_s, end_s) in last.items()]
    return sorted((each for each in spans if each[0] < each[1]), key=lambda each: each[:2])


def overlaps(leases):
    """Return pairs of leases of two members at one time."""
    spans, found = held(leases), []
    for number, (_, end_s, member) in enumerate(spans):
        for other in spans[number + 1 :]:
            if other[0] >= end_s:
                break
            if other[2] is not member:
                found.append((spans[number], other))
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_leads_at_a_time_and_one_leads_after_the_faults(seed, monkeypatch):
    leases, members = simulate(seed, monkeypatch)
    assert not overlaps(leases)
    assert leader_of(members)._until_s > SECONDS


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_dies_is_replaced_within_a_second_of_its_lease(seed, monkeypatch):
    died = []

    def leader_dies(world, brokers, members):
        world.sleep(20)
        died.append(leader_of(members))
        brokers.cut[died[0]._name] = brokers.coordinator_cut[died[0]._name] = SECONDS

    leases, _ = simulate(seed, monkeypatch, leader_dies)
    (successor,) = leaders_after(15, leases) - set(died)
    assert 0 < takeover_s(leases, successor) < TAKEOVER_S + 1.0


def leader_of(members):
    """Return the one member that leads."""
    (leader,) = (each for each in members if each.is_leading.is_set())
    return leader


def leaders_after(seconds, leases):
    """Return who led then: at the start, several may take the lead from each other."""
    return {member for at_s, until_s, member in leases if until_s and at_s > seconds}


def takeover_s(leases, successor):
    """Return when it first got a lease since the leader has died or left, at 20 s."""
    since = [at_s for at_s, until_s, member in leases if member is successor and until_s]
    return min(at_s for at_s in since if at_s > 20) - 20


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_stops_leads_until_it_has_settled(seed, monkeypatch):
    settled_s = []

    def leader_leaves(world, _, members):
        world.sleep(20)
        leader = leader_of(members)

        def settle():
            # What it has handed over may be sent in all this time.
            leader.leases.append((world.now_s, SECONDS, leader))
            world.sleep(8)
            leader.leases.append((world.now_s, 0, leader))
            settled_s.append(world.now_s)

        leader.close(settle)

    leases, members = simulate(seed, monkeypatch, leader_leaves)
    assert not overlaps(leases)
    # The standby reads that the lead was given back, and waits for no lease.
    assert takeover_s(leases, leader_of(members)) + 20 - settled_s[0] < TAKEOVER_S + 1.0


@pytest.mark.parametrize("seed", range(5))
def test_a_short_cut_of_all_members_changes_no_leader(seed, monkeypatch):

    def brokers_restart(world, brokers, members):
        world.sleep(20)
        for each in members:
            brokers.cut[each._name] = brokers.coordinator_cut[each._name] = world.now_s + 3

    leases, _ = simulate(seed, monkeypatch, brokers_restart)
    assert len(leaders_after(15, leases)) == 1


def never_wait(self, fenced_at, _):
    return self.has_read(fenced_at)


def never_read(self, _, now_s):
    return now_s >= self._leases_end_s


def lease_from_the_answer(self, heartbeat):
    written = WRITE(self, heartbeat)
    return written and written._replace(begun_s=self._brokers.world.now_s)


def never_fenced(self):
    self._brokers.epoch = self._epoch = 1


def latest_lease(self, fence):
    """Hold the lease of the heartbeat that was to be written, not of the one that was."""
    begun = self._until_s
    RENEW(self, fence)
    if self._until_s > begun:
        self._lease_until(self.world.now_s + LONE_LEASE_S - HEARTBEAT_S)


WRITE, RENEW = Leads.write, Election._renew


@pytest.mark.parametrize(
    ("of", "name", "mutant"),
    [
        (Leadership, "may_lead", never_wait),
        (Leadership, "may_lead", never_read),
        (Leads, "write", lease_from_the_answer),
        (Leads, "init", never_fenced),
        (Election, "_renew", latest_lease),
    ],
)
def test_a_mutant_of_the_protocol_is_caught(of, name, mutant, monkeypatch):
    monkeypatch.setattr(of, name, mutant)
    assert any(overlaps(simulate(seed, monkeypatch)[0]) for seed in range(SEEDS))
