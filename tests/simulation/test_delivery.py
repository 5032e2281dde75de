"""Each message once, under kills, pauses, cuts and whatever brokers do: the real wheel, simulated.

A seed draws the load and the faults. `python -m tests.simulation.test_delivery 0 10000` runs 10,000
seeds from 0 on. It prints the history of a failure, without the faults that it does not need.
"""

import logging
import random
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
from tests.simulation import spark
from tests.simulation.client import patch_client
from tests.simulation.heartbeats import Brokers
from tests.simulation.kafka import EPOCH_MS, Kafka, Record
from tests.simulation.pipeline import Clock, Machine, Pipeline, Timer, patch_pipeline
from tests.simulation.spark import DESTINATIONS, INTAKE, LANES, NAMES, SETTINGS, WHEEL, Rows
from tests.simulation.world import Process, World

from duetime.client.cancellation import cancel_and_confirm
from duetime.core.errors import DuetimeError
from duetime.core.messages import MessageId
from duetime.pipeline.release.scheduler import ReleaseScheduler
from duetime.stores import wheel_store
from duetime.stores.wheel_store import KafkaStore

#: When the load begins and ends, when faults end, and when all must be delivered, in seconds.
LOAD_S, FAULTS_S, END_S = (6.0, 30.0), 26.0, 90.0

#: Messages, and their delays in ms.
MESSAGES, DELAYS_MS = 120, (0, 45_000)

MACHINES = ("a", "b")

#: The machine that leads when a fault begins, and how often that is the one.
LEADER, LEADERS = "leader", 3

#: How long a machine takes to start a process again, in seconds.
RESTART_S = (1.0, 5.0)

#: Clocks of brokers, and of machines, are off by this, in seconds.
BROKER_SKEW_S, MACHINE_SKEW_S = 2.0, 0.2

#: The share of messages that are cancelled, and how long before they are due at least, in seconds.
CANCELLED, CANCEL_S = 0.2, 4.0

#: The seeds of each run of the tests, and those within which a mutant must fail.
SEEDS, MUTANT_SEEDS = 60, 400


class Fault(NamedTuple):
    """A fault: its time, kind, place and extent."""

    at_s: float
    kind: str
    #: The machine or the partition.
    where: object
    #: How long, or how far, in seconds.
    much: float


def draw_faults(numbers):
    """Return the faults of a world."""
    machines = [*MACHINES, *[LEADER] * LEADERS]
    slots = numbers.sample(WHEEL[: SETTINGS.wheel.partitions], 20)
    partitions = [slots, LANES, LANES[-2:] * 5, DESTINATIONS * 3, INTAKE * 3]
    places = [place for group in partitions for place in group]
    kinds = {
        "kill": (machines, (0, 0)),
        "kill soon": (machines, (1, 60)),
        "kill at step": (machines, (1, 4)),
        "pause": (machines, (0.2, 9)),
        "pause at step": (machines, (0.2, 9)),
        "cut": (machines, (0.2, 15)),
        "clock": (machines, (-3, 3)),
        "moved": (places, (0, 25)),
        "lagging": (places, (0.5, 20)),
        "stalled": ((None,), (0.1, 2)),
        "unclean": (slots, (0, 3)),
        "recreated": ([NAMES.wheel(0), NAMES.wheel(1)], (0, 0)),
    }
    found, at_s = [], 0.0
    for _ in range(numbers.randint(1, 8)):
        kind = numbers.choice(list(kinds))
        where, much = kinds[kind]
        # Some come one upon the other.
        is_next = found and numbers.random() < 0.5
        at_s = at_s + numbers.uniform(0, 4) if is_next else numbers.uniform(LOAD_S[0], FAULTS_S)
        found.append(Fault(at_s, kind, numbers.choice(where), numbers.uniform(*much)))
    return sorted(found)


class Simulation:
    """One world, from its load to what was delivered."""

    def __init__(self, seed, monkeypatch, faults=None):
        self.world = World(seed)
        self.kafka, self.brokers = Kafka(self.world), Brokers(self.world)
        # By other numbers: a world without one of its faults is the same until then.
        drawn = draw_faults(random.Random(f"faults {seed}"))  # noqa: S311 (no secret)
        self.faults = drawn if faults is None else faults
        self.checkpoint = defaultdict(int)
        self.machines = {each: Machine(each, self.kafka) for each in MACHINES}
        self.taken, self.delivered = {}, defaultdict(list)
        #: Messages that the brokers have lost.
        self.excused = set()
        #: By machine: the step at which a fault begins, how many are left until then, the fault.
        self.at_step = {}
        #: The answers to cancels, by message.
        self.answers = {}
        patch_pipeline(monkeypatch, self.world, self.kafka, self.brokers)
        patch_client(monkeypatch, self.world, self.kafka)
        self.kafka.on_append.append(self._on_append)
        for at in INTAKE + LANES + WHEEL + DESTINATIONS:
            log = self.kafka.logs[at]
            log.skew_s = self.world.random.uniform(-BROKER_SKEW_S, BROKER_SKEW_S)
        for each in self.machines.values():
            each.clock.skew_s = self.world.random.uniform(-MACHINE_SKEW_S, MACHINE_SKEW_S)

    def run(self):
        """Run it; return what is wrong."""
        for each in MACHINES:
            self._start(each)
        self.world.start(self._load)
        for each in self.faults:
            self.world.at(each.at_s, lambda fault=each: self._begin(fault))
        self.world.disturb = self._disturb
        self.world.run(END_S)
        is_clock_set = any(each.kind == "clock" for each in self.faults)
        wrong = list(self.kafka.violations)
        for number, due_ms in self.taken.items():
            times, answer = self.delivered[number], self.answers.get(number)
            may_be_lost = answer is not None or number in self.excused
            if len(times) > 1 or not (times or may_be_lost):
                wrong.append(f"message {number} delivered {len(times)} times {times}")
            if times and answer == "cancelled" and not is_clock_set | (number in self.excused):
                wrong.append(f"message {number} was cancelled, and delivered {times}")
            early_s = (due_ms - EPOCH_MS) / 1_000 - MACHINE_SKEW_S - min(times, default=END_S)
            if early_s > 0 and not is_clock_set:
                wrong.append(f"message {number} was {early_s:.3f} s early")
        return wrong

    def _on_append(self, place, record):
        if place in INTAKE and not record.is_cancel:
            self.taken[record.id] = record.due_ms
        if place in DESTINATIONS:
            self.delivered[record.id].append(round(self.world.now_s, 3))
        kind = "cancel of " if record.is_cancel else ""
        self.world.note(f"{place[0]}-{place[1]} has {kind}{record.id} at {record.offset}")

    def _load(self):
        numbers = self.world.random
        times_s = sorted(numbers.uniform(*LOAD_S) for _ in range(MESSAGES))
        for number, at_s in enumerate(times_s):
            self.world.sleep(at_s - self.world.now_s)
            now_ms = EPOCH_MS + int(at_s * 1_000)
            record = Record(number, now_ms + numbers.randint(*DELAYS_MS), now_ms)
            if self.kafka.logs[INTAKE[0]].away_until_s <= self.world.now_s:
                self.kafka.append(INTAKE[0], record)
            latest_s = (record.due_ms - now_ms) / 1_000 - CANCEL_S
            if latest_s > 0 and numbers.random() < CANCELLED:
                self._cancel(record, numbers.uniform(0, latest_s))

    def _cancel(self, record, after_s):
        """Have a client cancel a message after a time."""

        def cancel():
            self.world.sleep(after_s)
            try:
                cancel_and_confirm(
                    MessageId(due_ms=record.due_ms, unique=str(record.id)),
                    SETTINGS,
                    Clock(self.kafka),
                )
            except DuetimeError as error:
                answer = type(error).__name__
            else:
                answer = "cancelled"
            self.answers[record.id] = answer
            self.world.note(f"answer to the cancel of {record.id}: {answer}")

        self.answers[record.id] = "none"
        self.world.start(cancel, Process("client"))

    def _start(self, name):
        machine = self.machines[name]
        machine.pipeline = made = Pipeline(machine, self.checkpoint)
        self.at_step.pop(name, None)

        def run():
            made.run()
            self.world.note(f"{made.process.name} ends")
            self.world.at(0, lambda: self._kill(name))

        self.world.start(run, made.process)

    def _leader(self):
        """Return the machine that leads, or any."""
        is_leading = {
            name: each.pipeline.election.is_leading.is_set() for name, each in self.machines.items()
        }
        leading = [name for name, leads in is_leading.items() if leads]
        return [*leading, self.world.random.choice(MACHINES)][0]

    def _kill(self, name, _=0):
        made = self.machines[name].pipeline
        if not made.process.is_alive:
            return
        self.world.kill(made.process)
        self.world.kill(made.jvm.process)
        self.world.at(self.world.random.uniform(*RESTART_S), lambda: self._start(name))

    def _kill_soon(self, name, steps):
        self._at_step(name, None, int(steps), self._kill)

    def _kill_at_step(self, name, steps):
        self._at_step(name, "job", int(steps), self._kill)

    def _pause_at_step(self, name, seconds):
        self._at_step(name, "commit", 1, lambda name: self._pause(name, seconds))

    def _at_step(self, machine, step, count, begin):
        """Have a fault begin at one of the next steps of a machine's process."""
        self.at_step[machine] = step, count, begin

    def _disturb(self, process, name):
        step, count, begin = self.at_step.get(process.machine, (None, 0, None))
        if not count or step not in {None, name}:
            return
        self.at_step[process.machine] = step, count - 1, begin
        if count == 1:
            self.world.note(f"at step {name}: {process.name}")
            if step == "commit":
                begin(process.machine)
            else:
                self.world.at(0, lambda: begin(process.machine))

    def _begin(self, fault):
        where = self._leader() if fault.where == LEADER else fault.where
        self.world.note(f"{fault.kind} {where} {fault.much:.1f}")
        getattr(self, "_" + fault.kind.replace(" ", "_"))(where, fault.much)

    def _pause(self, name, seconds):
        made = self.machines[name].pipeline
        for each in (made.process, made.jvm.process):
            self.world.pause(each, seconds)

    def _cut(self, name, seconds):
        until_s = self.world.now_s + seconds
        self.kafka.cut[name] = until_s
        self.brokers.cut[name] = self.brokers.coordinator_cut[name] = until_s

    def _clock(self, name, seconds):
        self.machines[name].clock.skew_s += seconds

    def _moved(self, place, seconds):
        """Another broker leads the partition, after some time without any."""
        skew_s = self.world.random.uniform(-BROKER_SKEW_S, BROKER_SKEW_S)
        self.kafka.move_leader(place, seconds, skew_s)

    def _lagging(self, place, seconds):
        self.kafka.logs[place].lags_until_s = self.world.now_s + seconds

    def _stalled(self, _, seconds):
        self.kafka.stalled_until_s = self.world.now_s + seconds

    def _unclean(self, place, count):
        """The brokers lose records that they have acknowledged."""
        log = self.kafka.logs[place]
        kept = max(log.start, log.high_watermark - int(count))
        self._excuse(log.records[kept:])
        log.truncate(kept)
        log.next_epoch()

    def _recreated(self, topic, _):
        for place in [each for each in self.kafka.logs if each[0] == topic]:
            log = self.kafka.logs[place]
            self._excuse(log.records[log.start :])
            self.kafka.recreate(place)

    def _excuse(self, records):
        self.excused |= {each.id for each in records}


def shrunk(seed, faults, monkeypatch):
    """Return the faults without those that the failure does not need."""
    for each in list(faults):
        fewer = [one for one in faults if one is not each]
        if Simulation(seed, monkeypatch, fewer).run():
            faults = fewer
    return faults


def check(seed, monkeypatch):
    """Return nothing, or the history of the seed's failure."""
    simulation = Simulation(seed, monkeypatch)
    if not simulation.run():
        return ""
    simulation = Simulation(seed, monkeypatch, shrunk(seed, simulation.faults, monkeypatch))
    wrong = simulation.run()
    return "\n".join([f"seed {seed}", *wrong, *simulation.world.history])


@pytest.fixture(autouse=True)
def no_log():
    """The pipeline logs each failure."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_message_comes_once(seed, monkeypatch):
    assert not check(seed, monkeypatch)


def settled_before_it_is_sent(self, claims):
    self._store.mark_started(claims, self._clock.now_ms())
    self._store.settle(claims)
    self._job(claims)


def unclaimed(self, ends, due):
    found = CLAIM(self, ends, due)
    self._claimed.clear()
    return found


CLAIM = KafkaStore._claim

MUTANTS = {
    "a start that is not noted": (KafkaStore, "mark_started", lambda *_: None),
    "settled before it is sent": (ReleaseScheduler, "_release", settled_before_it_is_sent),
    "no watchdog": (Timer, "set", lambda *_: None),
    "clocks that agree": (spark, "CLOCKS_MS", 0),
    "claimed twice": (KafkaStore, "_claim", unclaimed),
    "replicas that are not waited for": (Rows, "_shown", lambda self, at: self._offsets.ends(at)),
    "logs that lose nothing": (KafkaStore, "_truncated", lambda *_: set()),
    "topics that stay": (wheel_store, "is_same_topic", lambda *_: True),
    "longer lanes once the clock was set back": (spark, "present_lane", lambda _: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_protocol_is_caught(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    assert any(Simulation(seed, monkeypatch).run() for seed in range(MUTANT_SEEDS))


def history_of(seed):
    """Return nothing, or the history of a failure, in a process of its own."""
    logging.disable()
    with pytest.MonkeyPatch.context() as patches:
        return check(seed, patches)


def main(first, count):
    """Run the seeds on all cores; print the history of the first that fails, and how many do."""
    with ProcessPoolExecutor() as pool:
        histories = filter(None, pool.map(history_of, range(first, first + count), chunksize=10))
        failed = 0
        for history in histories:
            failed += 1
            print(history if failed == 1 else history.splitlines()[:3])
    print(f"{failed} of {count} seeds failed")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
