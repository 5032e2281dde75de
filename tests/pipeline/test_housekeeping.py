"""What went wrong is counted by the broker's offsets, and what is of no more use is freed."""

import json
from contextlib import closing
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from tests.conftest import SetClock, eventually

from duetime.connection import librdkafka_properties
from duetime.pipeline.housekeeping import Tally
from duetime.pipeline.leader import FAILURES, Leader
from duetime.stores.kafka import KafkaStore
from duetime.topics import TopicNames

pytestmark = pytest.mark.system


@pytest.fixture
def append(settings, topics):  # noqa: ARG001 (the topics must be there)
    producer = Producer(librdkafka_properties(settings))

    def appended(topic, count):
        for _ in range(count):
            producer.produce(topic, b"x", partition=0)
        assert producer.flush(30) == 0

    return appended


def test_what_is_rejected_and_what_is_dead_is_counted_since_the_last_time(settings, append, caplog):
    names = TopicNames(settings)
    append(names.rejected, 2)
    tally = Tally(settings)
    append(names.rejected, 3)
    append(names.dead, 1)
    tally.tell()
    tally.tell()
    tally.close()
    assert [each.getMessage() for each in caplog.records] == [
        f"rejected messages=3 total=5 topic={names.rejected}",
        f"dead letters messages=1 total=1 topic={names.dead}",
    ]


def test_what_has_failed_is_kept_until_its_last_retry_and_then_freed(settings, append, now_ms):
    """Who cancels a message when it is tried again finds it there."""
    place = TopicNames(settings).failed, 0
    append(place[0], 3)
    committed = {"startOffset": json.dumps({place[0]: {"0": 2}})}
    query = SimpleNamespace(lastProgress={"sources": [committed]})
    with closing(KafkaStore(settings)) as store:
        clock = SetClock(now_ms)
        leader = SimpleNamespace(
            _means=SimpleNamespace(clock=clock), _settings=settings, _wheel=store
        )
        start = lambda: store._offsets.starts([place])[place]  # noqa: E731 (asked again)
        Leader._visit(leader, FAILURES, query)
        clock.ms += settings.retry_backoff_max_ms - 60_000
        Leader._visit(leader, FAILURES, query)
        assert start() == 0
        clock.ms += 120_000
        Leader._visit(leader, FAILURES, query)
        eventually(lambda: start() == 2)
