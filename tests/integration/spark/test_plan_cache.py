"""A plan that is made once gives for each read what a plan of its own would give."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import chain

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import DataFrame

from duetime.core.settings import Settings
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import OffsetRange
from duetime.spark.catalyst import PlanCache, as_single_read
from duetime.spark.kafka_io import read_ranges, read_stream


@pytest.fixture(scope="module")
def settings(broker):
    return Settings(bootstrap=broker.bootstrap)


@pytest.fixture(scope="module")
def topic(settings):
    """Ten records in each of two partitions."""
    name = f"planned-{uuid.uuid4().hex[:8]}"
    properties = librdkafka_properties(settings)
    admin, producer = AdminClient(properties), Producer(properties)
    admin.create_topics([NewTopic(name, 2)])[name].result()
    for number in range(20):
        value, headers = f"value {number}", [("n", str(number))]
        producer.produce(name, value, partition=number % 2, headers=headers)
    assert producer.flush(30) == 0
    return name


class Steps:
    """Steps over a read, and the number of times that they were planned."""

    def __init__(self):
        self.calls = 0

    def __call__(self, records):
        self.calls += 1
        shown = records.selectExpr("partition", "offset", "string(value) value", "headers")
        return shown.where("offset % 3 = 1").coalesce(1).sortWithinPartitions("offset", "partition")


def test_plan_is_reused_over_other_reads(spark, settings, topic):
    steps = Steps()
    planned = PlanCache(spark, steps)
    reads = [
        [OffsetRange(topic, 0, 0, 5)],
        [OffsetRange(topic, 1, 5, 10)],
        [OffsetRange(topic, 0, 2, 9), OffsetRange(topic, 1, 0, 10)],
    ]
    records = [read_ranges(spark, settings, each) for each in reads]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda read: planned(read).collect(), records))
    assert steps.calls == 1
    assert found == [steps(read).collect() for read in records]
    assert len(found[2]) > len(found[0]) > 0


def test_python_reader_reads_again_each_time(spark):
    def numbers(first):
        def read(batches):
            for _ in batches:
                yield pa.RecordBatch.from_pydict({"n": range(first, first + 10)})

        return spark.range(0, 1, 1, 1).mapInArrow(read, "n bigint")

    planned = PlanCache(spark, lambda records: records.where("n % 2 = 0").coalesce(1).sort("n"))
    found = [planned(numbers(first)).collect() for first in (0, 100, 7)]
    assert [[row.n for row in rows] for rows in found] == [
        [0, 2, 4, 6, 8],
        [100, 102, 104, 106, 108],
        [8, 10, 12, 14, 16],
    ]


@pytest.mark.parametrize("is_one_task", [True, False])
def test_steps_of_one_task_are_done_for_each_partition_on_request(spark, is_one_task):
    planned = PlanCache(spark, lambda records: records.coalesce(1).sortWithinPartitions("n"))

    def parts(first):
        halves = [spark.range(first + at, first - 1, -1, 1) for at in (1, 3)]
        records = reduce(DataFrame.union, halves).toDF("n")
        found = planned.observed(as_single_read(spark, records), is_one_task=is_one_task)
        return [[row.n for row in part] for part in found.rows.rdd.glom().collect()]

    for first in (0, 10):
        found = [[first, first + 1], list(range(first, first + 4))]
        assert parts(first) == ([sorted(chain.from_iterable(found))] if is_one_task else found)


def test_each_micro_batch_is_read_by_itself(spark, settings, topic, tmp_path):
    def shown(rows):
        for batch in rows:
            yield pa.RecordBatch.from_pydict({"shown": batch.column("value").to_pylist()})

    def steps(batch):
        return batch.selectExpr("upper(string(value)) value").mapInArrow(shown, "shown string")

    planned, found = PlanCache(spark, steps), []

    def handle(batch, number):  # noqa: ARG001 (Spark gives it)
        found.append(sorted(row.shown for row in planned(batch).collect()))

    reading = read_stream(spark, settings, [topic], batch=8)
    query = reading.writeStream.foreachBatch(handle).trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path)).start().awaitTermination()
    assert len(found) > 1
    assert sorted(chain.from_iterable(found)) == sorted(f"VALUE {number}" for number in range(20))
