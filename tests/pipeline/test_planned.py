"""A plan that is made once gives for each read what a plan of its own would give."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from duetime.config import Settings
from duetime.connection import librdkafka_properties
from duetime.pipeline.kafka import read_ranges, read_stream
from duetime.pipeline.planned import PlannedOnce
from duetime.stores import OffsetRange

pytestmark = pytest.mark.system


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
    """What is made of a read, and how often that was asked for."""

    def __init__(self):
        self.calls = 0

    def __call__(self, records):
        self.calls += 1
        shown = records.selectExpr("partition", "offset", "string(value) value", "headers")
        return shown.where("offset % 3 = 1").coalesce(1).sortWithinPartitions("offset", "partition")


def test_each_read_is_its_own_and_the_steps_are_those_of_the_first(spark, settings, topic):
    steps = Steps()
    planned = PlannedOnce(spark, steps)
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


def test_what_python_reads_is_read_anew_each_time(spark):
    def numbers(first):
        def read(batches):
            for _ in batches:
                yield pa.RecordBatch.from_pydict({"n": range(first, first + 10)})

        return spark.range(0, 1, 1, 1).mapInArrow(read, "n bigint")

    planned = PlannedOnce(spark, lambda records: records.where("n % 2 = 0").coalesce(1).sort("n"))
    found = [planned(numbers(first)).collect() for first in (0, 100, 7)]
    assert [[row.n for row in rows] for rows in found] == [
        [0, 2, 4, 6, 8],
        [100, 102, 104, 106, 108],
        [8, 10, 12, 14, 16],
    ]


def test_each_micro_batch_is_its_own(spark, settings, topic, tmp_path):
    def shown(rows):
        for batch in rows:
            yield pa.RecordBatch.from_pydict({"shown": batch.column("value").to_pylist()})

    def steps(batch):
        return batch.selectExpr("upper(string(value)) value").mapInArrow(shown, "shown string")

    planned, found = PlannedOnce(spark, steps), []

    def handle(batch, number):  # noqa: ARG001 (Spark gives it)
        found.append(sorted(row.shown for row in planned(batch).collect()))

    reading = read_stream(spark, settings, [topic], batch=8)
    query = reading.writeStream.foreachBatch(handle).trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path)).start().awaitTermination()
    assert len(found) > 1
    assert sorted(chain.from_iterable(found)) == sorted(f"VALUE {number}" for number in range(20))
