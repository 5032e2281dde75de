"""Spark's producers, by what the driver's JVM says of them."""

import signal
from concurrent.futures import ThreadPoolExecutor

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
from duetime.spark.catalyst import java_array
from duetime.spark.kafka_io import client_id, write_batch
from duetime.spark.session import PRODUCERS, close_producers, drop_broken_producers
from duetime.spark.task_jvms import DriverProducers

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
    metrics, offsets = DriverProducers(spark), Offsets(settings, "reader")
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


def break_producers(spark):
    """Do what Kafka's producer does when the broker refuses its credentials."""
    java = spark._jvm
    reflect = java.org.apache.commons.lang3.reflect
    module = getattr(java, PRODUCERS).__getattr__("MODULE$")
    pool = reflect.FieldUtils.readField(module, "pool", True)
    entries = pool.getAsMap().values().iterator()
    while entries.hasNext():
        producer = entries.next().producer().producer()
        state = reflect.FieldUtils.readField(producer, "transactionManager", True)
        error = java.org.apache.kafka.common.errors.SaslAuthenticationException("refused")
        reflect.MethodUtils.invokeMethod(state, True, "transitionToFatalError", java_array(error))


def sent(spark, settings, topic):
    """Whether the write went through."""
    try:
        write_batch(rows(spark, topic), settings, "slow")
    except (PySparkException, Py4JJavaError):
        return False
    return True
