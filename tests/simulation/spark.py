"""A model of what Spark does for the pipeline, in a simulated world.

The release job, the queries of intake and lanes, and what they read back, as the docstrings of
`duetime.pipeline.release.job`, `delivery.relays` and `recovery.deduplicator` say.
"""

from collections import defaultdict
from contextlib import suppress
from functools import partial
from weakref import WeakSet

from tests.simulation.kafka import Offsets, Producer
from tests.simulation.world import Event

from duetime.core.errors import DuetimeError, KafkaError, LeaderPaused
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.pipeline.leadership.lease import WAITS_MS
from duetime.pipeline.recovery.deduplicator import CLOCKS_MS
from duetime.pipeline.recovery.progress import INTERVAL_S
from duetime.pipeline.recovery.read_back import VISIBLE_INTERVAL_S, VISIBLE_TIMEOUT_S
from duetime.spark.kafka_io import DELIVERY_TIMEOUT_S, RETRY_PAUSE_S

SETTINGS = Settings(wheel_slots=24, wheel_levels=2)
NAMES = TopicNames(SETTINGS)

INTAKE = [(NAMES.native, 0)]
LANES = [(NAMES.lanes, lane) for lane in range(SETTINGS.delay_lanes.lanes)]
WHEEL = [
    (NAMES.wheel(level), each)
    for level in range(SETTINGS.wheel_levels)
    for each in range(SETTINGS.wheel.partitions)
]
DESTINATIONS = [("orders", 0), ("orders", 1), ("mails", 0)]

#: Errors that fail one step of a process, and not the process.
ERRORS = (DuetimeError, ConnectionError)


class Jvm:
    """The JVM: rows run in it, and its producers send."""

    def __init__(self, world, kafka, process):
        self.world, self.kafka, self.process = world, kafka, process
        self.leases, self._producers, self._jobs = {}, WeakSet(), {}
        #: The metrics of its producers.
        self.producers = self

    def extend_lease(self, name, until_s):
        self._require()
        self.leases[name] = until_s

    def end_lease(self, name):
        self._require()
        self.leases[name] = 0.0

    def unacknowledged_bytes(self):
        self._require()
        return sum(each.held for each in self._producers)

    def _require(self):
        if not self.process.is_alive:
            raise ConnectionError("the JVM has ended")

    def producer(self):
        """Return a producer that no other job uses."""
        made = Producer(self.kafka, self.process, DELIVERY_TIMEOUT_S)
        self._producers.add(made)
        return made

    def await_quiet(self, timeout_s):
        until_s = self.world.now_s + timeout_s
        while self.unacknowledged_bytes() and self.world.now_s < until_s:
            self.world.sleep(0.1)

    def run(self, job):
        """Run a job's task; raise its error, or that the JVM or the job has ended."""
        self._require()
        done, ended = Event(self.world), []

        def body():
            try:
                job()
                ended.append(None)
            except Exception as error:  # noqa: BLE001 (raised below)
                ended.append(error)
            finally:
                self._jobs.pop(task, None)
                done.set()

        task = self.world.start(body, self.process)
        self._jobs[task] = None
        done.wait()
        if not ended:
            raise ConnectionError("the job was cancelled, or the JVM has ended")
        if ended[0] is not None:
            raise ended[0]

    def cancel_all(self):
        """End all tasks. What their producers hold is sent all the same."""
        for each in list(self._jobs):
            self.world.end(each)

    def require_lease(self, name):
        """Wait for the lease as a row does."""
        for wait_ms in (0, *WAITS_MS):
            if wait_ms:
                self.world.sleep(wait_ms / 1_000)
            if self.world.now_s < self.leases.get(name, 0.0):
                return
        raise LeaderPaused(name)


class Rows:
    """The rows of one term, in one JVM; in place of ReleaseJob."""

    def __init__(self, jvm, clock, lease, guard):
        self.jvm, self.clock, self.world, self.kafka = jvm, clock, jvm.world, jvm.kafka
        self.lease, self.guard = lease, guard
        self._offsets = Offsets(self.kafka, "recover")

    def places(self, record, present=None):
        """Return where a record goes now: a message to one place, a cancel wherever that may be.

        A record of the lanes has a `present` one.
        """
        now_ms, wheel = self.clock.now_ms(), SETTINGS.wheel
        left_ms = record.due_ms - now_ms
        is_later = left_ms > SETTINGS.short_delay_threshold_ms and present is None
        if is_later:
            slots = [wheel.place(record.due_ms, now_ms)]
            slots += wheel.higher_slots(record.due_ms, now_ms) if record.is_cancel else []
            return [slot_place(slot, record) for slot in slots]
        if record.is_cancel:
            return []
        lane = SETTINGS.delay_lanes.lane(left_ms) if left_ms > 0 else None
        if lane is not None:
            # Not up to a longer one, after the clock was set back.
            return [(NAMES.lanes, lane if present is None else min(lane, present))]
        self.sleep_until(record.due_ms)
        return [destination(record)]

    def sleep_until(self, instant_ms):
        while (left_ms := instant_ms - self.clock.now_ms()) > 0:
            self.world.sleep(min(left_ms, 1_000) / 1_000)

    def send(self, producer, record, present=None):
        """Send a record where it belongs, while we lead; see `places`."""
        for place in self.places(record, present):
            self.jvm.require_lease(self.lease)
            producer.send(place, record)

    def __call__(self, claims):
        """Empty the claims; see `ReleaseJob`."""
        self.jvm.run(lambda: self._release(claims))

    def _release(self, claims):
        records = self._claimed(claims)
        started_ms = [each.started_ms for each in claims if each.started_ms is not None]
        if started_ms:
            records = self.drop_moved_on(records, min(started_ms))
        kept = {}
        order = sorted(records, key=lambda one: (not one[1].is_cancel, *arrival(one[1])))
        for _, record in order:
            kept.setdefault(record.id, record)
        now_ms, threshold_ms = self.clock.now_ms(), SETTINGS.short_delay_threshold_ms

        def turn(record):
            return record.due_ms - now_ms <= threshold_ms, record.due_ms, *arrival(record)

        producer = self.jvm.producer()
        for record in sorted(kept.values(), key=turn):
            if not turn(record)[0]:
                self._route_on(producer, record)
            elif not record.is_cancel:
                self.sleep_until(record.due_ms)
                self.jvm.require_lease(self.lease)
                producer.send(destination(record), record)
        producer.flush()

    def route_cancels(self, claims):
        """Route on the cancels that are due later."""

        def route():
            producer, now_ms = self.jvm.producer(), self.clock.now_ms()
            for _, record in self._claimed(claims):
                left_ms = record.due_ms - now_ms
                if record.is_cancel and left_ms > SETTINGS.short_delay_threshold_ms:
                    self._route_on(producer, record)
            producer.flush()

        self.jvm.run(route)

    def _claimed(self, claims):
        return [
            (each.place, record)
            for each in claims
            for record in self.kafka.read(each.place, each.start, each.end)
        ]

    def _route_on(self, producer, record):
        slot = SETTINGS.wheel.place(record.due_ms, self.clock.now_ms())
        self.jvm.require_lease(self.lease)
        producer.send(slot_place(slot, record), record)

    def drop_moved_on(self, records, since_ms):
        """Leave out the records whose message has moved on since; see `Deduplicator`."""
        written = self._written(since_ms - CLOCKS_MS)
        return [
            (place, record)
            for place, record in records
            if record.is_cancel
            or not any(
                is_further(there, found, place, record) for there, found in written[record.id]
            )
        ]

    def drop_ingested(self, records, since_ms):
        """Leave out the records whose message is anywhere else."""
        written = self._written(since_ms - CLOCKS_MS)
        left = [one for one in records if one[1].is_cancel or not written[one[1].id]]
        # Those meet their cancel in no slot.
        near_ms = self.clock.now_ms() + SETTINGS.short_delay_threshold_ms
        cancelled = self._cancelled(since_ms - CLOCKS_MS)
        return [
            (place, record)
            for place, record in left
            if record.is_cancel or record.due_ms > near_ms or record.id not in cancelled
        ]

    def _cancelled(self, since_ms):
        """Return the messages whose cancel came in time, of the intake topic since an instant."""
        found = defaultdict(list)
        self._collect(self._offsets.ends(INTAKE), since_ms, found, cancels=True)
        return {
            number
            for number, records in found.items()
            if any(
                each.due_ms - each.at_ms > SETTINGS.short_delay_threshold_ms for _, each in records
            )
        }

    def _written(self, since_ms):
        """Return where each message was appended since, first where messages wait."""
        found = defaultdict(list)
        with self.guard.hold():
            internal = self._shown(WHEEL + LANES)
            self._collect(internal, since_ms, found)
        self._collect(self._shown(DESTINATIONS), since_ms, found)
        return found

    def _shown(self, places):
        """Return where the logs end, once readers are shown all that leaders have now."""
        logs = self.kafka.ask(lambda: {at: self.kafka.led(at).end for at in places})
        until_s = self.world.now_s + VISIBLE_TIMEOUT_S
        ends = self._offsets.ends(places)
        while behind := [at for at in places if ends[at] < logs[at]]:
            if self.world.now_s > until_s:
                raise KafkaError("replicas lag")
            self.world.sleep(VISIBLE_INTERVAL_S)
            ends |= self._offsets.ends(behind)
            # A new leader may lack what the last one had.
            now = self.kafka.ask(lambda: {at: self.kafka.led(at).end for at in behind})
            logs |= {at: min(logs[at], now[at]) for at in behind}
        return ends

    def _collect(self, ends, since_ms, found, *, cancels=False):
        firsts = self._offsets.first_since(dict.fromkeys(ends, since_ms))
        for place, first in firsts.items():
            if first is not None and first < ends[place]:
                for record in self.kafka.read(place, first, ends[place]):
                    if record.is_cancel == cancels:
                        found[record.id].append((place, record))


def slot_place(slot, record):
    """Return the partition of a record in a slot."""
    return NAMES.wheel(slot.level), SETTINGS.wheel.partition(slot, str(record.id))


def present_lane(place):
    """Return the lane that a record is in; None for a record of another topic."""
    return place[1] if place in LANES else None


def destination(record):
    """Return the partition that a message is for."""
    return DESTINATIONS[record.id % len(DESTINATIONS)]


def arrival(record):
    """Return the order of arrival."""
    return record.taken_ms, record.offset


def rank(place):
    """Return how far a message is that has a record here; see `hop_rank`."""
    topic, partition = place
    levels, lanes = SETTINGS.wheel_levels, SETTINGS.delay_lanes.lanes
    if topic == NAMES.lanes:
        return levels + lanes - partition
    return next((levels - each for each in range(levels) if topic == NAMES.wheel(each)), 10_000)


def is_further(there, found, place, record):
    """Return whether one record of a message was written after another."""
    if there == place:
        return found.offset > record.offset
    return (rank(there), found.at_ms, there) > (rank(place), record.at_ms, place)


class Query:
    """A query in real time, with its checkpoint; recovers what is behind that first."""

    def __init__(self, rows, places, checkpoint, may_commit):
        self._rows, self._places = rows, places
        self._checkpoint, self._may_commit = checkpoint, may_commit
        self._world, self._kafka, self._jvm = rows.world, rows.kafka, rows.jvm
        self._offsets = Offsets(self._kafka, "query")
        self.is_wanted = True

    def start(self):
        self._world.start(self._run)

    def _run(self):
        while self.is_wanted:
            producer = self._jvm.producer()
            with suppress(*ERRORS):
                self._recover(producer)
                self._stream(producer)
            if not self.is_wanted or not self._jvm.process.is_alive:
                return
            # Until none of its records is in flight.
            self._world.sleep(RETRY_PAUSE_S)

    def _recover(self, producer):
        ends = self._offsets.ends(self._places)
        found = [
            (at, record)
            for at in self._places
            if self._checkpoint[at] < ends[at]
            for record in self._kafka.read(at, self._checkpoint[at], ends[at])
        ]
        if found:
            since_ms = min(record.at_ms for _, record in found)
            drop = self._rows.drop_ingested if self._places == INTAKE else self._rows.drop_moved_on

            def route():
                for at, record in sorted(drop(found, since_ms), key=lambda one: one[1].due_ms):
                    self._rows.send(producer, record, present_lane(at))
                producer.flush()

            self._jvm.run(route)
        self._commit(ends)

    def _commit(self, offsets):
        if self._may_commit():
            self._checkpoint |= offsets

    def _stream(self, producer):
        """Route records as they come, until one is given up; commit what is acknowledged."""
        reached, failed = {at: self._checkpoint[at] for at in self._places}, []
        tasks = [
            self._world.start(partial(self._read, at, reached, producer, failed), self._jvm.process)
            for at in self._places
        ]
        try:
            while self.is_wanted and not failed and not producer.given_up:
                self._world.sleep(INTERVAL_S)
                noted = dict(reached)
                if not self._jvm.process.is_alive:
                    return
                if not producer.held and not producer.given_up:
                    self._commit(noted)
        finally:
            for each in tasks:
                self._world.end(each)
        if failed or producer.given_up:
            raise KafkaError("records could not be delivered in time")

    def _read(self, place, reached, producer, failed):
        try:
            while True:
                more = self._kafka.appended[place]
                for record in self._kafka.read(place, reached[place]):
                    if place in LANES:
                        self._wait_in_lane(place, record)
                    self._rows.send(producer, record, present_lane(place))
                    reached[place] = record.offset + 1
                more.wait()
        except DuetimeError as error:
            failed.append(error)

    def _wait_in_lane(self, place, record):
        lanes = SETTINGS.delay_lanes
        wait_ms, step_ms = lanes.wait_ms(place[1]), lanes.step_ms(0)
        over_ms = record.at_ms + wait_ms
        until_ms = record.due_ms if record.due_ms < over_ms + step_ms else over_ms
        pause_ms = min(until_ms - self._rows.clock.now_ms(), wait_ms + step_ms)
        self._world.sleep(max(0, pause_ms) / 1_000)
