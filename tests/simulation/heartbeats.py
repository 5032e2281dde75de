"""The log of heartbeats on simulated brokers, for the real election."""

from duetime.kafka.heartbeats import STEP_S, Fenced, Written
from duetime.pipeline.leadership import election


class Brokers:
    """The log, and the epoch of its transactional id."""

    def __init__(self, world):
        self.world = world
        self.records, self.epoch = [], 0
        #: Machines that the partition's leader and the coordinator do not answer, until when.
        self.cut, self.coordinator_cut = {}, {}
        #: Whether answers may be late or old by themselves.
        self.has_faults = lambda: True

    def reach(self, cut, within_s=float("inf")):
        """Wait until a request of this machine is here; return whether it is, in this time."""
        world = self.world
        world.between(0.0005, 0.02)
        until_s, machine = world.now_s + within_s, world.process.machine
        while (end_s := cut.get(machine, 0)) > world.now_s < until_s:
            world.sleep(min(end_s, until_s) - world.now_s)
        return end_s <= world.now_s


class Log:
    """In place of HeartbeatLog."""

    def __init__(self, brokers):
        self._brokers, self._position = brokers, 0
        self._unwritten = []
        self._stalled_until_s = 0.0

    def start(self):
        self._brokers.reach(self._brokers.cut)
        return not self._brokers.records

    def read(self, wait_s):
        brokers, world = self._brokers, self._brokers.world
        world.between(0, wait_s)
        if brokers.cut.get(world.process.machine, 0) > world.now_s:
            return
        if brokers.has_faults() and world.random.random() < 0.01:
            self._stalled_until_s = world.now_s + world.random.uniform(0.2, 1.0)
        brokers.records += self._unwritten
        self._unwritten = []
        if world.now_s < self._stalled_until_s:
            return
        # What a fetch has brought may be older than what is there.
        end = len(brokers.records) - world.random.choice((0, 0, 0, 1))
        found = brokers.records[self._position : end]
        self._position = max(self._position, end)
        for each in found:
            world.step()
            yield each

    def write(self, heartbeat):
        # One that does not arrive in time is given up.
        self._unwritten = [*self._unwritten, heartbeat][-2:]

    def close(self):
        pass


class Leads:
    """In place of LeaderHeartbeats."""

    def __init__(self, brokers):
        self._brokers = brokers
        brokers.reach(brokers.coordinator_cut)
        # A transaction that the last leader left open is aborted before.
        brokers.world.between(0, brokers.world.random.choice((0.02, 0.6)))
        self.init()
        self._begun, self._is_appended = None, False
        brokers.world.between(0, 0.02)

    def init(self):
        self._brokers.epoch += 1
        self._epoch = self._brokers.epoch

    def write(self, heartbeat):
        brokers, world = self._brokers, self._brokers.world
        started_s = world.now_s
        if self._begun is None:
            self._begun, self._is_appended = Written(started_s, heartbeat), False
            world.step()
        if not self._is_appended:
            if not brokers.reach(brokers.cut, STEP_S):
                return None
            # The partition's leader knows of a fence only once another has written there.
            brokers.records.append(self._begun.heartbeat)
            self._is_appended = True
        world.step()
        if not brokers.reach(brokers.coordinator_cut, STEP_S):
            return None
        if brokers.epoch != self._epoch:
            raise Fenced("by another")
        world.between(0, 0.02)
        if world.now_s - started_s > STEP_S:
            return None
        done, self._begun = self._begun, None
        return done

    def close(self):
        pass


def patch_election(monkeypatch, world, brokers):
    """Have elections run in this world."""
    monkeypatch.setattr(election, "time", world.time)
    monkeypatch.setattr(election, "threading", world.threading)
    monkeypatch.setattr(election, "HeartbeatLog", lambda _: Log(brokers))
    monkeypatch.setattr(election, "LeaderHeartbeats", lambda _: Leads(brokers))
