"""Open transactions in the intake topics are found, by offsets alone."""

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY
from tests.support.clocks import SetClock, eventually

from duetime.cli.admin import checkup
from duetime.core.clock import SystemClock
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.pipeline.monitoring.exporter import TransactionWatch

pytestmark = pytest.mark.usefixtures("topics")

MINUTE_MS = 60_000


@pytest.fixture
def names(settings):
    return TopicNames(settings)


@pytest.fixture
def producer(settings):
    """A producer with a transaction that is still empty."""
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


def test_without_a_transaction_there_is_no_warning(settings, names, watch, caplog):
    plain = Producer(librdkafka_properties(settings))
    for topic in names.intake:
        send(plain, topic)
    watch.check()
    assert warnings(caplog) == []
    assert seconds("native") == seconds("control") == seconds("transactional") == 0


def test_one_in_a_shared_topic_is_warned_of_once_and_measured(
    names, watch, clock, producer, caplog
):
    send(producer, names.control)
    clock.ms += 5_000
    watch.check()
    (told,) = warnings(caplog)
    assert f"topic={names.control} partition=0 seconds=" in told
    assert told.endswith(f"send records of transactions to {names.transactional}")
    clock.ms += MINUTE_MS
    watch.check()
    assert len(warnings(caplog)) == 1
    assert 55 < seconds("control") < 120
    assert seconds("native") == 0
    producer.commit_transaction(60)
    producer.begin_transaction()

    def is_over():
        watch.check()
        return seconds("control") == 0

    # Brokers write the end of a transaction a moment after they have answered.
    eventually(is_over)


def test_a_long_one_in_the_transactional_topic_is_warned_of(names, watch, clock, producer, caplog):
    send(producer, names.transactional, partition=1)
    watch.check()
    assert warnings(caplog) == []
    clock.ms += 2 * MINUTE_MS
    watch.check()
    (told,) = warnings(caplog)
    assert f"topic={names.transactional} partition=1 seconds=" in told
    assert "kafka-transactions.sh" in told
    assert 110 < seconds("transactional") < 180


def test_doctor_finds_a_long_transaction(settings, names, clock, producer):
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
