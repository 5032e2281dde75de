"""A real broker, a real pipeline, and readers of what it delivers."""

import threading
import time
import uuid
from datetime import timedelta

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.conftest import small_settings

from duetime.admin import create_topics
from duetime.clock import SystemClock
from duetime.connection import librdkafka_properties
from duetime.local.jars import pipeline_jars
from duetime.message import DUE_AT_MS, DUE_ID
from duetime.pipeline.runner import Pipeline
from duetime.topics import TopicNames, required_topics

#: How long an event may take on a busy machine, in seconds. Nothing waits for it in vain.
PATIENCE_S = 180.0


def now_ms():
    return SystemClock().now_ms()


class Arrived:
    """A delivered record: what a test asks about."""

    def __init__(self, record):
        self.key, self.value, self.headers = record.key(), record.value(), record.headers() or []
        self.topic, self.partition = record.topic(), record.partition()
        self.appended_ms = record.timestamp()[1]
        self.by_name = dict(self.headers)

    @property
    def id(self):
        return self.by_name[DUE_ID].decode()

    @property
    def late_ms(self):
        return self.appended_ms - int(self.by_name[DUE_AT_MS])


class Inbox:
    """Reads topics from their beginning; `arrived` is everything read so far."""

    def __init__(self, settings, topics):
        self.arrived = []
        properties = {"group.id": f"inbox-{uuid.uuid4().hex}", "enable.auto.commit": False}
        self._consumer = Consumer(librdkafka_properties(settings) | properties)
        found = self._consumer.list_topics(timeout=PATIENCE_S).topics
        places = [
            TopicPartition(name, each, 0) for name in topics for each in found[name].partitions
        ]
        self._consumer.assign(places)

    def take(self, count):
        """Wait until `count` records are there in all; returns them."""
        self.until(lambda: len(self.arrived) >= count, f"{count} records")
        assert len(self.arrived) == count
        return self.arrived

    def until(self, enough, what):
        """Wait until what was read so far is enough."""
        until_s = time.monotonic() + PATIENCE_S
        while not enough():
            assert time.monotonic() < until_s, f"{what}: only {len(self.arrived)} came"
            records = self._consumer.consume(1_000, timeout=0.1)
            self.arrived += [Arrived(each) for each in records if not each.error()]

    def until_id(self, identity):
        """Wait until this message is there; returns everything read so far."""
        self.until(lambda: any(each.id == identity for each in self.arrived), identity)
        return self.arrived

    def close(self):
        self._consumer.close()


class Live:
    """A pipeline that runs, or whose process does, and everything to try it with."""

    def __init__(self, settings):
        self.settings = settings
        self.names = TopicNames(settings)
        #: Where what was sent is, as a rejected record's `due-error-source` has it.
        self.sources = set()
        self._inboxes = []
        self.admin = AdminClient(librdkafka_properties(settings))
        larger = {"linger.ms": 5, "message.max.bytes": 2_000_000}
        self._producer = Producer(librdkafka_properties(settings) | larger)

    def topic(self, partitions=1, config=()):
        """A destination of its own for one test."""
        return self.topics(1, partitions, config)[0]

    def topics(self, count, partitions=1, config=()):
        names = [f"to_{uuid.uuid4().hex[:8]}" for _ in range(count)]
        stamped = {"message.timestamp.type": "LogAppendTime"} | dict(config)
        wanted = [NewTopic(name, num_partitions=partitions, config=stamped) for name in names]
        for created in self.admin.create_topics(wanted).values():
            created.result()
        return names

    def inbox(self, *topics):
        self._inboxes.append(Inbox(self.settings, topics))
        return self._inboxes[-1]

    def inbox_when_there(self, topic, partitions=1):
        """Wait until someone else has created the topic, or given it so many partitions."""
        until_s = time.monotonic() + PATIENCE_S
        while not self._is_there(topic, partitions):
            assert time.monotonic() < until_s, topic
        return self.inbox(topic)

    def _is_there(self, topic, partitions):
        found = self.admin.list_topics(timeout=PATIENCE_S).topics.get(topic)
        return found and len(found.partitions) >= partitions

    def rejected(self):
        return self.inbox(self.names.rejected)

    def send(self, topic, value=None, key=None, headers=(), partition=-1):
        """A record as any sender may write it; where it is, is in `sources` after `flush`."""
        self._producer.produce(
            topic, value, key, headers=list(headers), partition=partition, on_delivery=self._sent
        )
        self._producer.poll(0)

    def _sent(self, error, record):
        assert error is None
        self.sources.add(f"{record.topic()}/{record.partition()}/{record.offset()}".encode())

    def flush(self):
        assert self._producer.flush(PATIENCE_S) == 0

    def close(self):
        for each in self._inboxes:
            each.close()
        self.flush()
        # A broker for a whole session's partitions would run out of files.
        names = [topic.name for topic in required_topics(self.settings)]
        for deleted in self.admin.delete_topics(names).values():
            deleted.result()


def fresh_settings(bootstrap, directory):
    """Settings with a namespace of its own, a small wheel, and a rescue that looks often."""
    return small_settings(
        bootstrap,
        rescue_every_ms=2_000,
        retry_attempts=2,
        retry_backoff_ms=200,
        checkpoint=directory.as_uri(),
    )


@pytest.fixture(scope="session")
def down(broker):
    """Makes everything but the pipeline, whose checkpoint is the directory given."""
    return lambda directory: Live(fresh_settings(broker.bootstrap, directory))


@pytest.fixture(scope="session")
def live(down, tmp_path_factory, _jvm_ends_well):
    """One pipeline for all tests that need no other; it runs as `duetime run` would."""
    found = down(tmp_path_factory.mktemp("checkpoint"))
    create_topics(found.settings)
    pipeline = Pipeline(found.settings, jars=pipeline_jars())
    pipeline.start()
    watch = threading.Thread(target=pipeline.watch)
    watch.start()
    found.pipeline = pipeline
    await_first_messages(found)
    yield found
    pipeline.ask_to_stop()
    watch.join()
    pipeline.stop()
    found.close()


def await_first_messages(live):
    """A cold JVM takes seconds for these, and tests that count on seconds must not meet that."""
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is above)

    topic = live.topic()
    with Client(live.settings) as client:
        for delay_s in (0, 1, 6):
            client.produce(topic, "first", in_=timedelta(seconds=delay_s))
    live.inbox(topic).take(3)


@pytest.fixture
def settings(live):
    """The pipeline's own; the writer into its wheel works with them."""
    return live.settings


@pytest.fixture
def topics(live):
    """They are there, and stay."""
    return live.names


@pytest.fixture
def sender(live):
    """A producer of the client library."""
    from duetime.client import Producer as Client  # noqa: PLC0415 (another Producer is above)

    with Client(live.settings) as client:
        yield client
