"""Leadership under pauses, cuts and slow brokers: one holds a lease at a time, and soon one does.

The real election runs on a simulated log and clock. A mutant of each rule must be caught.
"""

from types import SimpleNamespace

import pytest
from tests.simulation.world import World

from duetime.core.clock import SystemClock
from duetime.core.settings import Settings
from duetime.kafka.heartbeats import STEP_S, Fenced, Written
from duetime.kafka.leadership import HEARTBEAT_S, IS_WARM, LONE_LEASE_S, Leadership
from duetime.pipeline.leadership import election
from duetime.pipeline.leadership.election import Election

SECONDS, MEMBERS, SEEDS = 40.0, 3, 60

TAKEOVER_S = 1.5

#: Faults end here: by the end of the world, one leads.
FAULTS_END_S = 20.0


class Broker:
    """The log, and the epoch of its transactional id."""

    def __init__(self, world):
        self.world = world
        self.records, self.epoch = [], 0
        #: Members that the partition's leader and the coordinator do not answer, until when.
        self.cut, self.coordinator_cut = {}, {}

    def reach(self, member, cut, within_s=float("inf")):
        """Wait until a request of the member is here; return whether it is, in this time."""
        world = self.world
        world.between(0.0005, 0.02)
        until_s = world.now_s + within_s
        while (end_s := cut.get(member, 0)) > world.now_s < until_s:
            world.sleep(min(end_s, until_s) - world.now_s)
        return end_s <= world.now_s


class Log:
    """In place of HeartbeatLog."""

    def __init__(self, broker, member):
        self._broker, self._member, self._position = broker, member, 0
        self._unwritten = []
        self._stalled_until_s = 0.0

    def start(self):
        self._broker.reach(self._member, self._broker.cut)
        return not self._broker.records

    def read(self, wait_s):
        world, broker = self._broker.world, self._broker
        world.between(0, wait_s)
        self._member.maybe_pause()
        if broker.cut.get(self._member, 0) > world.now_s:
            return
        if self._member.has_faults() and world.random.random() < 0.01:
            self._stalled_until_s = world.now_s + world.random.uniform(0.2, 1.0)
        broker.records += self._unwritten
        self._unwritten = []
        if world.now_s < self._stalled_until_s:
            return
        # What a fetch has brought may be older than what is there.
        end = len(broker.records) - world.random.choice((0, 0, 0, 1))
        found = broker.records[self._position : end]
        self._position = max(self._position, end)
        for each in found:
            self._member.maybe_pause()
            yield each

    def write(self, heartbeat):
        # One that does not arrive in time is given up.
        self._unwritten = [*self._unwritten, heartbeat][-2:]

    def close(self):
        pass


class Leads:
    """In place of LeaderHeartbeats."""

    def __init__(self, broker, member):
        self._broker, self._member = broker, member
        broker.reach(member, broker.coordinator_cut)
        # A transaction that the last leader left open is aborted before.
        broker.world.between(0, broker.world.random.choice((0.02, 0.6)))
        broker.epoch += 1
        self._epoch = broker.epoch
        self._begun, self._is_appended = None, False
        broker.world.between(0, 0.02)

    def write(self, heartbeat):
        world, broker = self._broker.world, self._broker
        started_s = world.now_s
        if self._begun is None:
            self._begun, self._is_appended = Written(started_s, heartbeat), False
            self._member.maybe_pause()
        if not self._is_appended:
            if not broker.reach(self._member, broker.cut, STEP_S):
                return None
            # The partition's leader knows of a fence only once another has written there.
            broker.records.append(self._begun.heartbeat)
            self._is_appended = True
        self._member.maybe_pause()
        if not broker.reach(self._member, broker.coordinator_cut, STEP_S):
            return None
        if broker.epoch != self._epoch:
            raise Fenced("by another")
        world.between(0, 0.02)
        self._member.maybe_pause()
        if world.now_s - started_s > STEP_S:
            return None
        done, self._begun = self._begun, None
        return done

    def close(self):
        pass


class Flag:
    """In place of threading.Event."""

    def __init__(self, world):
        self._world, self._is_set = world, False

    def set(self):
        self._is_set = True

    def is_set(self):
        return self._is_set

    def wait(self, seconds):
        self._world.sleep(seconds)


class Task:
    """In place of threading.Thread."""

    def __init__(self, world, run):
        self._world, self._run, self._is_alive = world, run, True

    def start(self):
        self._world.start(self._until_done)

    def is_alive(self):
        return self._is_alive

    def join(self):
        while self._is_alive:
            self._world.sleep(0.01)

    def _until_done(self):
        self._run()
        self._is_alive = False


class Member(Election):
    """An election whose leases are noted."""

    def prepare(self, world, leases):
        self.world, self.leases = world, leases
        self.status = lambda: {IS_WARM: True}
        return self

    def maybe_pause(self):
        """A process may stand still between any two steps."""
        world = self.world
        if self.has_faults() and world.random.random() < 0.003:
            world.between(*world.random.choice(((1.0, 2.0), (0.1, 8.0))))

    def has_faults(self):
        return self.world.now_s < FAULTS_END_S

    def _lease_until(self, instant_s):
        super()._lease_until(instant_s)
        self.leases.append((self.world.now_s, self._until_s, self))

    __hash__ = object.__hash__


@pytest.fixture
def no_pauses(monkeypatch):
    """Only what a test does itself goes wrong."""
    monkeypatch.setattr(Member, "has_faults", lambda _: False)


def cut_now_and_then(world, broker, members):
    while True:
        world.between(1.0, 6.0)
        if world.now_s > FAULTS_END_S:
            return
        hit = world.random.choice([[each] for each in members] + [members])
        both = [broker.cut, broker.coordinator_cut]
        kinds = world.random.choice((both, both, [broker.coordinator_cut]))
        until_s = world.now_s + world.random.uniform(0.2, 6.0)
        for each in hit:
            for what in kinds:
                what[each] = min(until_s, FAULTS_END_S)


def simulate(seed, monkeypatch, faults=cut_now_and_then):
    """Run one world; return what each call has set the leases to, and the members."""
    world, leases = World(seed), []
    broker = Broker(world)
    members = []
    monkeypatch.setattr(election, "time", SimpleNamespace(monotonic=lambda: world.now_s))
    monkeypatch.setattr(election, "HeartbeatLog", lambda _: None)
    monkeypatch.setattr(
        election, "LeaderHeartbeats", lambda settings: Leads(broker, settings.member)
    )
    for number in range(MEMBERS):
        member = Member(Settings(), SystemClock()).prepare(world, leases)
        member._member = member._name = str(number)
        member._log = Log(broker, member)
        member._settings = SimpleNamespace(
            takeover_seconds=TAKEOVER_S, namespace="d", in_term=lambda _: None, member=member
        )
        member._closing = Flag(world)
        member._thread = Task(world, member._run)
        members.append(member)
        member._thread.start()
    world.start(lambda: faults(world, broker, members))
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


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_dies_is_replaced_within_a_second_of_its_lease(seed, monkeypatch):
    died = []

    def leader_dies(world, broker, members):
        world.sleep(20)
        died.append(leader_of(members))
        broker.cut[died[0]] = broker.coordinator_cut[died[0]] = SECONDS

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


@pytest.mark.usefixtures("no_pauses")
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


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("seed", range(5))
def test_a_short_cut_of_all_members_changes_no_leader(seed, monkeypatch):

    def brokers_restart(world, broker, members):
        world.sleep(20)
        for each in members:
            broker.cut[each] = broker.coordinator_cut[each] = world.now_s + 3

    leases, _ = simulate(seed, monkeypatch, brokers_restart)
    assert len(leaders_after(15, leases)) == 1


def never_wait(self, fenced_at, _):
    return self.has_read(fenced_at)


def never_read(self, _, now_s):
    return now_s >= self._leases_end_s


def lease_from_the_answer(self, heartbeat):
    written = WRITE(self, heartbeat)
    return written and written._replace(begun_s=self._broker.world.now_s)


def never_fenced(self, broker, member):
    INIT(self, broker, member)
    broker.epoch = self._epoch = 1


def latest_lease(self, fence):
    """Hold the lease of the heartbeat that was to be written, not of the one that was."""
    begun = self._until_s
    RENEW(self, fence)
    if self._until_s > begun:
        self._lease_until(self.world.now_s + LONE_LEASE_S - HEARTBEAT_S)


WRITE, INIT, RENEW = Leads.write, Leads.__init__, Election._renew


@pytest.mark.parametrize(
    ("of", "name", "mutant"),
    [
        (Leadership, "may_lead", never_wait),
        (Leadership, "may_lead", never_read),
        (Leads, "write", lease_from_the_answer),
        (Leads, "__init__", never_fenced),
        (Election, "_renew", latest_lease),
    ],
)
def test_a_mutant_of_the_protocol_is_caught(of, name, mutant, monkeypatch):
    monkeypatch.setattr(of, name, mutant)
    assert any(overlaps(simulate(seed, monkeypatch)[0]) for seed in range(SEEDS))
