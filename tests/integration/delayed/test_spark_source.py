"""The Spark source on a real broker and a real Spark."""

import json
from itertools import pairwise

import pytest
from tests.support.delayed_topics import send_shuffled

from duetime.core.clock import SystemClock
from duetime.core.errors import ConfigError
from duetime.delayed.spark_source import properties, register

pytestmark = pytest.mark.slow


class Query:
    """A query over a delayed topic, and its batches."""

    def __init__(self, spark, topic, directory):
        register(spark)
        self._spark, self._topic, self._checkpoint = spark, topic, str(directory)
        self.batches = []
        self._failing = 0

    def _stream(self, **options):
        stream = self._spark.readStream.format("delayed_kafka")
        return stream.options(
            **{"kafka.bootstrap.servers": self._topic.bootstrap, "subscribe": self._topic.name},
            **options,
        ).load()

    def run(self, **options):
        """Read everything that is due now; return the batches."""
        self.batches = []
        writer = self._stream(**options).writeStream.foreachBatch(self._take)
        writer = writer.option("checkpointLocation", self._checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()
        return self.batches

    def fail_at(self, batch):
        self._failing = batch

    def until(self, count):
        """Run the query until it has this many rows."""
        self.batches = []
        writer = self._stream().writeStream.foreachBatch(self._take)
        writer = writer.option("checkpointLocation", self._checkpoint)
        query = writer.trigger(processingTime="100 milliseconds").start()
        while sum(map(len, self.batches)) < count:
            assert not query.exception()
            query.awaitTermination(0.05)
        query.processAllAvailable()
        self.progress = query.lastProgress
        query.stop()
        return [row for batch in self.batches for row in batch]

    def _take(self, batch, _number):
        rows = batch.collect()
        for row in rows:
            row_ms = 0 if row.deliver_after is None else row.deliver_after.timestamp() * 1_000
            assert row_ms <= SystemClock().now_ms()
        if self._failing and len(self.batches) == self._failing:
            self._failing = 0
            raise RuntimeError("as the test wants it")
        self.batches.append(rows)


@pytest.fixture
def query(spark, topic, tmp_path):
    return Query(spark, topic, tmp_path)


def texts(batches):
    return [bytes(row.value).decode() for batch in batches for row in batch]


def test_a_restart_repeats_the_failed_batch(query, topic, now_ms):
    for number in range(300):
        after = None if number == 299 else now_ms - number * 7919 % 300
        topic.send(after, str(number), key="k", headers=[("a", b"b")])
    topic.send(now_ms + 600_000, "far")
    topic.flush()
    query.fail_at(1)
    with pytest.raises(Exception, match="as the test wants it"):
        query.run(maxRecordsPerTrigger=100)
    found = texts(query.batches)
    batches = query.run(maxRecordsPerTrigger=100)
    assert {len(batch) for batch in batches} == {100}
    order = sorted(range(299), key=lambda number: (-(number * 7919 % 300), number))
    assert found + texts(batches) == ["299", *map(str, order)]
    row = batches[0][0]
    assert (bytes(row.key), row.topic, row.partition) == (b"k", topic.name, 0)
    assert (row.timestampType, row.headers[0].key) == (1, "a")
    topic.send(now_ms - 5_000, "late")
    topic.flush()
    assert texts(query.run()) == ["late"]
    assert query.run() == []


def test_old_records_are_returned_in_order(query, topic, now_ms):
    send_shuffled(topic, now_ms, 20_000)
    batches = query.run(maxRecordsPerTrigger=8_000)
    assert [len(batch) for batch in batches] == [8_000, 8_000, 4_000]
    found = [(row.deliver_after, row.offset) for batch in batches for row in batch]
    assert all(one < next_ for one, next_ in pairwise(found))


def test_a_running_query_returns_records_at_their_time(query, topic, now_ms):
    for number, delay_ms in enumerate((3_000, 2_000, 2_000, 4_000)):
        topic.send(now_ms + delay_ms, str(number))
    topic.flush()
    assert texts([query.until(4)]) == ["1", "2", "0", "3"]
    told = json.loads(query.progress.sources[0].endOffset)
    assert told[f"{topic.name}/0"]["removed"] == 0


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="cake"):
        properties({"subscribe": "a", "cake": "1"})
