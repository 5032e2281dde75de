"""Spark's producers, by what the driver's JVM says of them."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from tests.support.clocks import eventually
from tests.support.topics import small_settings

from duetime.bench.chaos import send_signal
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.local.broker import LocalBroker
from duetime.spark import producer_pool
from duetime.spark.catalyst import java_array
from duetime.spark.kafka_io import client_id, sink_options, write_batch
from duetime.spark.producer_pool import ProducerPool, close_producers, drop_broken_producers
from duetime.spark.task_jvms import DriverJvm

pytestmark = pytest.mark.timeout(600)

PATIENCE_S = 150.0


@pytest.fixture
def paused(tmp_path):
    """A broker that may be paused."""
    with LocalBroker(tmp_path / "kafka") as broker:
        yield broker
        send_signal(broker.pid, signal.SIGCONT)


def rows(spark, topic):
    return spark.range(1).select(F.lit(topic).alias("topic"), F.lit(b"x").alias("value"))


@pytest.mark.slow
def test_producers_are_closed_once_their_records_have_arrived(spark, paused):
    """A leader that stops while its brokers are slow.

    Its successor reads back at once. What arrives after that would be sent twice.
    """
    settings, topic = small_settings(paused.bootstrap), "letters"
    admin = AdminClient(librdkafka_properties(settings))
    admin.create_topics([NewTopic(topic, 1)])[topic].result()
    eventually(lambda: sent(spark, settings, topic))
    metrics, offsets = DriverJvm(spark).producers, Offsets(settings, "reader")
    before = metrics.sent(client_id(settings, "slow"))
    send_signal(paused.pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        # The query is stopped while its producer waits for an answer.
        written = pool.submit(sent, spark, settings, topic)
        eventually(lambda: metrics.sent(client_id(settings, "slow")) > before)
        spark.sparkContext.cancelAllJobs()
        closed = pool.submit(close_producers, spark)
        with pytest.raises(TimeoutError):
            closed.result(1)
        send_signal(paused.pid, signal.SIGCONT)
        closed.result(PATIENCE_S)
        assert not written.result(PATIENCE_S)
    assert offsets.ends([(topic, 0)]) == {(topic, 0): 2}
    offsets.close()


def test_producer_with_a_fatal_error_is_replaced(spark, broker):
    """As after credentials that were refused while it asked for its id: it stays broken."""
    settings, topic = small_settings(broker.bootstrap), "letters"
    eventually(lambda: sent(spark, settings, topic))
    assert drop_broken_producers(spark) == 0
    break_producers(spark)
    assert not sent(spark, settings, topic)
    assert not sent(spark, settings, topic)
    assert drop_broken_producers(spark) > 0
    assert sent(spark, settings, topic)
    assert drop_broken_producers(spark) == 0


@pytest.fixture
def held(spark, broker):
    """The producer of a sink, held, with a settings and topic to send by it."""
    settings = small_settings(broker.bootstrap)
    eventually(lambda: sent(spark, settings, "letters"))
    with holding(spark, settings) as producer:
        assert producer.is_ready()
        yield producer, settings


@contextmanager
def holding(spark, settings):
    producer = DriverJvm(spark).hold_producer(sink_options(settings, "slow"))
    yield producer
    producer.release()
    close_producers(spark)


def test_flush_says_that_all_has_arrived(spark, held):
    producer, settings = held
    assert producer.flush()
    assert sent(spark, settings, "letters")
    assert producer.flush()


def test_flush_says_that_a_record_was_refused(spark, held):
    producer, settings = held
    admin = AdminClient(librdkafka_properties(settings))
    refusing = NewTopic("refusing", 1, config={"max.message.bytes": "1"})
    admin.create_topics([refusing])["refusing"].result()
    assert not sent(spark, settings, "refusing")
    assert not producer.flush()
    assert sent(spark, settings, "letters")
    assert not producer.flush()
    # It is an earlier run's record to the next.
    next_held = DriverJvm(spark).hold_producer(sink_options(settings, "slow"))
    assert next_held.is_ready()
    assert next_held.flush()
    next_held.release()


def test_flush_of_a_producer_that_cannot_send_any_more_says_so(spark, held):
    producer, _ = held
    break_producers(spark)
    assert not producer.flush()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_flush_of_a_producer_that_was_closed_says_so(spark, held, is_replaced):
    producer, settings = held
    close_producers(spark)
    if is_replaced:
        assert sent(spark, settings, "letters")
    assert not producer.flush()


@pytest.mark.slow
def test_flush_waits_for_what_is_not_acknowledged(spark, paused):
    settings, topic = small_settings(paused.bootstrap), "letters"
    eventually(lambda: sent(spark, settings, topic))
    metrics = DriverJvm(spark).producers
    with holding(spark, settings) as producer, ThreadPoolExecutor() as pool:
        assert producer.is_ready()
        before = metrics.sent(client_id(settings, "slow"))
        send_signal(paused.pid, signal.SIGSTOP)
        written = pool.submit(sent, spark, settings, topic)
        eventually(lambda: metrics.sent(client_id(settings, "slow")) > before)
        flushed = pool.submit(producer.flush)
        with pytest.raises(TimeoutError):
            flushed.result(1)
        send_signal(paused.pid, signal.SIGCONT)
        assert flushed.result(PATIENCE_S)
        assert written.result(PATIENCE_S)


@pytest.mark.slow
def test_producer_without_an_id_is_not_ready(spark, paused, monkeypatch):
    """It drops what it is given, should the broker refuse it one."""
    monkeypatch.setattr(producer_pool, "ID_TIMEOUT_S", 1.0)
    send_signal(paused.pid, signal.SIGSTOP)
    with holding(spark, small_settings(paused.bootstrap)) as producer:
        assert not producer.is_ready()
        send_signal(paused.pid, signal.SIGCONT)
        eventually(producer.is_ready)


def break_producers(spark):
    """Do what Kafka's producer does when the broker refuses its credentials."""
    java, pool = spark._jvm, ProducerPool(spark)
    invoke = java.org.apache.commons.lang3.reflect.MethodUtils.invokeMethod
    for each in pool._entries():
        error = java.org.apache.kafka.common.errors.SaslAuthenticationException("refused")
        state = pool._state(each.producer())
        invoke(state, True, "transitionToFatalError", java_array(error))


def sent(spark, settings, topic):
    """Whether the write went through."""
    try:
        write_batch(rows(spark, topic), settings, "slow")
    except (PySparkException, Py4JJavaError):
        return False
    return True
