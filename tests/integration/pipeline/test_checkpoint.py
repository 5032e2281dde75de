"""Checkpoints before their query starts: torn by a power cut, or of topics that are gone."""

import json
import logging
import shutil
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.state import GroupStateTimeout
from tests.support.batches import process_available
from tests.support.checkpoints import cut
from tests.support.clocks import eventually

from duetime.core.errors import KafkaError
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.pipeline.query_factory import state_problems
from duetime.pipeline.recovery.checkpoint import NOTE, Checkpoints
from duetime.spark.kafka_io import NO_LIMIT, read_stream, start_micro_batches, start_real_time

#: The query, and another one.
QUERY, OTHER = "query", "other"


class Query:
    """A query over a topic of its own, that is begun and ended as often as a test wants it."""

    def __init__(self, spark, settings):
        self._spark, self.settings = spark, settings
        self.topic = f"{settings.namespace}-read"
        self.path = Path(settings.checkpoint.removeprefix("file://")) / QUERY
        self._admin = AdminClient(librdkafka_properties(settings))
        self._producer = Producer(librdkafka_properties(settings))
        self._offsets = Offsets(settings, settings.namespace)
        self.checkpoints = Checkpoints(spark, settings, self._offsets)
        self.create()

    def create(self, partitions=2):
        for created in self._admin.create_topics([NewTopic(self.topic, partitions)]).values():
            created.result()

    def create_again(self, partitions=2):
        self._admin.delete_topics([self.topic])[self.topic].result()
        there = lambda: self._admin.list_topics(timeout=30).topics  # noqa: E731 (asked again)
        eventually(lambda: self.topic not in there(), "the end of the topic")
        self.create(partitions)

    def send(self, *values):
        for value in values:
            self._producer.produce(self.topic, value, partition=0)
        assert self._producer.flush(30) == 0

    def open(self, name=QUERY, problems=()):
        self.checkpoints.open(name, [self.topic], problems)

    def run(self, name=QUERY):
        """Returns what it reads up to the present end."""
        read = []

        def handle(batch, _number):
            read.extend(row.value.decode() for row in batch.orderBy("offset").collect())

        records = read_stream(self._spark, self.settings, [self.topic], batch=NO_LIMIT)
        process_available(records, handle, self.settings, name)
        return read

    def fail(self):
        """Begins a batch that is not committed."""
        records = read_stream(self._spark, self.settings, [self.topic], batch=NO_LIMIT)
        process_available(records, lambda *_: 1 // 0, self.settings, QUERY)

    def stop_before_a_batch(self):
        """Notes where the query begins, and reads nothing."""
        records = read_stream(self._spark, self.settings, [self.topic])
        running = start_real_time(records.select("key", "value", "topic"), self.settings, QUERY, 60)
        eventually((self.path / "sources/0/0").exists, "where it begins")
        running.stop()
        assert not list((self.path / "offsets").glob("[0-9]*"))

    def advance(self, offset, start=0):
        """Of its first partition, which has all records."""
        place = self.topic, 0
        self.checkpoints.advance(QUERY, {place: start}, reached={place: offset})

    def reached(self):
        return self.checkpoints.inspect(QUERY, [self.topic]).offsets

    def batches(self, first, size):
        """The recovery of its first partition, batch by batch."""
        place = self.topic, 0
        begin = {place: self.reached().get(place, 0)}
        ends = self._offsets.ends([place])
        return self.checkpoints.batches(QUERY, begin, ends, (first, size))

    def count(self):
        """The same of a query that remembers how many there were."""
        counts = []

        def handle(batch, _number):
            counts.extend(row["count"] for row in batch.select("count").collect())

        process_available(self.counted(), handle, self.settings, QUERY)
        return counts

    def counted(self):
        records = read_stream(self._spark, self.settings, [self.topic], batch=NO_LIMIT)
        return records.groupBy("topic").applyInPandasWithState(
            _count, "count bigint", "count bigint", "update", GroupStateTimeout.NoTimeout
        )

    def newest(self, folder):
        return max((self.path / folder).glob("[0-9]*"), key=lambda path: int(path.name))

    def close(self):
        self._admin.delete_topics([self.topic])[self.topic].result()
        self._offsets.close()


def _count(_key, frames, state):
    count = sum(map(len, frames)) + (state.get[0] if state.exists else 0)
    state.update((count,))
    yield pd.DataFrame({"count": [count]})


@pytest.fixture
def query(spark, settings, tmp_path):
    with closing(Query(spark, settings.model_copy(update={"checkpoint": tmp_path.as_uri()}))) as it:
        yield it


def without_checksum(path):
    """Of a file system that has none, or lost it as well."""
    path.with_name(f".{path.name}.crc").unlink()


def errors(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["empty", "half"])
@pytest.mark.parametrize("checked", [True, False], ids=["checksum", "no checksum"])
@pytest.mark.parametrize("folders", [["offsets"], ["commits"], ["offsets", "commits"]], ids=str)
def test_query_with_torn_files_starts_and_reads_their_batch_again(
    query, caplog, folders, checked, share
):
    for value in ("a", "b", "c"):
        query.send(value)
        query.open()
        assert query.run() == [value]
    for folder in folders:
        path = query.newest(folder)
        cut(path, share)
        if not checked:
            without_checksum(path)
    query.send("d")
    with pytest.raises(StreamingQueryException):
        query.run()
    query.open()
    assert query.run() == ["c", "d"]
    assert all(f"query={QUERY} file=" in each for each in errors(caplog))
    assert len(errors(caplog)) == len({*folders, "commits"})
    query.open()
    assert query.run() == []


def test_query_whose_batches_are_all_torn_starts_without_a_checkpoint(query, caplog):
    for value in ("a", "b"):
        query.send(value)
        query.open()
        query.run()
    for path in (query.path / "offsets").glob("[0-9]*"):
        cut(path)
    query.open()
    assert query.run() == ["a", "b"]
    assert "none of its batches can be read" in errors(caplog)[-1]


@pytest.mark.parametrize("folder", ["offsets", "commits"])
def test_query_whose_first_batch_was_never_finished_starts(query, folder):
    """A kill or a full disk leaves Spark's file before it gets its name."""
    query.send("a")
    query.open()
    query.stop_before_a_batch()
    left = query.path / folder / ".0.36d5b8ee-c33f-4b65-a295-b4867fa85b5f.tmp"
    left.touch()
    left.with_name(f".{left.name}.crc").touch()
    with pytest.raises(StreamingQueryException, match="should be empty"):
        query.run()
    query.open()
    assert query.run() == ["a"]


@pytest.mark.parametrize("name", ["metadata", "sources/0/0", NOTE])
def test_other_torn_files_lose_nothing(query, name):
    query.send("a")
    query.open()
    query.run()
    cut(query.path / name)
    query.send("b")
    query.open()
    # Without its metadata, Spark takes the rest for another query's.
    assert query.run() == (["a", "b"] if name == "metadata" else ["b"])


@pytest.mark.slow
@pytest.mark.parametrize("folders", [["offsets"], ["commits"], ["offsets", "commits"]], ids=str)
def test_state_is_as_of_the_batch_that_the_query_goes_on_from(query, folders):
    query.open()
    for count in (1, 2, 3):
        query.send("x")
        assert query.count() == [count]
    for folder in folders:
        cut(query.newest(folder))
    query.send("x")
    query.open()
    # The batch is made once more as it was, or with what came since.
    assert query.count()[-1] == 4


def test_query_with_empty_state_files_starts_without_a_checkpoint(query, caplog):
    query.open()
    for _ in range(2):
        query.send("x")
        query.count()
    cut(next((query.path / "state").rglob("2.changelog")))
    query.send("x")
    query.open()
    assert query.count() == [3]
    assert "state cannot be read" in errors(caplog)[-1]


def test_query_that_failed_to_load_state_starts_without_a_checkpoint(query):
    """A half file with its checksum gone as well looks whole: only Spark finds out."""
    query.open()
    for _ in range(2):
        query.send("x")
        query.count()
    for path in (query.path / "state").rglob("[0-9]*.changelog"):
        cut(path, 0.5)
        without_checksum(path)
    query.send("x")
    query.open()
    last = start_micro_batches(
        query.counted(), lambda batch, _: batch.collect(), query.settings, QUERY
    )
    eventually(last.exception, "its end")
    query.open(problems=state_problems(last))
    assert query.count() == [3]
    assert state_problems(None) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5], ids=["fewer", "as many", "more"])
def test_topic_that_was_created_again_is_read_from_its_start(query, caplog, count):
    query.send("a", "b")
    for name in (QUERY, OTHER):
        query.open(name)
        assert query.run(name) == ["a", "b"]
    shutil.copytree(query.path, query.path.with_name("before"))
    query.create_again()
    sent = [f"new {number}" for number in range(count)]
    query.send(*sent)
    query.open()
    assert query.run() == sent
    (told,) = errors(caplog)
    assert f"query={QUERY}" in told
    assert f"topic {query.topic} was created again" in told
    query.open()
    assert len(errors(caplog)) == 1


@pytest.mark.slow
def test_spark_alone_skips_records_of_a_topic_created_again(query):
    """What Spark does by itself: what makes all of this necessary."""
    query.send("a", "b")
    query.run()
    query.create_again()
    query.send("new")
    assert query.run() == []


def test_partition_that_ends_before_the_offset_is_read_from_its_start(query, caplog):
    """A log that lost its end keeps the topic's id. So it seems where there is no note yet."""
    query.send("a", "b")
    query.open()
    query.run()
    (query.path / NOTE).unlink()
    query.create_again()
    query.send("new")
    query.open()
    assert query.run() == ["new"]
    (told,) = errors(caplog)
    assert f"partition 0 of {query.topic} ends at 1, and 2 was read" in told


def test_topic_that_was_created_again_may_have_fewer_partitions(query):
    query.send("a", "b")
    query.open()
    query.run()
    query.create_again(partitions=1)
    query.send("new")
    query.open()
    assert query.run() == ["new"]


def test_checkpoint_of_another_cluster_is_not_used(query, caplog):
    query.send("a")
    query.open()
    query.run()
    note = json.loads((query.path / NOTE).read_text())
    # As of brokers that give topics no ids.
    (query.path / f".{NOTE}.crc").unlink()
    (query.path / NOTE).write_text(json.dumps(note | {"cluster_id": "other", "topic_ids": {}}))
    query.open()
    assert query.run() == ["a"]
    assert "another cluster" in errors(caplog)[0]


def test_checkpoint_without_a_note_is_used(query, caplog):
    query.send("a")
    query.run()
    query.open()
    query.send("b")
    assert query.run() == ["b"]
    assert errors(caplog) == []


def test_topic_created_again_is_detected_while_its_query_runs(query):
    query.open()
    query.open(OTHER)
    assert query.checkpoints.recreated_topics() == {}
    query.create_again()
    eventually(
        lambda: query.checkpoints.recreated_topics() == dict.fromkeys((QUERY, OTHER), query.topic)
    )
    query.open()
    assert query.checkpoints.recreated_topics() == {OTHER: query.topic}


def test_query_goes_on_from_what_it_has_reached_since_its_last_commit(query):
    query.send("a")
    query.open()
    assert query.run() == ["a"]
    query.send("b", "c", "d")
    query.advance(3)
    assert query.run() == ["d"]
    query.advance(2)
    assert query.run() == []


def test_query_without_a_commit_goes_on_from_what_it_has_reached(query):
    query.open()
    query.stop_before_a_batch()
    query.send("a", "b", "c")
    query.advance(2)
    with pytest.raises(StreamingQueryException):
        query.fail()
    query.open()
    query.advance(2)
    assert query.run() == ["c"]


@pytest.mark.slow
@pytest.mark.parametrize(("reached", "left"), [(2, ["c"]), (3, [])])
def test_batch_that_was_begun_does_not_hold_back_what_was_reached(query, reached, left):
    query.send("a")
    query.open()
    assert query.run() == ["a"]
    query.send("b", "c")
    with pytest.raises(StreamingQueryException):
        query.fail()
    query.open()
    query.advance(reached)
    assert query.run() == left


def test_query_without_a_checkpoint_starts_at_the_earliest_record(query):
    query.send("a", "b")
    query.open()
    query.advance(2)
    assert query.run() == ["a", "b"]


def test_query_does_not_begin_at_records_that_are_deleted(query):
    """A real-time query fails there."""
    query.send("a")
    query.open()
    assert query.run() == ["a"]
    query.send("b", "c", "d")
    query.advance(2, start=3)
    assert query.run() == ["d"]


@pytest.mark.parametrize("had_batches", [False, True])
def test_recovery_commits_each_batch_and_the_first_is_small(query, had_batches):
    query.open()
    if had_batches:
        query.send("z")
        assert query.run() == ["z"]
    query.send(*"abcdef")
    before = int(had_batches)
    begun = query.batches(1, 3)
    assert [(each.start, each.end) for each in next(begun)] == [(before, before + 1)]
    assert [(each.start, each.end) for each in next(begun)] == [(before + 1, before + 4)]
    # As after a kill in the second one, which is repeated.
    begun.close()
    query.open()
    counts = [sum(each.count for each in ranges) for ranges in query.batches(2, 4)]
    assert counts == [2, 3]
    query.send("g")
    query.open()
    assert query.run() == ["g"]


def test_recovery_of_a_leader_that_has_stopped_commits_nothing(query):
    query.open()
    query.send(*"abc")
    begun = query.batches(1, 3)
    next(begun)
    query.checkpoints.close()
    with pytest.raises(KafkaError, match="lead was lost"):
        next(begun)
    assert not query.reached()
