"""Delayed topics made visible, on a real broker, without Spark."""

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import closing, contextmanager

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka import KafkaError as BrokerError
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from tests.support.clocks import eventually
from tests.support.delayed_topics import IN_ORDER, ONE_AT_A_TIME, PATIENCE_S
from tests.support.topics import small_settings

from duetime.bench.chaos import revealed
from duetime.client.dead_letters import DeadLetterFilter, DeadLetters
from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.topics import TopicNames
from duetime.delayed import forwarder
from duetime.delayed.forwarder import DelayedForwarder
from duetime.kafka import producer
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.heartbeats import MemberReader
from duetime.kafka.producer import OF_ANY_SIZE

STAMPED = {"message.timestamp.type": "LogAppendTime"}

#: What a topic takes as Kafka comes, in bytes, and more than that.
ROOM, WIDE = 1_048_588, 4_000_000


class Lease:
    """A lease that the test sets."""

    def __init__(self):
        self.is_held = True

    def __call__(self):
        return self.is_held


#: Of a process that always leads.
LEADS = Lease()


class Shown:
    """A delayed topic of three partitions, its visible one of two, and topics of failures."""

    def __init__(self, bootstrap, *, delayed=ROOM, visible=ROOM, kept=ROOM):
        """Create the topics with these limits of bytes for a record."""
        self.name = f"shown_{uuid.uuid4().hex[:8]}"
        self.delayed = f"{self.name}.delayed"
        topics = {self.delayed: {"delayed.delivery.max.ms": 60_000}}
        self.settings = small_settings(bootstrap, delayed_topics=topics)
        self.names = TopicNames(self.settings)
        names = self.names
        failed = names.retry, names.rejected, names.dead_letter, names.redrive_log
        rest = dict.fromkeys((*failed, names.leader), (1, kept))
        places = {self.delayed: (3, delayed), self.name: (2, visible)} | rest
        wanted = [
            NewTopic(name, count, config=STAMPED | {"max.message.bytes": str(most_bytes)})
            for name, (count, most_bytes) in places.items()
        ]
        self._admin = AdminClient(librdkafka_properties(self.settings))
        for created in self._admin.create_topics(wanted).values():
            created.result()
        self._producer = Producer(librdkafka_properties(self.settings) | OF_ANY_SIZE | IN_ORDER)
        self._consumer = Consumer(librdkafka_properties(self.settings) | {"group.id": "test"})

    def send(self, after, value, partition=0, key=None, headers=()):
        own = [] if after is None else [(H.DELIVER_AFTER_MS, str(after))]
        headers = [*headers, *own]
        self._producer.produce(self.delayed, value, key, partition=partition, headers=headers)

    def set(self, name, value):
        """Set a setting of the visible topic."""
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        topic = ConfigResource(ResourceType.TOPIC, self.name, incremental_configs=[entry])
        self._admin.incremental_alter_configs([topic])[topic].result()

    def flush(self):
        assert self._producer.flush(PATIENCE_S) == 0

    def records(self, topic, count, partition=0):
        """Wait for exactly this many records of a partition."""
        place = TopicPartition(topic, partition, 0)
        eventually(
            lambda: self.count(topic, partition) >= count,
            lambda: f"{self.count(topic, partition)} in {topic}, of {self._counts()}",
        )
        self._consumer.assign([place])
        found = self._consumer.consume(count, timeout=PATIENCE_S)
        assert (len(found), self.count(topic, partition)) == (count, count)
        return found

    def _counts(self):
        topics = self.name, self.names.retry, self.names.rejected, self.names.dead_letter
        return {topic: self.count(topic) for topic in topics}

    def has_standby(self):
        """Return whether one leads, and another stands by."""
        with closing(MemberReader(self.settings)) as members:
            leader, standbys = members.read(SystemClock().now_ms())
        return leader and standbys

    def count(self, topic, partition=0):
        place = TopicPartition(topic, partition)
        try:
            return self._consumer.get_watermark_offsets(place, timeout=PATIENCE_S)[1]
        except KafkaException as error:
            if error.args[0].code() != BrokerError.NOT_LEADER_FOR_PARTITION:
                raise
            # The topic is new, and the machine busy.
            return 0


@pytest.fixture
def shown(broker):
    return Shown(broker.bootstrap)


@pytest.fixture
def running(shown):
    with made_visible(shown):
        yield shown


@contextmanager
def made_visible(shown):
    keeper = DelayedForwarder(shown.settings, shown.delayed, LEADS)
    keeper.start()
    yield
    keeper.close()


@pytest.mark.slow
def test_records_appear_in_their_partition_in_the_order_of_their_times(running, now_ms):
    delays = [number * 7919 % 1_500 for number in range(500)]
    for number, delay_ms in enumerate(delays):
        key, headers = f"k{number}", [("a", b"b")]
        running.send(now_ms + delay_ms, f"{number}", number % 2, key, headers)
    running.flush()
    for partition in (0, 1):
        found = running.records(running.name, 250, partition)
        sent = [number for number in range(500) if number % 2 == partition]
        sent.sort(key=lambda number: (delays[number], number))
        assert [int(each.value()) for each in found] == sent
        assert all(each.timestamp()[1] >= time_of(each) for each in found)
        names = [name for name, _ in found[0].headers()]
        assert names == ["due-at-ms", "due-id", "a", H.DELIVER_AFTER_MS]
        assert found[0].key() == f"k{sent[0]}".encode()


def test_rejected_and_failed_records_delay_no_others(running, now_ms):
    running.send(now_ms + 600_000, "over the limit", key="k", headers=[("a", b"b")])
    running.send("tomorrow", "nonsense")
    running.send("9" * 5_000, "more of it")
    running.send(now_ms, "no such partition", partition=2)
    running.send(None, "plain")
    running.send(now_ms, "due")
    running.flush()
    found = running.records(running.name, 2)
    assert [each.value() for each in found] == [b"plain", b"due"]
    rejected = running.records(running.names.rejected, 3)
    assert [dict(each.headers())["due-error"] for each in rejected] == [
        b"beyond-limit",
        b"bad-due-time",
        b"bad-due-time",
    ]
    assert (rejected[0].key(), rejected[0].headers()[0]) == (b"k", ("a", b"b"))
    (failed,) = running.records(running.names.retry, 1)
    words = dict(failed.headers())
    assert (words["due-error"], words["due-partition"]) == (b"no-such-partition", b"2")


def test_a_record_that_its_topic_refuses_delays_no_others(running, now_ms):
    # A broker takes records of its own millisecond then.
    running.set("message.timestamp.type", "CreateTime")
    running.set("message.timestamp.before.max.ms", "0")
    for _ in range(20):
        running.send(now_ms, "may be refused")
    running.flush()
    failures = running.names.retry
    eventually(lambda: running.count(failures) + running.count(running.name) == 20, "all of them")
    (failed, *_) = running.records(failures, running.count(failures))
    assert dict(failed.headers())["due-error"] == b"refused-by-broker"


@pytest.mark.slow
def test_a_record_too_large_for_all_topics_leaves_its_place(broker, now_ms):
    wide = Shown(broker.bootstrap, delayed=WIDE)
    large, told = b"x" * 2_000_000, ("due-callback", b"http://x")
    wide.send(now_ms, large, key="k", headers=[("a", b"b"), told])
    wide.send(now_ms + 600_000, large, key="k", headers=[("a", b"b"), told])
    wide.send(now_ms, b"x", headers=[("a", large)])
    wide.send(now_ms, "next")
    wide.flush()
    with made_visible(wide):
        (found,) = wide.records(wide.name, 1)
        (rejected,) = wide.records(wide.names.rejected, 1)
        wide.records(wide.names.dead_letter, 2)
    assert found.value() == b"next"
    words = dict(rejected.headers())
    assert (rejected.key(), rejected.value(), rejected.headers()[0]) == (None, None, told)
    assert words["due-error"] == b"beyond-limit"
    assert words["due-error-source"] == f"{wide.delayed}/0/1".encode()
    # A retry would send another message, without its value.
    assert wide.count(wide.names.retry) == 0
    letters = DeadLetters(wide.settings).latest(DeadLetterFilter(), 9)
    assert [each.headers for each in letters] == [(("a", b"b"), told, at(now_ms)), ()]
    assert [each.key for each in letters] == [b"k", None]
    for offset, letter in zip((0, 2), letters, strict=True):
        assert (letter.topic, letter.partition, letter.value) == (wide.name, 0, None)
        assert (letter.reason, letter.due_ms, letter.attempts) == ("record-deleted", now_ms, 1)
        assert letter.detail.startswith("the visible topic refused it: ")
        assert letter.detail.endswith(f"its record is {wide.delayed}/0/{offset}")


@pytest.mark.slow
def test_failed_records_are_sent_elsewhere_despite_a_full_queue(broker, now_ms, monkeypatch):
    monkeypatch.setattr(producer, "OF_ANY_SIZE", OF_ANY_SIZE | ONE_AT_A_TIME)
    wide = Shown(broker.bootstrap, delayed=WIDE)
    for _ in range(3):
        wide.send(now_ms, b"x" * 2_000_000)
        wide.send(now_ms, "next")
    wide.flush()
    with made_visible(wide):
        wide.records(wide.name, 3)
        wide.records(wide.names.dead_letter, 3)


def test_a_very_large_record_appears_if_its_topic_accepts_it(broker, now_ms):
    wide, large = Shown(broker.bootstrap, delayed=WIDE, visible=WIDE), b"x" * 2_000_000
    wide.send(now_ms, large)
    wide.flush()
    with made_visible(wide):
        (found,) = wide.records(wide.name, 1)
    assert found.value() == large


def test_many_large_records_are_rejected_with_their_values(broker, now_ms):
    shown = Shown(broker.bootstrap, kept=150_000)
    for number in range(30):
        shown.send(now_ms + 600_000, f"{number}" + "x" * 30_000)
    shown.flush()
    with made_visible(shown):
        rejected = shown.records(shown.names.rejected, 30)
    assert {len(each.value()) for each in rejected} == {30_001, 30_002}


def test_records_taken_before_a_pause_appear_after_it(shown, now_ms, monkeypatch, caplog):
    monkeypatch.setattr(forwarder, "RESTART_DELAY_S", 0.1)
    # Every record is taken too long ago.
    monkeypatch.setattr(forwarder, "PAUSE_S", -1.0)
    for number in range(1_200):
        shown.send(now_ms + number % 700, f"{number}")
    shown.flush()
    running = DelayedForwarder(shown.settings, shown.delayed, LEADS)
    running.start()
    eventually(lambda: caplog.text.count("starting again") >= 3)
    monkeypatch.setattr(forwarder, "PAUSE_S", 4.0)
    found = shown.records(shown.name, 1_200)
    running.close()
    assert {int(each.value()) for each in found} == set(range(1_200))


def test_without_the_lease_the_next_leader_forwards(shown, now_ms, monkeypatch, caplog):
    monkeypatch.setattr(forwarder, "RESTART_DELAY_S", 0.1)
    for number in range(2_000):
        shown.send(now_ms + number, f"{number}")
    shown.flush()
    lease = Lease()
    old = DelayedForwarder(shown.settings, shown.delayed, lease)
    new = DelayedForwarder(shown.settings, shown.delayed, LEADS)
    old.start()
    eventually(lambda: shown.count(shown.name) >= 300)
    lease.is_held = False
    eventually(lambda: "the lease is lost" in caplog.text)
    new.start()
    found = shown.records(shown.name, 2_000)
    # The old one has not joined as the same member, which would take the partitions back.
    assert caplog.text.count("starting again") == 1
    old.close()
    new.close()
    assert [int(each.value()) for each in found] == list(range(2_000))


def test_records_held_when_the_lease_is_lost_are_dropped(shown, monkeypatch):
    lease, steps = Lease(), []

    class Sender:
        """Records the calls; the lease is lost with the second record."""

        def __init__(self, *_):
            steps.append("opened")

        def forward(self, message):
            lease.is_held = message < 2
            steps.append(message)

        def fail(self, _error):
            steps.append("failed")

        def abandon(self):
            steps.append("dropped")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            steps.append("closed")

    class Reader(Sender):
        """Reads three records at once."""

        def subscribe(self, *_, **__):
            pass

        def consume(self, *_):
            return [1, 2, 3]

    monkeypatch.setattr(forwarder, "ForwardingProducer", Sender)
    monkeypatch.setattr(forwarder, "DelayedConsumer", Reader)
    monkeypatch.setattr(forwarder, "RESTART_DELAY_S", 0.0)
    running = DelayedForwarder(shown.settings, shown.delayed, lease)
    running.start()
    eventually(lambda: steps.count("closed") == 2)
    # Nothing is opened without the lease.
    assert steps == ["opened", "opened", 1, 2, "failed", "dropped", "closed", "closed"]
    lease.is_held = True
    eventually(lambda: steps.count("opened") > 2)
    running.close()


def test_a_record_sent_a_second_time_has_only_its_new_id(running, now_ms):
    old = [("due-id", b"000000000001-old"), ("due-at-ms", b"1"), ("a", b"b")]
    running.send(now_ms, "again", headers=old)
    running.flush()
    (found,) = running.records(running.name, 1)
    assert [name for name, _ in found.headers()] == ["due-at-ms", "due-id", "a", H.DELIVER_AFTER_MS]
    assert dict(found.headers())["due-id"].endswith(f"-@{running.delayed}.0.0".encode())


VISIBLE = """
import json, sys, threading
from duetime.core.settings import Settings
from duetime.delayed.forwarder import DelayedForwarder
asked = json.load(sys.stdin)
DelayedForwarder(Settings(**asked["settings"]), asked["topic"], lambda: True).start()
threading.Event().wait()
"""


@pytest.mark.slow
def test_after_kills_each_record_appears_once_and_in_order(shown, now_ms):
    for number in range(3_000):
        shown.send(now_ms + number * 7919 % 3_000, f"{number}", key=f"{number}")
    shown.flush()
    for count in (1, 800, 2_000):
        with started(shown) as process:
            eventually(lambda least=count: shown.count(shown.name) >= least)
            process.kill()
    keeper = DelayedForwarder(shown.settings, shown.delayed, LEADS)
    keeper.start()
    found = [int(each.value()) for each in shown.records(shown.name, 3_000)]
    keeper.close()
    assert found == sorted(range(3_000), key=lambda number: (number * 7919 % 3_000, number))


#: Sends while it holds the lease; it does not detect a pause.
LED = """
import json, math, sys, threading
from duetime.core.clock import SystemClock
from duetime.core.settings import Settings
from duetime.delayed import forwarder
from duetime.pipeline.leadership.election import Election
asked = json.load(sys.stdin)
settings = Settings(**asked["settings"])
election = Election(settings, SystemClock())
election.start()
forwarder.PAUSE_S = math.inf
election.is_leading.wait()
forwarder.DelayedForwarder(settings, asked["topic"], election.holds_lease).start()
threading.Event().wait()
"""


@pytest.mark.hostile
def test_a_leader_paused_beyond_its_session_sends_nothing_more(shown, now_ms):
    """The old leader continues although a new one has sent what became due meanwhile.

    The old leader knows these records from before the pause. Its consumer returns them before it
    hears that its partitions are another's, so that only the lease keeps it from sending them.
    """
    count, step_ms = 4_000, 5
    for number in range(count):
        shown.send(now_ms + 5_000 + step_ms * number, f"{number}")
    shown.flush()
    with ended(started(shown, LED)) as leader:
        eventually(lambda: shown.count(shown.name) > 200)
        with ended(started(shown, LED)):
            eventually(shown.has_standby)
            os.kill(leader.pid, signal.SIGSTOP)
            before = shown.count(shown.name)
            # The new leader has sent everything that was due by then.
            eventually(lambda: shown.count(shown.name) > before + 2_000)
            os.kill(leader.pid, signal.SIGCONT)
            found = shown.records(shown.name, count)
            assert leader.poll() is None
    assert [int(each.value()) for each in found] == list(range(count))


@contextmanager
def ended(process):
    """Kill the process at the end of the block."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def started(shown, program=VISIBLE):
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True)
    asked = {"settings": revealed(shown.settings), "topic": shown.delayed}
    process.stdin.write(json.dumps(asked))
    process.stdin.close()
    process.stdin = None
    return process


def at(ms):
    """Return the header with the due time."""
    return H.DELIVER_AFTER_MS, str(ms).encode()


def time_of(record):
    return int(dict(record.headers())[H.DELIVER_AFTER_MS])
