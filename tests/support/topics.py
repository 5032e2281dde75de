"""Settings with a namespace of a test's own, its topics, and what is written into them."""

import uuid
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from duetime.core import headers as H
from duetime.core.settings import Settings
from duetime.core.topics import TopicNames
from duetime.kafka.admin import create_topics
from duetime.kafka.connection import librdkafka_properties

#: The settings that every process of these tests finds in its environment.
FROM_OUTSIDE = {"spark_properties"}

#: W3C Trace Context: the sender's trace goes on with whoever reads the message.
TRACE = (
    ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("tracestate", b"congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"),
)


def configure(admin, topic, name, value):
    """Change one setting of a topic."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    for changed in admin.incremental_alter_configs([resource]).values():
        changed.result()


@pytest.fixture
def settings(broker):
    """Settings with a namespace of its own and a small wheel: 3 levels, 68 minutes. No topics."""
    return small_settings(broker.bootstrap)


def small_settings(bootstrap, **others):
    name = f"t{uuid.uuid4().hex[:8]}"
    small = {
        "bootstrap": bootstrap,
        "namespace": name,
        "airtel_topic": f"{name}.in.airtel",
        "countdown_topic": f"{name}.in.countdown",
        "scheduler_topic": f"{name}.in.scheduler",
        "wheel_slots": 16,
        "wheel_levels": 3,
        "release_lead_ms": 1_000,
        # Most tests ask what arrives, not how punctually.
        "warm_up_seconds": 0,
    }
    return Settings(**(small | others))


@pytest.fixture
def topics(settings):
    """The names of duetime's topics under `settings`, created, and deleted at the end."""
    with created_topics(settings) as names:
        yield names


@contextmanager
def created_topics(settings):
    """The same, for who has settings of another scope."""
    names = create_topics(settings)
    yield names
    # A broker for a whole session's partitions would run out of files.
    admin = AdminClient(librdkafka_properties(settings))
    for deleted in admin.delete_topics(names).values():
        deleted.result()


@pytest.fixture
def on_broker(settings, monkeypatch):
    """Makes the command use the test's own namespace on the test's broker."""
    changed = settings.model_dump(mode="json", exclude_defaults=True, exclude=FROM_OUTSIDE)
    for name, value in changed.items():
        monkeypatch.setenv(f"DUETIME_{name.upper()}", str(value))
    return settings


def dead_letters_of(settings):
    """Writes dead letters, as the pipeline does."""
    producer = Producer(librdkafka_properties(settings))

    def write(  # noqa: PLR0913 (all that a letter may have)
        topic="to",
        reason="unknown-topic",
        last_ms=2_000,
        *,
        cluster="eu",
        waits=True,
        passed_on=(),
        **record,
    ):
        failure = (reason, "so it is", "10", "1500", last_ms)
        words = (topic, "3", cluster, "1000", "0000000003e8-a", *failure)
        headers = [("h", b"\x00"), *passed_on] + [
            (name, str(word)) for name, word in zip(H.DEAD_LETTER, words, strict=True)
        ]
        content = {"key": b"k", "value": b"\xff"} | record
        producer.produce(TopicNames(settings).dead_letter, headers=headers, **content)
        assert not waits or producer.flush(30) == 0

    return write


#: How long records that were written may take to come, in seconds.
READ_S = 30


def first_records(settings, topic, count, offset=0):
    """Return `count` records of a topic, from this offset of each partition."""
    consumer = Consumer(librdkafka_properties(settings) | {"group.id": settings.namespace})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, each, offset) for each in partitions])
    records = consumer.consume(count, timeout=READ_S)
    consumer.close()
    return records


def taken_in(settings, count):
    """Return `count` records of the native intake topic."""
    return first_records(settings, f"{settings.namespace}.in", count)
