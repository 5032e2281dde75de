"""Open transactions in the intake topics are noticed, by offsets alone."""

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY
from tests.conftest import SetClock, eventually

from duetime.clock import SystemClock
from duetime.connection import librdkafka_properties
from duetime.doctor import checkup
from duetime.pipeline.transaction_watch import TransactionWatch
from duetime.topics import TopicNames

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("topics")]

MINUTE_MS = 60_000


@pytest.fixture
def names(settings):
    return TopicNames(settings)


@pytest.fixture
def producer(settings):
    """One with a transaction, which is empty as yet."""
    own = {"transactional.id": settings.namespace, "transaction.timeout.ms": 10 * MINUTE_MS}
    begun = Producer(librdkafka_properties(settings) | own)
    begun.init_transactions(60)
    begun.begin_transaction()
    yield begun
    begun.abort_transaction(60)


@pytest.fixture
def clock():
    return SetClock(SystemClock().now_ms())


@pytest.fixture
def watch(settings, clock):
    watch = TransactionWatch(settings, clock)
    yield watch
    watch.start()
    watch.close()


def send(producer, topic, partition=0):
    producer.produce(topic, "x", partition=partition)
    assert producer.flush(60) == 0


def seconds(contract):
    return REGISTRY.get_sample_value("duetime_open_transaction_seconds", {"contract": contract})


def warnings(caplog):
    found = [each.getMessage() for each in caplog.records]
    return [each for each in found if each.startswith("transaction is open")]


def test_without_one_nothing_is_told(settings, names, watch, caplog):
    plain = Producer(librdkafka_properties(settings))
    for topic in names.intake:
        send(plain, topic)
    watch.look()
    assert warnings(caplog) == []
    assert seconds("native") == seconds("control") == seconds("transactional") == 0


def test_one_in_a_topic_of_all_is_warned_of_once_and_how_long_it_lasts_is_told(
    names, watch, clock, producer, caplog
):
    send(producer, names.control)
    clock.ms += 5_000
    watch.look()
    (told,) = warnings(caplog)
    assert f"topic={names.control} partition=0 seconds=" in told
    assert told.endswith(f"send records of transactions to {names.transactional}")
    clock.ms += MINUTE_MS
    watch.look()
    assert len(warnings(caplog)) == 1
    assert 55 < seconds("control") < 120
    assert seconds("native") == 0
    producer.commit_transaction(60)
    producer.begin_transaction()

    def is_over():
        watch.look()
        return seconds("control") == 0

    # Brokers write the end of a transaction a moment after they have answered.
    eventually(is_over)


def test_in_the_topic_for_them_one_that_is_long_is_warned_of(names, watch, clock, producer, caplog):
    send(producer, names.transactional, partition=1)
    watch.look()
    assert warnings(caplog) == []
    clock.ms += 2 * MINUTE_MS
    watch.look()
    (told,) = warnings(caplog)
    assert f"topic={names.transactional} partition=1 seconds=" in told
    assert "kafka-transactions.sh" in told
    assert 110 < seconds("transactional") < 180


def test_doctor_finds_one_that_is_open_for_long(settings, names, clock, producer):
    def transactions():
        return next(each for each in checkup(settings, clock) if each.name == "transactions")

    send(producer, names.native)
    assert transactions().ok
    clock.ms += MINUTE_MS
    found = transactions()
    assert not found.ok
    assert f"{names.native}, partition 0, for " in found.detail
    assert names.transactional in found.detail
    producer.abort_transaction(60)
    producer.begin_transaction()
    eventually(lambda: transactions().ok)
