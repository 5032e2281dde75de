"""Progress under stalls, outages and errors: whatever is reached is acknowledged.

The real decision reads a simulated producer, whose thread may stand still at any of its steps. A
mutant of each rule must be caught.
"""

import random
from collections import deque

import pytest

from duetime.pipeline.recovery import progress
from duetime.pipeline.recovery.progress import RunProducer, RunProgress
from duetime.spark.kafka_io import DELIVERY_TIMEOUT_S

SEEDS, SECONDS, STEP_S = 150, 60.0, 0.05

PARTITION = ("in", 0)

#: Requests of a producer that wait for an answer.
IN_FLIGHT = 5

#: The faults of a world, and how likely one begins and ends in a step.
FAULTS = ("is_cut", "is_slow", "is_stalled")
BEGINS, ENDS = 0.002, 0.01
#: How likely a producer breaks in a step.
BREAKS = 0.0002

read = RunProducer.read


class Producer:
    """Kafka's producer, as far as its metrics tell, and the task that gives it records."""

    def __init__(self, world):
        self.world = world
        #: The next record's offset; whether it is acknowledged, by offset.
        self.next, self.acknowledged = 0, set()
        #: (offset, created at), in the buffer and at the broker.
        self.buffer, self.in_flight = deque(), deque()
        self.count, self.given_up, self.started_ms, self.is_broken = 0, 0, 1, False
        self.thread = self.run()

    def run(self):
        """One step of its thread at a time, as in Sender.sendProducerData."""
        while True:
            now_s = self.world.now_s
            yield
            for held in (self.in_flight, self.buffer):
                while held and now_s - held[0][1] >= DELIVERY_TIMEOUT_S:
                    held.popleft()
                    self.given_up += 1
            yield
            while self.buffer and len(self.in_flight) < IN_FLIGHT and not self.world.is_cut:
                self.in_flight.append(self.buffer.popleft())
                self.count += 1
            yield
            while self.in_flight and not self.world.is_cut and not self.world.is_slow:
                self.acknowledged.add(self.in_flight.popleft()[0])
            yield

    def give(self):
        """Give it the next record. A task whose records were given up has failed."""
        if not (self.given_up or self.is_broken):
            self.buffer.append((self.next, self.world.now_s))
            self.next += 1

    def break_down(self):
        """Drop all that it holds, uncounted."""
        self.is_broken = True
        self.buffer.clear()
        self.in_flight.clear()

    def sent(self):
        self.world.pass_time()
        return self.count

    def unacknowledged_bytes(self):
        self.world.pass_time()
        return len(self.buffer) + len(self.in_flight)

    def errors(self):
        self.world.pass_time()
        return self.given_up

    def is_over(self):
        self.world.pass_time()
        return self.is_broken


class World:
    """The time, and the faults of one seed."""

    def __init__(self, seed):
        self.random, self.now_s, self.wall_s = random.Random(seed), 0.0, 1e9  # noqa: S311 (no secret)
        self.is_cut = self.is_slow = self.is_stalled = False
        self.producer = Producer(self)
        self.rate = self.random.choice((0.02, 0.2, 1, 5))

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.wall_s + self.now_s

    def pass_time(self):
        """Let a moment pass, in which the thread may get anywhere."""
        for _ in range(self.random.randrange(4)):
            self.step(STEP_S / 4)

    def step(self, seconds):
        self.now_s += seconds
        for each in FAULTS:
            if self.random.random() < (ENDS if getattr(self, each) else BEGINS):
                setattr(self, each, not getattr(self, each))
        if self.random.random() < BREAKS:
            self.producer.break_down()
        for _ in range(int(self.rate + self.random.random())):
            self.producer.give()
        if not self.is_stalled:
            for _ in range(self.random.randrange(9)):
                next(self.producer.thread)


def run(seed, monkeypatch):
    """Return how many offsets were reached, if each was acknowledged."""
    world = World(seed)
    monkeypatch.setattr(progress, "time", world)
    producer = RunProducer(lambda: world.producer)
    found, reached = RunProgress(), 0
    while world.now_s < SECONDS:
        noted = world.producer.next
        world.pass_time()
        reading = producer.read({PARTITION: noted})
        for offset in found.add(reading).values():
            lacking = set(range(offset)) - world.producer.acknowledged
            assert not lacking, f"seed {seed}: {min(lacking)} is not acknowledged, {offset} reached"
            reached = max(reached, offset)
        for _ in range(int(progress.INTERVAL_S / STEP_S)):
            world.step(STEP_S)
    return reached


def run_all(seeds, monkeypatch):
    return [run(seed, monkeypatch) for seed in range(seeds)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_is_reached_is_acknowledged(seed, monkeypatch):
    run(seed, monkeypatch)


def test_a_busy_producer_comes_forward(monkeypatch):
    reached = run_all(SEEDS, monkeypatch)
    assert sum(each > 0 for each in reached) > SEEDS / 2


def errors_first(self, offsets):
    errors = self._producer.errors() if self._producer else 0
    return read(self, offsets)._replace(errors=errors)


def deaf_to_errors(self, offsets):
    return read(self, offsets)._replace(errors=0)


def deaf_to_breaks(self, offsets):
    return read(self, offsets)._replace(is_over=False)


@pytest.mark.parametrize(
    ("of", "name", "mutant"),
    [
        (progress, "GROWTHS", 0),
        (progress, "DELIVERY_TIMEOUT_S", DELIVERY_TIMEOUT_S / 2),
        (RunProducer, "read", errors_first),
        (RunProducer, "read", deaf_to_errors),
        (RunProducer, "read", deaf_to_breaks),
    ],
)
def test_a_mutant_is_caught(of, name, mutant, monkeypatch):
    monkeypatch.setattr(of, name, mutant)
    with pytest.raises(AssertionError, match="is not acknowledged"):
        run_all(20 * SEEDS, monkeypatch)
