"""Delivering in transactions, on a real broker. Nothing of this needs Spark."""

import uuid
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.clocks import eventually
from tests.support.topics import small_settings

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.core.errors import KafkaError, LeaderPaused
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.local.broker import LocalBroker
from duetime.pipeline.delivery import transactional
from duetime.pipeline.delivery.transactional import Forwarder, TransactionalDelivery

pytestmark = pytest.mark.timeout(600)

#: How long what is there may take to come, in seconds.
PATIENCE_S = 90.0


class Sending:
    """The topics of a forwarder, with a sender before it and readers behind it."""

    def __init__(self, bootstrap):
        self.settings: Settings = small_settings(bootstrap, transactional_delivery=True)
        self.names = TopicNames(self.settings)
        self._admin = AdminClient(librdkafka_properties(self.settings))
        self._producer = Producer(librdkafka_properties(self.settings))
        self.isolated = []
        for each in (self.names.sending, self.names.isolated()):
            self.create(each)

    def create(self, name, **config):
        (created,) = self._admin.create_topics([NewTopic(name, 1, config=config)]).values()
        created.result()
        return name

    def destination(self, **config):
        return self.create(f"to_{uuid.uuid4().hex[:8]}", **config)

    def due(self, topic, *values, name=None):
        """Messages that a window sends: with the headers of those that wait."""
        for each in values:
            own = topic, None, None, "1", name or f"000000000001-{each}"
            headers = [*zip(H.SCHEDULED, own, strict=True), ("sender's", "own")]
            self._producer.produce(self.names.sending, each, key="k", headers=headers)
        assert self._producer.flush(PATIENCE_S) == 0

    @contextmanager
    def forwarder(self):
        with Forwarder(self.settings, SystemClock(), self.isolated.append) as found:
            found.begin()
            yield found

    def forward(self, forwarder, up_to):
        """Forward until the position is there."""
        while forwarder.position < up_to:
            forwarder.forward()

    def arrived(self, topic):
        """Read a topic up to its end with `read_committed`."""
        consumer = Consumer(
            librdkafka_properties(self.settings)
            | {"group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
            | {"enable.partition.eof": True, "isolation.level": "read_committed"}
        )
        consumer.subscribe([topic])
        found = []
        while True:
            record = consumer.poll(PATIENCE_S)
            assert record is not None
            if record.error():
                consumer.close()
                return found
            found.append(record)

    def values(self, topic):
        return [each.value().decode() for each in self.arrived(topic)]


@pytest.fixture(scope="module")
def sending(broker):
    """One for all: each test goes on where the last one ended, as a pipeline would."""
    return Sending(broker.bootstrap)


def test_message_arrives_with_its_headers(sending):
    topic = sending.destination()
    sending.due(topic, "a", "b")
    with sending.forwarder() as forwarder:
        sending.forward(forwarder, 2)
    first, second = sending.arrived(topic)
    assert (first.key(), first.value(), second.value()) == (b"k", b"a", b"b")
    assert first.headers() == [
        ("due-at-ms", b"1"),
        ("due-id", b"000000000001-a"),
        ("sender's", b"own"),
    ]


@pytest.mark.slow
def test_earlier_forwarder_is_fenced_off(sending):
    """A leader stands still in the middle of a transaction, and goes on when another leads.

    What it had sent was appended, and what it sends now reaches the broker: as the requests do that
    a kernel has kept while the network was away. Neither counts.
    """
    topic = sending.destination()
    with sending.forwarder() as old:
        start = old.position
        sending.due(topic, "before")
        sending.forward(old, start + 1)
        old._producer.begin_transaction()
        old._producer.produce(topic, "in the middle")
        assert old._producer.flush(PATIENCE_S) == 0
        sending.due(topic, "in-the-middle")
        with sending.forwarder() as new:
            sending.forward(new, start + 2)
            old._producer.produce(topic, "too late")
            with pytest.raises(KafkaException):
                old._producer.commit_transaction(PATIENCE_S)
            sending.due(topic, "after")
            sending.forward(new, start + 3)
    assert sending.values(topic) == ["before", "in-the-middle", "after"]


def test_repeated_message_is_dropped_after_a_restart_too(sending):
    topic = sending.destination()
    with sending.forwarder() as forwarder:
        start = forwarder.position
        sending.due(topic, "one")
        sending.due(topic, "one")
        sending.forward(forwarder, start + 2)
    sending.due(topic, "one")
    sending.due(topic, "two")
    with sending.forwarder() as forwarder:
        assert forwarder.position == start + 2
        sending.forward(forwarder, start + 4)
    assert sending.values(topic) == ["one", "two"]


@pytest.mark.slow
def test_refused_record_is_isolated_and_others_arrive_once(sending):
    refusing = sending.destination(**{"max.message.bytes": "1000"})
    missing, topic = f"to_{uuid.uuid4().hex[:8]}", sending.destination()
    sending.due(topic, "first")
    sending.due(refusing, "x" * 5_000, name="000000000001-large")
    sending.due(missing, "nowhere")
    sending.due(topic, "last")
    sending.isolated.clear()
    with sending.forwarder() as forwarder:
        sending.forward(forwarder, forwarder.position + 4)
    assert sending.values(topic) == ["first", "last"]
    assert sending.values(refusing) == []
    assert set(sending.isolated) == {refusing, missing}
    found = sending.arrived(sending.names.isolated())
    # As it waited, for who sends it by itself.
    assert [dict(each.headers())["due-topic"].decode() for each in found] == [refusing, missing]
    assert found[1].value() == b"nowhere"


def test_requests_that_wait_behind_a_refused_one_are_repeated(sending):
    """librdkafka drops them, and counts their sequence numbers: the next transaction failed."""
    refusing = sending.destination(**{"max.message.bytes": "1000"})
    topics = [sending.destination() for _ in range(8)]
    for each in (*topics[:4], refusing, *topics[4:]):
        sending.due(each, "x" * 5_000, name=f"000000000001-{each}")
    sending.isolated.clear()
    with sending.forwarder() as forwarder:
        sending.forward(forwarder, forwarder.position + 9)
    assert sending.isolated == [refusing]
    assert [len(sending.arrived(each)) for each in topics] == [1] * 8


def test_refused_forwarder_gives_way_to_a_later_one(sending):
    """The later one goes on between the refusal and the earlier one's next transaction."""
    refusing, topic = sending.destination(**{"max.message.bytes": "1000"}), sending.destination()
    sending.due(topic, "ahead")
    sending.due(refusing, "x" * 5_000, name="000000000001-too-large")

    def take_over(_topic):
        with sending.forwarder() as new:
            sending.forward(new, start + 2)

    with Forwarder(sending.settings, SystemClock(), take_over) as old:
        old.begin()
        start = old.position
        with pytest.raises(KafkaError, match="another process"):
            sending.forward(old, start + 2)
        with sending.forwarder() as new:
            assert new.position == start + 2
    assert sending.values(topic) == ["ahead"]


def test_refused_forwarder_without_the_lease_fences_nobody_off(sending):
    refusing, topic = sending.destination(**{"max.message.bytes": "1000"}), sending.destination()
    sending.due(refusing, "x" * 5_000, name="000000000001-not-taken")
    sending.due(topic, "of-the-next")
    with Forwarder(sending.settings, SystemClock(), holds_lease=lambda: False) as old:
        old.begin()
        start = old.position
        with pytest.raises(LeaderPaused):
            sending.forward(old, start + 2)
    with sending.forwarder() as new:
        sending.forward(new, start + 2)
    assert sending.values(topic) == ["of-the-next"]


@pytest.mark.slow
def test_first_forwarder_begins_at_the_earliest_record(sending):
    topic = sending.destination()
    with Forwarder(sending.settings, SystemClock()) as forwarder:
        assert not forwarder.is_behind()
        sending.due(topic, "left")
        assert forwarder.is_behind()
        forwarder.begin()
        sending.forward(forwarder, forwarder.position + 1)
    assert sending.values(topic) == ["left"]


def test_foreign_records_stop_nothing(sending):
    topic = sending.destination()
    before = len(sending.arrived(sending.names.isolated()))
    sending.due("t", "x", name="no id")
    sending._producer.produce(sending.names.sending, "foreign", headers=[("due-topic", b"\xff")])
    sending._producer.produce(sending.names.sending, None)
    sending.due(topic, "ours")
    with sending.forwarder() as forwarder:
        sending.forward(forwarder, forwarder.position + 4)
    assert sending.values(topic) == ["ours"]
    assert len(sending.arrived(sending.names.isolated())) == before + 3


@contextmanager
def delivering(sending, **changed):
    freed = []
    settings = sending.settings.model_copy(update=changed)
    found = TransactionalDelivery(
        settings, SystemClock(), lambda: True, sending.isolated.append, freed.append
    )
    found.start()
    try:
        yield found, freed
    finally:
        found.close()


def test_undeliverable_message_does_not_stop_those_behind_it(sending, monkeypatch):
    """Nothing else is in its batch, so that it may as well be the cluster that fails."""
    monkeypatch.setattr(transactional, "DELIVERY_S", 1.0)
    topic, missing = sending.destination(), f"to_{uuid.uuid4().hex[:8]}"
    before = len(sending.arrived(sending.names.isolated()))
    sending.due(missing, "alone")
    with delivering(sending):
        eventually(lambda: len(sending.arrived(sending.names.isolated())) == before + 1)
        sending.due(topic, "behind")
        eventually(lambda: sending.values(topic) == ["behind"])


@pytest.mark.slow
def test_backlog_is_sent_and_freed_when_switched_off(sending):
    topic = sending.destination()
    sending.due(topic, "left-over")
    with delivering(sending, transactional_delivery=False) as (delivery, freed):
        eventually(lambda: bool(freed))
        delivery.close()
        with sending.forwarder() as forwarder:
            assert freed == [forwarder.position]
            assert not forwarder.is_behind()
    assert sending.values(topic) == ["left-over"]


def test_many_expired_ids_are_forgotten_at_once(sending):
    """A plain dict takes hours for it: to find the first one it passes all that are gone."""
    with sending.forwarder() as forwarder:
        forwarder._forwarded.clear()
        forwarder._forwarded.update((str(number), 0.0) for number in range(1_000_000))
        assert forwarder._new([]) == []
        assert not forwarder._forwarded


@pytest.mark.slow
def test_messages_are_delivered_after_the_coordinator_was_restarted(tmp_path):
    """The client waits for ever for a coordinator that is gone, in spite of its timeout."""
    with LocalBroker(tmp_path) as broker:
        sending = Sending(broker.bootstrap)
        topic = sending.destination()
        with delivering(sending):
            sending.due(topic, "before")
            eventually(lambda: sending.values(topic) == ["before"])
            broker.kill()
            broker.start()
            sending.due(topic, "after")
            eventually(lambda: sending.values(topic) == ["before", "after"])
