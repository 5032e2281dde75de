"""The progress of a real-time query on a real broker."""

from contextlib import closing
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import functions as F
from tests.support.clocks import eventually

from duetime.core.errors import KafkaError
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import LogIdentity, Offsets
from duetime.pipeline.recovery.progress import ProgressKeeper
from duetime.spark.kafka_io import read_stream, start_real_time
from duetime.spark.task_jvms import DriverJvm

#: A query that passes records on, to the topic in their key.
QUERY = "passing"

HOUR_S = 3_600


class Passing:
    """A query that runs in real time, and the topics it reads and writes."""

    def __init__(self, spark, settings, keeper):
        self._spark, self._settings, self._keeper = spark, settings, keeper
        self.read, self._written = f"{settings.namespace}-asked", f"{settings.namespace}-passed"
        self._admin = AdminClient(librdkafka_properties(settings))
        # It refuses them.
        self.narrow = f"{settings.namespace}-letters-of-one-byte"
        narrow = NewTopic(self.narrow, 1, config={"max.message.bytes": "1"})
        created = [NewTopic(self.read, 2), NewTopic(self._written, 1), narrow]
        for each in self._admin.create_topics(created).values():
            each.result()
        self._producer = Producer(librdkafka_properties(settings))
        self.offsets = Offsets(settings, TopicNames(settings).progress_group)
        self.query = None

    def begin(self):
        ids = self.offsets.topic_ids([self.read])
        run = self._keeper.begin_run(QUERY, ids)
        records = read_stream(
            self._spark, self._settings, [self.read], group_prefix=run.group_prefix
        )
        noted = self._keeper.with_notes(run, records)
        rows = noted.select(F.col("key").cast("string").alias("topic"), "value")
        self.query = start_real_time(rows, self._settings, QUERY, HOUR_S)

    def send(self, count, *, to=None, partition=0):
        for _ in range(count):
            self._producer.produce(self.read, b"x", to or self._written, partition)
        assert self._producer.flush(30) == 0

    def reached(self):
        commits = self.offsets.commits([(self.read, 0), (self.read, 1)])
        return {partition: one.offset for (_, partition), one in commits.items()}

    def passed(self):
        return self.offsets.ends([(self._written, 0)])[self._written, 0]

    def close(self):
        if self.query:
            self.query.stop()
        self.offsets.close()
        for each in self._admin.delete_topics([self.read, self._written, self.narrow]).values():
            each.result()


@pytest.fixture
def keeper(spark, settings):
    with closing(ProgressKeeper(settings, DriverJvm(spark))) as found:
        found.start()
        yield found


@pytest.fixture
def passing(spark, settings, keeper, tmp_path):
    at = settings.model_copy(update={"checkpoint": tmp_path.as_uri()})
    with closing(Passing(spark, at, keeper)) as found:
        found.begin()
        yield found


def test_all_that_is_acknowledged_is_reached_also_the_last_record(passing):
    passing.send(3)
    passing.send(1, partition=1)
    eventually(lambda: passing.reached() == {0: 3, 1: 1}, passing.reached)
    passing.send(2, partition=1)
    eventually(lambda: passing.reached() == {0: 3, 1: 3}, passing.reached)


def test_nothing_is_reached_beyond_a_record_that_is_refused(passing, keeper):
    passing.send(3)
    eventually(lambda: passing.reached() == {0: 3}, passing.reached)
    passing.send(1, to=passing.narrow)
    passing.send(5, partition=1)
    # The query fails with the next record, or at the end of its batch.
    eventually(lambda: passing.send(1) or passing.query.exception(), passing.reached)
    keeper._step()
    keeper._step()
    assert passing.reached()[0] == 3


@pytest.mark.slow
def test_a_run_that_has_ended_commits_nothing(passing, keeper):
    passing.send(1)
    eventually(lambda: passing.reached() == {0: 1}, passing.reached)
    keeper._end(QUERY)
    passing.send(5)
    eventually(lambda: passing.passed() == 6, passing.passed)
    keeper._step()
    keeper._step()
    assert passing.reached() == {0: 1}


@pytest.mark.slow
def test_commits_that_do_not_belong_are_not_reached_and_never_will_be(passing, keeper):
    """Not when the log has grown past them, either."""
    passing.send(3)
    eventually(lambda: passing.reached() == {0: 3}, passing.reached)
    place = passing.read, 0
    (topic_id,) = passing.offsets.topic_ids([passing.read]).values()
    assert keeper.resume_offsets(QUERY, [passing.read]) == {place: 3}
    for offset, note in ((9, topic_id), (2, "1" * 32)):
        passing.offsets.commit({place: offset}, {place: LogIdentity(topic_id=note).text()})
        assert keeper.resume_offsets(QUERY, [passing.read]) == {}
        assert passing.reached() == {0: 0, 1: 0}
    passing.offsets.commit({place: 2})
    assert keeper.resume_offsets(QUERY, [passing.read]) == {}


def test_progress_is_not_kept_where_kafka_does_not_answer_about_the_group(
    passing, keeper, monkeypatch
):
    """As without rights to it: the client waits for a coordinator until its time is over."""
    asked = Mock(side_effect=KafkaError("no answer"))
    monkeypatch.setattr(keeper._offsets, "commits", asked)
    with pytest.raises(KafkaError):
        keeper.resume_offsets(QUERY, [passing.read])
    assert keeper.resume_offsets(QUERY, [passing.read]) == {}
    assert keeper.begin_run(QUERY, {}) is None
    monkeypatch.undo()
    assert keeper.resume_offsets(QUERY, [passing.read]) is not None
    assert keeper.begin_run(QUERY, {})
