"""Metrics of a queue, from the commits of its tracker."""

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY
from tests.support.clocks import SetClock
from tests.support.producers import NoProducers
from tests.support.topics import created_topics, small_settings

from duetime.core.setting_types import QueueSettings
from duetime.core.topics import TopicNames
from duetime.kafka.connection import librdkafka_properties
from duetime.kafka.offsets import Offsets
from duetime.pipeline.monitoring.exporter import MetricsExporter
from duetime.queue.stats import TrackerState

NOW_MS = 1_800_000_000_000


@pytest.fixture
def queue(broker):
    """Settings with one queue, and its name."""
    settings = small_settings(broker.bootstrap)
    name = f"jobs_{settings.namespace}"
    settings = settings.model_copy(update={"queues": {name: QueueSettings(partitions=2)}})
    with created_topics(settings):
        yield settings, name


def note(settings, name, *notes):
    """As the tracker notes them, one a partition."""
    offsets = Offsets(settings, TopicNames(settings).redelivery_group)
    places = [(f"{name}__markers", partition) for partition in range(len(notes))]
    texts = [each.text() for each in notes]
    offsets.commit(dict.fromkeys(places, 0), dict(zip(places, texts, strict=True)))
    offsets.close()


def sample(name, queue):
    return REGISTRY.get_sample_value(name, {"queue": queue})


def test_queue_metrics_follow_the_commits_of_the_tracker(queue):
    settings, name = queue
    note(settings, name, TrackerState(redelivered_total=7))
    health = MetricsExporter(settings, SetClock(NOW_MS), NoProducers())
    oldest = TrackerState(in_flight=1, oldest_ms=NOW_MS - 90_000, redelivered_total=9)
    note(
        settings,
        name,
        oldest,
        TrackerState(in_flight=2, oldest_ms=NOW_MS - 1_000, redelivered_total=1),
    )
    producer = Producer(librdkafka_properties(settings))
    producer.produce(f"{name}__undelivered", b"x")
    assert producer.flush(30) == 0

    health.update()

    assert sample("duetime_queue_in_flight", name) == 3
    assert sample("duetime_queue_oldest_seconds", name) == 90
    assert sample("duetime_queue_redelivered_total", name) == 2
    assert sample("duetime_queue_dead_total", name) == 1
    note(settings, name, TrackerState(redelivered_total=9), TrackerState(redelivered_total=1))
    health.update()
    assert sample("duetime_queue_oldest_seconds", name) == 0
    health.start()
    health.close()
    assert sample("duetime_queue_in_flight", name) is None
