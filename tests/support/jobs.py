"""A queue's topics on a real broker, its workers, and their markers."""

import uuid
from datetime import timedelta

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from duetime.core.setting_types import QueueSettings
from duetime.core.settings import Settings
from duetime.kafka.connection import librdkafka_properties
from duetime.queue import Queue

#: How long an event may take on a busy machine, in seconds.
PATIENCE_S = 150.0

PARTITIONS = 2


class Jobs:
    """A topic that is a queue, without a tracker."""

    def __init__(self, settings, topic):
        self.settings, self.topic = settings, topic
        self._producer = Producer(librdkafka_properties(settings))
        self._queues = []

    def send(self, *values, partition=0, headers=()):
        for value in values:
            self._producer.produce(self.topic, value, partition=partition, headers=list(headers))
        assert self._producer.flush(PATIENCE_S) == 0

    def queue(self, **options):
        """Return a worker's queue, which is closed after the test."""
        given = {"group": "workers", "timeout": timedelta(seconds=30)} | options
        self._queues.append(Queue(self.topic, settings=self.settings, **given))
        return self._queues[-1]

    def markers(self, count):
        """Return the first `count` markers: partition, key, value, headers."""
        found = self._first(f"{self.topic}__markers", count)
        return [(each.partition(), each.key(), each.value(), each.headers()) for each in found]

    def _first(self, topic, count):
        properties = {"group.id": uuid.uuid4().hex, "enable.auto.commit": False}
        consumer = Consumer(librdkafka_properties(self.settings) | properties)
        consumer.assign([TopicPartition(topic, each, 0) for each in range(PARTITIONS)])
        records = consumer.consume(count, timeout=PATIENCE_S)
        consumer.close()
        assert len(records) == count
        return records

    def close(self):
        for each in self._queues:
            each.close()


@pytest.fixture
def jobs(broker):
    topic = f"jobs_{uuid.uuid4().hex[:8]}"
    settings = Settings(
        bootstrap=broker.bootstrap, queues={topic: QueueSettings(partitions=PARTITIONS)}
    )
    admin = AdminClient(librdkafka_properties(settings))
    wanted = [NewTopic(name, num_partitions=PARTITIONS) for name in (topic, f"{topic}__markers")]
    for created in admin.create_topics(wanted).values():
        created.result()
    found = Jobs(settings, topic)
    yield found
    found.close()
    for deleted in admin.delete_topics([each.topic for each in wanted]).values():
        deleted.result()
