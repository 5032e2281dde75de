"""Senders with transactions: what one of them leaves open delays nobody else."""

import itertools
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Producer
from tests.support.clocks import eventually
from tests.support.live import LATE_MS

from duetime.client.rescheduling import reschedule
from duetime.core.clock import SystemClock
from duetime.core.messages import MessageId
from duetime.kafka.connection import librdkafka_properties
from duetime.stores.wheel_reader import WheelReader

#: How long a transaction stays open at most, in ms: longer than anybody here waits.
OPEN_MS = 600_000

#: The pipeline's own topics have at most so many partitions where senders write.
PARTITIONS = 4

NUMBERS = itertools.count()


@pytest.fixture
def begun(live):
    """Begins transactions; each that is open at the end is aborted."""
    producers = []

    def begin():
        name = f"{live.settings.namespace}.{next(NUMBERS)}"
        own = {"transactional.id": name, "transaction.timeout.ms": OPEN_MS}
        producer = Producer(librdkafka_properties(live.settings) | own)
        producer.init_transactions(60)
        producer.begin_transaction()
        producers.append(producer)
        return producer

    yield begin
    for each in producers:
        each.abort_transaction(60)


def leave_open(producer, topic, partitions, headers):
    """A record of an open transaction in each partition."""
    for partition in range(partitions):
        producer.produce(topic, "open", partition=partition, headers=headers)
    assert producer.flush(60) == 0


def native(topic, delay_ms, **own):
    headers = {"due-topic": topic, "due-in-ms": str(delay_ms)}
    return list((headers | own).items())


def is_cancelled(live, identity):
    with closing(WheelReader(live.settings)) as reader:
        found = reader.find(MessageId.parse(identity), SystemClock().now_ms())
    return found is not None and found.cancelled


def assert_others_are_served(live, sender):
    """A message that is due in a second comes, and a cancel takes effect."""
    topic = live.topic()
    waits = sender.produce(topic, "waits", in_=timedelta(seconds=60))
    soon = [sender.produce(topic, "soon", in_=timedelta(seconds=1)) for _ in range(20)]
    sender.flush()
    arrived = live.inbox(topic).take(len(soon))
    assert {each.id for each in arrived} == set(soon)
    assert max(each.late_ms for each in arrived) < LATE_MS
    sender.cancel(waits)
    sender.flush()
    eventually(lambda: is_cancelled(live, waits), "a cancel that is heard")


def test_an_open_transaction_in_the_topics_of_all_delays_nobody(live, sender, begun):
    producer, nowhere = begun(), live.topic()
    leave_open(producer, live.names.native, PARTITIONS, native(nowhere, OPEN_MS))
    leave_open(producer, live.names.control, 1, [("due-op", "stop")])
    assert_others_are_served(live, sender)


@pytest.mark.slow
def test_an_open_transaction_in_its_intake_topic_delays_no_other_topic(live, sender, begun):
    leave_open(begun(), live.names.transactional, PARTITIONS, native(live.topic(), 0))
    assert_others_are_served(live, sender)


@pytest.mark.slow
def test_what_is_committed_is_delivered_and_what_is_aborted_is_not(live, begun):
    topic = live.topic()
    for value, end in (("no", "abort"), ("yes", "commit"), ("no", "abort"), ("last", "commit")):
        producer = begun()
        headers = native(topic, 0)
        producer.produce(live.names.transactional, value, partition=0, headers=headers)
        assert producer.flush(60) == 0
        getattr(producer, f"{end}_transaction")(60)
        producer.begin_transaction()
    inbox = live.inbox(topic)
    inbox.until(lambda: any(each.value == b"last" for each in inbox.arrived), "the last")
    assert [each.value for each in inbox.arrived] == [b"yes", b"last"]


def test_a_message_is_not_delivered_before_its_transaction_ends(live, begun):
    topic, producer = live.topic(), begun()
    headers = native(topic, 0)
    producer.produce(live.names.transactional, "x", partition=0, headers=headers)
    assert producer.flush(60) == 0
    inbox, witness = live.inbox(topic), live.topic()
    live.send(live.names.native, "x", headers=native(witness, 0))
    live.inbox(witness).take(1)
    assert inbox.arrived == []
    producer.commit_transaction(60)
    producer.begin_transaction()
    assert len(inbox.take(1)) == 1


def test_a_rescheduled_message_comes_at_its_new_time_and_only_then(live, sender):
    topic = live.topic()
    old, later = (waiting(live, sender, topic, delay_s) for delay_s in (20, 50))
    new = reschedule(old, in_=timedelta(seconds=8), settings=live.settings)
    at_once = reschedule(later, in_=timedelta(0), settings=live.settings)
    assert [each.id for each in live.inbox(topic).take(2)] == [at_once, new]
    # Past the time that the first one had.
    witness = sender.produce(topic, "x", at=instant_after(old))
    sender.flush()
    assert live.inbox(topic).until_id(witness)[-1].id == witness
    assert len(live.inbox(topic).take(3)) == 3
    eventually(lambda: is_cancelled(live, later), "the cancel of the other one")


def instant_after(identity):
    """Half a second after the message is due."""
    due_ms = MessageId.parse(identity).due_ms
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=due_ms + 500)


def waiting(live, sender, topic, delay_s):
    """The id of a message that waits in the wheel."""
    identity = sender.produce(topic, "x", in_=timedelta(seconds=delay_s))
    sender.flush()
    with closing(WheelReader(live.settings)) as reader:
        found = lambda: reader.find(MessageId.parse(identity), SystemClock().now_ms())  # noqa: E731 (asked again)
        eventually(found, "the message in the wheel")
    return identity
