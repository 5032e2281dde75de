"""A simulated Kafka: logs with high watermarks and leader epochs, clocks, lost and late requests.

Times are of the world, in seconds; timestamps are in ms of the clock of a partition's leader.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.simulation.world import Event

from duetime.core.errors import KafkaError
from duetime.kafka.offsets import TIMEOUT_S, TRIES_S, Commit, LogIdentity, Position

#: The instant at which a world begins, in epoch ms.
EPOCH_MS = 1_700_000_000_000

#: Timeout of a producer's attempt, and the least and most latency of a request, in seconds.
ATTEMPT_S, LATENCY_S = 2.5, (0.0003, 0.01)

#: An attempt that was not answered is repeated after this time, in seconds.
BACKOFF_S = 0.1


class Record(NamedTuple):
    """A record of any log: of a message, or of a cancel."""

    id: int
    due_ms: int
    taken_ms: int
    is_cancel: bool = False
    at_ms: int = 0
    offset: int = -1


@dataclass
class Log:
    """The log of a partition, at its leader."""

    topic_id: str = "1"
    records: list[Record] = field(default_factory=list)
    #: Records before it are deleted.
    start: int = 0
    #: Readers are shown the records before it.
    high_watermark: int = 0
    epoch: int = 0
    #: The first offset of each epoch.
    epochs: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    skew_s: float = 0.0
    #: No leader, and a follower in sync that lags, until then.
    away_until_s: float = 0.0
    lags_until_s: float = 0.0

    @property
    def end(self):
        return len(self.records)

    def truncate(self, end):
        """Lose what is behind an offset."""
        del self.records[max(end, self.start) :]
        self.high_watermark = min(self.high_watermark, self.end)
        self.epochs = [(epoch, first) for epoch, first in self.epochs if first <= self.end]

    def next_epoch(self):
        self.epoch += 1
        self.epochs.append((self.epoch, self.end))

    def end_of_epoch(self, epoch):
        """Return the end of the last epoch up to this one (KIP-101)."""
        later = [first for number, first in self.epochs if number > epoch]
        return later[0] if later else self.end


class Unanswered(Exception):
    """The partition has no leader now."""


class Kafka:
    """The cluster. Tasks wait for its answers."""

    def __init__(self, world):
        self.world = world
        self.logs = defaultdict(Log)
        self.commits = {}
        #: Processes whose requests do not arrive, until when.
        self.cut = defaultdict(float)
        #: Called with each record that readers may see from now on.
        self.on_append: list[Callable] = []
        #: By partition, what is set with its next records.
        self.appended = defaultdict(lambda: Event(world))
        self.stalled_until_s = 0.0
        #: Commits of offsets that the log does not have.
        self.violations = []

    def now_ms(self, skew_s):
        return EPOCH_MS + int((self.world.now_s + skew_s) * 1_000)

    def latency_s(self):
        return self.world.random.uniform(*LATENCY_S)

    def ask(self, action, timeout_s=TIMEOUT_S, *, may_be_late=False):
        """Have the brokers do something; return the answer. Raises KafkaError without one.

        `may_be_late`: a request that is cut off arrives later, even if its process has died.
        """
        world, until_s = self.world, self.world.now_s + timeout_s
        while world.now_s < until_s:
            try_s = until_s if may_be_late else min(until_s, world.now_s + TRIES_S[0])
            if (found := self._ask_once(action, try_s, may_be_late)) is not None:
                return found[0]
            world.sleep(BACKOFF_S)
        raise KafkaError("no answer")

    def _ask_once(self, action, until_s, may_be_late):
        """Return the answer in a tuple; None without one, or where a partition has no leader."""
        world, machine = self.world, self.world.process.machine
        answered, found = Event(world), []

        def arrive():
            # Brokers that stand still handle requests later, in the order in which they came.
            if (later_s := self.stalled_until_s) > world.now_s:
                world.at(later_s - world.now_s, arrive)
                return
            if (end_s := self.cut[machine]) > world.now_s:
                if may_be_late:
                    world.at(end_s - world.now_s, arrive)
                return
            try:
                found.append((action(),))
            except Unanswered:
                found.append(None)
            world.at(self.latency_s(), answered.set)

        world.at(self.latency_s(), arrive)
        if not answered.wait(until_s - world.now_s) or self.cut[machine] > world.now_s:
            return None
        return found[0]

    def led(self, place):
        """Return the log of a partition that has a leader."""
        log = self.logs[place]
        if log.away_until_s > self.world.now_s:
            raise Unanswered
        return log

    def append(self, place, record):
        """Append to the leader's log; return the offset."""
        log = self.led(place)
        offset = log.end
        log.records.append(record._replace(at_ms=self.now_ms(log.skew_s), offset=offset))
        self.replicate(place, log)
        return offset

    def replicate(self, place, log):
        """Show readers what the followers have, soon."""

        def show():
            if log is not self.logs[place]:
                return
            if (until_s := max(log.lags_until_s, log.away_until_s)) > self.world.now_s:
                self.world.at(until_s - self.world.now_s + 0.001, show)
                return
            shown = log.records[log.high_watermark :]
            log.high_watermark = log.end
            for each in shown:
                for call in self.on_append:
                    call(place, each)
            self.appended.pop(place, Event(self.world)).set()

        self.world.at(self.world.random.uniform(0, 0.002), show)

    def read(self, place, start, end=None):
        """Return the records that readers are shown, from an offset on. A task's request."""

        def find():
            log = self.led(place)
            last = log.high_watermark if end is None else min(end, log.high_watermark)
            return log.records[max(start, log.start) : last]

        return self.ask(find)

    def move_leader(self, place, away_s, skew_s):
        """Have another broker lead. Its log ends at the high watermark."""
        log = self.logs[place]
        log.away_until_s = self.world.now_s + away_s
        log.truncate(log.high_watermark)
        log.skew_s, log.lags_until_s = skew_s, 0.0
        log.next_epoch()

    def recreate(self, place):
        """Delete the topic, and create it again."""
        number = int(self.logs[place].topic_id) + 1
        self.logs[place] = Log(topic_id=str(number), skew_s=self.logs[place].skew_s)


class Offsets:
    """In place of `duetime.kafka.offsets.Offsets`."""

    def __init__(self, kafka, group):
        self._kafka, self._group = kafka, group

    def close(self):
        pass

    def _each(self, places, find):
        """Ask two brokers, one after the other."""
        # A set's order is another one in each process.
        places = sorted(places)
        if not places:
            return {}
        half = self._kafka.world.random.randrange(len(places) + 1)
        found = {}
        for part in filter(None, (places[:half], places[half:])):
            found |= self._kafka.ask(lambda part=part: {at: find(at) for at in part})
        return found

    def starts(self, places):
        return self._each(places, lambda at: self._kafka.led(at).start)

    def latest(self, places):
        def find(at):
            log = self._kafka.led(at)
            return Position(log.high_watermark, log.epoch)

        return self._each(places, find)

    def ends(self, places, **_):
        return {at: one.offset for at, one in self.latest(places).items()}

    def first_since(self, instants_ms):
        def find(at):
            log = self._kafka.led(at)
            shown = log.records[log.start : log.high_watermark]
            return next((one.offset for one in shown if one.at_ms >= instants_ms[at]), None)

        return self._each(instants_ms, find)

    def first_appended_ms(self, places):
        def find(at):
            log = self._kafka.led(at)
            return log.records[log.start].at_ms if log.start < log.high_watermark else -1

        return self._each(places, find)

    def truncated(self, positions):
        def find(at):
            log, (offset, epoch) = self._kafka.led(at), positions[at]
            return log.end_of_epoch(epoch) < offset or offset > log.end

        return {at for at, is_lost in self._each(positions, find).items() if is_lost}

    def topic_ids(self, topics):
        wanted = set(topics)
        return self._kafka.ask(
            lambda: {
                topic: log.topic_id
                for (topic, _), log in self._kafka.logs.items()
                if topic in wanted
            }
        )

    def commits(self, places):
        commits, group = self._kafka.commits, self._group
        return self._kafka.ask(
            lambda: {at: commits[group, at] for at in places if (group, at) in commits}
        )

    def commit(self, offsets, notes):
        kafka, made = self._kafka, dict(offsets)
        if not made:
            return

        def store():
            for at, offset in made.items():
                log, note = kafka.logs[at], LogIdentity.parse(notes[at])
                is_of_log = (note.topic_id, note.leader_epoch) == (log.topic_id, log.epoch)
                if is_of_log and offset > log.end:
                    kafka.violations.append(f"settled beyond the log: {at} {offset} > {log.end}")
                kafka.commits[self._group, at] = Commit(offset, notes[at])

        # The process may stand still between its look at the lease and the request.
        kafka.world.step("commit")
        kafka.ask(store, may_be_late=True)

    def delete_before(self, offsets):
        kafka, made = self._kafka, dict(offsets)

        def delete():
            for at, offset in made.items():
                log = kafka.logs[at]
                log.start = max(log.start, min(offset, log.high_watermark))

        kafka.world.at(kafka.latency_s(), delete)


class Producer:
    """Kafka's producer, in a JVM: idempotent, in order, each record for the delivery timeout."""

    def __init__(self, kafka, jvm, delivery_s):
        self._kafka, self._jvm, self._delivery_s = kafka, jvm, delivery_s
        self._queues = defaultdict(deque)
        self._sending = set()
        #: The records that are neither acknowledged nor given up.
        self.held = 0
        self.given_up = 0
        self._changed = Event(kafka.world)

    def send(self, place, record):
        """Hand over a record."""
        self._queues[place].append((record, self._kafka.world.now_s))
        self.held += 1
        if place not in self._sending:
            self._sending.add(place)
            self._kafka.world.start(lambda: self._run(place), self._jvm)

    def flush(self):
        """Wait until it holds no record, or has given one up. Raises KafkaError then."""
        while self.held and not self.given_up:
            self._changed.clear()
            self._changed.wait()
        if self.given_up:
            raise KafkaError("records could not be delivered in time")

    def _run(self, place):
        queue = self._queues[place]
        while queue:
            record, since_s = queue[0]
            if not self._deliver(place, record, since_s + self._delivery_s):
                self.given_up += 1
            queue.popleft()
            self.held -= 1
            self._changed.set()
        self._sending.discard(place)

    def _deliver(self, place, record, until_s):
        """Try until the record is acknowledged, or its time is over; return which."""
        kafka, world = self._kafka, self._kafka.world
        appended = []

        def append():
            # A repeated request of an idempotent producer is recognised, by its leader or the next.
            log = kafka.led(place)
            if not (
                appended and log.end > appended[0] and log.records[appended[0]].id == record.id
            ):
                appended[:] = [kafka.append(place, record)]
            return log

        while world.now_s < until_s:
            try:
                log = kafka.ask(append, min(ATTEMPT_S, until_s - world.now_s))
            except KafkaError:
                world.sleep(BACKOFF_S)
                continue
            begun_s = world.now_s
            # Every replica in sync has it.
            while world.now_s < min(begun_s + ATTEMPT_S, until_s):
                if log.high_watermark > appended[0] and log is kafka.logs[place]:
                    return True
                world.sleep(0.002 if world.now_s < begun_s + 0.05 else 0.1)
        return False
