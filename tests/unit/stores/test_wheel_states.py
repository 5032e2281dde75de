"""The wheel's store in any order of windows, failures, takeovers and lost logs, against a model.

Kafka is made up, and the store is real. Each record is delivered once, unless Kafka loses it first.
A leader that has lost the lead sends nothing more, but may still commit what it was about to.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from duetime.core.settings import Settings
from duetime.kafka.offsets import Commit, OffsetRange, Position
from duetime.stores import wheel_store
from duetime.stores.wheel_reader import SlotPartitions
from duetime.stores.wheel_store import KafkaStore

SETTINGS = Settings(namespace="d", wheel_levels=2)

#: When the world begins, epoch ms, and when everything is overdue.
BEGIN_MS = 1_700_000_000_000
END_MS = BEGIN_MS + 2 * SETTINGS.wheel.span_ms()

#: Two slots: a window, and a cascade.
SLOTS = [SETTINGS.wheel.place(BEGIN_MS + each, BEGIN_MS) for each in (10_000, 600_000)]

#: Their partitions, to which this wheel is confined.
PLACES = [place for slot in SLOTS for place in SlotPartitions(SETTINGS).of(slot)]

#: Scans after which nothing may be left: a log that was cut is found by the first.
SCANS = 3


@dataclass
class Log:
    """A partition: the name, the timestamp and the leader epoch of each record, from offset 0."""

    topic_id: str
    records: list = field(default_factory=list)
    start: int = 0
    epoch: int = 0

    @property
    def kept(self):
        return self.records[self.start :]


class Kafka:
    """The logs, the commits of one group, and the answers that the store gets."""

    def __init__(self):
        self._ids = count()
        self.now_ms = BEGIN_MS
        self.topic_id = defaultdict(lambda: f"id-{next(self._ids)}")
        self.logs = {}
        self.committed = {}
        #: When each record was delivered.
        self.delivered = {}

    def log(self, place):
        return self.logs.setdefault(place, Log(self.topic_id[place[0]]))

    def create_again(self, topic):
        self.topic_id.pop(topic, None)
        self.logs = {place: log for place, log in self.logs.items() if place[0] != topic}

    # What follows is called by the store.

    def commits(self, places):
        return {place: self.committed[place] for place in places if place in self.committed}

    def commit(self, offsets, notes):
        for place, offset in offsets.items():
            self.committed[place] = Commit(offset, notes.get(place, ""))

    def starts(self, places):
        return {place: self.log(place).start for place in places}

    def latest(self, places):
        return {p: Position(len(self.log(p).records), self.log(p).epoch) for p in places}

    def topic_ids(self, topics):
        return {topic: self.topic_id[topic] for topic in topics}

    def first_since(self, instants_ms):
        return {place: self._first(place, ms) for place, ms in instants_ms.items()}

    def _first(self, place, instant_ms):
        log = self.log(place)
        found = (at for at, (_, ms, _) in enumerate(log.records) if ms >= instant_ms)
        return next((at for at in found if at >= log.start), None)

    def first_appended_ms(self, places):
        return {place: log.kept[0][1] if (log := self.log(place)).kept else -1 for place in places}

    def truncated(self, positions):
        """The end of an epoch is known to the log, as of KIP-320."""
        return {
            place
            for place, at in positions.items()
            if sum(epoch <= at.leader_epoch for *_, epoch in self.log(place).records) < at.offset
        }

    def delete_before(self, offsets):
        for place, offset in offsets.items():
            log = self.log(place)
            gone = log.records[log.start : offset]
            assert all(name in self.delivered for name, *_ in gone), "deleted before its delivery"
            log.start = max(log.start, min(offset, len(log.records)))

    def close(self): ...


@dataclass
class Work:
    """A claim, and how far it is."""

    claim: OffsetRange
    is_started: bool = False
    is_sent: bool = False


class Process:
    """A leader: its store, and what it is about to do."""

    def __init__(self, kafka):
        self.kafka, self.store, self.works = kafka, KafkaStore(SETTINGS), []

    def add(self, claims):
        self.works += [Work(each) for each in claims]

    def start(self, work):
        self.store.mark_started([work.claim], self.kafka.now_ms)
        work.is_started = True

    def send(self, work, most=None):
        """Send all records, or the first ones; leave out what is found when it is read back."""
        claim, since_ms = work.claim, work.claim.started_ms
        kafka, log = self.kafka, self.kafka.log(claim.place)
        for name, *_ in log.records[max(claim.start, log.start) : claim.end][:most]:
            was_found = since_ms is not None and kafka.delivered.get(name, -1) >= since_ms
            if not was_found:
                assert name not in kafka.delivered, f"{name} is delivered twice"
                kafka.delivered[name] = kafka.now_ms
        work.is_sent = most is None

    def settle(self, work):
        self.store.settle([work.claim])
        self.works.remove(work)

    def fail(self, work):
        self.store.release([work.claim])
        self.works.remove(work)


class WheelStates(RuleBasedStateMachine):
    """One leader after another, on logs of which Kafka may lose the end, or all."""

    def __init__(self):
        super().__init__()
        self.kafka = MadeUp.kafka = Kafka()
        self.names, self.former = count(), []
        self.leader = Process(self.kafka)

    def drawn(self, data, works):
        self.kafka.now_ms += 10
        return data.draw(st.sampled_from(works))

    def works(self, **wanted):
        return [w for w in self.leader.works if all(getattr(w, k) == v for k, v in wanted.items())]

    @rule(data=st.data(), records=st.integers(1, 3))
    def append(self, data, records):
        log = self.kafka.log(self.drawn(data, PLACES))
        for _ in range(records):
            log.records.append((f"m{next(self.names)}", self.kafka.now_ms, log.epoch))

    @rule(slot=st.sampled_from(SLOTS))
    def acquire(self, slot):
        self.leader.add(self.leader.store.acquire(slot))

    @rule()
    def scan(self):
        self.leader.add(self.leader.store.acquire_overdue(self.kafka.now_ms))

    @precondition(lambda self: self.works(is_started=False))
    @rule(data=st.data())
    def start(self, data):
        self.leader.start(self.drawn(data, self.works(is_started=False)))

    @precondition(lambda self: self.works(is_started=True, is_sent=False))
    @rule(data=st.data())
    def send(self, data):
        self.leader.send(self.drawn(data, self.works(is_started=True, is_sent=False)))

    @precondition(lambda self: self.works(is_sent=True))
    @rule(data=st.data())
    def settle(self, data):
        self.leader.settle(self.drawn(data, self.works(is_sent=True)))

    @precondition(lambda self: self.works())
    @rule(data=st.data(), sent=st.integers(0, 2))
    def fail(self, data, sent):
        work = self.drawn(data, self.works())
        if work.is_started and not work.is_sent:
            self.leader.send(work, sent)
        self.leader.fail(work)

    @rule()
    def take_over(self):
        self.kafka.now_ms += 2_000
        self.former.append(self.leader)
        self.leader = Process(self.kafka)

    @precondition(lambda self: any(each.works for each in self.former))
    @rule(data=st.data())
    def commit_late(self, data):
        """A former leader goes on between its look at the lease and the commit."""
        former = self.drawn(data, [each for each in self.former if each.works])
        work = self.drawn(data, former.works)
        if work.is_sent:
            former.settle(work)
        elif not work.is_started:
            former.start(work)

    @rule(data=st.data(), lost=st.integers(1, 2))
    def cut(self, data, lost):
        """A power cut takes the last records, and the log has another leader epoch then."""
        log = self.kafka.log(self.drawn(data, PLACES))
        del log.records[max(log.start, len(log.records) - lost) :]
        log.epoch += 1

    @rule(place=st.sampled_from(PLACES))
    def create_again(self, place):
        topic, _ = place
        self.kafka.create_again(topic)

    def teardown(self):
        self.kafka.now_ms = END_MS
        for work in [*self.leader.works]:
            self.leader.fail(work)
        for _ in range(SCANS):
            self.scan()
            for work in [*self.leader.works]:
                self.leader.start(work)
                self.leader.send(work)
                self.leader.settle(work)
        left = [name for log in self.kafka.logs.values() for name, *_ in log.kept]
        assert [name for name in left if name not in self.kafka.delivered] == []


class MadeUp:
    """In place of Offsets: the Kafka of the present run."""

    kafka: Kafka

    def __new__(cls, *_):
        return cls.kafka


def test_each_record_is_delivered_once(monkeypatch):
    monkeypatch.setattr(wheel_store, "Offsets", MadeUp)
    monkeypatch.setattr(wheel_store.SlotPartitions, "all", lambda _: PLACES)
    run_state_machine_as_test(
        WheelStates,
        settings=hypothesis_settings(max_examples=500, stateful_step_count=40, deadline=None),
    )
