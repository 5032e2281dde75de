"""What Prometheus is told of a queue, as its notes and dead letters have it."""

import pytest
from confluent_kafka import Producer
from prometheus_client import REGISTRY
from tests.conftest import SetClock, created_topics, small_settings

from duetime.connection import librdkafka_properties
from duetime.kmq.notes import Note
from duetime.pipeline.health import Health
from duetime.pipeline.queue_health import Counted
from duetime.stores.offsets import Offsets
from duetime.tables import QueueSettings
from duetime.topics import TopicNames

NOW_MS = 1_800_000_000_000


def test_what_came_out_and_is_no_dead_letter_was_delivered_again():
    counted = Counted(out=5, dead=2)
    assert counted.more(out=9, dead=3) == (3, 1)
    assert counted.more(out=9, dead=3) == (0, 0)


def test_a_letter_that_is_not_noted_yet_makes_no_count_too_high_or_fall():
    counted = Counted(out=0, dead=0)
    assert counted.more(out=1, dead=2) == (0, 2)
    assert counted.more(out=3, dead=2) == (1, 0)


def test_dead_letters_whose_topic_was_made_anew_are_counted_on():
    assert Counted(out=9, dead=5).more(out=10, dead=1) == (0, 1)


def test_dead_letters_that_could_not_be_counted_for_once_are_not_counted_again():
    counted = Counted(out=9, dead=5)
    assert [counted.more(out=9, dead=dead) for dead in (0, 5, 6)] == [(0, 0), (0, 0), (0, 1)]


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


def told(name, queue):
    return REGISTRY.get_sample_value(name, {"queue": queue})


@pytest.mark.system
def test_what_is_worked_on_and_what_came_of_it_is_told(queue):
    settings, name = queue
    note(settings, name, Note(out=7))
    health = Health(settings, SetClock(NOW_MS), None)
    oldest = Note(open=1, oldest_ms=NOW_MS - 90_000, out=9)
    note(settings, name, oldest, Note(open=2, oldest_ms=NOW_MS - 1_000, out=1))
    producer = Producer(librdkafka_properties(settings))
    producer.produce(f"{name}__undelivered", b"x")
    assert producer.flush(30) == 0

    health.look()

    assert told("duetime_queue_in_flight", name) == 3
    assert told("duetime_queue_oldest_seconds", name) == 90
    assert told("duetime_queue_redelivered_total", name) == 2
    assert told("duetime_queue_dead_total", name) == 1
    note(settings, name, Note(out=9), Note(out=1))
    health.look()
    assert told("duetime_queue_oldest_seconds", name) == 0
    health.start()
    health.close()
    assert told("duetime_queue_in_flight", name) is None
