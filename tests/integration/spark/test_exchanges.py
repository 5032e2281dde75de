"""Exchanges with an executor: here the driver, which runs the tasks of these tests."""

import time

import pytest
from pyspark.sql import functions as F
from tests.support.clocks import eventually
from tests.support.topics import small_settings

from duetime.core.errors import SetupError
from duetime.core.topics import TopicNames
from duetime.pipeline.delivery.delivery_errors import UNKNOWN, request_metadata, request_name
from duetime.spark import catalyst
from duetime.spark.kafka_io import client_id, write_batch
from duetime.spark.session import jvm
from duetime.spark.task_jvms import ERRORS, SENT, Exchange

#: Any place: there is one executor.
DRIVER = "driver", "executor_here_driver"


@pytest.fixture(scope="module")
def exchange(spark):
    return Exchange(spark)


def test_properties_are_set_and_the_clocks_read(spark, exchange):
    before_s = time.monotonic()
    answer = exchange(*DRIVER, {"duetime.a": "é", "duetime.b": "1:;,2,;"}, [])
    system = jvm(spark).java.lang.System
    assert [system.getProperty(f"duetime.{name}") for name in "ab"] == ["é", "1:;,2,;"]
    assert before_s < answer.started_s < answer.nano_ns / 1e9 < answer.ended_s < time.monotonic()
    assert answer.skew_ms == 0


def test_task_that_runs_elsewhere_sets_nothing(spark, exchange):
    with pytest.raises(SetupError, match="executor 7 had no free core"):
        exchange("7", "executor_here_7", {"duetime.c": "1"}, [])
    assert jvm(spark).java.lang.System.getProperty("duetime.c") is None


def test_requests_of_rows_are_taken_once(spark, exchange):
    settings = small_settings("127.0.0.1:1")
    flag = request_name(settings)
    assert exchange(*DRIVER, {}, [flag]).requests == {flag: []}
    rows = spark.createDataFrame([("a",), ("b",)], "topic string")
    unknown, here = F.array(F.lit(UNKNOWN)), F.lit(None).cast("string")
    requested = rows.where(request_metadata(settings, unknown, F.col("topic"), here))
    assert requested.count() == 2
    assert sorted(exchange(*DRIVER, {}, [flag]).requests[flag]) == ["a", "b"]
    assert exchange(*DRIVER, {}, [flag]).requests == {flag: []}


@pytest.mark.usefixtures("topics")
def test_metrics_of_producers_are_answered(spark, exchange, settings):
    topics = TopicNames(settings)
    rows = spark.range(3).select(F.lit(topics.native).alias("topic"), F.lit(b"x").alias("value"))
    write_batch(rows, settings, "exchanged")
    name = client_id(settings, "exchanged")

    def found():
        for keys, values in exchange(*DRIVER, {}, []).beans:
            if keys["type"] == "producer-topic-metrics" and keys["client-id"] == name:
                return keys["topic"], values[SENT], values[ERRORS]
        return None

    assert eventually(found) == (topics.native, 3, 0)


def test_first_attempt_of_a_task_is_one(spark):
    assert spark.range(1).where(catalyst.task_attempt() == 0).count() == 1
