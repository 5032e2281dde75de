"""A delayed topic for each test on the shared broker, and patient readers."""

import time
import uuid
from functools import partial

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from tests.support.clocks import eventually
from tests.support.topics import configure

from duetime.core import headers as H
from duetime.core.clock import SystemClock
from duetime.delayed import DelayedConsumer

#: How long something may take on a busy machine, in seconds. Nothing waits for it in vain.
PATIENCE_S = 150.0

#: Of a producer: what a new topic's leader refuses at first is not written after what came later.
IN_ORDER = {"enable.idempotence": True, "max.in.flight.requests.per.connection": 1}

#: Of a producer: what is reported takes up all its queue until the report has returned.
ONE_AT_A_TIME = {"queue.buffering.max.messages": 1}


class DelayedTopic:
    """A delayed topic with its producer and admin client."""

    def __init__(self, bootstrap, partitions=1, **config):
        self.bootstrap = bootstrap
        self.name = f"delayed_{uuid.uuid4().hex[:8]}"
        # The broker may stop before they are closed.
        silent = {"bootstrap.servers": bootstrap, "log_level": 2}
        self.admin = AdminClient(silent)
        settings = {"message.timestamp.type": "LogAppendTime"} | config
        topic = NewTopic(self.name, num_partitions=partitions, config=settings)
        self.admin.create_topics([topic])[self.name].result()
        self._producer = Producer(silent | IN_ORDER | {"linger.ms": 5})

    def send(self, deliver_after_ms, value, partition=0, key=None, headers=()):
        """Send a record as a client in any language would."""
        own = [] if deliver_after_ms is None else [(H.DELIVER_AFTER_MS, str(deliver_after_ms))]
        while True:
            try:
                self._producer.produce(
                    self.name, value, key, partition=partition, headers=[*headers, *own]
                )
            except BufferError:
                self._producer.poll(0.1)
            else:
                return

    def send_old(self, now_ms, count):
        """Send this many due records, and one that is due later."""
        for number in range(count):
            self.send(now_ms - number % 7, str(number))
        self.send(now_ms + 600_000, "far")
        self.flush()

    def add_partition(self, count):
        """Add a partition, and wait until a producer knows it."""
        self.admin.create_partitions([NewPartitions(self.name, count)])[self.name].result()
        known = partial(self._producer.list_topics, self.name, PATIENCE_S)
        eventually(lambda: len(known().topics[self.name].partitions) >= count, within_s=PATIENCE_S)

    def configure(self, name, value):
        """Change a setting of the topic."""
        configure(self.admin, self.name, name, value)

    def flush(self):
        assert self._producer.flush(PATIENCE_S) == 0

    def remove_before(self, offset, partition=0):
        """Remove records as retention would."""
        (removed,) = self.admin.delete_records(
            [TopicPartition(self.name, partition, offset)]
        ).values()
        removed.result()

    def properties(self, group="g", **others):
        ours = {"bootstrap.servers": self.bootstrap, "group.id": f"{group}-{self.name}"}
        return ours | {name.replace("_", "."): value for name, value in others.items()}

    def is_assigned(self, group="g"):
        """Return whether members of the group have partitions, by the broker."""
        name = f"{group}-{self.name}"
        found = self.admin.describe_consumer_groups([name])[name].result()
        return any(each.assignment.topic_partitions for each in found.members)

    def reader(self, group="g", clock=None, **others):
        consumer = DelayedConsumer(self.properties(group, **others), clock=clock)
        consumer.subscribe([self.name])
        return consumer


@pytest.fixture
def topic(broker):
    return DelayedTopic(broker.bootstrap)


@pytest.fixture
def two_partitions(broker):
    return DelayedTopic(broker.bootstrap, partitions=2)


def read(consumer, count):
    """Wait for this many messages, none of which may be early."""
    found = []
    until_s = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < until_s, f"only {len(found)} of {count} came"
        message = consumer.poll(1)
        if message is not None:
            assert message.deliver_after_ms <= SystemClock().now_ms()
            found.append(message)
    return found


def values(messages):
    return [message.value().decode() for message in messages]


def send_shuffled(topic, now_ms, count):
    started_ms = now_ms - 60_000 - count // 2
    for number in range(count):
        topic.send(started_ms + number // 2 + number * 7919 % 60_000, b"v")
    topic.flush()


def offsets(reader, stretches):
    found = {place: [] for place in stretches}
    for place, records in reader.all_batches(stretches):
        found[place] += [each.offset() for each in records]
    return found
