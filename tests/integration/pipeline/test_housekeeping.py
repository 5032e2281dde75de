"""Failures are counted by offsets, and records that were processed are deleted."""

import json
from contextlib import closing
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer
from tests.support.clocks import SetClock, eventually

from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.pipeline import RETRIES
from duetime.pipeline.leader import Leader
from duetime.pipeline.service import RejectionLogger
from duetime.stores.wheel_store import KafkaStore


@pytest.fixture
def append(settings, topics):  # noqa: ARG001 (the topics must be there)
    producer = Producer(librdkafka_properties(settings))

    def appended(topic, count):
        for _ in range(count):
            producer.produce(topic, b"x", partition=0)
        assert producer.flush(30) == 0

    return appended


def test_new_rejections_and_dead_letters_are_logged_once(settings, append, caplog):
    names = TopicNames(settings)
    append(names.rejected, 2)
    tally = RejectionLogger(settings)
    append(names.rejected, 3)
    append(names.dead_letter, 1)
    tally.log_new()
    tally.log_new()
    tally.close()
    assert [each.getMessage() for each in caplog.records] == [
        f"rejected messages=3 total=5 topic={names.rejected}",
        f"dead letters messages=1 total=1 topic={names.dead_letter}",
    ]


def test_failed_messages_are_kept_until_the_last_retry_and_then_deleted(settings, append, now_ms):
    """A message that is cancelled before its retry is found there."""
    place = TopicNames(settings).retry, 0
    append(place[0], 3)
    committed = {"startOffset": json.dumps({place[0]: {"0": 2}})}
    query = SimpleNamespace(lastProgress={"sources": [committed]})
    with closing(KafkaStore(settings)) as store:
        clock = SetClock(now_ms)
        leader = SimpleNamespace(
            _context=SimpleNamespace(clock=clock), _settings=settings, _wheel=store
        )
        start = lambda: store._offsets.starts([place])[place]  # noqa: E731 (asked again)
        Leader._delete_read(leader, RETRIES, query)
        clock.ms += settings.retry_backoff_max_ms - 60_000
        Leader._delete_read(leader, RETRIES, query)
        assert start() == 0
        clock.ms += 120_000
        Leader._delete_read(leader, RETRIES, query)
        eventually(lambda: start() == 2)
