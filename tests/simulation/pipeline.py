"""A process of `duetime run` in a simulated world.

Its election, watchdog, wheel store, scheduler and cascades are the real ones; Spark is a model.
"""

from contextlib import suppress
from functools import partial

from tests.simulation.heartbeats import patch_election
from tests.simulation.kafka import Offsets
from tests.simulation.spark import ERRORS, INTAKE, LANES, SETTINGS, Jvm, Query, Rows
from tests.simulation.world import Pool, Process, wait_all

from duetime.core import threads
from duetime.pipeline.leadership import lease
from duetime.pipeline.leadership.election import Election
from duetime.pipeline.leadership.lease import Watchdog, lease_name
from duetime.pipeline.release import cascades, scheduler
from duetime.pipeline.release.scheduler import ReleaseScheduler
from duetime.pipeline.service import CHECK_INTERVAL_S, LEAD_RETRY_S
from duetime.spark.kafka_io import RETRY_PAUSE_S
from duetime.stores import wheel_store
from duetime.stores.wheel_store import DeletionGuard, KafkaStore

#: How long Spark takes to start, in seconds.
START_S = (2.0, 4.0)


class Clock:
    """A machine's clock."""

    def __init__(self, kafka):
        self._kafka, self.skew_s = kafka, 0.0

    def now_ms(self):
        return self._kafka.now_ms(self.skew_s)


class Machine:
    """Runs one pipeline after the other."""

    def __init__(self, name, kafka):
        self.name, self.kafka, self.clock = name, kafka, Clock(kafka)
        #: How often a pipeline was started, and the present one.
        self.starts, self.pipeline = 0, None


class Pipeline:
    """A process that leads or stands by, on one machine."""

    def __init__(self, machine, checkpoint):
        """All pipelines share the checkpoint."""
        self.kafka, self.world, self.clock = machine.kafka, machine.kafka.world, machine.clock
        self.checkpoint = checkpoint
        machine.starts += 1
        name = f"{machine.name}.{machine.starts}"
        self.process = Process(name, machine.name)
        self.jvm = Jvm(self.world, self.kafka, Process(f"{name}.jvm", machine.name))
        self.guard = DeletionGuard()
        self.election = Election(SETTINGS, self.clock)
        self._stop_leading = []

    def run(self):
        """Take part until the JVM ends."""
        self.election._member = self.election._name = self.process.name
        self.election.start()
        self.world.between(*START_S)
        self.election.attach(self.jvm)
        self.election.status = lambda: {"is_warm": True}
        term, lead_s = None, 0.0
        while self.jvm.process.is_alive and not self.election.broken:
            self.world.sleep(0.05)
            is_leading = self.election.is_leading.is_set()
            if term is not None and not (is_leading and self.election.term == term):
                self._stand_by()
                term, lead_s = None, self.world.now_s + RETRY_PAUSE_S
            elif term is None and is_leading and self.world.now_s >= lead_s:
                try:
                    self._lead()
                except ERRORS:
                    self._stop()
                    lead_s = self.world.now_s + LEAD_RETRY_S
                    if self._scheduler:
                        self._end_jobs()
                        lead_s = self.world.now_s + RETRY_PAUSE_S
                else:
                    term = self.election.term
            elif term is not None:
                self._supervise()

    def _lead(self):
        self._scheduler = None
        term = self.election.term
        holds_lease = partial(self.election.holds_lease_of, term)
        self._watchdog = Watchdog(self.jvm, self.election.jvm_end_s, self._is_quiet)
        self._watchdog.start()
        self._stop_leading.append(self._watchdog.stop)
        self._stop_leading.append(self._await_quiet_unless_leading)
        rows = Rows(self.jvm, self.clock, lease_name(SETTINGS.in_term(term)), self.guard)
        self._wheel = KafkaStore(SETTINGS, self.guard, holds_lease, self.election.generations)
        self._scheduler = ReleaseScheduler(
            settings=SETTINGS, store=self._wheel, job=rows, clock=self.clock
        )
        self._stop_leading.append(self._scheduler.stop)
        from_ms = self.clock.now_ms()
        self._scheduler.release_overdue()
        self._queries = [
            Query(rows, places, self.checkpoint, holds_lease) for places in (LANES, INTAKE)
        ]
        self._scheduler.start(from_ms)
        for each in self._queries:
            self._stop_leading.append(partial(setattr, each, "is_wanted", False))
            each.start()
        self._supervised_s = self.world.now_s

    def _supervise(self):
        if self.world.now_s - self._supervised_s >= CHECK_INTERVAL_S:
            self._supervised_s = self.world.now_s
            with suppress(*ERRORS):
                self._wheel.refresh_commits(self.clock.now_ms())

    def _stand_by(self):
        self.jvm.cancel_all()
        self._stop()
        self._end_jobs()

    def _end_jobs(self):
        self.jvm.cancel_all()
        self._scheduler.join()

    def _stop(self):
        while self._stop_leading:
            with suppress(*ERRORS):
                self._stop_leading.pop()()

    def _await_quiet_unless_leading(self):
        if not self.election.holds_lease():
            self.jvm.await_quiet(RETRY_PAUSE_S)

    def _is_quiet(self):
        return not (self.election.holds_lease() or self.jvm.unacknowledged_bytes())


class Timer:
    """In place of PosixTimer: the kernel's, which ends a JVM also while it is paused."""

    def __init__(self, jvm):
        self._jvm, self._number = jvm, 0

    def set(self, instant_s):
        self._jvm.unacknowledged_bytes()
        self._number += 1
        number, world, process = self._number, self._jvm.world, self._jvm.process

        def fire():
            if self._number == number and process.is_alive:
                world.note(f"watchdog ends {process.name}")
                world.kill(process)

        if instant_s:
            world.at(max(0.0, instant_s - world.now_s), fire)


def patch_pipeline(monkeypatch, world, kafka, brokers):
    """Have the real parts run in this world."""
    patch_election(monkeypatch, world, brokers)
    for module in (scheduler, wheel_store, lease, threads):
        monkeypatch.setattr(module, "time", world.time)
    for module in (scheduler, threads):
        monkeypatch.setattr(module, "threading", world.threading)
    for module in (scheduler, cascades):
        monkeypatch.setattr(module, "ThreadPoolExecutor", lambda size, **_: Pool(world, size))
    # So that slots of a few records are cut, too.
    monkeypatch.setattr(cascades, "CHUNK", 4)
    monkeypatch.setattr(cascades, "CUT_UNTIL_MS", 2_000)
    monkeypatch.setattr(scheduler, "wait", wait_all)
    monkeypatch.setattr(scheduler, "reach", lambda _: world.step("job"))
    monkeypatch.setattr(wheel_store, "Offsets", lambda _, group: Offsets(kafka, group))
    monkeypatch.setattr(lease, "_posix_timer", Timer)
